"""`LanguageModel`: a proposer that talks to a language model.

The model reads the campaign by the tools of a `Desk`, and proposes interventions by a tool. It cannot start a run,
judge or spend. Each intervention is checked by the campaign as any other. A model that answers prose is asked again
twice. Without an answer the strategist goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentjet.research.campaign.desk import REPAIRS, TOOLS, Desk
from agentjet.research.campaign.model_api import Message, Model, Reply
from agentjet.research.campaign.models import Proposal, ProposerAway, View
from agentjet.research.records import shortened

MAX_TURNS = 40
"""Maximum answers of the model to one request for proposals."""
RULES = """You are a researcher who improves an agent that is trained by reinforcement learning. Code runs, measures and
judges; you read and propose. First read what was observed, then propose changes of the subject's files or settings,
each as a testable hypothesis: why (refer to entries of the notebook), what it predicts, what would refute it. Give no
results: they come from runs. The model, the held-out tasks, the evaluator and the budget are fixed. Propose at most
{most} interventions, the most promising first, then call finish. Question: {topic}"""


@dataclass
class LanguageModel:
    """A `Proposer`."""

    model: Model
    papers: Path | None = None
    seconds: float = 900.0
    """Time limit for one request for proposals."""
    name: str = "llm"
    limit: str = ""
    """A sentence for the report about the origin of its answers."""

    def propose(self, view: View, most: int) -> Sequence[Proposal | str]:
        """Raises `ProposerAway` if the model does not answer."""
        desk = Desk(view, most, self.papers)
        messages: list[Message] = [{"role": "system", "content": RULES.format(most=most, topic=view.topic)}]
        messages.append({"role": "user", "content": f"The newest run is entry {view.observed}. Begin."})
        deadline, prose = time.monotonic() + self.seconds, 0
        for _ in range(MAX_TURNS):
            if time.monotonic() > deadline:
                break
            try:
                reply = self.model.reply(messages, TOOLS)
            except ProposerAway:
                if desk.proposals:
                    return desk.proposals
                raise
            messages.append(said(reply))
            for call in reply.calls:
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": desk.use(call)})
            if desk.finished or len(desk.proposals) >= most:
                return desk.proposals
            if not reply.calls:
                prose += 1
                if prose > REPAIRS:
                    return [*desk.proposals, shortened(reply.text or "(an empty answer)")]
                messages.append({"role": "user", "content": "Use the tools: propose, or finish with the reason."})
        if not desk.proposals:
            raise ProposerAway(f"no proposal within {MAX_TURNS} answers and {self.seconds:g} s")
        return desk.proposals


def said(reply: Reply) -> Message:
    """An answer as a message."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]
    return {"role": "assistant", "content": reply.text} | ({"tool_calls": calls} if calls else {})
