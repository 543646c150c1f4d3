"""The runner without a server. With servers: `tests/e2e/test_research.py`.

1. A slot that cannot serve is tried three times, then the trial is lost; a repeat starts from the base model. Before
   the first completed trial, a lost one ends the run and does not count.
2. A launch is on disk when it returns. The next runner of the folder continues waiting launches, and runs whose
   environment died.
3. An error that affects the whole study is raised in `collect`.
4. Trials that differ only in fidelity share a run.
5. Reported weight changes answer whether the last steps changed the weights.
6. Shared servers serve the weights of the first one.
7. A diverged run that cannot answer scores the floor, and never more than its lowest reward.
8. An unavailable slot is left out, with a message, and used again when it answers; its lost trial is not an attempt.
9. A run that is back at the base model is measured again.
10. A policy that diverges in the middle fails its calls and ends the training: a result, not a lost run.
11. A lost machine costs a trial nothing, unless the trial loses every one.
12. Trials that compare wait before those that explore, continued runs before new ones, then as they were launched.
13. Where seconds are compared, all trials run on machines of one kind, and the others are told.
14. It says which slot works at which trial.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from agentjet.cli.trial_servers import check_weights
from agentjet.client import AsyncSwarm
from agentjet.errors import AgentJetError, ConfigError
from agentjet.protocol import EpisodeList, Event
from agentjet.research import swarm_runner
from agentjet.research.arm_process import ArmClient, ArmFailed
from agentjet.research.diagnosis import Signals
from agentjet.research.models import Address, Outcome, Setting, Subject, Trial, canonical
from agentjet.research.swarm_runner import (
    MAX_MACHINES,
    MAX_SERVINGS,
    POLICY,
    MachineLost,
    RunningServer,
    ServerUnavailable,
    SwarmRunner,
    kept_policy,
)
from agentjet.research.trial_process import RunRecord, TrialOrder, TrialProcess, scoring, weight_changes
from tests.research.world import FakeSlot

SUBJECT = Subject("m", "examples/digits/agent.py:agent", "a.jsonl", "b.jsonl", settings={"job.group_size": 4}, steps=9)
TRIAL = Trial("s", "a", {"job.optimizer.lr": 0.5}, 7, "confirm", 1 / 3)


def completing(run: Path, settings: Setting) -> None:
    """The waiting trials of a seed end, with their learning rate as score."""
    for file in run.parent.parent.glob("launches/*/trial.json"):
        trial = Trial.from_json(json.loads(file.read_text()))
        if trial.seed == settings["job.seed"] and not file.with_name("outcome.json").exists():
            ended = Outcome(trial.id, "completed", float(str(settings["job.optimizer.lr"])), settings={"job.x": 1})
            file.with_name("draft.json").write_text(canonical(ended.to_json()))


def dying(run: Path, settings: Setting) -> None:
    """The run of `k-1` ends, while half of the episodes do not come back."""
    signals = {"batch/episodes": (8.0,) * 3, "episodes/aborted": (9.0,) * 3, "episodes/expired": (0.0,) * 3}
    ended = Outcome(TRIAL.id, "completed", 0.5, signals=signals, note="the reason of most: ValueError: no such room")
    (run.parent.parent / "launches" / "k-1" / "draft.json").write_text(canonical(ended.to_json()))


def complete_one(folder: Path) -> None:
    """Trials of the study have worked before."""
    (folder / "launches" / "k-0").mkdir(parents=True)
    (folder / "launches" / "k-0" / "trial.json").write_text(canonical(TRIAL.to_json()))
    (folder / "launches" / "k-0" / "outcome.json").write_text(canonical(Outcome(TRIAL.id, "completed", 1.0).to_json()))


def test_a_first_trial_that_is_lost_is_not_counted(tmp_path: Path) -> None:
    for _ in range(2):
        with SwarmRunner(SUBJECT, tmp_path, [FakeSlot(AgentJetError("no port is free"))]) as runner:
            if not runner.has("k-1"):
                runner.launch("k-1", TRIAL)
            with pytest.raises(ConfigError, match=r"does not count. Fix the error .* nowhere: no port is free"):
                runner.collect("k-1")
        assert not list((tmp_path / "launches" / "k-1").glob("outcome.json"))
        assert not list((tmp_path / "runs").iterdir())
    assert len(list((tmp_path / "launches" / "k-1").glob("lost-*/trace"))) == 2


def test_a_run_whose_environment_died_is_lost_before_anybody_hears_of_it(tmp_path: Path) -> None:
    slot = FakeSlot(before=dying)
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as runner:
        runner.launch("k-1", TRIAL)
        with pytest.raises(
            ConfigError, match=r"does not count.* dead_environment: .* did not come back; .*no such room"
        ):
            runner.collect("k-1")
    assert len(list((tmp_path / "launches" / "k-1").glob("lost-*/trace"))) == 1
    complete_one(tmp_path)
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as runner:
        outcome = runner.collect("k-1")
    assert (outcome.end, outcome.score, slot.finished) == ("infra_failed", None, [])
    assert (tmp_path / "launches" / "k-1" / "run" / "trace").exists(), "a repeat begins anew"
    assert not list((tmp_path / "runs").iterdir())


def test_a_place_that_cannot_serve(tmp_path: Path) -> None:
    complete_one(tmp_path)
    slot = FakeSlot(AgentJetError("no port is free"))
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as runner:
        runner.launch("k-1", TRIAL)
        outcome = runner.collect("k-1")
        assert (outcome.trial, outcome.end, outcome.score) == (TRIAL.id, "infra_failed", None)
        assert outcome.note == "nowhere: no port is free"
        assert (tmp_path / "launches" / "k-1" / "run" / "trace").exists()
        runner.launch("k-2", replace(TRIAL, setting={"model": "larger"}))
        runner.collect("k-2")
    assert len(slot.asked) == 2 * MAX_SERVINGS and slot.finished == []
    assert slot.asked[-1]["model.name"] == "larger"
    assert slot.asked[0] == {
        "job.optimizer.total_steps": 9,
        "job.group_size": 4,
        "job.optimizer.lr": 0.5,
        "model.name": "m",
        "job.seed": 7,
        "job.max_steps": 3,
    }


class Keeping(FakeSlot):
    """Each run ends with a score and a policy."""

    def run_finished(self, run: Path) -> None:
        (run / POLICY).mkdir()
        (run / POLICY / "weights").write_text(run.name)


def test_the_policy_of_an_arms_newest_confirming_run_is_kept(tmp_path: Path) -> None:
    trials = {
        "k-1": replace(TRIAL, fidelity=1.0, phase="confirm"),
        "k-2": replace(TRIAL, fidelity=1.0, phase="confirm", seed=8),
        "k-3": replace(TRIAL, fidelity=1.0, phase="explore", seed=9),
    }
    ended = iter(trials.items())

    def end(run: Path, settings: Setting) -> None:
        key, trial = next(ended)
        outcome = Outcome(trial.id, "completed", 1.0)
        (tmp_path / "launches" / key / "draft.json").write_text(canonical(outcome.to_json()))

    with SwarmRunner(SUBJECT, tmp_path, [Keeping(before=end)]) as runner:
        for key, trial in trials.items():
            runner.launch(key, trial)
            assert runner.collect(key).score == 1.0
    kept = kept_policy(tmp_path, TRIAL.arm, TRIAL.setting)
    assert (kept / POLICY / "weights").read_text() == trials["k-2"].run
    assert json.loads((kept / "run.json").read_text())["seed"] == 8
    assert not list((tmp_path / "runs").glob(f"*/{POLICY}")) and len(list((tmp_path / "policies").iterdir())) == 1


@pytest.mark.parametrize("began", [False, True])
def test_a_place_that_is_gone_costs_nothing(tmp_path: Path, began: bool) -> None:
    if began:
        complete_one(tmp_path)
    slot = FakeSlot(AgentJetError("no answer"), "http://x", is_gone=True)
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as runner:
        for key in ("k-1", "k-2"):
            runner.launch(key, TRIAL)
        with pytest.raises(ServerUnavailable, match=r"^--server http://x: no answer$"):
            runner.collect("k-1")
    assert len(slot.asked) == MAX_SERVINGS, "one trial asked for it, and no other"
    for key in ("k-1", "k-2"):
        assert [path.name for path in (tmp_path / "launches" / key).iterdir()] == ["trial.json"]
    assert (tmp_path / "runs" / TRIAL.run / "trace").exists(), "it may be gone on with"


def test_an_error_is_that_of_the_last_try(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with SwarmRunner(replace(SUBJECT, agent="none.py:agent"), tmp_path, [FakeSlot(None)]) as runner:
            runner.launch("k-1", TRIAL)
            with pytest.raises(ConfigError, match=r"none\.py: No such file") as error:
                runner.collect("k-1")
            found.append(str(error.value))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "trouble", [AgentJetError("no answer"), OSError(errno.ENOSPC, "No space left on device", "runs")]
)
def test_a_later_call_begins_again_after_a_trouble_of_the_machine(trouble: Exception, tmp_path: Path) -> None:
    """The subject follows from the trial, as in a campaign."""
    slot = FakeSlot(trouble, is_gone=isinstance(trouble, AgentJetError))

    def of(trial: Trial) -> Subject:
        settings = {"job.optimizer.lr": float(len(trial.arm))}
        return replace(SUBJECT, model="/home/models/tiny", settings=settings, judged=True)

    with SwarmRunner(of, tmp_path, [slot], notify=lambda line: None) as runner:
        runner.launch("k 1", replace(TRIAL, arm="c0", setting={}))
        for _ in range(2):
            with pytest.raises((ServerUnavailable, OSError), match=r"no answer$|No space left"):
                runner.collect("k 1")
        slot.error, slot.is_gone, slot.before = AgentJetError("over"), False, completing
        slot.asked.clear()
        ended = runner.collect("k 1")
        assert runner.has("k 1") and ended.score == 2.0
        assert ended.settings["model.name"] == "tiny" and ended.settings["job.x"] == 1  # no path of this machine
    assert len(slot.asked) == 1 and slot.asked[0]["job.seed"] == TRIAL.seed


def test_where_one_place_is_gone_the_others_go_on(tmp_path: Path) -> None:
    complete_one(tmp_path)
    told: list[str] = []
    may_work = Signal()

    def work(run: Path, settings: Setting) -> None:
        assert may_work.wait(60)
        completing(run, settings)

    def notify(line: str) -> None:
        told.append(line)
        may_work.set()

    gone = FakeSlot(AgentJetError("no answer"), "http://x", is_gone=True)
    there = FakeSlot(name="http://y", before=work)

    with SwarmRunner(SUBJECT, tmp_path, [gone, there], notify) as runner:
        for seed in range(1, 5):
            runner.launch(f"k-{seed}", replace(TRIAL, seed=seed, fidelity=1.0))
        assert {runner.collect(f"k-{seed}").end for seed in range(1, 5)} == {"completed"}
    assert told == ["left out for 60 s or more: --server http://x: no answer"]
    assert len(gone.asked) == MAX_SERVINGS


def test_a_place_that_returns_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in growing pauses. The other place works until it is back."""
    monkeypatch.setattr(swarm_runner, "AWAY_SECONDS", (0.01, 0.02))
    complete_one(tmp_path)
    told: list[str] = []
    is_back = Signal()

    def work(run: Path, settings: Setting) -> None:
        assert is_back.wait(60)
        completing(run, settings)

    def notify(line: str) -> None:
        told.append(line)
        if line == "tried again: http://x":
            is_back.set()
        else:
            returning.error, returning.is_gone, returning.before = AgentJetError("over"), False, completing

    returning = FakeSlot(AgentJetError("no answer"), "http://x", is_gone=True)
    with SwarmRunner(SUBJECT, tmp_path, [returning, FakeSlot(name="http://y", before=work)], notify) as runner:
        for seed in range(1, 5):
            runner.launch(f"k-{seed}", replace(TRIAL, seed=seed))
        assert {runner.collect(f"k-{seed}").end for seed in range(1, 5)} == {"completed"}
    assert told == ["left out for 0 s or more: --server http://x: no answer", "tried again: http://x"]
    assert len(returning.asked) > MAX_SERVINGS


