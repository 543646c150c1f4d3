"""Whether an exercise went as it must, told from what was sampled and not from what the server believes.

1. The client ended well, printed the policy's own answer and reached nobody but the server.
2. The policy was asked exactly as often as the exercise has turns; nothing was asked twice, no answer got lost.
3. Each prompt says what the client had to send: the very words that a faithful history adds, no more and no less.
4. The recorded tree holds exactly the tokens that the sampler was fed and said. Its mask covers those it said.
5. The sampler was told to follow a grammar where the client asked for one, and the answer is one that it allows.
6. Timelines begin where they must and nowhere else, and the reason is counted.
7. The forest trains every sampled token once, behind its exact context, with the advantage that the reward makes,
   that of its agent role where it has one, and with the set it was chosen among where there was a grammar; and it holds
   nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from agentjet.timeline import Forest
from conformance.conversation import Turn
from conformance.episode import OTHER_ADVANTAGE, Evidence, Exercise
from conformance.policy import Said
from tests.timeline.training import count_prefixes


def problems(exercise: Exercise, evidence: Evidence) -> list[str]:
    """What is wrong, worst first; nothing when the exercise is green."""
    found = [*_client(exercise, evidence)]
    if len(evidence.said) != len(exercise.turns):
        return [*found, f"the policy was asked {len(evidence.said)} times, not {len(exercise.turns)}"]
    found += _prompts(exercise.turns, evidence)
    found += _grammars(exercise, evidence)
    found += _record(exercise, evidence)
    found += _training(exercise, evidence)
    return found


def _client(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    ended = evidence.ended
    if ended.code != 0:
        yield f"the client ended with exit code {ended.code}: {_last_words(ended.errors)}"
    elif ended.answer != exercise.answer:
        yield f"the client heard {ended.answer!r} instead of {exercise.answer!r}"
    if ended.reached:
        yield f"the client tried to reach {', '.join(sorted(set(ended.reached)))}"


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-600:]


def _prompts(turns: tuple[Turn, ...], evidence: Evidence) -> Iterator[str]:
    before: list[Said] = []
    for number, (turn, said) in enumerate(zip(turns, evidence.said, strict=True), start=1):
        text, rest = evidence.text(said.prompt), 0
        for words in turn.sees:
            at = text.find(words, rest)
            if at < 0:
                yield f"call {number} was not told {words!r} in: {text[-800:]!r}"
                break
            rest = at + len(words)
        if turn.adds is not None:
            continued = [one for one in before if said.prompt[: len(one.tokens)] == one.tokens]
            longest = max((len(one.tokens) for one in continued), default=0)
            added = evidence.text(said.prompt[longest:])
            if not longest or added != turn.adds:
                yield f"call {number} adds {added[-800:]!r} instead of {turn.adds!r}"
        before.append(said)


def _grammars(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    for number, said in enumerate(evidence.said, start=1):
        if bool(said.grammar) != exercise.is_constrained:
            yield f"call {number} was sampled {'under a' if said.grammar else 'without a'} grammar"
        if not said.is_allowed:
            yield f"call {number}: the grammar does not allow the scripted answer"


def _record(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    calls: list[dict[str, Any]] = evidence.tree["calls"]
    if len(calls) != len(exercise.turns):
        yield f"{len(calls)} calls were recorded, not {len(exercise.turns)}"
        return
    whole: dict[str, list[int]] = {}
    for number, (turn, said, call) in enumerate(zip(exercise.turns, evidence.said, calls, strict=True), start=1):
        kept = whole[call["parent"]][: call["kept"]] if call["parent"] else []
        whole[call["call_id"]] = tokens = [*kept, *call["tokens"]]
        if tuple(tokens) != said.tokens:
            yield f"call {number} is recorded with other tokens than the policy saw and said"
        if [0] * len(kept) + call["mask"] != [0] * len(said.prompt) + [1] * len(said.completion):
            yield f"call {number}: the mask does not cover exactly what was sampled"
        if call["fork"] != turn.fork:
            yield f"call {number} is counted as {call['fork'] or 'no fork'!r}, not {turn.fork or 'no fork'!r}"
        if call["role"] != exercise.role:
            yield f"call {number} is of role {call['role']!r}, not {exercise.role!r}"
        if call["retry_of"] or call["orphan"]:
            yield f"call {number} is taken for a retry or an orphan"


def _training(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    if evidence.forest is None:
        yield "nothing was learned"
        return
    wanted = Counter(_targets(evidence.said, exercise.advantage))
    wanted += Counter(_targets(evidence.other, OTHER_ADVANTAGE))
    trained = Counter(_trained(evidence.forest))
    if missing := wanted - trained:
        yield f"{missing.total()} of {wanted.total()} sampled tokens are not trained in their context and by the reward"
    if extra := trained - wanted:
        yield f"{extra.total()} tokens are trained that nobody sampled in that context"
    if evidence.forest.num_nodes != count_prefixes(said.tokens for said in (*evidence.said, *evidence.other)):
        yield "the forest does not hold each token in its context exactly once"
    if evidence.forest.num_sequences != 2:
        yield f"the two episodes became {evidence.forest.num_sequences} sequences"


Target = tuple[tuple[int, ...], float, bool]
"""A context with the token that was sampled in it at the end, its advantage, and whether its choice was restricted."""


def _targets(said: tuple[Said, ...], advantage: float) -> Iterator[Target]:
    for one in said:
        for length in range(len(one.prompt) + 1, len(one.tokens) + 1):
            yield one.tokens[:length], advantage, bool(one.grammar)


def _trained(forest: Forest) -> Iterator[Target]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    targets = zip(forest.node.tolist(), forest.advantage.tolist(), (forest.allowed >= 0).tolist(), strict=True)
    for node, advantage, is_restricted in targets:
        yield paths[node], round(advantage, 6), is_restricted
