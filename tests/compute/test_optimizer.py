"""The optimisers of `job.optimizer.name`.

1. A checkpoint continues each of them bit by bit, in any type of weights.
2. Another name begins with new moments at its first step, also in a replay. A skipped step changes nothing.
3. Muon changes the matrices of the layers, and AdamW everything else, by steps of one size.
4. AdamW with moments of 8 bits stays near AdamW. Embeddings keep 32 bits.
5. A backend, a policy or an installation that cannot have one is refused with the key, the value and the way out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentjet.compute import checkpoint, protocol
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.memory import Learning, gathered_need, optimizer_bytes, size_from_config
from agentjet.compute.optimizer import Optimizer, matrices_of
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import CAPABILITIES, check_capabilities
from agentjet.config import ServeConfig
from agentjet.errors import CheckpointError, ConfigError
from agentjet.timeline.forest import build_forest
from tests.cluster.test_memory import SMOLLM2
from tests.compute.conftest import make_policy, sampled_rows
from tests.compute.direct import learn_directly
from tests.compute.test_learner import job
from tests.tiny import make_model

EIGHT_BITS = pytest.param("adamw_8bit", marks=pytest.mark.needs("bitsandbytes"))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Matrices of 4096 numbers or more, which have 8 bits."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", hidden=128)


def train(learner: PolicyLearner, names: str, first: int = 0, **optimizer: Any) -> list[dict[str, float]]:
    """Learns one batch for each of the optimisers, separated by spaces."""
    found = []
    for version, name in enumerate(names.split(), first):
        forest = build_forest(sampled_rows(learner.policy, seed=version))
        settings = job({"mini_batches": 2}, optimizer={"name": name, "lr": 1e-3, "weight_decay": 0.1, **optimizer})
        found.append(learn_directly(learner, forest, settings, version))
    return found


def weights(learner: PolicyLearner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.trainable().items()}


def same(ours: PolicyLearner, theirs: PolicyLearner) -> bool:
    pairs = zip(ours.masters(), theirs.masters(), strict=True)
    return all(torch.equal(*pair) for pair in pairs) and ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "muon", EIGHT_BITS])
def test_a_checkpoint_continues_bit_by_bit(wide_folder: Path, tmp_path: Path, name: str, dtype: str) -> None:
    first = PolicyLearner(make_policy(wide_folder, dtype=dtype))
    train(first, f"{name} {name}")
    digest = checkpoint.save(tmp_path / "two", first, {"policy_version": 2})
    undisturbed = train(first, f"{name} {name}", 2)
    second = PolicyLearner(make_policy(wide_folder, dtype=dtype, offload_optimizer=name == "muon"))
    checkpoint.load(tmp_path / "two", second)
    assert checkpoint.save(tmp_path / "again", second, {"policy_version": 2}) == digest
    assert train(second, f"{name} {name}", 2) == undisturbed
    first.weights_changed()
    second.weights_changed()
    assert same(first, second)


@pytest.mark.parametrize("names", ["adamw adamw muon adamw", "muon muon adamw muon"])
@pytest.mark.parametrize("saved", [2, 3])
def test_another_optimiser_begins_with_new_moments_also_in_a_replay(
    tiny_folder: Path, tmp_path: Path, names: str, saved: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is older than the change, or has the moments of the other optimiser."""
    caplog.set_level("INFO")
    before, after = " ".join(names.split()[:saved]), " ".join(names.split()[saved:])
    first = PolicyLearner(make_policy(tiny_folder))
    train(first, before)
    checkpoint.save(tmp_path / "saved", first, {"policy_version": saved})
    train(first, after, saved)
    replayed = PolicyLearner(make_policy(tiny_folder))
    checkpoint.load(tmp_path / "saved", replayed)
    train(replayed, after, saved)
    first.weights_changed()
    replayed.weights_changed()
    assert same(first, replayed)
    *_, former, present = names.split()
    assert f"job.optimizer.name is {present!r} instead of {former!r} from policy version 3 on" in caplog.text


@pytest.mark.parametrize(("former", "present"), [("muon", "adamw"), ("adamw", "muon")])
def test_moments_of_another_optimiser_are_dropped(tiny_folder: Path, former: str, present: str) -> None:
    first, new = (PolicyLearner(make_policy(tiny_folder)) for _ in range(2))
    train(first, former)
    new.restore({"masters": first.state()["masters"], "moments": dict.fromkeys(first.state()["masters"])})
    for learner in (first, new):
        train(learner, present, 1)
        learner.weights_changed()
    assert same(first, new)


def test_a_skipped_step_keeps_the_optimiser(policy: Policy) -> None:
    learner = PolicyLearner(policy)
    train(learner, "adamw")
    before = learner.state()
    forest = build_forest(sampled_rows(policy))
    infinite = forest.with_columns(advantage=torch.full((forest.num_targets,), math.inf).numpy())
    metrics = learn_directly(learner, infinite, job(optimizer={"name": "muon"}), 1)
    assert metrics["optim/skipped_steps"] == 1
    assert learner.state().keys() == before.keys() and before["moments"].keys() == learner.state()["moments"].keys()
    assert all("exp_avg" in moments for moments in learner.state()["moments"].values())