@pytest.mark.parametrize("machines", [MAX_SERVINGS + 1, MAX_MACHINES])
def test_a_lost_machine_costs_a_trial_time_only(tmp_path: Path, machines: int) -> None:
    complete_one(tmp_path)
    slot = FakeSlot(MachineLost("node 3 is gone"))

    def work(run: Path, settings: Setting) -> None:
        if len(slot.asked) > machines:
            completing(run, settings)

    slot.before = work
    told: list[str] = []
    with SwarmRunner(SUBJECT, tmp_path, [slot], told.append) as runner:
        runner.launch("k-1", TRIAL)
        outcome = runner.collect("k-1")
    assert {*told} == {"nowhere: node 3 is gone; the trial goes on elsewhere"}
    ended = ("completed", "") if machines < MAX_MACHINES else ("infra_failed", "nowhere: node 3 is gone")
    assert (outcome.end, outcome.note) == ended


def test_what_decides_soonest_goes_first(tmp_path: Path) -> None:
    explore, confirm = (
        replace(TRIAL, phase=phase, setting={"job.optimizer.lr": 1.0}) for phase in ("explore", "confirm")
    )
    trials = [replace(explore, seed=1), replace(explore, seed=2), replace(confirm, seed=3), replace(confirm, seed=4)]
    slot = FakeSlot(before=completing)
    complete_one(tmp_path)
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as runner:
        for trial in trials:
            runner.launch(f"k-{trial.seed}", trial)
        for trial in (trials[1], trials[3]):
            (tmp_path / "runs" / trial.run).mkdir()
            RunRecord(tmp_path / "runs" / trial.run / "record.json").add_score(0, scoring([[0.5]], 1))
        for trial in trials:
            runner.collect(f"k-{trial.seed}")
    assert [settings["job.seed"] for settings in slot.asked] == [4, 3, 2, 1]


