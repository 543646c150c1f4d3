"""`SwarmRunner`: trials on swarm servers, as many at a time as there are places.

Under the study's folder a launch is `launches/KEY/` (`trial.json`, then `outcome.json`, `work.log`), a line of weights
`runs/RUN/` (its record, and what its place keeps of it). Trials that differ in fidelity alone share a run: the longer
one goes on from where the shorter one ended. All of it is on disk, so that a runner that takes up the folder of another
goes on with what that one was killed in: the processes of a runner end with it, and a run carries on from its newest
step.

A loss counts at a place that can still be had, and nowhere else. A place that cannot is left out: its trial waits for
the others, and where there are none it ends the study's work, to be gone on with.
"""

from __future__ import annotations

import hashlib
import json
import queue
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.journal import write_whole
from agentjet.research.models import Outcome, Setting, Trial
from agentjet.research.records import Value, canonical, shortened
from agentjet.research.run_signals import with_dead_environment
from agentjet.research.servers import RunningServer, ServerSlot, ServerUnavailable, check_changes
from agentjet.research.subject import Subject
from agentjet.research.trial_process import ANSWERS, WRONG_STUDY, TrialOrder

LOOK_SECONDS = 0.5
"""Between two looks of who waits: signals are seen in between."""
ENDING_SECONDS = 30.0
"""How long a process is given to abort its episodes."""
MAX_SERVINGS = 3
"""Servers that a trial may lose."""
NUM_LOG_LINES = 20


