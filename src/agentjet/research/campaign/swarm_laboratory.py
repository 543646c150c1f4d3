"""`SwarmLaboratory` runs the commits of a subject on swarm servers, several side by side.

An order is a trial of `SwarmRunner` whose arm is a commit. The trial's process is the judge's: it reads the locked copy
of the evaluator and of the held-out tasks. The commit's own code runs in a further process, behind a fence, in the
folder of the commit. All state is in the campaign's folder, so a laboratory that was killed continues each run from its
newest step. Trials that differ only in length share a run.

If no server or no disk space is left, `LaboratoryAway` is raised and no trial is lost: the next call tries again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from agentjet.research import fence
from agentjet.research.campaign.laboratory import LaboratoryAway
from agentjet.research.campaign.models import Observation, Order, Transcript
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Outcome, Study, Trial
from agentjet.research.servers import ServerSlot, ServerUnavailable
from agentjet.research.subject import Subject
from agentjet.research.swarm_runner import SwarmRunner, read_json
from agentjet.research.trial_process import SEEN

CAMPAIGN = "campaign"
"""Name in place of a study for the trials that observe."""
UNFENCED = "this kernel has no Landlock (Linux 5.13), so the arms' code runs with the rights of this user"


class SwarmLaboratory:
    """A `Laboratory` and context manager. Leaving it ends all processes; the next one of the folder continues."""

    def __init__(self, repo: SubjectRepo, slots: Sequence[ServerSlot], notify: Callable[[str], None] = print) -> None:
        self._repo, self._slots, self._notify = repo, slots, notify
        self._runner: SwarmRunner | None = None
        self.limits = () if fence.version() else (UNFENCED,)
        """Sentences for the report about what this machine cannot guarantee."""

    def has(self, key: str) -> bool:
        with self._at_work() as runner:
            return runner.has(key)

    def launch(self, key: str, order: Order) -> None:
        trial = Trial(CAMPAIGN, order.commit, {}, order.seed, "explore", order.share)
        with self._at_work() as runner:
            runner.launch(key, trial)

    def collect(self, key: str) -> Observation:
        with self._at_work() as runner:
            outcome = runner.collect(key)
            launch = self._repo.folder / "launches" / key
            trial = Trial.from_json(read_json(launch / "trial.json"))
            seen = read_json(launch / SEEN) if (launch / SEEN).exists() else {}
        return observed(trial, outcome, seen)

    def runner(self, study: Study) -> StudyRunner:
        return StudyRunner(self, study)

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _at_work(self) -> Iterator[SwarmRunner]:
        """Yields the runner, which a failure replaces. Raises `LaboratoryAway`."""
        try:
            if self._runner is None:
                self._runner = SwarmRunner(self._subject_of, self._repo.folder, self._slots, self._notify)
            yield self._runner
        except (ServerUnavailable, OSError) as error:
            self.close()
            raise LaboratoryAway(str(error).partition(". No trial")[0]) from error

    def _subject_of(self, trial: Trial) -> Subject:
        return self._repo.subject(trial.arm)


@dataclass(frozen=True)
class StudyRunner:
    """A `TrialRunner` of a study whose arms are commits."""

    laboratory: SwarmLaboratory
    study: Study

    def has(self, key: str) -> bool:
        return self.laboratory.has(key)

    def launch(self, key: str, trial: Trial) -> None:
        with self.laboratory._at_work() as runner:
            runner.launch(key, replace(trial, arm=self.study.arm(trial.arm).code))

    def collect(self, key: str) -> Outcome:
        with self.laboratory._at_work() as runner:
            return replace(runner.collect(key), trial=key.rpartition("-")[0])


def observed(trial: Trial, outcome: Outcome, seen: Mapping[str, Any]) -> Observation:
    """The observation of an ended trial. `seen` are the facts about its episodes, from the trial's process."""
    run = Observation(trial.arm, trial.seed, trial.fidelity, error="pending", signals=outcome.signals)
    if outcome.end == "infra_failed":
        failed = seen.get("failed", "")
        return replace(run, error=failed or outcome.note or "the run was lost", subject_fails=bool(failed))
    newest = seen.get("newest", [])
    both = [(one["reward"], one["judged"]) for one in newest if one["judged"] is not None]
    return replace(
        run,
        error="",
        score=outcome.score,
        curve=outcome.curve,
        settings={name: value for name, value in outcome.settings.items() if name != "model.name"},  # a path
        transcripts=chosen(newest),
        overrides=overrides(outcome.signals),
        training_reward=mean([reward for reward, _ in both]),
        judged_reward=mean([judged for _, judged in both]),
        rejected=mean([float(judged > reward) for reward, judged in both]),
        overpaid=mean([float(reward > judged) for reward, judged in both]),
        swapped=seen.get("swapped"),
        by_task={task: (least, most, number) for task, (least, most, number) in seen.get("by_task", {}).items()},
        shared_tasks=int(outcome.facts.get("tasks_shared", 0)),
    )


def chosen(episodes: Sequence[Mapping[str, Any]]) -> tuple[Transcript, ...]:
    """The episodes with the highest, the median and the lowest reward; none twice."""
    ranked = sorted(episodes, key=lambda one: -float(one["reward"]))
    places = {0: "best", len(ranked) - 1: "worst"} | ({len(ranked) // 2: "median"} if len(ranked) > 2 else {})
    return tuple(
        Transcript(place, one["task"], tuple(one["messages"]), one["reward"], one["judged"])  # type: ignore[arg-type]
        for number, place in sorted(places.items())
        if ranked
        for one in [ranked[number]]
    )


def overrides(signals: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """By job setting, the share of the calls that set another value."""
    return {
        f"job.{name.removeprefix('overridden/')}": statistics.fmean(value or 0.0 for value in values)
        for name, values in signals.items()
        if name.startswith("overridden/")
    }


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
