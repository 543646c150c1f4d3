"""`SwarmRunner` runs trials on swarm servers, one per slot at a time.

A `ServerSlot` serves one run at a time and continues it where it stands. Those of servers that are there or are started
are in `agentjet.cli.trial_servers`.

In the study's folder, a launch is `launches/KEY/` (`trial.json`, then `outcome.json`, `work.log`). A run is `runs/RUN/`
(its record and the files of its slot). Trials that differ only in fidelity share a run: the longer one continues the
shorter one. All state is on disk. A new runner of the folder continues what a killed one left, from each run's newest
step; the processes of a runner end with it.

A lost trial counts only if its slot is still available. An unavailable slot is left out, and asked again after a pause.
Its trial goes to another slot. Without slots `collect` raises `ServerUnavailable`; a later call begins with all slots
again. A slot that starts its servers on several machines goes on at another one (`MachineLost`).

Trials wait in the order of `_queue`: what decides soonest goes first.
"""

from __future__ import annotations

import fcntl
import json
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, Protocol, Self

from agentjet.errors import AgentJetError, ConfigError
from agentjet.research.diagnosis import with_dead_environment
from agentjet.research.journal import write_whole
from agentjet.research.models import (
    Address,
    Outcome,
    Setting,
    Subject,
    Trial,
    canonical,
    hash_of,
    of_server,
    shortened,
    shown_model,
)
from agentjet.research.trial_process import WRONG_STUDY, RunRecord, TrialOrder

# ---- servers ---------------------------------------------------------------------------------------------------------

MODEL = ("model", "model.name", "model.path")
"""Settings that arms cannot set: the model belongs to the study."""
OPERATION = ("server.", "model.threads")
"""Settings that do not affect training."""


class ServerUnavailable(ConfigError):
    """No trial can run on this server at present."""


class MachineLost(AgentJetError):
    """The machine of a server is gone, or the server was withdrawn. The slot starts the next one elsewhere."""


def check_changes(changes: Setting, *, of_all: bool = False) -> None:
    """Raises `ConfigError` for settings in which arms cannot differ, because training would be the same. With `of_all`
    the settings are those of all arms, which may not name a model.
    """
    for name, value in changes.items():
        if name in MODEL:
            raise ConfigError(
                f"{name} = {value!r}: all arms run the study's --model; an arm with another base model has the change "
                "model = 'ID', and further settings of models need another study, in another folder"
            )
        if name.startswith(OPERATION) and not of_all:
            raise ConfigError(
                f"{name} = {value!r} belongs to the server and does not affect training: set it for all "
                "arms (--set), or omit it"
            )


@dataclass(frozen=True)
class RunningServer:
    address: Address
    check: Callable[[], object]
    """Called repeatedly during the trial. Raises `AgentJetError` if the run is not served any more."""
    machine: str = ""
    """Kind of the hardware: see `StatusResponse.machine`. Empty if it is unknown."""


class ServerSlot(Protocol):
    """A slot for one run of a policy. Used by one thread."""

    @property
    def name(self) -> str:
        """Name for messages."""

    def serve(self, run: Path, settings: Setting, stopping: Event) -> AbstractContextManager[RunningServer]:
        """Serves the run from where it stopped. Raises `AgentJetError` without a server, or if it is `stopping`."""

    def check(self) -> None:
        """Contacts the server once. Raises `ServerUnavailable` if no trial could run there."""

    def run_finished(self, run: Path) -> None:
        """Called when no trial continues this run. A slot with the policy moves it to `POLICY` in its folder."""


POLICY = "policy"
"""Folder of a finished run with its policy, if its slot has it."""
MACHINE = "machine"
"""File beside the runs with the kind of their machines, if these must be equal."""


def first_noted(file: Path, found: str) -> str:
    """Returns the text of the file. A file without any gets this one."""
    with file.open("a+", encoding="utf-8") as noted:
        fcntl.flock(noted, fcntl.LOCK_EX)  # other slots of the study write it too
        noted.seek(0)
        first = noted.read()
        if not first:
            noted.write(found)
    return first or found


