"""Two ranks on gloo, without a gateway, compared with one learner of the embedded backend. Pinned here:

1. the gradient of two ranks is that of one for every loss, aggregation, correction, KL term, mini-batch, micro-batch
   and set of `test_locks`, within 1e-6 in float32 and 1e-12 in float64, in both modes; so are the metrics;
2. a replay from a checkpoint is equal bit by bit on the same number of ranks, also if only one of both offloads the
   optimiser;
3. a checkpoint restores equal bits on another number of ranks (4 to 2 to 1), and in the other backend;
4. an exported folder and the published weights are the policy, adapters folded in; an adapter is published whole, also
   if each rank holds a part of it;
5. what one rank cannot do fails on all of them, and none waits;
6. an operation that fails on all ranks changes nothing;
7. two ranks repeat the routes of experts as one does, in both modes;
8. two ranks have the gradient of one with every kind of teacher in the learner, in its context, and by likely tokens;
9. the watchdog of NCCL is set by names that the installed torch knows.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.compute import checkpoint
from agentjet.compute.group import Sharding, nccl_variables
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.passes import score
from tests.cluster import rank_cases
from tests.cluster.rank_cases import (
    AFTER,
    BEFORE,
    OFFLOADED,
    RECOMPUTED,
    Case,
    digest,
    gradients_of_one,
    learn,
    policy_of,
    state_of,
)
from tests.cluster.spawn import spawn
from tests.compute.architectures import make_architecture
from tests.compute.baseline import relative
from tests.compute.conftest import make_policy
from tests.compute.test_locks import RECIPES
from tests.compute.test_routes import forest_with_routes, make_mixture
from tests.tiny import make_model

ALL = tuple(range(len(RECIPES)))
SOME = (0, 4, 9, 13, 15)
"""Batches with a KL term, a correction, mini-batches and sequence ratios."""
GRADIENTS: dict[Case, tuple[int, ...]] = {
    ("full", "gathered"): ALL,
    ("full", "sharded"): SOME,
    ("double", "gathered"): (13,),
    ("double", "sharded"): (13,),
    ("lora", "gathered"): (9,),
    ("lora", "sharded"): (9,),
    ("full recomputed", "gathered"): (9,),
    ("full recomputed", "sharded"): (9,),
    ("lora recomputed", "sharded"): (9,),
    ("full bfloat16", "gathered"): (4,),
    ("full bfloat16", "sharded"): (4,),
}
LARGEST_ERROR = {"full": 1e-6, "double": 1e-12, "lora": 1e-6, "full bfloat16": 3e-2}
REPLAYS: list[Case] = [("full", "gathered"), (f"full bfloat16{OFFLOADED}", "sharded"), ("lora", "sharded")]
MORE_REPLAYS: list[Case] = [
    ("full", "sharded"),
    (f"full{OFFLOADED}", "gathered"),
    ("full bfloat16", "gathered"),
    ("full bfloat16", "sharded"),
    (f"lora bfloat16{OFFLOADED}", "gathered"),
    (f"lora bfloat16{OFFLOADED}", "sharded"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tiny = make_model(tmp_path_factory.mktemp("models") / "tiny")
    return dict.fromkeys({kind for kind, _ in (*GRADIENTS, *REPLAYS, *MORE_REPLAYS)} | {"lora", "full"}, tiny)


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of the ranks, and what each found: gradients, replays, errors, an adapter. A start takes seconds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, spawn(2, rank_cases.all_work, models, folder, GRADIENTS, REPLAYS)


def check_gradients(kind: str, found: Any, models: dict[str, Path], batches: tuple[int, ...]) -> None:
    gradients, metrics = found
    expected_gradients, expected_metrics = gradients_of_one(kind, models, batches)
    assert gradients.keys() == expected_gradients.keys()
    kind = kind.removesuffix(RECOMPUTED)
    for step, expected in expected_gradients.items():
        error = relative(torch.from_numpy(gradients[step]), torch.from_numpy(expected))
        assert error <= LARGEST_ERROR.get(kind, 1e-5), (step, RECIPES[step[0]])
        ours, theirs = metrics[step], expected_metrics[step]
        computed, needed = ours.pop("forest/tokens_computed"), theirs.pop("forest/tokens_computed")
        assert computed >= needed or kind == "rows", "ranks may repeat nodes above a cut; rows have less padding"
        assert ours == pytest.approx(theirs, rel=1e-4 if "bfloat16" not in kind else 0.5, abs=1e-6), step


def test_torch_knows_the_variables_of_nccl() -> None:
    header = Path(torch.__file__).with_name("include") / "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    known = set(re.findall(r'"(\w+)"', header.read_text()))
    assert nccl_variables(0.5)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1" and nccl_variables(0.5).keys() <= known


@pytest.mark.parametrize(("kind", "sharding"), GRADIENTS)
def test_two_ranks_have_the_gradient_of_one(
    kind: str, sharding: Sharding, two_ranks: tuple[Path, list[Any]], models: dict[str, Path]
) -> None:
    found = two_ranks[1][0][0]
    check_gradients(kind, found[kind, sharding], models, GRADIENTS[kind, sharding])


@pytest.mark.parametrize(("kind", "sharding"), rank_cases.TAUGHT_CASES)
def test_two_ranks_learn_from_a_teacher_as_one(
    kind: str, sharding: Sharding, two_ranks: tuple[Path, list[Any]], models: dict[str, Path]
) -> None:
    ours, theirs = (found[5][kind, sharding] for found in two_ranks[1])
    expected = rank_cases.taught_ranks(None, models, [(kind, sharding)])[kind, sharding]
    assert len(ours) == len(expected) == len(rank_cases.TAUGHT) + 2
    for (gradient, metrics), (one, of_one), (other, _) in zip(ours, expected, theirs, strict=True):
        error = relative(torch.from_numpy(gradient), torch.from_numpy(one))
        assert error <= (1e-6 if kind == "double" else 1e-5), "grades are stored in float32"
        assert np.array_equal(gradient, other) and np.abs(one).max() > 0
        for values in (metrics, of_one):
            values.pop("forest/tokens_computed")
        assert metrics == pytest.approx(of_one, rel=1e-4, abs=1e-6)


def test_two_ranks_repeat_the_routes_of_one(tmp_path: Path) -> None:
    folder = make_mixture(tmp_path / "mixture", "qwen3_moe")
    forest = forest_with_routes(make_policy(folder))
    [(expected, metrics)] = rank_cases.repeat_routes(None, folder, forest)
    [(plain, _)] = rank_cases.repeat_routes(None, folder, replace(forest, routes=None))
    for gradient, found in spawn(2, rank_cases.repeat_routes, folder, forest)[0]:
        assert relative(torch.from_numpy(gradient), torch.from_numpy(expected)) <= 1e-6
        assert relative(torch.from_numpy(gradient), torch.from_numpy(plain)) > 1e-2
        assert found["moe/route_mismatch"] == pytest.approx(metrics["moe/route_mismatch"], rel=0.2)
        assert found["policy/mismatch_kl_own_routes"] == pytest.approx(metrics["policy/mismatch_kl_own_routes"])


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_any_number_of_ranks_has_the_gradient_of_one(num_ranks: int, tmp_path: Path) -> None:
    folders = {"full": make_model(tmp_path / "tiny")}
    folders |= {kind: make_architecture(tmp_path / kind, kind) for kind in ("gpt_oss", "qwen3_next")}
    folders["rows"] = make_architecture(tmp_path / "rows", "recurrent_gemma")
    cases: dict[Case, tuple[int, ...]] = {(kind, "gathered"): SOME for kind in folders}
    cases |= {("full", "sharded"): ALL, ("rows", "sharded"): SOME}
    found = spawn(num_ranks, rank_cases.gradients_of_ranks, folders, cases)[0]
    for (kind, sharding), batches in cases.items():
        check_gradients(kind, found[kind, sharding], folders, batches)


@pytest.mark.parametrize(("kind", "sharding"), REPLAYS)
def test_a_replay_is_equal_and_its_files_are_the_policy(
    kind: str, sharding: Sharding, two_ranks: tuple[Path, list[Any]], models: dict[str, Path]
) -> None:
    folder, (first, _) = two_ranks
    check_replay(kind, folder / f"{kind}-{sharding}", first[1][kind, sharding], models)


@pytest.mark.thorough
def test_more_replays_are_equal(models: dict[str, Path], tmp_path: Path) -> None:
    found = spawn(2, rank_cases.save_and_replay, models, tmp_path, MORE_REPLAYS)[0]
    for kind, sharding in MORE_REPLAYS:
        check_replay(kind, tmp_path / f"{kind}-{sharding}", found[kind, sharding], models)


def check_replay(kind: str, folder: Path, found: Any, models: dict[str, Path]) -> None:
    assert found["restored"] == digest(found["saved"])
    assert found["replayed"] == found["undisturbed"] != found["restored"]
    assert (found["state"]["policy_version"], found["state"]["operation"]) == (2, 8)
    assert found["state"]["digest"] == found["digest"]
    check_embedded(kind, folder, found, models)
    check_export(kind, folder, found, models)


def check_embedded(kind: str, folder: Path, found: Any, models: dict[str, Path]) -> None:
    """The embedded backend reads the checkpoint of ranks."""
    learner = PolicyLearner(policy_of(kind, models[kind]))
    assert checkpoint.load(folder / "step_000002", learner)["policy_version"] == 2
    assert learner.fingerprint == found["fingerprint"], "a replay on the other backend would look like another one"
    restored = state_of(learner)
    assert restored.keys() == found["saved"].keys() and any(name.startswith("reference ") for name in restored)
    for name, expected in found["saved"].items():
        assert np.array_equal(restored[name], expected), name
    if "bfloat16" not in kind:  # Adam divides by gradients, of which some are rounding errors.
        after = learn(learner, AFTER)
        assert vector(after, "master") == pytest.approx(vector(found["after"], "master"), abs=2e-4)


def vector(arrays: dict[str, np.ndarray], key: str) -> np.ndarray:
    return np.concatenate([array.ravel() for name, array in arrays.items() if name.startswith(f"{key} ")])


def check_export(kind: str, folder: Path, found: Any, models: dict[str, Path]) -> None:
    """The exported folder and the published weights are the policy, adapters folded in."""
    dtype = "bfloat16" if "bfloat16" in kind else "float32"
    exported = make_policy(folder / "export", dtype=dtype)
    for name, p in exported.model.named_parameters():
        assert np.array_equal(p.detach().float().numpy(), found["weights"][name]), name
    if kind.startswith("full"):
        for name, p in exported.model.named_parameters():
            master = torch.from_numpy(found["after"][f"master {name}"])
            assert torch.equal(p.detach(), master.to(p.dtype)), name
    else:
        check_merged(kind, folder, exported.model, found, models)


def check_merged(kind: str, folder: Path, exported: Any, found: Any, models: dict[str, Path]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(models[kind], dtype=exported.dtype)
    merged = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload()
    for name, p in merged.named_parameters():
        assert torch.allclose(p, exported.get_parameter(name), atol=1e-6 if "bfloat16" not in kind else 2e-2), name


@pytest.mark.thorough
@pytest.mark.parametrize("counts", [(4, 2, 1), (1, 3)])
def test_a_checkpoint_reshards(counts: tuple[int, ...], models: dict[str, Path], tmp_path: Path) -> None:
    """From the embedded backend to the first count, and on; the last one is compared with one learner all along."""
    case: Case = ("full", "sharded")
    learner = PolicyLearner(policy_of("full", models["full"]))
    saved = learn(learner, BEFORE)
    path = tmp_path / "embedded"
    checkpoint.save(path, learner, {"policy_version": 2, "operation": 8})
    for count in counts:
        target = tmp_path / f"of {count}"
        restored, _ = spawn(count, rank_cases.load_and_save, models, case, path, target, ())[0]
        assert digest(restored) == digest(saved), count
        path = target


def test_ranks_publish_the_whole_adapter(two_ranks: tuple[Path, list[Any]], models: dict[str, Path]) -> None:
    from peft import get_peft_model_state_dict

    publication, weights = two_ranks[1][0][3]
    policy = policy_of("lora", models["lora"])
    expected = get_peft_model_state_dict(policy.model)
    assert set(weights) == set(expected)
    assert all(np.array_equal(weights[key], tensor.detach().numpy()) for key, tensor in expected.items())
    assert json.loads(publication.adapter)["r"] == 4 and publication.num_bytes < 50_000
    probe = score(policy, np.array(publication.probe_tokens, np.int32), 0)
    assert publication.probe_logprobs == pytest.approx([one.logprob for one in probe], abs=1e-5)


@pytest.mark.parametrize(("kind", "sharding"), rank_cases.FAILURES)
def test_an_operation_that_fails_changes_nothing(
    kind: str, sharding: Sharding, two_ranks: tuple[Path, list[Any]]
) -> None:
    for *_, found, _ in two_ranks[1]:
        errors, states = zip(*found[kind, sharding].values(), strict=True)
        hooks = [re.findall("`(token_loss|next_state)`", error) for error in errors]
        assert hooks == [[], ["token_loss"], ["token_loss"], ["next_state"]]
        assert len(set(states)) == 1 < len(states)


def test_an_error_of_one_rank_is_raised_on_all(two_ranks: tuple[Path, list[Any]]) -> None:
    first, second = (errors for _, _, errors, *_ in two_ranks[1])
    assert first == second
    assert "could not be written" in first[0]
    assert "does not see" in first[1] and "server.data_dir must be on a file system" in first[1]
    assert first[2].startswith("rank 1 does not see")
    assert "is damaged: trainer/.metadata" in first[3] and len(first) == 5
    assert first[4].startswith("job.optimizer.name = 'muon': the cluster backend has 'adamw'")
