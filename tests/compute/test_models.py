"""The table of docs/models.md, checked on a tiny random model of each architecture. Pinned here:

1. each architecture loads, and the table is right about prefix sharing and adapters;
2. wrappers that read images train their language model only, to the gradient of one row per call;
3. an export of a wrapper keeps its other parts and its processor's files;
4. the tokenizer is that of `transformers`, also if its class rebuilds the file.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.config import ModelConfig
from agentjet.errors import ConfigError
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.timeline.forest import build_forest
from tests import tiny
from tests.compute.architectures import BRANCHING, MORE, ROWS, WRAPPERS, make_architecture
from tests.compute.baseline import Baseline, Double, episodes, learner_gradient, policy_gradient, relative

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def load(folder: Path, *, rank: int = 0) -> Policy:
    settings = {"name": str(folder), "device": "cpu", "dtype": "float32", "lora": {"rank": rank}}
    return load_policy(ModelConfig.model_validate(settings))


@pytest.mark.parametrize("kind", [*BRANCHING, *MORE, *WRAPPERS, *ROWS])
def test_the_table_says_what_a_model_gets(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_architecture(tmp_path / kind, kind)
    with caplog.at_level(logging.WARNING, "agentjet"):
        policy = load(folder, rank=2)
    name = type(policy.model.get_base_model()).__name__  # type: ignore[operator]
    sharing = "yes" if policy.info.shares_prefixes else "no"
    adapters = "all but `out_proj`" if kind in ("mamba", "falcon_h1") else "all"
    if "routed experts get no adapter" in caplog.text:
        adapters = "all but experts"
    assert f"| {kind} | `{name}` | {sharing} | {adapters} |" in PAGE.read_text(encoding="utf-8")
    assert all("lora_" in name and "vision" not in name for name in policy.trainable())
    assert policy.info.end_tokens == (tiny.SPECIAL.index("<|im_end|>"),)


def test_a_wrapper_learns_its_language_model_only(tmp_path: Path) -> None:
    policy = load(make_architecture(tmp_path / "model", "qwen3_vl"))
    trained = set(policy.trainable())
    assert {name for name, _ in policy.model.named_parameters() if "visual" in name}.isdisjoint(trained)
    rows = episodes(policy)
    policy.model.double()
    with Double():
        baseline = Baseline(policy, rows, None)
        gradient = learner_gradient(policy, build_forest(rows), policy_gradient(), None)
    assert relative(gradient, baseline.gradient(policy_gradient())) <= 1e-9


def test_an_exported_wrapper_is_whole(tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "model", "gemma3_vl")
    (folder / "preprocessor_config.json").write_text("{}")
    load(folder).save(tmp_path / "export", merged=True)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "export"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    kept = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= kept


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LlamaTokenizer` adds the dummy prefix to the first text only, in spite of its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_architecture(tmp_path / "model", "llama")
    tiny.sentencepiece("prepend").save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for tokenizer_class, second in (("PreTrainedTokenizerFast", " a"), ("LlamaTokenizer", "a")):
        config = json.dumps({"tokenizer_class": tokenizer_class, **names})
        (folder / "tokenizer_config.json").write_text(config)
        vocabulary = Vocabulary(load(folder).info.tokenizer_path)
        assert vocabulary.add_prefix("a", first=True) == " a"
        assert vocabulary.add_prefix("a", first=False) == second
        (tmp_path / "cache").rename(tmp_path / second)
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match="cache/agentjet cannot be written: set XDG_CACHE_HOME to another place"):
        load(folder)


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="type 'vit', which is not a causal language model: use"):
        load(tmp_path)
