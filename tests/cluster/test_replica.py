"""A replica with a real vLLM engine, in the sampler's environment. Pinned here:

1. a replica without weights samples nothing;
2. tokens are exact, and log-probabilities are those of the sampled distribution, within 1e-4 of transformers;
3. the reported set of each token is the one that the embedded backend would report;
4. a grammar is followed exactly, also when a completion goes on from tokens that were sampled elsewhere;
5. after a publish all tokens have the new version and its log-probabilities, in running completions, too; a model with
   a tied head is not left with a part of its old weights;
6. a request that would end vLLM's engine fails alone, and a cancelled one leaves no trace;
7. weights that are not finite fail completions, and the replica lives;
8. a publication that lacks a weight, or whose stream ends early, ends the process, because the engine has half of it,
   and nothing of the process stays.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from agentjet.compute import transfers
from agentjet.compute.model import load_policy
from agentjet.compute.token_choice import Grammars, Guide, restrict
from agentjet.compute.weights import probe_failure
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.errors import AgentJetError, ComputeError, GrammarError, OutOfCache, WorkerDied
from agentjet.rendering import Renderer
from agentjet.rendering.grammar import write_grammar
from agentjet.timeline.forest import decode_set, encode_set
from agentjet.types import Constraint, ModelInfo, SamplingParams
from tests.cluster.local_replica import (
    POLICY,
    Completed,
    LocalReplica,
    Wanted,
    raw_logprobs,
    running,
    sampler_python,
)
from tests.tiny import make_model

PYTHON = sampler_python()
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.thorough,
    pytest.mark.needs("vllm"),
]

ASYNC_PATH = Path(__file__).parent / "async_path"
TOLERANCE = 1e-4
CONTEXT = 512
ATTEMPTS = 8
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sum", "product"]}, "note": {"type": "string", "maxLength": 6}},
    "required": ["kind", "note"],
    "additionalProperties": False,
}


@dataclass
class World:
    """A replica, and the models of the versions that it may have."""

    replica: LocalReplica
    info: ModelInfo
    models: dict[int, Any]
    version: int = 0

    def adopt(self, version: int) -> list[float]:
        self.version = version
        return self.replica.adopt(self.replica.publish(self.models[version], version))

    @property
    def model(self) -> Any:
        return self.models[self.version]


REPLICAS: dict[str, tuple[tuple[Path, ...], str]] = {
    "": ((), "file"),
    "async": ((ASYNC_PATH,), "file"),
    "ipc": ((), "ipc"),
    "nccl": ((), "nccl"),
}


@pytest.fixture(scope="module", params=REPLICAS.values(), ids=REPLICAS)
def world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[World]:
    """A replica as on a CPU, one with the scheduling of GPUs, and those that get their weights without a file."""
    paths, transfer = request.param
    folder = tmp_path_factory.mktemp("replica")
    config = ModelConfig(
        name=str(make_model(folder / "tiny", hidden=64)), device="cpu", dtype="float32", threads=1,
        context_length=CONTEXT,
    )  # fmt: skip
    models = {0: AutoModelForCausalLM.from_pretrained(config.name, dtype=torch.float32).eval()}
    for version in (1, 2, 3):
        models[version] = perturbed(models[0], version)
    info = load_policy(config).info
    GenerationConfig(eos_token_id=[*range(100, 200)]).save_pretrained(config.name)  # Must not end completions.
    assert PYTHON is not None
    with LocalReplica(PYTHON, folder / "log", *paths) as replica:
        compute = ComputeConfig.model_validate({"weight_transfer": transfer, "colocated": transfer == "ipc"})
        replica.load(config, info, SamplerConfig(max_concurrent=8, cache_tokens=4096), compute)
        with pytest.raises(ComputeError, match="no weights yet"):
            replica.sample(Wanted([5, 6], SamplingParams(max_tokens=2)))
        with pytest.raises(ComputeError, match="no weights yet"):
            replica.score([5, 6], 0)
        made = World(replica, info, models)
        made.adopt(0)
        yield made


def perturbed(model: Any, seed: int) -> Any:
    twin = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return twin


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 200, length).tolist()


def check(world: World, found: Completed, wanted: Wanted) -> None:
    """Compare log-probabilities, and the sets of a truncation, with the model of each token's version."""
    info, models = world.info, world.models
    params, start = wanted.params, len(wanted.tokens)
    tokens = [*wanted.tokens, *found.tokens]
    guide = None
    if params.grammar:
        guide = Grammars(info, models[0].config.vocab_size).guide(params.grammar)
        assert guide is not None
        for token in wanted.tokens[start - wanted.num_sampled :]:
            guide.advance(token)
    after = {version: raw_logprobs(models[version], tokens) for version in set(found.versions)}
    for i, (token, version) in enumerate(zip(found.tokens, found.versions, strict=True)):
        logits = after[version][start - 1 + i] / (params.temperature or 1)
        if guide is not None:
            assert found.support[i] == encode_set(allowed(guide, len(logits)))
            mask = torch.from_numpy(decode_set(found.support[i], len(logits)))
            logits = logits.masked_fill(~mask, -torch.inf)
        else:
            top_k, top_p = (params.top_k, params.top_p) if params.temperature else (0, 1.0)
            members = decode_set(found.support[i], len(logits))
            if [found.support[i]] != restrict(logits[None].clone(), np.array([top_k]), np.array([top_p]), [b""]):
                check_truncation(logits, members, top_k, top_p)
            logits = logits.masked_fill(~torch.from_numpy(members), -torch.inf)
        assert abs(float(logits.log_softmax(-1)[token]) - found.logprobs[i]) <= TOLERANCE, (i, version)
        if params.temperature == 0:
            assert token == int(logits.argmax())
        if guide is not None:
            guide.advance(token)


