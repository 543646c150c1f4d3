"""`Subject`: what every trial of a study trains, and how it is scored. What its arms change of that is theirs.

Code and tasks are named, not held: `FILE.py:FUNCTION`, relative to the folder the study is run in, or
`package.module:function`. Tasks may also be a file of JSON lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentjet.research.records import Record, Setting, refuse


@dataclass(frozen=True)
class Subject(Record):
    """A model, the agent it is trained in, and the tasks it is scored on."""

    model: str
    """A Hugging Face id, a local folder, or `smollm2-135m`: where every run begins."""
    agent: str
    """Plays the training tasks, `agent(task, episode) -> reward`."""
    tasks: str
    """What is trained on: a function that returns tasks, or a file of them (`FILE.jsonl`)."""
    held_out: str
    """What is scored, named likewise, and never trained on."""
    evaluator: str = ""
    """Plays the held-out tasks: its mean reward is the score. Empty: the agent does."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """By arm, the agent of arms that differ in code or in reward."""
    settings: Setting = field(default_factory=dict)
    """Of the server, where they are not the defaults; arms and knobs change them further."""
    steps: int = 40
    """Batches of a full run."""
    evaluations: int = 4
    """Times a full run is scored, evenly spaced, the last one at its end."""
    repeats: int = 1
    """Episodes of each held-out task in a scoring."""
    concurrency: int = 32
    """Episodes at the same time."""
    floor: float = 0.0
    """The score of a policy that can no longer answer: of a run that diverged."""
    patience: float = 1800.0
    """Seconds that the training between two scorings, or a scoring, may take before the run is given up as lost."""
    code: str = ""
    """Hash of the code and the tasks that are named here: what changed since is refused."""

    def __post_init__(self) -> None:
        refuse(self.steps < 1, f"subject.steps = {self.steps}: a run learns at least 1 batch")
        most = f"give 1 to subject.steps = {self.steps}"
        refuse(not 1 <= self.evaluations <= self.steps, f"subject.evaluations = {self.evaluations}: {most} of them")
        refuse(self.repeats < 1, f"subject.repeats = {self.repeats}: each held-out task is played at least once")
        refuse(self.concurrency < 1, f"subject.concurrency = {self.concurrency}: give 1 or more")
        refuse(not self.patience > 0, f"subject.patience = {self.patience}: give seconds above 0")

    def agent_of(self, arm: str) -> str:
        """Where the agent of an arm is."""
        return self.agents.get(arm, self.agent)

    def steps_at(self, fidelity: float) -> int:
        """The batches of a run of that fraction of the full length."""
        return max(1, round(self.steps * fidelity))
