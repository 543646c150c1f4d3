"""The table of model families: what each writes, and whether the renderer and the parser read it.

`tests/templates/families.json` explains its fields in `about`. `python -m bench.models` counts with this module, too.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from agentjet.errors import InvalidRequest
from agentjet.front.prompts import AnswerDelta, CompletionParser
from agentjet.rendering import Renderer, template_for
from agentjet.rendering.chat_template import make_sandbox
from agentjet.types import Conversation, Message, ModelInfo, Sampled
from tests import tiny

TABLE: dict[str, Any] = json.loads((tiny.TEMPLATES / "families.json").read_text(encoding="utf-8"))
ENTRIES: dict[str, dict[str, Any]] = TABLE["templates"]
FAMILIES: dict[str, dict[str, str]] = TABLE["families"]
USER = TABLE["conversations"]["prompt"]
WITH_PROMPT = ("answers", "prompt")
CALLS = ("one_call", "two_calls", "call_beside_text", "typed_arguments")
OTHER_ENDS = ("<|return|>", "<|tool_response>")
"""Tokens that end a turn of gpt-oss and Gemma 4 beside the `end` of their entry."""

# ---- templates -------------------------------------------------------------------------------------------------------


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


# ---- what a model writes ---------------------------------------------------------------------------------------------


def written(name: str, case: str) -> str | None:
    """Returns the completion of a model for a case with calls, without its end token; None if the table has none.

    A model whose prompt opens a reasoning block thinks "Hm." first.
    """
    entry = ENTRIES[name]
    own = entry.get("writes") or {}
    if case not in own and (not entry["renders_calls"] or (case == "two_calls" and not entry["parallel"])):
        return None
    text = _cut(entry, own.get(case) or _turn(entry, case))
    if entry["call_ids"].startswith("functions.NAME:N"):
        for i, call in enumerate(TABLE["conversations"][case][1]["tool_calls"]):
            text = text.replace(call["id"], f"functions.{call['function']['name']}:{i}")
    return _thought(entry) + text if _is_open(entry) else text


def reasoned(name: str) -> str:
    """Returns a completion that thinks "Hm." and answers "Hello.", without its end token."""
    entry = ENTRIES[name]
    text = _cut(entry, _turn(entry, "reasoning"))
    if "Hm." in text and not _is_open(entry):
        return text
    return _thought(entry) + text.removeprefix(entry["reasoning"]["open"] + entry["reasoning"]["close"])


def _is_open(entry: dict[str, Any]) -> bool:
    return bool(entry["reasoning"] and entry["reasoning"]["opened_by_prompt"])


def _thought(entry: dict[str, Any]) -> str:
    """Returns the reasoning as a model writes it, from the generation prompt on."""
    style = entry["reasoning"]
    close = f"\n{style['close']}\n\n" if style["close"].startswith(("</think>", "[BEGIN")) else style["close"]
    return ("" if style["opened_by_prompt"] else style["open"]) + "Hm." + close


def _turn(entry: dict[str, Any], case: str) -> str:
    """Returns the last turn of a case as the template writes it. Without the reasoning block that a prompt opens."""
    text, prompt = entry["renders"][case], entry["renders"]["prompt"]
    if not _is_open(entry):
        return text.removeprefix(prompt)
    open_, close = entry["reasoning"]["open"], entry["reasoning"]["close"]
    bare = prompt.rpartition(open_)[0] if open_ else prompt
    text = text.removeprefix(prompt if text.startswith(prompt) else bare)
    return text.split(close, 1)[-1].lstrip("\n")


def _cut(entry: dict[str, Any], text: str) -> str:
    """Returns a turn up to its end token."""
    for end in (entry["end"], entry["eos"], *OTHER_ENDS):
        text = text.split(end)[0]
    return text


# ---- what the product reads ------------------------------------------------------------------------------------------


def model_info(folder: Path, name: str) -> ModelInfo:
    """Writes a tokenizer with the control tokens of a template; returns the card of a model with both."""
    entry = ENTRIES[name]
    path = tiny.make_tokenizer(folder)
    tokenizer = tiny.tokenizer()
    control = dict.fromkeys([*entry["control_tokens"], entry["end"], entry["eos"]])
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control if token not in tiny.MARKERS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    template, tool_format = template_for(name, tiny.template(name))
    return ModelInfo(
        name=name,
        tokenizer_path=str(path),
        chat_template=template,
        context_length=2048,
        end_tokens=tuple(tokenizer.token_to_id(end) for end in dict.fromkeys((entry["end"], entry["eos"]))),
        bos_token="<|endoftext|>",
        eos_token=entry["eos"],
        tool_format=tool_format,
    )


@dataclass(frozen=True, slots=True)
class Read:
    """A completion as the server reads it: the message, and the one of the streamed pieces."""

    message: Message
    streamed: Message

    @property
    def is_whole(self) -> bool:
        """True if the streamed pieces are the message's."""
        return self.streamed == self.message


