"""The tables of docs/models.md, checked on a tiny random model of each architecture. Pinned here:

1. each architecture loads, and the tables are right about prefix sharing, adapters, tools and reasoning;
   `python -m tests.model_page` writes them;
2. wrappers that read images train their language model only, to the gradient of one row per call;
3. an export keeps every tensor of the original files, its class and its processor's files;
4. an adapter samples, learns and is exported, or is refused; so is a model whose code fails;
5. the tokenizer is that of `transformers`, also if its class rebuilds the file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from agentjet.compute.merging import merge_folders
from agentjet.compute.model import BaseModel, machine_kind
from agentjet.compute.sampler import ModelSampler
from agentjet.config import LoraConfig
from agentjet.errors import ConfigError
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.timeline.forest import build_forest
from agentjet.types import SamplingParams
from tests import tiny
from tests.compute.architectures import BRANCHING, BY_TYPE, EVERY, MORE, ROWS, WRAPPERS, make_architecture
from tests.compute.baseline import Baseline, Double, episodes, learner_gradient, policy_gradient, relative
from tests.compute.conftest import make_policy, model_config, with_random_adapter
from tests.model_page import ARCHITECTURE, FAMILY, PAGE, architecture_row, family_rows, rows_of

NO_FOREST = {"recurrent_gemma": "layers of kind linear_attention"}
"""Why a model learns one row per timeline, and samples them one by one."""


@pytest.mark.parametrize("kind", [*BRANCHING, *MORE, *WRAPPERS, *ROWS])
def test_the_table_says_what_a_model_gets(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_architecture(tmp_path / kind, kind)
    with caplog.at_level(logging.WARNING, "agentjet"):
        policy = make_policy(folder, rank=2)
    name = type(policy.model.get_base_model()).__name__  # type: ignore[operator]
    learning, sampling = ("yes" if shares else "no" for shares in (policy.learns_forests, policy.info.shares_prefixes))
    adapters = "all but `out_proj`" if kind in ("mamba", "falcon_h1") else "all"
    if "routed experts get no adapter" in caplog.text:
        adapters = "all but experts"
    lines = [r.getMessage() for r in caplog.records if "prefixes are" in r.getMessage()]
    assert len(lines) == (kind in NO_FOREST)
    assert all(NO_FOREST[kind] in line and line.endswith("): one row per timeline") for line in lines)
    assert f"| {kind} | `{name}` | {learning} | {sampling} | {adapters} |" in PAGE.read_text(encoding="utf-8")
    assert all("lora_" in name and "vision" not in name for name in policy.trainable())
    assert policy.info.end_tokens == (tiny.SPECIAL.index("<|im_end|>"),)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BY_TYPE)
def test_the_table_says_what_other_models_get(kind: str, tmp_path: Path) -> None:
    assert architecture_row(kind, tmp_path / kind) in rows_of(PAGE.read_text(encoding="utf-8"), ARCHITECTURE)


def test_the_tables_have_every_architecture_and_family() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rows_of(page, FAMILY) == family_rows(page)
    rows = rows_of(page, ARCHITECTURE)
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(EVERY)


def test_a_wrapper_learns_its_language_model_only(tmp_path: Path) -> None:
    policy = make_policy(make_architecture(tmp_path / "model", "qwen3_vl"))
    trained = set(policy.trainable())
    assert {name for name, _ in policy.model.named_parameters() if "visual" in name}.isdisjoint(trained)
    rows = episodes(policy)
    policy.model.double()
    with Double():
        baseline = Baseline(policy, rows, None)
        gradient = learner_gradient(policy, build_forest(rows), policy_gradient(), None)
    assert relative(gradient, baseline.gradient(policy_gradient())) <= 1e-9


def whole(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """All tensors of a folder, as the index names them if there is one, and its class."""
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] if index.exists() else None
    found: dict[str, torch.Tensor] = {}
    for file in set(names.values()) if names else {"model.safetensors"}:
        found |= load_file(folder / file)
    assert names is None or names.keys() == found.keys()
    return found, json.loads((folder / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        # Every wrapper once, with all weights and with an adapter in turns.
        (kind, rank) if (i + rank // 2) % 2 == 0 else pytest.param(kind, rank, marks=pytest.mark.thorough)
        for i, kind in enumerate(WRAPPERS)
        for rank in (0, 2)
    ],
)
def test_an_exported_wrapper_is_whole(tmp_path: Path, kind: str, rank: int) -> None:
    folder = make_architecture(tmp_path / "model", kind)
    (folder / "preprocessor_config.json").write_text("{}")
    make_policy(folder, rank=rank).save(tmp_path / "export", merged=True)
    (before, own), (after, exported) = whole(folder), whole(tmp_path / "export")
    assert exported == own
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    kept = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= kept
    if rank:
        make_policy(folder, rank=rank).save(tmp_path / "adapter", merged=False)
        merge_folders(tmp_path / "merged", [tmp_path / "adapter"], base=str(folder))
    else:
        merge_folders(tmp_path / "merged", [tmp_path / "export"], base=str(folder))
    merged, class_name = whole(tmp_path / "merged")
    assert class_name == own and merged.keys() == before.keys()


@pytest.mark.parametrize("named", [None, "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "SomethingElse"])
def test_the_config_names_the_class(tmp_path: Path, named: str | None) -> None:
    folder = make_architecture(tmp_path / "model", "qwen3_5")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": named and [named]}
    (folder / "config.json").write_text(json.dumps(config))
    wanted = "Qwen3_5ForCausalLM" if named == "Qwen3_5ForCausalLM" else "Qwen3_5ForConditionalGeneration"
    assert type(make_policy(folder).model).__name__ == wanted


@pytest.mark.parametrize("shards", [1, 2])
def test_an_export_keeps_tensors_that_the_class_does_not_read(tmp_path: Path, shards: int) -> None:
    """Heads for later tokens of Qwen3.5; a second copy of a tied matrix would be out of date."""
    folder = make_architecture(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    tensors, _ = whole(folder)
    more = {
        "mtp.fc.weight": torch.arange(4.0).bfloat16(),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    if shards == 1:
        save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        save_file(more, folder / "more.safetensors", metadata={"format": "pt"})
        files = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(more, "more.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    policy = make_policy(folder)
    with torch.no_grad():
        next(iter(policy.trainable().values())).add_(1)
    policy.save(tmp_path / "export", merged=True)
    after, _ = whole(tmp_path / "export")
    assert after.keys() == {*tensors, "mtp.fc.weight"}
    assert torch.equal(after["mtp.fc.weight"], more["mtp.fc.weight"])
    again = make_policy(tmp_path / "export").trainable()
    assert all(torch.equal(p, again[name]) for name, p in policy.trainable().items())


@pytest.mark.parametrize(
    ("modules", "tied", "refused"),
    [
        ("q_proj,lm_head", True, "embed_tokens and lm_head share one matrix"),
        ("embed_tokens,q_proj", True, "embed_tokens and lm_head share one matrix"),
        ("nothing", True, "nothing"),
        ("rotary_emb", True, "model.lora.target_modules"),
        ("embed_tokens,q_proj", False, ""),
        ("q_proj,lm_head", False, ""),
        ("lm_head", False, ""),
        ("embed_tokens", False, ""),
    ],
)
def test_an_adapter_samples_learns_and_is_exported_or_refused(
    tmp_path: Path, modules: str, tied: bool, refused: str
) -> None:
    base = BaseModel(model_config(make_architecture(tmp_path / "model", "llama", tie_word_embeddings=tied)))
    lora = LoraConfig(rank=2, target_modules=modules)
    if refused:
        with pytest.raises(ConfigError, match=refused):
            base.adapted(lora)
        return
    policy = with_random_adapter(base.adapted(lora), 3)
    sampler = ModelSampler(base.policy, 64, 8192)
    sampler.submit(1, np.array([5, 6, 7], np.int32), SamplingParams(max_tokens=3, temperature=1.0, seed=1), policy)
    assert [token.logprob < 0 for token in sampler.step()] == [True]
    gradient = learner_gradient(policy, build_forest(episodes(policy)), policy_gradient(), None)
    assert float(gradient.abs().sum()) > 0
    policy.save(tmp_path / "export", merged=True)
    exported = make_policy(tmp_path / "export")
    ids = torch.arange(5, 15)[None]
    with policy.attention("eager"), exported.attention("eager"), torch.no_grad():
        ours, theirs = (p.model(input_ids=ids).logits for p in (policy, exported))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_an_adapter_that_text_does_not_reach_is_refused(tmp_path: Path) -> None:
    """Otherwise it would be trained for ever and change nothing."""
    folder = make_architecture(tmp_path / "model", "qwen3_vl")
    lora = LoraConfig(rank=2, target_modules="qkv")
    with pytest.raises(ConfigError, match=r"target_modules = 'qkv': the model does not .*; use 'all-linear', or name"):
        make_policy(folder, lora=lora)


@pytest.mark.parametrize("error", [TypeError("forward() lacks pixel_values"), AttributeError("no last_hidden_state")])
def test_a_model_whose_code_fails_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = make_architecture(tmp_path / "model", "llama")

    def forward(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(ConfigError, match=rf"\(llama\) cannot be trained: .*{error.args[0][-12:]}; use another model"):
        make_policy(folder)


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LlamaTokenizer` adds the dummy prefix to the first text only, in spite of its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_architecture(tmp_path / "model", "llama")
    tiny.sentencepiece("prepend").save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for tokenizer_class, second in (("PreTrainedTokenizerFast", " a"), ("LlamaTokenizer", "a")):
        config = json.dumps({"tokenizer_class": tokenizer_class, **names})
        (folder / "tokenizer_config.json").write_text(config)
        vocabulary = Vocabulary(make_policy(folder).info.tokenizer_path)
        assert vocabulary.add_prefix("a", first=True) == " a"
        assert vocabulary.add_prefix("a", first=False) == second
        (tmp_path / "cache").rename(tmp_path / second)
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match="cache/agentjet cannot be written: set XDG_CACHE_HOME to another place"):
        make_policy(folder)


def test_a_model_with_named_templates_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_architecture(tmp_path / "model", "llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}<tool_call></tool_call>")
    policy = make_policy(folder)
    assert policy.info.tool_format == "hermes"
    policy.save(tmp_path / "export", merged=True)
    assert make_policy(tmp_path / "export").info == dataclasses.replace(policy.info, name=str(tmp_path / "export"))
    shutil.rmtree(folder / "additional_chat_templates")
    with caplog.at_level(logging.WARNING, "agentjet"):
        make_policy(folder)
    assert "the chat template has no tools" in caplog.text


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="type 'vit', which is not a causal language model: use"):
        make_policy(tmp_path)


@pytest.mark.parametrize(
    ("facts", "name"),
    [("processor : 0\nmodel name\t: A 9000\nflags : x\nmodel name\t: A 9000\n", "A 9000"), ("processor : 0\n", ".+")],
)
def test_a_machine_has_the_name_and_the_used_cores_of_its_cpu(tmp_path: Path, facts: str, name: str) -> None:
    (tmp_path / "cpuinfo").write_text(facts)
    kind = machine_kind(torch.device("cpu"), tmp_path / "cpuinfo")
    assert re.fullmatch(rf"{torch.get_num_threads()} of \d+ cores of {name}", kind)
