"""Files of a model that AgentJet does not load unchanged. Pinned here:

1. custom code of a folder is never run, and nothing waits for an answer on standard input; if `transformers` supports
   the architecture, the folder loads;
2. files that lack weights are refused: version 0, the reference of a KL penalty, must be the same each time. Tied
   weights are not missing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentjet.errors import ConfigError
from tests.compute.conftest import make_policy

AUTO_MAP = {"AutoConfig": "code.Strange", "AutoModelForCausalLM": "code.StrangeModel"}
CODE = "raise SystemExit('code of the folder was run')"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(tiny_folder, copied)
    (copied / "code.py").write_text(CODE)
    return copied


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_known_architecture_loads_without_the_code_it_brings(folder: Path) -> None:
    edit(folder / "config.json", auto_map=AUTO_MAP)
    assert make_policy(folder).info.num_parameters > 0


def test_an_unknown_architecture_is_refused_in_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> str:
        raise AssertionError(f"standard input was read: {prompt}")

    monkeypatch.setattr("builtins.input", asked)
    edit(folder / "config.json", auto_map=AUTO_MAP, model_type="strange")
    with pytest.raises(ConfigError, match=r"model\.name = .*: it needs custom code \(auto_map\), which AgentJet never"):
        make_policy(folder)


@pytest.mark.parametrize("lacks", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_files_that_lack_weights_are_refused(folder: Path, lacks: str) -> None:
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied, and not missing"
    del weights[lacks]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"its files lack 1 of the model's weights \({lacks}\)"):
        make_policy(folder)


def test_the_reference_is_version_0(folder: Path) -> None:
    policy = make_policy(folder)
    original = policy.original_weights()
    assert all(torch.equal(p, original[name]) for name, p in policy.trainable().items())