@pytest.mark.parametrize("equal", [False, True])
def test_seconds_are_compared_on_machines_of_one_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    """The first machine decides. Without it the comparison waits, with the way out."""
    told: list[str] = []
    may_end = Signal()

    def run_process(runner: SwarmRunner, order: TrialOrder, server: RunningServer, log: Path) -> str:
        assert may_end.wait(60)
        ended = Outcome(order.trial.id, "completed", 1.0, machine={"hardware": server.machine})
        Path(order.answer).write_text(canonical(ended.to_json()))
        return ""

    def notify(line: str) -> None:
        told.append(line)
        may_end.set()

    def machines(slots: list[FakeSlot], *seeds: int) -> set[str]:
        with SwarmRunner(SUBJECT, tmp_path, slots, notify, equal_machines=equal) as runner:
            for seed in seeds:
                runner.launch(f"k-{seed}", replace(TRIAL, seed=seed))
            return {runner.collect(f"k-{seed}").machine["hardware"] for seed in seeds}

    monkeypatch.setattr(SwarmRunner, "_run_process", run_process)
    first, other = FakeSlot(None, "a", machine="8 x H200"), FakeSlot(None, "b", machine="1 x T4")
    may_end.set()
    assert machines([first], 1) == {"8 x H200"}
    if not equal:
        assert machines([other], 2) == {"1 x T4"} and not told
        return
    may_end.clear()
    assert machines([other, first], 2, 3) == {"8 x H200"} and len(told) == 1
    reason = r"b is a machine of another kind \(1 x T4\), .* those of the first one \(8 x H200\): offer machines"
    assert re.match(rf"left out for 60 s or more: {reason}", told[0])
    with pytest.raises(ServerUnavailable, match=rf"^{reason} .* start again in another folder$"):
        machines([other], 4)