def test_muon_changes_matrices_by_steps_of_the_size_of_adamw(policy: Policy) -> None:
    learner = PolicyLearner(policy)
    before = weights(learner)
    [metrics] = train(learner, "muon", weight_decay=0.0)
    assert metrics["optim/grad_norm"] > 0 and metrics["optim/steps"] == 2
    matrices = {name for name in before if name.endswith("_proj.weight")}
    assert matrices == matrices_of(policy) and len(matrices) == 2 * 7
    for name, moments in learner.state()["moments"].items():
        assert set(moments) == ({"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}), name
        step = (learner.policy.trainable()[name].detach() - before[name]) / 1e-3
        if name in matrices:  # Two steps, each of 0.2 sqrt(largest side) times a matrix with singular values near 1.
            values = torch.linalg.svdvals(step) / (0.2 * math.sqrt(max(step.shape)))
            assert 0.5 < float(values.mean()) < 2.5, name


@pytest.mark.needs("bitsandbytes")
def test_moments_of_8_bits_stay_near_those_of_32(wide_folder: Path) -> None:
    exact, small = (PolicyLearner(make_policy(wide_folder)) for _ in range(2))
    start, forest = weights(exact), build_forest(sampled_rows(exact.policy))
    for learner, name in ((exact, "adamw"), (small, "adamw_8bit")):
        for version in range(4):
            learn_directly(learner, forest, job(optimizer={"name": name, "lr": 1e-4}), version)
    for name, moments in small.state()["moments"].items():
        bits = {key: value.dtype for key, value in moments.items() if key.startswith(("state", "exp"))}
        assert set(bits.values()) == {torch.uint8 if name.endswith("_proj.weight") else torch.float32}, name
        assert ("exp_avg" in bits) == (name == "model.embed_tokens.weight")
    for name, ours in weights(small).items():
        way = weights(exact)[name] - start[name]
        assert float((ours - start[name] - way).norm()) < 0.1 * float(way.norm()), name


LORA = {"model.lora.rank": 4}
OFFLOAD = {"model.offload_optimizer": True}
CLUSTER = {"compute.backend": "cluster"}
NAMED = {"policies": {"planner": {"lora": {"rank": 4}}, "coder": {}}}


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("muon", CLUSTER, "job.optimizer.name = 'muon': the cluster backend has 'adamw': .* compute.backend = 'embedd"),
        ("adamw_8bit", CLUSTER, "job.optimizer.name = 'adamw_8bit': the cluster backend has 'adamw'"),
        ("muon", LORA, "job.optimizer.name = 'muon': .* an adapter is a product of two: choose 'adamw'"),
        ("muon", NAMED, "job.optimizers.planner.name = 'muon': .* or set model.lora.rank = 0"),
        ("adamw_8bit", OFFLOAD, "job.optimizer.name = 'adamw_8bit': .* or set model.offload_optimizer = false"),
        (
            "adamw_8bit",
            {},
            r"job.optimizer.name = 'adamw_8bit': bitsandbytes is not installed: pip install '\.\[bitsan",
        ),
        ("adamw", CLUSTER | LORA | OFFLOAD, ""),
        ("muon", OFFLOAD, ""),
    ],
)
def test_what_cannot_have_an_optimiser_refuses_it(
    name: str, settings: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "find_spec", lambda _: None)
    given: dict[str, Any] = {"job": {"optimizer": {"name": name}}}
    if "policies" in settings:
        given = {"job": {"optimizers": {"planner": {"name": name}}}}
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = given
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    config = ServeConfig.model_validate(given)

    def check() -> None:
        check_capabilities(lambda compute: CAPABILITIES[compute.backend], config, config.job)

    if not error:
        check()
        return
    with pytest.raises(ConfigError, match=error.replace(" .* ", " .*")):
        check()


def test_a_checkpoint_of_an_optimiser_that_is_missing_is_not_damaged(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = PolicyLearner(make_policy(tiny_folder))
    train(learner, "muon")
    checkpoint.save(tmp_path / "one", learner, {"policy_version": 1})
    none = protocol.Capabilities()
    monkeypatch.setitem(protocol.CAPABILITIES, "embedded", none)
    other = PolicyLearner(make_policy(tiny_folder))
    before = weights(other)
    with pytest.raises(ConfigError, match=r"job\.optimizer\.name = 'muon': the embedded backend has 'adamw'") as raised:
        checkpoint.load(tmp_path / "one", other)
    assert not isinstance(raised.value, CheckpointError)
    with pytest.raises(ConfigError, match=r"job\.optimizer\.name = 'muon'"):
        train(other, "muon")
    assert other.has_gradient, "the operation changed nothing"
    assert all(torch.equal(weight, before[name]) for name, weight in weights(other).items())


def test_the_memory_is_that_of_the_optimiser(tiny_folder: Path) -> None:
    size = size_from_config(SMOLLM2)
    share = size.layer_parameters / size.num_parameters
    for name, saved in {"adamw": 0, "muon": 4, "adamw_8bit": 6}.items():
        found = optimizer_bytes(name, size)
        assert found == 12 - saved * share and optimizer_bytes(name, size, adapter=True) == 12 - saved
        assert gathered_need(1000, Learning(optimizer_bytes=found), ranks=1).optimizer == int(1000 * found)
    policy = make_policy(tiny_folder)
    masters = {name: p.detach().clone().requires_grad_() for name, p in policy.trainable().items()}
    for name in ("adamw", "muon"):
        optimizer = Optimizer(name, policy, masters)
        for master in masters.values():
            master.grad = torch.ones_like(master)
        optimizer.step(job(optimizer={"name": name}).optimizer, 0.0)
        held = sum(t.numel() * 4 for of in optimizer.moments().values() for t in of.values() if t.dim())
        matrices = sum(masters[each].numel() for each in matrices_of(policy)) if name == "muon" else 0
        assert held == 8 * sum(master.numel() for master in masters.values()) - 4 * matrices