def check_truncation(logits: torch.Tensor, members: np.ndarray, top_k: int, top_p: float) -> None:
    """Check a set by its definition; tokens that differ by rounding only may change places at its edge."""
    inside, outside = logits[members], logits[~members]
    assert inside.min() >= outside.max() - 2 * TOLERANCE
    pool = logits.topk(top_k).values if top_k else logits
    if top_p == 1:
        assert len(inside) == len(pool)
        return
    probabilities = (inside - pool.logsumexp(-1)).exp()
    assert len(inside) <= len(pool)
    assert probabilities.sum() >= top_p - TOLERANCE
    assert probabilities.sum() - probabilities.min() < top_p + TOLERANCE


def allowed(guide: Guide, vocabulary: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(guide.mask, np.uint8), count=vocabulary, bitorder="little") == 1


def sample_across_versions(world: World, wanted: dict[int, Wanted], *, suspends: bool) -> dict[int, Completed]:
    """Sample from version 0 on, and adopt versions 1 to 3 during it; leaves version 3.

    Repeats if the completions ended before the first adoption, because other programs delayed this process.
    """
    for _ in range(ATTEMPTS):
        if world.version != 0:
            world.adopt(0)
        adopting = {5 * version: world.replica.publish(world.models[version], version) for version in (1, 2, 3)}
        found: dict[int, Completed] = world.replica.sample(wanted, adopting, suspends=suspends)
        world.version = 3
        if len({version for one in found.values() for version in one.versions}) > 1:
            return found
    pytest.fail(f"no completion had two versions in {ATTEMPTS} attempts")


DISTRIBUTIONS = {
    "plain": SamplingParams(max_tokens=24),
    "cool": SamplingParams(max_tokens=24, temperature=0.7),
    "greedy": SamplingParams(max_tokens=24, temperature=0, top_p=0.5),
    "top_p": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.7),
    "top_k": SamplingParams(max_tokens=24, top_k=5),
    "both": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.9, top_k=40),
}


