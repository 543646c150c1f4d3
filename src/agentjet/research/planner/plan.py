"""`Plan`: a study, how its question was understood and what it costs, and the page a person reads before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from agentjet.research.models import EXPECTED, Arm, Hypothesis, Study
from agentjet.research.planner.reading import Kind
from agentjet.research.planner.rehearsal import Cost, rehearse
from agentjet.research.planner.topics import MEANINGS

ARMS = ("arm", "changes", "code", "tunes before it is judged")


@dataclass(frozen=True)
class Plan:
    study: Study
    kind: Kind | None
    """None where the question came as a file."""
    understood: tuple[tuple[str, str], ...]
    """Words of the topic, and the settings they were taken for."""
    ignored: tuple[str, ...]
    cost: Cost
    notes: tuple[str, ...] = ()
    run_seconds: float | None = None
    servers: int = 1

    def with_study(self, study: Study) -> Plan:
        """The same plan with more in its study."""
        return replace(self, study=study, cost=rehearse(study))

    def to_markdown(self) -> str:
        study = self.study
        parts = [
            f"# {study.topic}",
            self._question(),
            "## Claims",
            self._claims(),
            "## Arms",
            self._arms(),
            "## Rules",
            self._rules(),
            "## Cost",
            self._cost(),
            f"Study `{study.id}`. It is fixed with its first journal entry; what is added later is exploratory.",
        ]
        return "\n\n".join(parts) + "\n"

    def _question(self) -> str:
        lines = [f"**Question**: {MEANINGS[self.kind]}" if self.kind else "**Question**: as the file puts it."]
        if self.understood:
            lines.append("Understood: " + "; ".join(f"“{words}” is `{name}`" for words, name in self.understood) + ".")
        if self.ignored:
            lines.append(f"Not understood, and not asked: {', '.join(f'“{word}”' for word in self.ignored)}.")
        return "\n\n".join([*lines, *(f"Note: {note}." for note in self.notes)])

    def _claims(self) -> str:
        rows = []
        for hypothesis in self.study.hypotheses:
            expected = EXPECTED[hypothesis.sign] if hypothesis.sign else f"proposed by {self._proposer(hypothesis)}"
            standing = "confirmatory" if hypothesis.confirmatory else "exploratory"
            rows.append((hypothesis.claim, expected, standing, hypothesis.why or "–"))
        return table(("claim", "expected", "standing", "because"), rows)

    def _proposer(self, hypothesis: Hypothesis) -> str:
        arm = self.study.arm(hypothesis.arm)
        return "a coding agent" if arm.code and arm.name == coded_name(arm.code) else "a language model"

    def _arms(self) -> str:
        """With the agent of each, where they differ in it."""
        subject = self.study.subject
        if subject is None or not subject.agents:
            return table(ARMS, map(arm_row, self.study.arms))
        rows = ((*arm_row(arm), f"`{subject.agent_of(arm.name)}`") for arm in self.study.arms)
        return table((*ARMS, "agent"), rows)

    def _rules(self) -> str:
        study, subject = self.study, self.study.subject
        known = (subject.evaluator or subject.agent if subject else "", study.evaluator)
        evaluator = ", ".join(f"`{name}`" for name in known if name) or "the runner’s"
        looks = ", ".join(map(str, study.looks))
        lines = [
            f"Score: {study.metric}. Smallest effect of interest: **{study.sesoi:g}**; less does not matter.",
            f"Seeds: fresh after tuning, the same for all arms; looks at {looks} an arm; alpha {study.alpha:g} in all, "
            "about: more where that effect is less than a fifth of what seeds differ by, or arms spread unequally.",
            "A claim is supported or refuted when its whole interval lies beyond that effect, practically equivalent "
            "when it lies within at the last look, else inconclusive.",
            f"Evaluator: {evaluator}; it scores every arm.",
        ]
        if study.subject is not None:
            lines.append(
                f"A run that diverged and answers no more scores {study.subject.floor:g}, or the least that one of its "
                "held-out episodes earned where that is less."
            )
        return "\n".join(f"* {line}" for line in lines)

    def _cost(self) -> str:
        study, cost = self.study, self.cost
        lines = [
            f"Budget: **{study.budget:g} full runs**, {study.reserve:.0%} of it for confirming alone, which has what "
            f"exploring leaves, too. Rehearsed on made-up scores, the study takes {cost.least:.1f} runs where all is "
            f"plain, and {cost.most:.1f} where nothing is."
        ]
        if cost.most > study.budget:
            lines.append("The budget may run out before the last look: what is open then ends as inconclusive.")
        if self.run_seconds is not None:
            hours = study.budget * self.run_seconds / self.servers / 3600
            lines.append(f"At {self.run_seconds:g} s a run, {self.servers} at a time, that is at most {hours:.1f} h.")
        return "\n\n".join(lines)


def coded_name(code: str) -> str:
    """Of an arm whose agent a coding agent wrote, by the hash of what it changed."""
    return f"agent {code[:6]}"


def arm_row(arm: Arm) -> tuple[str, ...]:
    changes = ", ".join(f"`{name} = {value}`" for name, value in arm.changes.items())
    knobs = "; ".join(f"`{knob.name}`: {tried(knob.values)}" for knob in arm.nuisance)
    return arm.name, changes or "–", f"`{arm.code}`" if arm.code else "–", knobs or "–"


def tried(values: tuple[float, ...]) -> str:
    if len(values) > 8:
        return f"{len(values)} values from {values[0]:g} to {values[-1]:g}"
    return ", ".join(f"{value:g}" for value in values)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
