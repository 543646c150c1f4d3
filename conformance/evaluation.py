"""lm-eval against an evaluation episode: it trains nothing, so its own results are judged.

The policy gives every token a log-probability by a rule, and samples one word. lm-eval must report the sums of that
rule over exactly the tokens of each answer, and the word.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentjet.types import PolicyId, SamplingParams, TokenScore
from conformance.child import Ended, command, run
from conformance.episode import JOB
from tests.fakes import ScriptedCompute
from tests.server.serving import serving
from tests.timeline.models import Model, make_model

CLIENT, SCRIPT = "lm-eval", "lm-eval.sh"
QUESTION, ANSWERS, WORD = "The opposite of hot is", (" cold", " hello", " the sea"), "cold"
LIKELIEST = -0.125


def logprob(before: Sequence[int], token: int) -> float:
    """The rule: of a token and its context, exact in binary."""
    return LIKELIEST * (1 + (token + len(before)) % 5)


async def evaluate(folder: Path) -> list[str]:
    """Run lm-eval on a fresh server that keeps everything in `folder`; what is wrong, nothing when it is green."""
    model = make_model(folder, "smollm2")

    def say(prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return (*model.ids(WORD), model.end)

    async def score(policy: PolicyId, tokens: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        given = [logprob(tokens[:at], tokens[at]) for at in range(1, len(tokens))]
        others = [(token + 1) % model.tokenizer.get_vocab_size() for token in tokens[1:]]
        return [TokenScore(one, ((other, LIKELIEST),)) for one, other in zip(given, others, strict=True)]

    def prepare(compute: ScriptedCompute) -> None:
        compute.score = score  # type: ignore[method-assign]

    (folder / "work").mkdir()
    async with serving(folder / "data", say, card=model.card, job=JOB, prepare=prepare) as served:
        episode = await served.begin(mode="eval")
        argv = command(SCRIPT, str(model.card.tokenizer_path))
        ended = await run(argv, {**episode, "model": "policy"}, folder, product=True)
        learned = served.run.compute.learned
    return [*_problems(model, ended, folder / "work"), *(["it was trained"] if learned else [])]


def _problems(model: Model, ended: Ended, work: Path) -> list[str]:
    if ended.code or ended.reached:
        return [f"exit code {ended.code}, reached {ended.reached}: {ended.errors.strip()[-600:]}"]
    [choice] = _samples(work, "choice")
    [word] = _samples(work, "word")
    wanted = [_loglikelihood(model.ids(QUESTION), model.ids(QUESTION + answer)) for answer in ANSWERS]
    found = [tuple(resp) for [resp] in choice["resps"]]
    problems = []
    if found != wanted:
        problems.append(f"log-likelihoods {found} were reported instead of {wanted}")
    if word["resps"] != [[WORD]]:
        problems.append(f"{word['resps']} was reported as the answer instead of {WORD!r}")
    return problems


def _loglikelihood(question: tuple[int, ...], whole: tuple[int, ...]) -> tuple[str, str]:
    """Sum over the answer's tokens and whether each is the likeliest, in the form of lm-eval's records."""
    given = [logprob(whole[:at], whole[at]) for at in range(len(question), len(whole))]
    return str(sum(given)), str(min(given) == LIKELIEST)


def _samples(work: Path, task: str) -> list[dict[str, Any]]:
    [file] = (work / "results").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