def test_reported_is_what_it_was_sampled_from(world: World) -> None:
    """All distributions in one batch, each with a named seed and without."""
    wanted = {
        i: Wanted(prompt(i // 4, 9 + i), replace(params, seed=i, is_reproducible=i < 6, piece_tokens=1 + i % 5))
        for i, params in enumerate([*DISTRIBUTIONS.values()] * 2)
    }
    found = world.replica.sample(wanted)
    for key, one in found.items():
        check(world, one, wanted[key])
        assert set(one.versions) == {world.version}
        assert one.finish_reason == ("stop" if one.tokens[-1] in world.info.end_tokens else "length")
        assert one.finish_reason == "stop" or len(one.tokens) == 24
        assert all(size <= wanted[key].params.piece_tokens for size in one.sizes)


def test_a_seed_gives_the_same_tokens_alone_and_beside_others(world: World) -> None:
    """If a client named it. Else vLLM needs no generator for the request, and draws other tokens each time."""
    params = SamplingParams(max_tokens=20, seed=-7, is_reproducible=True)
    wanted = Wanted(prompt(3, 11), params)
    alone = world.replica.sample(wanted)
    others = {i: Wanted(prompt(i, 40 + i), replace(params, seed=2**70 + i)) for i in range(1, 8)}
    assert world.replica.sample({0: wanted, **others})[0].tokens == alone.tokens
    derived = replace(wanted, params=replace(params, is_reproducible=False))
    found = world.replica.sample(dict.fromkeys(range(3), derived))
    assert len({tuple(one.tokens) for one in [alone, *found.values()]}) == 4
    for one in found.values():
        check(world, one, derived)


def test_a_grammar_is_followed_also_from_tokens_sampled_elsewhere(world: World) -> None:
    renderer = Renderer(world.info)
    grammar = write_grammar(Constraint(schema=SCHEMA), (), renderer.style)
    wanted = {
        i: Wanted(prompt(i, 10), SamplingParams(max_tokens=120, temperature=0.9, seed=i, grammar=grammar))
        for i in range(6)
    }
    wanted[6] = Wanted(prompt(6, 10), SamplingParams(max_tokens=60))  # Not restricted.
    found = world.replica.sample(wanted)
    check(world, found.pop(6), wanted[6])
    resumed = {}
    for key, one in found.items():
        check(world, one, wanted[key])
        assert one.finish_reason == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(renderer.text(one.tokens)))
        cut = len(one.tokens) // 2
        left = replace(wanted[key].params, max_tokens=120 - cut, seed=1000 + key)
        resumed[key] = Wanted([*wanted[key].tokens, *one.tokens[:cut]], left, num_sampled=cut)
    for key, rest in world.replica.sample(resumed).items():
        check(world, rest, resumed[key])
        text = renderer.text([*found[key].tokens[: resumed[key].num_sampled], *rest.tokens])
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))


@pytest.mark.parametrize("suspends", [False, True])
def test_publishes_reach_running_completions_whole(world: World, suspends: bool) -> None:
    """Three versions in one completion, with restricted ones beside it; each probe agrees with its learner."""
    params = SamplingParams(max_tokens=400, is_reproducible=True)
    wanted = {i: Wanted(prompt(i, 20), replace(params, seed=i, piece_tokens=1 + 7 * (i % 2))) for i in range(4)}
    wanted[4] = Wanted(prompt(4, 20), replace(params, top_p=0.8, piece_tokens=3))
    found = sample_across_versions(world, wanted, suspends=suspends)
    ends = world.info.end_tokens
    for key, one in found.items():
        check(world, one, wanted[key])
        assert one.versions == sorted(one.versions)
        assert one.tokens[-1] in ends or len(one.tokens) == 400
    for version in (1, 2, 3, 0):
        after = world.replica.publish(world.models[version], version).probe_logprobs
        assert np.abs(np.array(world.adopt(version)) - after).max() <= TOLERANCE
    check(world, world.replica.sample(wanted[0]), wanted[0])


def test_scores_are_those_of_the_model(world: World) -> None:
    tokens = prompt(8, 50)
    after = raw_logprobs(world.model, tokens)
    for num_likeliest in (0, 3):
        scores = world.replica.score(tokens, num_likeliest)
        assert len(scores) == len(tokens) - 1
        for i, score in enumerate(scores):
            assert abs(score.logprob - float(after[i, tokens[i + 1]])) <= TOLERANCE
            best = after[i].topk(num_likeliest)
            assert [id for id, _ in score.likeliest] == best.indices.tolist()
            assert np.allclose([one for _, one in score.likeliest], best.values, atol=TOLERANCE)


BAD: dict[str, tuple[Wanted, type[AgentJetError]]] = {
    "no tokens": (Wanted([], SamplingParams(max_tokens=2)), ComputeError),
    "negative id": (Wanted([5, -1], SamplingParams(max_tokens=2)), ComputeError),
    "unknown id": (Wanted([5, 10**6], SamplingParams(max_tokens=2)), ComputeError),
    "no room": (Wanted([5] * CONTEXT, SamplingParams(max_tokens=1)), OutOfCache),
    "too much room": (Wanted([5], SamplingParams(max_tokens=CONTEXT)), OutOfCache),
    "nothing wanted": (Wanted([5], SamplingParams(max_tokens=0)), ComputeError),
    "all sampled": (Wanted([5, 6], SamplingParams(max_tokens=2), num_sampled=2), ComputeError),
    "bad grammar": (Wanted([5], SamplingParams(max_tokens=2, grammar="start: nothing")), GrammarError),
    "broken grammar": (Wanted([5], SamplingParams(max_tokens=2, grammar="((((")), GrammarError),
    "other tokens": (
        Wanted([5, 100, 100], SamplingParams(max_tokens=9, grammar='start: "hello"'), num_sampled=2), GrammarError
    ),
}  # fmt: skip


