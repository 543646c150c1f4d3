"""Judges an exercise by the sampled tokens, not by the server's own records.

1. The client ended well, printed the policy's own answer and reached only the server. The files that it was to change
   have the expected content.
2. The policy was called exactly as often as the exercise has turns; no call was repeated, no answer was lost.
3. Each prompt has exactly the words that a faithful history adds, no more and no less.
4. The recorded tree holds exactly the tokens that the sampler received and sampled. Its mask covers the sampled ones.
5. The sampler followed a grammar where the client asked for one, and the answer matches it.
6. Timelines begin where they must and nowhere else, and the reason is counted.
7. The forest trains every sampled token once, behind its exact context, with the advantage of the reward (that of its
   agent role if it has one), and with the set it was chosen among where there was a grammar. It holds nothing else. It
   holds nothing of a call that a rule of the job leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from agentjet.timeline import Forest
from conformance.episode import OTHER_ADVANTAGE, Evidence, Exercise
from conformance.policy import Said


def problems(exercise: Exercise, evidence: Evidence) -> list[str]:
    """The problems, worst first; empty if the exercise is green."""
    found = [*_client(exercise, evidence), *_files(exercise.leaves, evidence.files)]
    if unsaid := [turn.says for turn in evidence.turns if all(turn is not one.turn for one in evidence.said)]:
        found.append(f"the policy was never asked for {unsaid[0]!r}")
    found += [f"the policy was asked once more: {_ends(prompt)}" for prompt in evidence.unanswered]
    if found and (unsaid or evidence.unanswered):
        return found
    found += _prompts(evidence)
    found += _grammars(exercise, evidence)
    found += _record(exercise, evidence)
    found += _training(exercise, evidence)
    return found


def _client(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    ended = evidence.ended
    if ended.code != 0:
        yield f"the client ended with exit code {ended.code}: {_last_words(ended.errors or ended.output)}"
    elif exercise.answer not in (ended.lines if exercise.is_product else [ended.answer]):
        yield f"the client heard {ended.answer!r} instead of {exercise.answer!r}: {_last_words(ended.errors)}"
    hosts = {address.rpartition(":")[0] or address for address in ended.reached}
    if unexpected := hosts.difference(exercise.reaches):
        yield f"the client tried to reach {', '.join(sorted(unexpected))}"


def _files(wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name, text in wanted.items():
        if found.get(name) != text:
            yield f"{name} holds {found.get(name)!r} instead of {text!r}"


def _ends(prompt: str) -> str:
    return repr(prompt if len(prompt) < 1600 else f"{prompt[:800]} ... {prompt[-800:]}")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-600:]


def _prompts(evidence: Evidence) -> Iterator[str]:
    before: list[Said] = []
    for number, said in enumerate(evidence.said, start=1):
        turn, text, rest = said.turn, evidence.text(said.prompt), 0
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
    if len(calls) != len(evidence.said):
        yield f"{len(calls)} calls were recorded, not {len(evidence.said)}"
        return
    whole: dict[str, list[int]] = {}
    recorded: dict[tuple[int, ...], tuple[list[int], dict[str, Any]]] = {}
    for call in calls:
        kept = whole[call["parent"]][: call["kept"]] if call["parent"] else []
        whole[call["call_id"]] = tokens = [*kept, *call["tokens"]]
        recorded[tuple(tokens)] = ([0] * len(kept) + call["mask"], call)
    has_side_call = any(said.turn.asked_by for said in evidence.said[:2])
    for number, said in enumerate(evidence.said, start=1):
        if said.tokens not in recorded:
            yield f"call {number} is recorded with other tokens than the policy saw and said"
            continue
        mask, call = recorded[said.tokens]
        if mask != [0] * len(said.prompt) + [int(said.turn.is_trained)] * len(said.completion):
            yield f"call {number}: the mask does not cover exactly what was sampled"
        fork = said.turn.fork if call is not calls[0] else ""
        # A product may send its side call beside its first call. Then neither has anything to fork from.
        is_at_once = has_side_call and number <= 2 and not call["parent"] and not call["fork"]
        if call["fork"] != fork and not is_at_once:
            yield f"call {number} is counted as {call['fork'] or 'no fork'!r}, not {fork or 'no fork'!r}"
        if call["role"] != exercise.role:
            yield f"call {number} is of role {call['role']!r}, not {exercise.role!r}"
        if call["retry_of"] or (call["orphan"] and said.turn.is_trained):
            yield f"call {number} is taken for a retry or an orphan"


def _training(exercise: Exercise, evidence: Evidence) -> Iterator[str]:
    if evidence.forest is None:
        yield "nothing was learned"
        return
    said = tuple(one for one in evidence.said if one.turn.is_trained)
    wanted = Counter(_targets(said, exercise.advantage))
    wanted += Counter(_targets(evidence.other, OTHER_ADVANTAGE))
    trained = Counter(_trained(evidence.forest))
    if missing := wanted - trained:
        yield f"{missing.total()} of {wanted.total()} sampled tokens are not trained in their context and by the reward"
    if extra := trained - wanted:
        yield f"{extra.total()} tokens are trained that nobody sampled in that context"
    contexts = {context for one in (*said, *evidence.other) for context in _contexts(one.tokens)}
    if evidence.forest.num_nodes != len(contexts):
        yield "the forest does not hold each token in its context exactly once"
    if evidence.forest.num_sequences != 2:
        yield f"the two episodes became {evidence.forest.num_sequences} sequences"


Target = tuple[bytes, float, bool]
"""A context with the token that was sampled in it at the end, its advantage, and whether its choice was restricted.

A context is a digest of its tokens: the prompts of products are long, and every token of them ends one.
"""


def _targets(said: tuple[Said, ...], advantage: float) -> Iterator[Target]:
    for one in said:
        for context in _contexts(one.tokens)[len(one.prompt) :]:
            yield context, advantage, bool(one.grammar)


def _trained(forest: Forest) -> Iterator[Target]:
    contexts: list[bytes] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        contexts.append(_context(contexts[parent] if parent >= 0 else b"", token))
    targets = zip(forest.node.tolist(), forest["advantage"].tolist(), (forest["support"] >= 0).tolist(), strict=True)
    for node, advantage, is_restricted in targets:
        yield contexts[node], round(advantage, 6), is_restricted


def _contexts(tokens: Iterable[int]) -> list[bytes]:
    """The context that each token ends."""
    contexts = [b""]
    for token in tokens:
        contexts.append(_context(contexts[-1], token))
    return contexts[1:]


def _context(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(8, "big"), digest_size=16).digest()
