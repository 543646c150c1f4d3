"""Every architecture of `transformers` loads, samples and is exported whole, or is refused with one sentence.

Routes of experts are recorded for every mixture, with the exceptions below.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentjet.compute.model import BaseModel
from agentjet.compute.sampler import ModelSampler
from agentjet.config import LoraConfig
from agentjet.errors import ConfigError
from agentjet.types import SamplingParams
from tests.compute.conftest import model_config
from tests.compute.every_architecture import make_any, model_types

pytestmark = [pytest.mark.thorough, pytest.mark.slow]

NOT_SMALL = {
    *("bamba", "blt", "cohere_compass_text", "cohere_compass", "dbrx", "dots1", "dots3_note", "dots3_note_text"),
    *("gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"),
    *("nemotron", "qwen4_exp", "qwen4_exp_text", "reformer", "zamba", "zamba2", "chameleon", "deepseek_ocr2"),
    *("diffusion_gemma", "emu3", "ernie4_5_vl_moe", "fast_vlm", "florence2", "evolla", "glm5_next"),
    *("granite4_vision", "granite_docling", "hunyuan_vl", "inkling2", "janus", "molmo2", "muse_spark"),
    *("nemotron_h_omni", "muse_glimmer", "perception_lm", "paligemma", "step3p7", "shieldgemma2"),
}
"""Model types whose config `every_architecture` cannot make small, or that need a library that is not installed."""
HEAD = "its logits are not the product of its last hidden states and its output embeddings"
PICTURES = "cannot be trained: .*(pixel|image|flattened_patches|bbox|input_ids or inputs_embeds)"
REFUSED = {
    **dict.fromkeys(
        [
            *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "inkling_text"),
            *("inkling_mm_model", "megatron-bert", "modernbert-decoder", "prophetnet", "rembert", "roberta"),
            *("roberta-prelayernorm", "roformer", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        ],
        HEAD,
    ),
    **dict.fromkeys(["blip", "pix2struct", "pi0", "udop"], "has no decoder between its input and output embeddings"),
    **dict.fromkeys(
        ["blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "vision-encoder-decoder"], PICTURES
    ),
    "t5gemma2": "cannot be trained: ValueError",
    "pp_formulanet": "cannot be trained: NotImplementedError",
}
"""Reasons of refusals by model type."""


WITHOUT_ROUTES = {"phimoe"}
"""Model types with experts whose routes are not recorded."""


def whole(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return tensors, json.loads((folder / "config.json").read_text())["architectures"][0]


CASES = [case for case in model_types() if case[1] not in NOT_SMALL]


@pytest.mark.parametrize(("auto", "model_type"), CASES, ids=lambda value: value.removeprefix("AutoModelFor"))
def test_it_loads_or_says_why(tmp_path: Path, auto: str, model_type: str) -> None:
    folder = make_any(tmp_path / "model", auto, model_type)
    config = model_config(folder)
    if model_type in REFUSED or (model_type, auto) == ("mllama", "AutoModelForCausalLM"):
        reason = REFUSED.get(model_type, "is not a causal language model")
        with pytest.raises(ConfigError) as refused:
            BaseModel(config)
        assert re.search(reason, str(refused.value), re.IGNORECASE) and "\n" not in str(refused.value)
        return
    base = BaseModel(config)
    has_experts = any(name.endswith("experts") for name, _ in base.policy.decoder.named_modules())
    has_routes = base.policy.info.routes is not None
    assert has_routes == (model_type not in WITHOUT_ROUTES) if has_experts else not has_routes
    sampler = ModelSampler(base.policy, 4, 256)
    sampler.submit(1, np.array([5, 6, 7, 8], np.int32), SamplingParams(max_tokens=3, seed=1))
    assert all(sampler.step()[0].logprob <= 0 for _ in range(2))
    try:
        base.adapted(LoraConfig(rank=2))
    except ConfigError as error:
        assert "model.lora.target_modules = 'all-linear'" in str(error)
    base.policy.save(tmp_path / "export", merged=True)
    (before, own), (after, exported) = whole(folder), whole(tmp_path / "export")
    assert exported == own and before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_most_architectures_are_tried() -> None:
    assert len(CASES) > 230 and len(CASES) - len(REFUSED) > 200
