"""RAM and RAM+ against numbers worked out by hand, and on folders of models and adapters.

1. Weights that one model changed stay whole, shared ones are averaged.
2. A model without weights of its own has factor 1; unchanged weights are those of the base, in its type.
3. An adapter and a whole model merge into a Hugging Face folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.compute.merging import WeightShares, base_of, merge, merge_folders
from agentjet.errors import ConfigError
from tests.compute.conftest import make_policy
from tests.tiny import make_model

CHANGES = [[0.1, 0.2, 0, 0, 0, 0.05], [0.3, 0, 0.4, 0, 0, 0], [0, 0, 0, 0.6, 0, 0.15]]


@pytest.mark.parametrize(
    ("rescale", "expected"), [(1.0, [0.2, 0.2, 0.4, 0.6, 0, 0.1]), (1.2, [0.2, 0.24, 0.48, 0.72, 0, 0.1])]
)
def test_the_arithmetic(rescale: float, expected: list[float]) -> None:
    base = {"w": torch.zeros(6), "only_in_base": torch.ones(2, dtype=torch.bfloat16)}
    merged, shares = merge(base, ({"w": torch.tensor(change)} for change in CHANGES), rescale)
    assert merged["w"].tolist() == pytest.approx(expected)
    assert merged["only_in_base"].dtype == torch.bfloat16 and merged["only_in_base"].tolist() == [1, 1]
    assert shares == [WeightShares(2, 1), WeightShares(1, 1), WeightShares(1, 1)]


def test_a_model_without_unique_weights() -> None:
    merged, shares = merge({"w": torch.zeros(1)}, [{"w": torch.ones(1)}, {"w": torch.full((1,), 3.0)}], 1.2)
    assert merged["w"].tolist() == [2.0] and shares == [WeightShares(1, 0)] * 2


def test_folders_of_an_adapter_and_of_a_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base")
    whole, adapted = make_policy(folder), make_policy(folder, rank=2)
    before = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    name = next(name for name in before if "layers.0" in name and "q_proj" in name)
    with torch.no_grad():
        dict(whole.model.named_parameters())[name][0] += 0.5
        for path, parameter in adapted.model.named_parameters():
            if "lora_B" in path and "layers.1" in path and "q_proj" in path:
                parameter += 0.1
    whole.save(tmp_path / "whole", merged=True)
    adapted.save(tmp_path / "adapter", merged=False)
    places = [str(tmp_path / "whole"), str(tmp_path / "adapter")]
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "out"), *places])
    assert done.exit_code == 0, done.output
    merged = make_policy(tmp_path / "out").model.state_dict()
    changed = [name for name in before if not torch.equal(before[name], merged[name])]
    assert changed == sorted([name, name.replace("layers.0", "layers.1")])
    assert torch.allclose(merged[name][0], before[name][0] + 0.5)
    with pytest.raises(ConfigError, match="--base"):
        base_of([tmp_path / "whole"])
    check_damaged(folder, tmp_path / "whole", tmp_path / "adapter")


def check_damaged(base: Path, whole: Path, adapter: Path) -> None:
    """Damaged folders are refused with their names."""
    weights, config = whole / "model.safetensors", adapter / "adapter_config.json"
    tensors = load_file(weights)
    save_file(
        {**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], torch.nan)},
        weights,
        {"format": "pt"},
    )
    (wanted := json.loads(config.read_text())).pop("peft_type")
    (adapter / "adapter_model.safetensors").write_bytes(b"cut off")
    changes = (
        (weights, weights.read_bytes(), "whole: the weights model.norm.weight are not finite"),
        (weights, weights.read_bytes()[:100], "whole cannot be read"),
        (config, config.read_bytes(), "adapter cannot be read"),
        (config, json.dumps(wanted).encode(), "adapter cannot be read"),
        (config, b"{", "adapter_config.json cannot be read"),
        (config, b"{}", "adapter_config.json cannot be read: it has no 'base_model_name_or_path'"),
    )
    for file, content, why in changes:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            merge_folders(whole.parent / "other", [file.parent], "" if content[:2] in (b"{", b"{}") else str(base))
    config.write_text(json.dumps({**wanted, "peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="adapter is an adapter without weights: it has no"):
        merge_folders(whole.parent / "other", [adapter], str(base))