def test_all_servers_begin_with_the_weights_of_the_first(tmp_path: Path) -> None:
    """Independent of the model's name. A server that does not report its weights is accepted."""
    for url, found in (("first", ""), ("second", "0a"), ("third", "0a"), ("fourth", "")):
        check_weights(tmp_path / "weights", url, found)
    with pytest.raises(
        ConfigError, match=r"^fifth serves .* 'ff', but the study started with '0a': serve the same model"
    ):
        check_weights(tmp_path / "weights", "fifth", "ff")


def test_in_how_many_of_the_last_steps_the_weights_changed() -> None:
    both = {"weights/learner": (0.0,) * 6 + (1.0, None, 1.0, 0.0), "weights/sampler": (1.0,) * 7 + (None, 0.0, 0.0)}
    found = weight_changes(Signals({name: (0.0,) * 2 + values for name, values in both.items()}))
    assert found == {"learner_changes": 2.0, "sampler_changes": 0.5}
    assert weight_changes(Signals({"reward/mean": (1.0,) * 9})) == {}, "a server of another make does not look"


class Mute:
    """A server whose policy does not answer."""

    async def episodes(self, limit: int) -> NoReturn:
        raise AgentJetError("the logits are no numbers")

    async def status(self) -> NoReturn:
        raise AgentJetError("the logits are no numbers")


