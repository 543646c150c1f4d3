"""Sampling under a grammar, or truncated. Pinned here:

1. every finished answer follows its schema, for every seed and both samplers; a cut answer has finish reason `length`;
2. the reported set and log-probabilities are those of the sampled distribution, also in the learner;
3. other requests are not affected, and a seed gives the same tokens beside any other requests;
4. a grammar that cannot be followed ends its own request only;
5. while a grammar is compiled, other completions are sampled, and its request can be cancelled, or its policy removed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.rank import Rank
from agentjet.compute.sampler import ModelSampler, NewToken
from agentjet.compute.token_choice import MAX_GRAMMARS, Grammars
from agentjet.config import JobConfig, SamplerConfig
from agentjet.errors import GrammarError, OutOfCache, PolicyRemoved
from agentjet.processes.rpc import Answer, ProcessRequest
from agentjet.rendering import Renderer
from agentjet.rendering.grammar import write_grammar
from agentjet.timeline.forest import EVERYTHING, Row, build_forest, call_row, decode_set, encode_set
from agentjet.types import Constraint, PolicyId, SamplingParams
from tests.compute.architectures import make_architecture
from tests.compute.baseline import row_logprobs
from tests.compute.conftest import choose, complete, make_policy, model_config, sampler_of, tokens
from tests.compute.direct import learn_directly

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sum", "product"]},
        "terms": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 4},
    },
    "required": ["kind", "terms", "note"],
    "additionalProperties": False,
}
KINDS = ("llama", "recurrent_gemma")


@pytest.fixture(scope="module", params=KINDS)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """One whose state can branch, and one whose cannot: either sampler."""
    policy = make_policy(make_architecture(tmp_path_factory.mktemp("model") / request.param, request.param))
    assert policy.info.shares_prefixes == (request.param == "llama")
    return policy


def json_grammar(policy: Policy) -> str:
    return write_grammar(Constraint(schema=SCHEMA), (), Renderer(policy.info).style)


def as_row(prompt: np.ndarray, sampled: Sequence[NewToken], temperature: float = 1.0, sequence: int = 0) -> Row:
    return call_row(
        np.concatenate([prompt, [new.token for new in sampled]]).astype(np.int32),
        np.array([new.logprob for new in sampled], np.float32),
        np.zeros(len(sampled), np.int32),
        1.0 - 2 * (sequence % 2),
        temperature,
        sequence,
        tuple(new.support for new in sampled),
    )


def test_every_answer_that_ends_follows_the_schema(policy: Policy) -> None:
    grammar, renderer = json_grammar(policy), Renderer(policy.info)
    requests = {
        seed: (tokens(seed % 4, 12), SamplingParams(max_tokens=200, seed=seed, grammar=grammar)) for seed in range(12)
    }
    requests[100] = (tokens(1, 12), SamplingParams(max_tokens=7, seed=1, grammar=grammar))
    found = complete(sampler_of(policy), requests)
    cut = found.pop(100)
    assert len(cut) == 7 and cut[-1].finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(renderer.text([new.token for new in cut]))
    texts = set()
    for sampled in found.values():
        assert sampled[-1].finish_reason == "stop" and sampled[-1].token in policy.end_tokens
        assert [new.finish_reason for new in sampled[:-1]] == [None] * (len(sampled) - 1)
        texts.add(renderer.text([new.token for new in sampled]))
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(renderer.text([new.token for new in sampled])))
        # Nothing else than an end may follow the closing brace.
        assert set(np.flatnonzero(decode_set(sampled[-1].support, policy.vocabulary))) == policy.end_tokens
    assert len(texts) > 10


RESTRICTED = {
    "grammar": SamplingParams(max_tokens=40, temperature=0.8, grammar="json"),
    "top_p": SamplingParams(max_tokens=12, temperature=0.8, top_p=0.6),
    "top_k": SamplingParams(max_tokens=12, temperature=0.8, top_k=5),
    "all of it": SamplingParams(max_tokens=40, temperature=0.8, top_p=0.8, top_k=40, grammar="json"),
}


@pytest.mark.parametrize("name", RESTRICTED)
def test_what_is_reported_is_what_it_was_sampled_from(policy: Policy, name: str) -> None:
    params = RESTRICTED[name]
    settings = {field: getattr(params, field) for field in ("max_tokens", "temperature", "top_p", "top_k")}
    grammar = json_grammar(policy) if params.grammar else ""
    requests = {i: (tokens(i // 3, 9), SamplingParams(**settings, seed=i, grammar=grammar)) for i in range(6)}
    found = complete(sampler_of(policy), requests)
    rows = [as_row(requests[i][0], sampled, 0.8, i) for i, sampled in found.items()]
    sizes = [int(decode_set(one, policy.vocabulary).sum()) for row in rows for one in row.support]
    assert 1 <= min(sizes) <= max(sizes) < policy.vocabulary
    assert max(sizes) > 4
    if params.top_k:
        assert max(sizes) <= params.top_k
    for row in rows:
        with torch.no_grad():
            assert row["logprob"] == pytest.approx(row_logprobs(policy, row).numpy(), abs=1e-4)
    metrics = learn_directly(PolicyLearner(policy), build_forest(rows), JobConfig(), 0)
    assert metrics["policy/mismatch_kl"] < 1e-7
    assert metrics["policy/entropy"] == pytest.approx(-np.concatenate([row["logprob"] for row in rows]).mean())


def test_neighbours_and_seeds(policy: Policy) -> None:
    """Constrained, truncated and free completions of one prompt side by side are what each is alone."""
    grammar, prompt = json_grammar(policy), tokens(1, 20)
    requests = {
        i: (prompt, SamplingParams(max_tokens=15, seed=i % 4, grammar=grammar if i % 2 else "", top_p=(1, 0.7)[i // 4]))
        for i in range(8)
    }
    together = complete(sampler_of(policy), requests)
    for i, request in requests.items():
        alone = complete(sampler_of(policy), {0: request})[0]
        assert [new.token for new in together[i]] == [new.token for new in alone]
        assert [new.support for new in together[i]] == [new.support for new in alone]
    assert all(new.support == EVERYTHING for new in [*together[0], *together[2]])
    assert [new.token for new in together[1]] != [new.token for new in together[3]]


def test_a_completion_that_loses_its_place_keeps_its_grammar(tmp_path: Path) -> None:
    policy = make_policy(make_architecture(tmp_path / "llama", "llama"))
    grammar = json_grammar(policy)
    requests = {
        i: (tokens(7, 30), SamplingParams(max_tokens=90, temperature=2.0, seed=i, grammar=grammar)) for i in range(8)
    }
    crowded = complete(ModelSampler(policy, 64, 768), requests)  # three rows for eight completions that part
    roomy = complete(ModelSampler(policy, 64, 16384), requests)
    for i in requests:
        assert [new.token for new in crowded[i]] == [new.token for new in roomy[i]]


def test_greedy_takes_the_likeliest_allowed_token(policy: Policy) -> None:
    grammar = json_grammar(policy)
    params = SamplingParams(max_tokens=200, temperature=0, grammar=grammar)
    one, other = (complete(sampler_of(policy), {seed: (tokens(1, 9), params)})[seed] for seed in (1, 2))
    assert [new.token for new in one] == [new.token for new in other]
    row = as_row(tokens(1, 9), one)
    with torch.no_grad():
        assert row["logprob"] == pytest.approx(row_logprobs(policy, row).numpy(), abs=1e-4)


def test_masks_come_before_temperature_and_truncation() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    mask = bytes([0b1110])  # all but the likeliest
    truncated = SamplingParams(max_tokens=1, top_p=0.7)
    chosen, logprobs, sets = choose(logits, [0, 0], [truncated] * 2, [mask, b""], [0.999, 0.999])
    assert chosen == [2, 1]
    assert logprobs == pytest.approx(np.log([0.15 / 0.45, 0.3 / 0.8]), abs=1e-6)
    assert [decode_set(one, 4).tolist() for one in sets] == [[False, True, True, False], [True, True, False, False]]
    assert choose(logits, [0], [SamplingParams(max_tokens=1)], [bytes([0b0100])], [0.0])[:2] == ([2], [0.0])


def test_a_grammar_that_cannot_be_compiled_is_refused_alone(policy: Policy) -> None:
    sampler = sampler_of(policy)
    sampler.submit(1, tokens(0, 10), SamplingParams(max_tokens=4))
    with pytest.raises(GrammarError, match="cannot be compiled"):
        sampler.submit(2, tokens(0, 10), SamplingParams(max_tokens=4, grammar="start: nothing\n"))
    with pytest.raises(GrammarError):
        sampler.submit(3, tokens(0, 10), SamplingParams(max_tokens=4, grammar=f"start: <[{policy.vocabulary}]>\n"))
    assert [new.id for new in sampler.step()] == [1]


def test_compiled_grammars_are_bounded(policy: Policy) -> None:
    grammars = Grammars(policy.info, policy.vocabulary)
    for number in range(MAX_GRAMMARS + 4):
        grammars.guide(f'start: "{number}"\n')
    known = [grammars.known_guide(f'start: "{number}"\n') is not None for number in range(MAX_GRAMMARS + 4)]
    assert known == [False] * 4 + [True] * MAX_GRAMMARS


def test_a_grammar_that_leads_nowhere_ends_its_own_request(policy: Policy) -> None:
    broken = SamplingParams(max_tokens=9, grammar='start: "a" NEVER\nNEVER: /b/ & /c/\n')
    requests = {1: (tokens(0, 9), broken), 2: (tokens(0, 9), SamplingParams(max_tokens=3, seed=5))}
    found = complete(sampler_of(policy), requests)
    [last] = found[1]
    assert str(last.error).startswith("the grammar cannot be followed") and last.finish_reason is None
    assert found[2][-1].finish_reason and not any(new.error is not None for new in found[2])


def test_ids_without_text_are_never_allowed(policy: Policy) -> None:
    """Embeddings are often padded beyond the tokenizer."""
    guide = Grammars(policy.info, policy.vocabulary + 40).guide("start: /(.|\\n)*/\n")
    assert guide is not None
    bits = np.unpackbits(np.frombuffer(guide.mask, np.uint8), bitorder="little")
    assert bits[: policy.vocabulary].any() and not bits[policy.vocabulary :].any()
    assert encode_set(bits[: policy.vocabulary].astype(bool)) != EVERYTHING
    assert Grammars(policy.info, policy.vocabulary).guide("") is None


# ---- grammars that take long ---------------------------------------------------------------------------------------

POLICY = PolicyId()
WORD = 'start: "ab"\n'


class Slow:
    """A worker whose grammars compile once `may_compile` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_compile = threading.Event()
        self.num_compiled = 0
        compile = Grammars._compile

        def wait(grammars: Grammars, grammar: str) -> object:
            self.num_compiled += 1
            assert self.may_compile.wait(60)
            return compile(grammars, grammar)

        monkeypatch.setattr(Grammars, "_compile", wait)
        self.folder = folder
        self.sent: list[Any] = []
        self.worker = Rank(self.sent.append)
        self.add()

    def add(self) -> None:
        self.worker.handle("add", POLICY, model_config(self.folder), SamplerConfig(cache_tokens=4096, max_concurrent=8))
        self.worker.policies[POLICY].policy.end_tokens = frozenset()

    def ask(self, id: int, grammar: str = "", max_tokens: int = 40) -> None:
        params = SamplingParams(max_tokens=max_tokens, seed=id, grammar=grammar, piece_tokens=1)
        self.worker.answer(ProcessRequest("sample", id, POLICY, (id, tokens(1, 9), params)))

    def compiled(self) -> None:
        """Handle the next grammar that the thread has compiled, or could not compile."""
        self.worker.answer(self.worker.inbox.get(timeout=60))

    def answers(self) -> dict[int, list[object]]:
        """What the worker sent since the last time, by completion: tokens and errors."""
        found: dict[int, list[object]] = {}
        for message in self.sent:
            for id, what in [(message.id, message.error)] if isinstance(message, Answer) else message:
                found.setdefault(id, []).append(what)
        self.sent.clear()
        return found