# ---- the runner ------------------------------------------------------------------------------------------------------

LOOK_SECONDS = 0.5
"""Interval at which waiting threads wake up, so that signals are handled."""
ENDING_SECONDS = 30.0
"""Time for a process to abort its episodes."""
MAX_SERVINGS = 3
"""Maximum servers that one trial may lose."""
MAX_MACHINES = 20
"""Maximum machines that one trial may lose. After so many, the trial may be the reason."""
AWAY_SECONDS = (60.0, 600.0)
"""Pause before a slot that was unavailable is asked again: first, and at most."""
NUM_LOG_LINES = 20


class Waiting(NamedTuple):
    """A launch that waits for a slot. The least goes first."""

    explores: bool = False
    is_new: bool = False
    launched: int = 0
    """Nanoseconds since 1970."""
    key: str = ""
    """Empty: the slot's thread ends."""


class RunningTrial(NamedTuple):
    trial: Trial
    slot: str
    since: float
    """Seconds since 1970."""


class SwarmRunner:
    """A `TrialRunner` and context manager. Leaving it ends all processes; the next runner of the folder continues."""

    def __init__(
        self,
        subject: Subject | Callable[[Trial], Subject],
        folder: Path,
        slots: Sequence[ServerSlot],
        notify: Callable[[str], None] = print,
        *,
        unsafe: bool = False,
        equal_machines: bool = False,
    ) -> None:
        """`notify` is called when a slot is left out or returns. `subject` may depend on the trial. `unsafe`: see
        `TrialOrder`. `equal_machines`: all trials must run on machines of one kind, because their seconds are compared.
        """
        self._unsafe, self._equal_machines = unsafe, equal_machines
        self._subject_of: Callable[[Trial], Subject] = (
            (lambda trial: subject.varied(trial.setting)) if isinstance(subject, Subject) else subject
        )
        self._slots, self._notify = slots, notify
        self._launches, self._runs = folder / "launches", folder / "runs"
        for made in (self._launches, self._runs):
            made.mkdir(parents=True, exist_ok=True)  # only here: a folder that was moved must not be created again
        self._waiting: queue.PriorityQueue[Waiting] = queue.PriorityQueue()
        self._stopping = threading.Event()
        self._ended = threading.Condition()
        self._error: Exception | None = None
        """The error that ended the work of all slots."""
        self._threads: list[threading.Thread] = []
        self._running: dict[str, RunningTrial] = {}

    def running(self) -> list[RunningTrial]:
        """The trials that slots work at now, oldest first."""
        return list(self._running.copy().values())

    # ---- the methods of a `TrialRunner` -----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        return (self._launches / key / "trial.json").exists()

    def launch(self, key: str, trial: Trial) -> None:
        """Queues a trial for the next free slot. Raises `ConfigError` for a setting that would have no effect."""
        check_changes(of_server(trial.setting))
        (self._launches / key).mkdir(exist_ok=True)
        write_whole(self._launches / key / "trial.json", canonical(trial.to_json()))
        if self._threads:
            self._queue(key)

    def collect(self, key: str) -> Outcome:
        """Raises `ServerUnavailable`, `OSError` for the disk, and `ConfigError` for an error that affects the study."""
        self._start()
        with self._ended:
            while not (has_ended := self._outcome_path(key).exists()) and self._error is None:
                self._ended.wait(LOOK_SECONDS)
        if not has_ended:
            self.close()
            assert self._error is not None
            raise self._error
        return Outcome.from_json(read_json(self._outcome_path(key)))

    def _start(self) -> None:
        """Starts the slots, unless they work. They begin with the unfinished launches."""
        if self._threads:
            return
        self._stopping, self._waiting, self._error = threading.Event(), queue.PriorityQueue(), None
        for trial in self._launches.glob("*/trial.json"):
            if not self._outcome_path(trial.parent.name).exists():
                self._queue(trial.parent.name)
        self._num_slots = len(self._slots)
        self._threads = [threading.Thread(target=self._work, args=(slot,), name=slot.name) for slot in self._slots]
        for thread in self._threads:
            thread.start()

    def _queue(self, key: str) -> None:
        """Puts a trial into its place in the queue: those of a running comparison before those that explore, continued
        runs before new ones, then as they were launched. Callers launch what they expect most of first.
        """
        file = self._launches / key / "trial.json"
        trial = Trial.from_json(read_json(file))
        is_new = not (self._runs / trial.run / "record.json").exists()
        self._waiting.put(Waiting(trial.phase != "confirm", is_new, file.stat().st_mtime_ns, key))

    def close(self) -> None:
        """Ends all processes. Idempotent."""
        self._stopping.set()
        for _ in self._threads:
            self._waiting.put(Waiting())
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the thread of a slot --------------------------------------------------------------------------------------

    def _work(self, slot: ServerSlot) -> None:
        pause = AWAY_SECONDS[0]
        while (waiting := self._waiting.get()).key and not self._stopping.is_set():
            try:
                try:
                    self._run_trial(waiting.key, slot)
                finally:
                    self._running.pop(waiting.key, None)
                pause = AWAY_SECONDS[0]
            except ServerUnavailable as gone:
                self._waiting.put(waiting._replace(is_new=False))
                pause = self._wait_for(slot, gone, pause)
            except Exception as error:  # thread boundary: `collect` raises it again
                self._error = error
                self._stopping.set()
            with self._ended:
                self._ended.notify_all()

    def _wait_for(self, slot: ServerSlot, gone: ServerUnavailable, pause: float) -> float:
        """Waits until a slot may work again, and returns the next pause. Ends all work with the last slot."""
        with self._ended:
            self._num_slots -= 1
            if not self._num_slots:
                self._error = self._error or gone
                self._stopping.set()
                return pause
        self._notify(f"left out for {pause:.0f} s or more: {gone}")
        while not self._stopping.wait(pause):
            pause = min(2 * pause, AWAY_SECONDS[1])
            with suppress(ServerUnavailable):
                slot.check()
                with self._ended:
                    self._num_slots += 1
                self._notify(f"tried again: {slot.name}")
                break
        return pause

    def _run_trial(self, key: str, slot: ServerSlot) -> None:
        """Runs one trial, on a new server if one dies. Raises `ConfigError`, and `ServerUnavailable` for the slot."""
        trial = Trial.from_json(read_json(self._launches / key / "trial.json"))
        self._running[key] = RunningTrial(trial, slot.name, time.time())
        subject = self._subject_of(trial)
        run = self._runs / trial.run
        run.mkdir(exist_ok=True)
        draft = self._launches / key / "draft.json"  # the outcome, before its run is moved or finished
        note, servings, machines = "", 0, 0
        while not draft.exists() and servings < MAX_SERVINGS and machines < MAX_MACHINES:
            subject.check_code()  # before the server loads the model, because it saves its first weights
            try:
                with slot.serve(run, self._setting(trial), self._stopping) as server:
                    self._check_machine(server.machine, slot)
                    order = TrialOrder(trial, subject, server.address, str(run), str(draft), self._unsafe)
                    note = self._run_process(order, server, self._launches / key / "work.log")
                    if draft.exists() and read_json(draft)["score"] is None:
                        try:
                            server.check()
                        except AgentJetError:  # the lost trial came of a server that is gone, and does not count
                            draft.unlink()
                            raise
                servings += 1
            except ConfigError:
                raise
            except MachineLost as error:
                note, machines = str(error), machines + 1
                self._notify(f"{slot.name}: {note}; the trial goes on elsewhere")
            except AgentJetError as error:
                note, servings = str(error), servings + 1
            if self._stopping.is_set():
                return
        if draft.exists():
            outcome = with_dead_environment(Outcome.from_json(read_json(draft)))
            if outcome.settings:  # those outside the job are the ones that the server was started with
                known = self._setting(trial)
                name = shown_model(str(known["model.name"]))
                outcome = replace(outcome, settings={**known, "model.name": name, **outcome.settings})
        else:
            curve = RunRecord(run / "record.json").curve(subject.steps_at(trial.fidelity))
            outcome = Outcome(trial.id, "infra_failed", curve=curve, note=shortened(f"{slot.name}: {note}"))
        if outcome.score is None:
            draft.unlink(missing_ok=True)  # if the slot is gone, `check` raises and nothing counts
            slot.check()
        write_whole(draft, canonical(outcome.to_json()))
        if not subject.judged:  # a campaign learns from a commit that cannot run
            self._check_first_trial(key, outcome, run)
        lost_run = self._launches / key / "run"
        if outcome.score is None and not lost_run.exists():
            run.rename(lost_run)  # a repeat starts from the base model
        elif trial.fidelity >= 1.0:
            slot.run_finished(run)
            self._keep_policy(trial, outcome, run / POLICY)
        draft.rename(self._outcome_path(key))  # the run is free: its next trial may start

    def _keep_policy(self, trial: Trial, outcome: Outcome, policy: Path) -> None:
        """Keeps the policy of the newest confirming run of each arm."""
        with self._ended:
            if trial.phase == "confirm" and policy.exists():
                kept = kept_policy(self._runs.parent, trial.arm, trial.setting)
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir(parents=True)
                policy.rename(kept / POLICY)
                write_whole(kept / "run.json", canonical({"seed": trial.seed, "outcome": outcome.to_json()}))
            shutil.rmtree(policy, ignore_errors=True)

    def _check_first_trial(self, key: str, lost: Outcome, run: Path) -> None:
        """Raises `ConfigError` for a lost trial if none was ever completed: the error then affects all trials."""
        ended = self._launches.glob("*/outcome.json")
        if lost.end != "infra_failed" or any(read_json(path)["score"] is not None for path in ended):
            return
        (self._launches / key / "draft.json").unlink()
        (self._runs / MACHINE).unlink(missing_ok=True)
        run.rename(self._launches / key / f"lost-{uuid.uuid4().hex[:6]}")
        raise ConfigError(
            "The first trial was lost and does not count. Fix the error and run the same command again. If you change "
            f"the code, plan another study in another folder. {lost.note}"
        )

    def _check_machine(self, found: str, slot: ServerSlot) -> None:
        """Raises `ServerUnavailable` for a machine of another kind than the first, if the trials compare seconds."""
        found = found or "unknown"
        if self._equal_machines and found != (first := first_noted(self._runs / MACHINE, found)):
            raise ServerUnavailable(
                f"{slot.name} is a machine of another kind ({found}), and the seconds of this comparison are "
                f"those of the first one ({first}): offer machines of that kind; if there are none "
                "any more, start again in another folder"
            )

    def _setting(self, trial: Trial) -> Setting:
        """Returns the complete settings for the server."""
        subject = self._subject_of(trial)
        return {
            "job.optimizer.total_steps": subject.steps,
            **subject.settings,
            **of_server(trial.setting),
            "model.name": subject.model,
            "job.seed": trial.seed,
            "job.max_steps": subject.steps_at(trial.fidelity),
        }

    def _run_process(self, order: TrialOrder, server: RunningServer, log: Path) -> str:
        """Runs a trial process. Returns the reason if it failed. Raises `ConfigError`, and errors of a lost server."""
        with log.open("ab") as output:
            begin = output.tell()
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
            with process.stdin as orders, suppress(BrokenPipeError):  # the process ends when this closes
                orders.write(canonical(order.to_json()).encode() + b"\n")
                while process.poll() is None and not self._stopping.wait(LOOK_SECONDS):
                    server.check()
        finally:
            try:
                code = process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        written = log.read_bytes()[begin:].decode("utf-8", "replace")
        tail = "\n".join(written.splitlines()[-NUM_LOG_LINES:])
        if code == WRONG_STUDY:
            raise ConfigError(tail)
        return f"the trial's process ended with exit code {code}:\n{tail}" if code else ""

    def _outcome_path(self, key: str) -> Path:
        return self._launches / key / "outcome.json"


def kept_policy(folder: Path, arm: str, setting: Setting) -> Path:
    """The folder with the policy of an arm's newest confirming run (`policy/`), and that run (`run.json`)."""
    return folder / "policies" / hash_of([arm, dict(setting)])


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
