"""The policy of an exercise: a sampler that returns its turns one after another and records its prompts.

A side call of a product (a title, a summary) is answered by its question, at any time; see `Turn.asked_by`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.compute.token_choice import Grammars
from agentjet.errors import ComputeError
from agentjet.timeline import Forest
from agentjet.types import Op, SamplingParams
from conformance.conversation import Turn
from tests.fakes import ScriptedCompute
from tests.timeline.models import Model


@dataclass(frozen=True)
class Said:
    """One sample as the sampler records it, independent of the gateway."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    turn: Turn
    """The scripted turn of the completion."""
    grammar: str = ""
    """The grammar of the sampler; empty if it was free."""
    is_allowed: bool = True
    """True if a sampler that follows `grammar` can produce the turn."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.completion


@dataclass
class Policy:
    """A script of `tests.fakes.ScriptedCompute`, and the forest that the worker gets to learn."""

    model: Model
    turns: list[Turn]
    """In the order of the conversation, except for those of side calls."""
    said: list[Said] = field(default_factory=list)
    learned: list[Forest] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    """Prompts that came when no turn was left, as text."""

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Raises `ComputeError` when no turn is left for `prompt`."""
        text = self.text(prompt)
        turn = self._turn(text)
        if turn is None:
            self.unanswered.append(text)
            raise ComputeError("the policy was asked once more than the exercise has turns")
        completion = (*self.model.ids(turn.says), *([] if turn.stopped else [self.model.end]))
        is_allowed = self._allows(params.grammar, completion)
        self.said.append(Said(tuple(prompt), completion, turn, params.grammar, is_allowed))
        return completion

    def _turn(self, text: str) -> Turn | None:
        """The first turn that was not sampled: of the side call that `text` is, or else of the conversation."""
        spoken = [one.turn for one in self.said]
        left = [turn for turn in self.turns if not any(turn is one for one in spoken)]
        sides = [turn for turn in left if turn.asked_by and turn.asked_by in text]
        return next((turn for turn in (*sides, *left) if turn in sides or not turn.asked_by), None)

    def _allows(self, grammar: str, completion: Sequence[int]) -> bool:
        guide = Grammars(self.model.card, self.model.tokenizer.get_vocab_size()).guide(grammar)
        for token in completion if guide is not None else ():
            if not guide.mask[token // 8] >> token % 8 & 1:
                return False
            if token != self.model.end and guide.advance(token):
                return False
        return True

    def attach(self, compute: ScriptedCompute) -> None:
        """Keep what `compute` learns."""
        forward_backward = compute.forward_backward

        async def learn_and_keep(op: Op, batch_id: int, loss: LossSpec) -> Outputs:
            batch = compute.policies[op.policy_id].batch
            assert batch is not None, "a batch is loaded before its operations"
            self.learned.append(loss.recipe.columns(batch, {})[0])
            return await forward_backward(op, batch_id, loss)

        compute.forward_backward = learn_and_keep  # type: ignore[method-assign]
        compute.piece = 3

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens by name."""
        return str(self.model.tokenizer.decode(list(tokens), skip_special_tokens=False))