@pytest.mark.parametrize(
    ("declared", "rewards", "score"),
    [
        (0.0, [[0.25, 1.0], [0.5]], 0.0),
        (0.0, [[-5.0, -3.0], [1.0]], -5.0),
        (-9.0, [[-5.0, -3.0], [1.0]], -9.0),
    ],
)
def test_diverging_is_never_worth_more_than_what_was_earned(
    tmp_path: Path, declared: float, rewards: list[list[float]], score: float
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t"}\n')
    subject = replace(SUBJECT, tasks=str(tasks), held_out=str(tasks), floor=declared)
    record = RunRecord(tmp_path / "record.json")
    record.add_score(0, scoring(rewards, 3))
    record.add_metrics({1: {"optim/skipped_steps": 1.0}})
    order = TrialOrder(
        TRIAL, subject, Address("http://127.0.0.1:1", "t"), str(tmp_path), str(tmp_path / "outcome.json")
    )
    outcome = asyncio.run(TrialProcess(order, cast(AsyncSwarm, Mute()), cast(ArmClient, None)).run())
    assert (outcome.end, outcome.score) == ("diverged", score)


def test_a_run_that_stands_at_the_base_model_again_is_measured_anew(tmp_path: Path) -> None:
    """On another server, because its own is gone."""
    for metrics, kept in (({}, {0: 0.5}), ({1: {"reward/mean": 1.0}}, {})):
        record = RunRecord(tmp_path / "record.json")
        record.add_score(0, scoring([[0.5]], 1))
        record.add_metrics(metrics)
        record.reset()
        assert {step: found.mean for step, found in record.scorings.items()} == kept and not record.metrics
        assert metrics == {} or RunRecord(record.path).scorings == {}


class Diverging:
    """A swarm whose training ends at the step that ruins the weights, with an unrelated error."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        self.version = 0

    async def episodes(self, limit: int) -> EpisodeList:
        return EpisodeList(episodes=[])

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(policy_version=self.version, last_event=1)

    async def evaluate(self, *args: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(results=[1], finished=[1], by_task={"t": [0.0]}, num_repeated=0)

    async def train(self, steps: int, seed: int) -> None:
        """That of the arm, which ends at the step."""
        self.version = 1
        raise ArmFailed("64 episodes in a row failed")

    async def events(self) -> AsyncIterator[Event]:
        for reason in ("KeyError: 'room'", "ValueError: no", "KeyError: 'room'"):
            yield Event(seq=0, kind="episode", time=0.0, body={"status": "aborted", "reason": reason})
        yield Event(seq=1, kind="step", time=0.0, body={"policy_version": 1, "metrics": self.metrics})


def diverging(folder: Path, metrics: dict[str, float], version: int = 0) -> TrialProcess:
    (folder / "tasks.jsonl").write_text('{"id": "t"}\n')
    tasks = str(folder / "tasks.jsonl")
    subject = replace(SUBJECT, tasks=tasks, held_out=tasks, floor=-3.0)
    (folder / "run").mkdir()
    order = TrialOrder(TRIAL, subject, Address("http://127.0.0.1:9", "x"), str(folder / "run"), str(folder / "answer"))
    both = Diverging(metrics)
    both.version = version
    return TrialProcess(order, cast(AsyncSwarm, both), cast(ArmClient, both))


@pytest.mark.parametrize(("aborted", "reason"), [(9.0, "the reason of most: KeyError: 'room'"), (1.0, "")])
def test_an_environment_that_dies_says_why(tmp_path: Path, aborted: float, reason: str) -> None:
    """A few episodes that are lost need no remark."""
    metrics = {"batch/episodes": 8.0, "episodes/aborted": aborted, "episodes/expired": 0.0}
    trial = diverging(tmp_path, metrics, version=3)
    trial._record.add_metrics(dict.fromkeys((2, 3), metrics))
    asyncio.run(trial._catch_up())
    assert trial._outcome("completed", 0.5).note == reason


@pytest.mark.parametrize(
    ("metrics", "end"),
    [
        ({"weights/finite": 0.0}, "diverged"),
        ({"weights/finite": 1.0, "optim/skipped_steps": 1.0}, "diverged"),
        ({"weights/finite": 1.0, "optim/skipped_steps": 0.0}, "infra_failed"),
        ({"reward/mean": 1.0}, "infra_failed"),
    ],
)
def test_a_policy_that_diverges_is_a_result(tmp_path: Path, metrics: dict[str, float], end: str) -> None:
    outcome = asyncio.run(diverging(tmp_path, metrics).run())
    assert (outcome.end, outcome.score) == (end, -3.0 if end == "diverged" else None)
    assert outcome.note == "64 episodes in a row failed"


def test_where_trials_run(tmp_path: Path) -> None:
    seen: list[object] = []

    def before(run: Path, settings: Setting) -> None:
        seen.extend((each.trial, each.slot) for each in runner.running())
        completing(run, settings)

    with SwarmRunner(SUBJECT, tmp_path, [FakeSlot(name="here", before=before)]) as runner:
        runner.launch("k-1", TRIAL)
        runner.collect("k-1")
        assert seen == [(TRIAL, "here")]
    assert runner.running() == []


def test_what_waits_is_taken_up_by_the_next(tmp_path: Path) -> None:
    complete_one(tmp_path)
    with SwarmRunner(SUBJECT, tmp_path, []) as first:
        assert not first.has("k-1")
        first.launch("k-1", TRIAL)
        assert first.has("k-1")
    slot = FakeSlot(AgentJetError("no port is free"))
    with SwarmRunner(SUBJECT, tmp_path, [slot]) as second:
        assert second.has("k-1") and second.collect("k-1").end == "infra_failed"
    with SwarmRunner(SUBJECT, tmp_path, []) as third:
        assert third.collect("k-1").end == "infra_failed"


def test_what_is_wrong_with_the_study_ends_it(tmp_path: Path) -> None:
    with SwarmRunner(SUBJECT, tmp_path, [FakeSlot(ConfigError("no such setting"))]) as runner:
        runner.launch("k-1", TRIAL)
        with pytest.raises(ConfigError, match="no such setting"):
            runner.collect("k-1")
    assert not (tmp_path / "launches" / "k-1" / "outcome.json").exists()


def test_a_setting_that_would_be_ignored_is_not_launched(tmp_path: Path) -> None:
    with SwarmRunner(SUBJECT, tmp_path, []) as runner:
        with pytest.raises(ConfigError, match=r"model\.name = 'other': all arms run the study's --model"):
            runner.launch("k-1", replace(TRIAL, setting={"model.name": "other"}))
        assert not runner.has("k-1")


def test_which_trials_share_a_run() -> None:
    assert replace(TRIAL, fidelity=1.0).run == TRIAL.run
    others = [
        replace(TRIAL, seed=8),
        replace(TRIAL, arm="b"),
        replace(TRIAL, phase="explore"),
        replace(TRIAL, study="t"),
    ]
    assert len({trial.run for trial in (TRIAL, *others)}) == 5
