"""A policy version means the same weights after a restart.

Pins:
1. a setting that would make other weights of the same batches is refused by name, with both values; others are not;
2. so are other base weights, once the worker is up;
3. a change of weights by rounding only is allowed;
4. a mistyped setting counts only once something was recorded; a data dir that has no record yet takes one.
5. journals that kept joined keys, `POLICY/SETTING`, are read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.config import JobConfig, LoraConfig, ModelConfig
from agentjet.errors import ConfigError
from agentjet.protocol import BeginRequest
from agentjet.swarm import Journal, SwarmState
from agentjet.swarm.origin import Origin
from agentjet.types import ModelInfo
from tests.swarm.world import World

CARD = ModelInfo("small", "", "", 100, (2,), device="cpu", dtype="bfloat16", weights="a1")


def settings(name: str = "small", *, dtype: Any = "auto", **others: Any) -> ModelConfig:
    lora = {"rank": 4, "target_modules": "q_proj,v_proj"} | others.pop("lora", {})
    return ModelConfig(name=name, dtype=dtype, lora=LoraConfig(**lora), **others)


def begun(folder: Path, model: ModelConfig) -> Path:
    """A journal of one episode, whose worker has been up."""
    path = folder / "journal.sqlite"
    journal = Journal.open(path, models={"policy": model})
    swarm = SwarmState(journal, JobConfig())
    swarm.check_origin("policy", CARD)
    swarm.record_origin()
    swarm.begin(BeginRequest(task_id="t"))
    journal.close()
    return path


@pytest.mark.parametrize(
    ("key", "was", "now", "other"),
    [
        ("model.name", "'small'", "'large'", settings("large")),
        ("model.dtype", "'bfloat16'", "'float32'", settings(dtype="float32")),
        ("model.lora.rank", "4", "8", settings(lora={"rank": 8})),
        ("model.lora.rank", "4", "0", settings(lora={"rank": 0})),
        ("model.lora.alpha", "32", "64", settings(lora={"alpha": 64})),
        ("model.lora.target_modules", "'q_proj,v_proj'", "'q_proj'", settings(lora={"target_modules": "q_proj"})),
    ],
)
def test_what_would_make_other_weights_is_refused(
    tmp_path: Path, key: str, was: str, now: str, other: ModelConfig
) -> None:
    path = begun(tmp_path, settings())
    for _ in range(2):  # A refusal records nothing.
        with pytest.raises(ConfigError) as refused:
            Journal.open(path, models={"policy": other})
        assert f"{str(tmp_path)!r} was created with {key} = {was}; {now} would change" in str(refused.value)
        assert "a new server.data_dir" in str(refused.value)
    Journal.open(path, models={"policy": settings()}).close()


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (settings(), settings(dtype="bfloat16")),
        (settings(), settings(threads=3, device="cpu", context_length=64)),
        (settings(), settings(lora={"target_modules": "v_proj, q_proj"})),
        (settings(lora={"rank": 0}), settings(lora={"rank": 0, "alpha": 1, "target_modules": "q_proj"})),
    ],
)
def test_what_changes_nothing_is_free(tmp_path: Path, was: ModelConfig, now: ModelConfig) -> None:
    Journal.open(begun(tmp_path, was), models={"policy": now}).close()


def test_other_base_weights_are_refused_once_the_worker_is_up(tmp_path: Path) -> None:
    begun(tmp_path, settings())
    world = World(tmp_path)
    assert world.journal.origin.of("policy")["model.dtype"] == "bfloat16"
    for card in (replace(CARD, weights="b2"), replace(CARD, dtype="float32")):
        with pytest.raises(
            ConfigError, match=r"model_weights = 'a1' .*; 'b2' would|dtype = 'bfloat16'; 'float32' would"
        ):
            world.swarm.check_origin("policy", card)
    world.swarm.check_origin("policy", CARD)
    world.swarm.check_origin("policy", replace(CARD, weights=""))  # a backend that takes no fingerprint
    world.swarm.check_origin("policy", replace(CARD, device="cuda:0"))  # It changes weights by rounding only.
    world.close()


def test_a_mistyped_setting_counts_once_something_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open(path, models={"policy": settings("smal", lora={"rank": 40})})
    journal.check_origin("policy", {"model_weights": "of another model"})
    journal.record_origin()
    journal.close()
    begun(tmp_path, settings())
    Journal.open(path, models={"policy": settings()}).close()


def test_a_data_dir_without_a_record_takes_what_its_policy_comes_up_with(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.begin()
    world.journal.file.set_meta("origin", '{"model.name":"small"}')
    world.close()
    with pytest.raises(ConfigError, match=r"model.name = 'small'; 'large' would"):
        Journal.open(world.path, models={"policy": settings("large")})
    Journal.open(world.path, models={"policy": settings(lora={"rank": 40})}).close()  # the checkpoint did not fit
    journal = Journal.open(world.path, models={"policy": settings()})
    journal.record_origin()
    journal.close()
    with pytest.raises(ConfigError, match=r"model.lora.rank = 4; 8 would"):
        Journal.open(world.path, models={"policy": settings(lora={"rank": 8})})


@pytest.mark.parametrize(
    ("earlier", "policies", "branched_from"),
    [
        ("{}", {}, ""),
        ('{"model.name":"small","model.lora.rank":4}', {"policy": {"model.name": "small", "model.lora.rank": 4}}, ""),
        (
            '{"policies":"coder,planner","planner/model.name":"small","coder/model.name":"a/b","branched_from":"d@3"}',
            {"coder": {"model.name": "a/b"}, "planner": {"model.name": "small"}},
            "d@3",
        ),
    ],
)
def test_origins_of_earlier_journals_are_read(earlier: str, policies: Any, branched_from: str) -> None:
    origin = Origin.from_json(earlier)
    assert origin == Origin(policies, branched_from) == Origin.from_json(origin.to_json())
    assert origin.flattened() == json.loads(earlier)