def test_a_bad_request_fails_alone(world: World) -> None:
    good = Wanted(prompt(1, 400), SamplingParams(max_tokens=CONTEXT - 400, seed=3))
    for wanted, error in BAD.values():
        with pytest.raises(error):
            world.replica.sample(wanted)
    with pytest.raises(ComputeError, match="at most"):
        world.replica.score([5] * CONTEXT, 1)
    check(world, world.replica.sample(good), good)


def test_a_cancelled_completion_ends(world: World) -> None:
    async def first_piece() -> None:
        stream = world.replica.peer.sample(
            POLICY, np.array(prompt(1, 8), np.int32), SamplingParams(max_tokens=450, temperature=2.0), 0
        )
        async for _ in stream:
            break
        await stream.aclose()

    for _ in range(20):  # More than there are places.
        world.replica.do(first_piece())
    wanted = Wanted(prompt(2, 8), SamplingParams(max_tokens=10))
    check(world, world.replica.sample(wanted), wanted)


def test_in_bfloat16_the_new_weights_pass_the_probe_and_old_ones_do_not() -> None:
    """The bundled model, whose probe tokens have log-probabilities of -15. Weights differ by 2 % of their deviation."""
    assert PYTHON is not None
    with running(PYTHON, "bfloat16") as one:
        old = one.replica.publish(one.published, 1)
        scored = one.replica.adopt(old)
        assert probe_failure(old, scored) == ""
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in one.published.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.02)
        new = one.replica.publish(one.published, 2)
        assert probe_failure(new, scored, old) != ""
        assert probe_failure(new, one.replica.adopt(new), old) == ""


def test_weights_that_are_not_finite_fail_completions_only(world: World) -> None:
    diverged = perturbed(world.models[0], 1)
    with torch.no_grad():
        for parameter in diverged.parameters():
            parameter.fill_(torch.nan)
    assert not np.isfinite(world.replica.adopt(world.replica.publish(diverged, 8))).any()
    with pytest.raises(ComputeError, match="diverged"):
        world.replica.sample(Wanted(prompt(3, 8), SamplingParams(max_tokens=4)))
    world.adopt(0)
    wanted = Wanted(prompt(3, 8), SamplingParams(max_tokens=4))
    check(world, world.replica.sample(wanted), wanted)


def test_z_half_a_publication_ends_the_replica(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of the file: the replica is gone after it, with vLLM's processes, sockets and shared memory."""
    own = psutil.Process(world.replica.process.pid)
    family = [own, *own.children(recursive=True)]
    sockets = {Path(one.laddr) for process in family for one in process.net_connections("unix") if one.laddr}
    segments = {Path(one.path) for process in family for one in process.memory_maps() if "/dev/shm/" in one.path}
    assert len(family) >= 3 and any(path.exists() for path in sockets)
    lacking, reason = world.replica.publish(world.model, 9, without="model.norm.weight"), "lack 1 parameters"
    if world.replica.transfer == "nccl":  # The stream ends after three weights.
        broadcasts = transfers._broadcasts

        def cut(*arguments: Any) -> Iterator[Any]:
            yield from itertools.islice(broadcasts(*arguments), 3)
            raise RuntimeError("cut")

        monkeypatch.setattr(transfers, "_broadcasts", cut)
        lacking, reason = world.replica.publish(world.model, 9), r"Way out: compute\.weight_transfer = 'file'"
    with pytest.raises(ComputeError, match=reason):
        world.replica.adopt(lacking)
    assert world.replica.process.wait(60) != 0
    assert not psutil.wait_procs(family[1:], timeout=60)[1]
    assert not [path for path in sockets | segments if path.exists()]
    with pytest.raises(WorkerDied):
        world.replica.sample(Wanted([5], SamplingParams(max_tokens=2)))