class SwarmRunner:
    """A `Runner`. Use it as a context: leaving it ends what runs, which the next runner of the folder takes up."""

    def __init__(
        self, subject: Subject, folder: Path, places: Sequence[ServerSlot], tell: Callable[[str], None] = print
    ) -> None:
        """Takes up at once what an earlier runner of the folder had launched and not ended, in that order. `tell` hears
        of a place that is left out.
        """
        self._subject, self._folder, self._tell = subject, folder, tell
        self._launches, self._runs = folder / "launches", folder / "runs"
        for made in (self._launches, self._runs):
            made.mkdir(parents=True, exist_ok=True)  # Here alone: a folder that is moved meanwhile is not made anew.
        self._waiting: queue.Queue[str | None] = queue.Queue()
        self._stopping = threading.Event()
        self._ended = threading.Condition()
        self._wrong: Exception | None = None
        """What ended the study's work."""
        for trial in sorted(self._launches.glob("*/trial.json"), key=lambda path: path.stat().st_mtime_ns):
            if not self._answer(trial.parent.name).exists():
                self._waiting.put(trial.parent.name)
        self._num_places = len(places)
        """That were not left out."""
        self._threads = [threading.Thread(target=self._work, args=(place,), name=place.name) for place in places]
        for thread in self._threads:
            thread.start()

    # ---- what a desk asks ------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        return (self._launches / key / "trial.json").exists()

    def launch(self, key: str, trial: Trial) -> None:
        """In a line for the next free place. Raises `ConfigError` for a setting that would be ignored."""
        check_changes(trial.setting)
        (self._launches / key).mkdir(exist_ok=True)
        write_whole(self._launches / key / "trial.json", canonical(trial.to_json()))
        self._waiting.put(key)

    def collect(self, key: str) -> Outcome:
        """Raises `ConfigError` for what is wrong with the whole study."""
        with self._ended:
            while not self._answer(key).exists():
                if self._wrong is not None:
                    raise self._wrong
                self._ended.wait(LOOK_SECONDS)
        return Outcome.from_json(read(self._answer(key)))

    def ask(self, key: str, question: str) -> Mapping[str, Value] | None:
        """What is known of a launch that ended: its settings, as the server had them; how many held-out tasks are
        trained on, too; the score before and after; in how many of the last steps the weights changed.
        """
        path = self._launches / key / ANSWERS
        answers: dict[str, Mapping[str, Value]] = read(path) if path.exists() else {}
        answer = answers.get(question)
        if answer is None or question != "settings":
            return answer
        trial = Trial.from_json(read(self._launches / key / "trial.json"))
        return {**self._setting(trial), **answer}  # What is no job setting, the server was started with.

    def close(self) -> None:
        """End what runs; idempotent."""
        self._stopping.set()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- the thread of a place -------------------------------------------------------------------------------------

    def _work(self, place: ServerSlot) -> None:
        while (key := self._waiting.get()) is not None and not self._stopping.is_set():
            try:
                self._carry_out(key, place)
            except ServerUnavailable as gone:
                self._leave_out(key, gone)
                break
            except Exception as error:  # the boundary of the thread: raised again where the study waits
                self._wrong = error
                self._stopping.set()
            with self._ended:
                self._ended.notify_all()
        place.close()

    def _leave_out(self, key: str, gone: ServerUnavailable) -> None:
        """Its trial is for the others, or for the next runner of the folder."""
        with self._ended:
            self._num_places -= 1
            if self._num_places:
                self._waiting.put(key)
                self._tell(f"left out from now on: {gone}")
                return
            self._wrong = ConfigError(
                f"{gone}. No trial was counted for it; go on from here with: agentjet research run "
                f"{shlex.quote(str(self._folder))}"
            )
            self._stopping.set()
            self._ended.notify_all()

    def _carry_out(self, key: str, place: ServerSlot) -> None:
        """One trial at one place; a server that dies is had again, and the run goes on. Raises `ConfigError`,
        and `ServerUnavailable` for a place that is gone.
        """
        trial = Trial.from_json(read(self._launches / key / "trial.json"))
        run = self._runs / name_of_run(trial)
        run.mkdir(exist_ok=True)
        draft = self._draft(key)
        note, servings = "", 0
        while not draft.exists() and servings < MAX_SERVINGS:
            servings += 1
            self._subject.check_code()  # Before a server loads the model: what it began with would be saved.
            try:
                with place.serving(run, self._setting(trial), self._stopping) as served:
                    order = TrialOrder(trial, self._subject, served.address, str(run), str(draft))
                    note = self._ordered(order, served, self._launches / key / "work.log")
            except ConfigError:
                raise
            except AgentJetError as error:
                note = str(error)
            if self._stopping.is_set():
                return
        if draft.exists():
            outcome = with_dead_environment(Outcome.from_json(read(draft)))
        else:
            outcome = Outcome(trial.id, "infra_failed", note=shortened(f"{place.name}: {note}"))
        if outcome.end == "infra_failed":
            draft.unlink(missing_ok=True)  # Where nothing can be had it is no outcome.
            place.check()
        write_whole(draft, canonical(outcome.to_json()))
        self._refuse_to_begin_lost(key, outcome, run)
        lost_run = self._launches / key / "run"
        if outcome.end == "infra_failed" and not lost_run.exists():
            run.rename(lost_run)  # A repeat begins anew.
        elif trial.fidelity >= 1.0:
            place.over(run)
        draft.rename(self._answer(key))  # Nobody has the run any more: the next trial of it may begin.

    def _refuse_to_begin_lost(self, key: str, lost: Outcome, run: Path) -> None:
        """Raises `ConfigError` for a lost trial where none was ever completed: whatever is wrong is wrong with all."""
        if lost.end != "infra_failed" or any(is_result(path) for path in self._launches.glob("*/outcome.json")):
            return
        self._draft(key).unlink()
        run.rename(self._launches / key / f"lost-{uuid.uuid4().hex[:6]}")
        raise ConfigError(
            "The first trial was lost, and nothing was counted: mend it and run the same command again; with other "
            f"code it is another study, planned in another folder. {lost.note}"
        )

    def _setting(self, trial: Trial) -> Setting:
        """The whole of it, for the server."""
        return {
            "job.optimizer.total_steps": self._subject.steps,
            **self._subject.settings,
            **trial.setting,
            "model.name": self._subject.model,
            "job.seed": trial.seed,
            "job.max_steps": self._subject.steps_at(trial.fidelity),
        }

    def _ordered(self, order: TrialOrder, served: RunningServer, log: Path) -> str:
        """Have a process carry out an order; why it did not, where it did not. Raises `ConfigError`, and what the
        server is lost with.
        """
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentjet.research.trial_process"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            with process.stdin as orders, suppress(BrokenPipeError):  # While it is open the process goes on.
                orders.write(canonical(order.to_json()).encode() + b"\n")
                while process.poll() is None and not self._stopping.wait(LOOK_SECONDS):
                    served.check()
        finally:
            code = ended(process)
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:])
        if code == WRONG_STUDY:
            raise ConfigError(tail)
        return f"the trial's process ended with exit code {code}:\n{tail}" if code else ""

    def _draft(self, key: str) -> Path:
        """The outcome, while its run is being put away."""
        return self._launches / key / "draft.json"

    def _answer(self, key: str) -> Path:
        return self._launches / key / "outcome.json"


def is_result(answer: Path) -> bool:
    """Whether a trial came to an end that says something of its arm."""
    return Outcome.from_json(read(answer)).end != "infra_failed"


def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that was asked to end."""
    try:
        return process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def name_of_run(trial: Trial) -> str:
    """Of the line of weights that a trial takes further."""
    content = canonical([trial.study, trial.arm, dict(trial.setting), trial.seed, trial.phase])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
