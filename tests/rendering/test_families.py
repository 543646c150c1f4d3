"""The table of model families: each template of ours renders the strings that its entry states.

An oracle is the real template, in a package that may be installed: TRL's `chat_templates` or `mistral-common`. It
renders the same strings from the same conversations. `tests/templates/families.json` explains its fields in `about`.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from agentjet.rendering.chat_template import make_sandbox
from tests import tiny

TABLE: dict[str, Any] = json.loads((tiny.TEMPLATES / "families.json").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = TABLE["templates"]
USER = TABLE["conversations"]["prompt"]
WITH_PROMPT = ("answers", "prompt")


def render(source: str, messages: list[dict[str, Any]], *, prompt: bool, eos: str) -> str:
    """Returns the text of a conversation with the tools of the table. Raises what the template raises."""
    return make_sandbox().from_string(source).render(
        messages=copy.deepcopy(messages), tools=copy.deepcopy(TABLE["tools"]), add_generation_prompt=prompt,
        bos_token="<BOS>", eos_token=eos,
    )  # fmt: skip


def behind_user(source: str, case: str, *, eos: str, followed: bool = False, json_text: bool = False) -> str | None:
    """Returns the text behind the first user's turn, or None where the template refuses the conversation.

    `followed`: the template omits the calls of a last turn, so an answer follows, and is cut off.
    """
    messages = copy.deepcopy(TABLE["conversations"][case])
    cut = followed and messages[-1].get("tool_calls")
    if cut:
        messages.append(TABLE["conversations"]["answers"][2])
    for message in messages:  # the names of reasoning that templates read
        if "reasoning_content" in message:
            message["reasoning"] = message["thinking"] = message["reasoning_content"]
    for call in (call for message in messages for call in message.get("tool_calls", ()) if json_text):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    try:
        text = render(source, messages, prompt=case in WITH_PROMPT, eos=eos)
    except TemplateError:
        return None
    # A template may write something else behind the first user once others follow: the text starts with that token.
    same = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(text, render(source, USER, prompt=False, eos=eos), strict=False)
    )
    shared = "".join(char for char, _ in same).rstrip("<")
    return text[len(shared) :].split("<SPECIAL_11>User" if cut else "\0")[0]


@pytest.mark.parametrize("name", ENTRIES)
def test_ours_render_the_strings_of_the_table(name: str) -> None:
    entry = ENTRIES[name]
    source = tiny.template(name)
    for case, text in entry["renders"].items():
        assert behind_user(source, case, eos=entry["eos"], followed=name == "nemotron_nano2") == text, case
    assert entry["declaration"] in render(source, USER, prompt=False, eos=entry["eos"])
    if entry["broken_call"]:
        assert entry["broken_call"] != entry["renders"]["two_calls"]


def test_every_family_has_a_template() -> None:
    assert {family["template"] for family in TABLE["families"].values()} == set(ENTRIES)
    with_tools = [name for name, family in TABLE["families"].items() if ENTRIES[family["template"]]["syntax"]]
    assert len(with_tools) == 45


@pytest.mark.thorough
@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    ("family", "file"),
    [
        (name, family["source"].removeprefix("TRL "))
        for name, family in TABLE["families"].items()
        if family["source"].startswith("TRL ")
    ],
)
def test_trl_renders_the_strings_of_the_table(family: str, file: str) -> None:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "chat_templates" / f"{file}.jinja").read_text(encoding="utf-8")
    entry = ENTRIES[TABLE["families"][family]["template"]]
    for case, text in entry["renders"].items():
        assert behind_user(source, case, eos=entry["eos"], json_text=file == "deepseekv3") == text, case


def tekken(version: str, folder: Path) -> Path:
    """Writes a small tokenizer file of a version that the package does not have. Only its control tokens matter."""
    module = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
    base = importlib.import_module("mistral_common.tokens.tokenizers.base")
    file = Path(module.__file__).parents[2] / "data" / "tekken_240911.json"
    source: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    source["vocab"] = source["vocab"][:2000]
    source["config"] |= {"version": version, "num_vocab_tokens": 2000, "default_vocab_size": 3000}
    del source["image"]
    tokens = dict.fromkeys(token["token_str"] for token in module.Tekkenizer.DEPRECATED_SPECIAL_TOKENS)
    tokens |= dict.fromkeys(token.value for token in base.SpecialTokens)
    source["special_tokens"] = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(tokens)
    ]
    (folder / "tekken.json").write_text(json.dumps(source), encoding="utf-8")
    return folder / "tekken.json"


BESIDE = "call_beside_text"
CASES = ("one_call", "two_calls", "typed_arguments", BESIDE)


@pytest.mark.thorough
@pytest.mark.needs("mistral-common")
@pytest.mark.parametrize(
    ("family", "version", "case"),
    [
        (family, version, case)
        for family, version in (
            ("Mistral Nemo", "v3"),
            ("Mistral 7B v0.3", "v3 of SentencePiece"),
            ("Mistral Small 3.2", "v11"),
            ("Devstral", "v13"),
            ("Ministral 3", "v13"),
        )
        for case in CASES
        if not (version.startswith("v3") and case == BESIDE)  # Version 3 has either text or calls.
    ],
)
def test_mistral_common_writes_the_calls_of_the_table(family: str, version: str, case: str, tmp_path: Path) -> None:
    mistral = importlib.import_module("mistral_common.tokens.tokenizers.mistral")
    request = importlib.import_module("mistral_common.protocol.instruct.request")
    messages = copy.deepcopy(TABLE["conversations"][case])
    for call in messages[1]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": "12 °C"}
        )  # an answer must follow
    messages[1]["content"] = messages[1]["content"] or None
    data = Path(mistral.__file__).parents[2] / "data"
    files = {
        "v3": data / "tekken_240718.json",
        "v3 of SentencePiece": data / "mistral_instruct_tokenizer_240323.model.v3",
    }
    tokenizer = mistral.MistralTokenizer.from_file(str(files.get(version) or tekken(version, tmp_path)))
    text = tokenizer.encode_chat_completion(request.ChatCompletionRequest(messages=messages, tools=TABLE["tools"])).text
    written = text.replace("▁", " ").split("[/INST]")[1].split("[TOOL_RESULTS]")[0]
    assert ENTRIES[TABLE["families"][family]["template"]]["renders"][case] == written