def read(renderer: Renderer, text: str, *, tools: bool) -> Read:
    """Reads a completion that arrives token by token; the tokenizer has about one token a character."""
    offered = tuple(TABLE["tools"]) if tools else ()
    parser = CompletionParser(renderer, Conversation((Message("user", "Hi"),), offered), stop=(), id_prefix="call")
    deltas: list[AnswerDelta] = []
    tokenizer = Tokenizer.from_file(str(Path(renderer.model.tokenizer_path) / "tokenizer.json"))
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        parser.push(Sampled((token,), (-0.5,), 0))
        deltas.append(parser.delta())
    parser.push(Sampled(renderer.model.end_tokens[:1], (-0.5,), 0, "stop"))
    message, rest = parser.message()
    whole = AnswerDelta(tuple(part for delta in (*deltas, rest) for part in delta.parts))
    return Read(message, Message("assistant", whole.text, whole.reasoning, whole.calls))


Tools = Literal["work", "refused", "wrong", "silent", "none"]


def tools_of(renderer: Renderer) -> Tools:
    """Returns what a family's tools are today: `silent` if the server offers them and reads no call.

    They work if each call is read with its name and its arguments, alone, in parallel, beside text, with typed
    arguments; and if the streamed pieces are those of the message.
    """
    entry = ENTRIES[name := renderer.model.name]
    if not entry["syntax"]:
        return "none"
    try:
        renderer.render(Conversation((Message("user", "Hi"),), tuple(TABLE["tools"])))
    except InvalidRequest:
        return "refused"
    texts = {case: text for case in CALLS if (text := written(name, case)) is not None}
    found = {case: read(renderer, text, tools=True) for case, text in texts.items()}
    if not found["one_call"].message.tool_calls:
        return "silent"
    return "work" if all(_is_right(case, texts[case], one) for case, one in found.items()) else "wrong"


def _is_right(case: str, text: str, found: Read) -> bool:
    message, wanted = found.message, []
    for call in TABLE["conversations"][case][1]["tool_calls"]:
        wanted.append((call["function"]["name"], call["function"]["arguments"]))
    got = [(call.name, _arguments(call.arguments)) for call in message.tool_calls]
    # A template may write the text beside a call as reasoning, or leave it out.
    told = "I look." not in text or "I look." in message.content + message.reasoning
    return got == wanted and told and message.content.strip() in ("", "I look.") and found.is_whole


def _arguments(text: str) -> Any:
    """Returns the arguments of a call. `count` is not in the tool's schema, so its type is free."""
    arguments = json.loads(text)
    return {key: int(value) if key == "count" and value == "3" else value for key, value in arguments.items()}


def separates_reasoning(renderer: Renderer) -> bool | None:
    """True if the server separates a family's reasoning from its answer, streamed and whole; None without reasoning."""
    if not ENTRIES[renderer.model.name]["reasoning"]:
        return None
    found = read(renderer, reasoned(renderer.model.name), tools=False)
    parts = (found.message.reasoning.strip(), found.message.content.strip())
    return parts == ("Hm.", "Hello.") and found.is_whole


# ---- oracles ---------------------------------------------------------------------------------------------------------

MISTRAL = {
    "Mistral Nemo": "v3",
    "Mistral 7B v0.3": "v3 of SentencePiece",
    "Mistral Small 3.2": "v11",
    "Devstral": "v13",
    "Ministral 3": "v13",
}
"""The version of mistral-common's tokenizer by family."""


def oracle_agrees(family: str, folder: Path) -> bool | None:
    """True if the family's oracle writes the strings of the table; None if it has none, or it is not installed."""
    if FAMILIES[family]["source"].startswith("TRL ") and importlib.util.find_spec("trl"):
        return not differences_of_trl(family)
    if family in MISTRAL and importlib.util.find_spec("mistral_common"):
        renders = ENTRIES[FAMILIES[family]["template"]]["renders"]
        return all(by_mistral(family, case, folder) == renders[case] for case in cases_of_mistral(family))
    return None


def differences_of_trl(family: str) -> list[str]:
    """Returns the cases of which the real template, of TRL's package, renders other strings than the table's."""
    file = FAMILIES[family]["source"].removeprefix("TRL ")
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "chat_templates" / f"{file}.jinja").read_text(encoding="utf-8")
    entry = ENTRIES[FAMILIES[family]["template"]]
    return [
        case
        for case, text in entry["renders"].items()
        if behind_user(source, case, eos=entry["eos"], json_text=file == "deepseekv3") != text
    ]


def cases_of_mistral(family: str) -> list[str]:
    """Returns the cases that mistral-common writes: version 3 has either text or calls."""
    return [case for case in ("one_call", "two_calls", "typed_arguments", "call_beside_text")
            if not (MISTRAL[family].startswith("v3") and case == "call_beside_text")]  # fmt: skip


def by_mistral(family: str, case: str, folder: Path) -> str:
    """Returns the text of a turn with calls, as mistral-common writes it."""
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
    version = MISTRAL[family]
    tokenizer = mistral.MistralTokenizer.from_file(str(files.get(version) or _tekken(version, folder)))
    asked = request.ChatCompletionRequest(messages=messages, tools=TABLE["tools"])
    text: str = tokenizer.encode_chat_completion(asked).text
    return text.replace("▁", " ").split("[/INST]")[1].split("[TOOL_RESULTS]")[0]


def _tekken(version: str, folder: Path) -> Path:
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