@pytest.fixture
def slow(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    slow = Slow(tiny_folder, monkeypatch)
    yield slow
    slow.may_compile.set()


def test_others_are_sampled_while_a_grammar_is_compiled(slow: Slow) -> None:
    slow.ask(1)
    slow.ask(2, WORD)
    slow.ask(3, WORD)
    for _ in range(5):
        slow.worker.sample_step()
    assert {id: len(got) for id, got in slow.answers().items()} == {1: 5}
    slow.may_compile.set()
    slow.compiled()
    slow.compiled()
    assert slow.num_compiled == 1, "both have the same grammar"
    slow.ask(4, WORD)
    assert slow.num_compiled == 1, "a known grammar needs no thread"
    slow.worker.sample_step()
    assert set(slow.answers()) == {1, 2, 3, 4}


def drop(slow: Slow) -> None:
    slow.worker.answer(ProcessRequest("cancel", 9, POLICY, (2,)))


def remove(slow: Slow) -> None:
    slow.worker.handle("remove", POLICY)


def replace(slow: Slow) -> None:
    slow.add()


@pytest.mark.parametrize(("end", "error"), [(drop, None), (remove, PolicyRemoved), (replace, PolicyRemoved)])
def test_a_request_may_end_while_its_grammar_is_compiled(
    slow: Slow, end: Callable[[Slow], None], error: type[Exception] | None
) -> None:
    slow.ask(2, WORD)
    slow.ask(3, 'start: "never compiled"\n')
    end(slow)
    assert [type(one) for one in slow.answers().get(2, [])] == ([error] if error else [])
    slow.may_compile.set()
    slow.compiled()
    slow.compiled()
    if end is not drop:
        slow.add()
        slow.ask(2, max_tokens=1)  # An id may come again: it is another request.
        slow.worker.sample_step()
        assert len(slow.answers()[2]) == 1
        assert slow.num_compiled == 1, "no request waits for the second grammar"
    slow.worker.sample_step()
    assert set(slow.answers()) == ({3} if end is drop else set())


def test_a_grammar_that_cannot_be_compiled_later_ends_its_own_request(slow: Slow) -> None:
    slow.may_compile.set()
    slow.ask(1)
    slow.ask(2, "start: nothing\n")
    slow.compiled()
    slow.worker.sample_step()
    found = slow.answers()
    assert isinstance(found[2][0], GrammarError) and len(found[1]) == 1
    slow.ask(3, WORD, max_tokens=10**6)
    slow.compiled()
    assert isinstance(slow.answers()[3][0], OutOfCache)
