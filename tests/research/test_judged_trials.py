"""Trials whose evaluator judges conversations, and the process of an arm's code.

1. The arm plays the held-out tasks without their answers; the judge scores what the server recorded. The first episodes
   of a task count.
2. A judge that fails stops the work; an arm that makes no call has failed itself.
3. Facts about the training episodes: rewards beside the judge's scores, extremes by task, inputs that prompts lack.
   Facts about the judge: its scale, and what it pays for answers of other tasks.
4. The arm's process loads code once, prints do not disturb it, and its errors have file and line.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm, Episode
from agentjet.client.rollout import call_agent
from agentjet.errors import AgentJetError, ConfigError
from agentjet.protocol import BeginRequest, BeginResponse
from agentjet.research import arm_process
from agentjet.research.arm_process import ArmAnswer, ArmClient, ArmFailed, ArmOrder
from agentjet.research.models import UNSEEN, Address, Judge, Outcome, Subject, Trial
from agentjet.research.trial_process import JudgedEpisodes, TrialOrder, TrialProcess, paid_facts
from agentjet.types import Task

JUDGE = """
def score(task, messages):
    return float(messages[-1]["content"] == task.payload["answer"])

def broken(task, messages):
    return messages[-1]["contents"]
"""


@dataclass
class Recorder:
    """A server that recorded these episodes, and an arm that played them: `(mode, task, answer, reward)`."""

    recorded: list[tuple[str, str, str, float]]
    played: list[Task] = field(default_factory=list)
    tasks: tuple[Task, ...] = (
        Task("a", payload={"q": "i", "answer": "1"}),
        Task("b", payload={"q": "ii", "answer": "2"}),
    )

    async def all_episodes(self, *, status: str, mode: str, **filters: object) -> AsyncIterator[SimpleNamespace]:
        for number, (of, task, _, reward) in enumerate(self.recorded):
            if of == mode:
                yield SimpleNamespace(episode_id=str(number), task_id=task, task_set="", reward=reward)

    async def episode_tree(self, episode: str) -> SimpleNamespace:
        answer = self.recorded[int(episode)][2]
        call = {"call_id": "c", "after": None, "orphan": "", "role": "", "versions": (), "tools": []}
        call |= {"messages": [{"role": "user", "content": "?"}], "response": {"role": "assistant", "content": answer}}
        names = ("episode_id", "task_id", "task_set", "group", "mode", "status", "trained_in", "client_id", "reward")
        calls = [SimpleNamespace(**call)] if answer else []
        facts = dict.fromkeys((*names, "code_version", "metrics", "reward_text")) | {"by_role": {}, "calls": calls}
        return SimpleNamespace(**facts)

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(policy_version=0, last_event=0)

    async def episodes(self, limit: int) -> SimpleNamespace:
        return SimpleNamespace(episodes=[])

    async def train(self, steps: int, seed: int) -> None:
        raise AgentJetError("it does not train")

    async def play(self, tasks: Sequence[Task], repeats: int, version: int, seed: int) -> ArmAnswer:
        self.played = [*tasks]
        return ArmAnswer(plays=2 * repeats)


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    (tmp_path / "judge.py").write_text(JUDGE)
    held_out = [{"id": "x", "q": 3, "answer": "3"}, {"id": "y", "q": 4, "answer": "4"}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    judge = f"{tmp_path / 'judge.py'}:score"
    return Subject("m", "a", "b", str(tmp_path / "held_out.jsonl"), judge, judged=True, hidden=("answer",))


def with_held_out(subject: Subject, *rows: Mapping[str, Any], judge: str = "", **changed: Any) -> Subject:
    """The subject with other held-out tasks, another judge and other fields."""
    Path(subject.held_out).write_text("\n".join(json.dumps({"id": f"h{n}", **row}) for n, row in enumerate(rows)))
    if judge:
        Path(subject.evaluator.partition(":")[0]).write_text(judge)
    return replace(subject, **changed)


def swapped(subject: Subject, answers: Sequence[str]) -> dict[str, float]:
    """The fact of an evaluation with these answers."""
    recorded = [("eval", f"h{number}", answer, 0.0) for number, answer in enumerate(answers)]
    judged = judged_by(subject, Recorder(recorded))
    asyncio.run(judged.score(0, seed=1))
    outcome = Outcome("t", "completed", 0.5)
    return {name: asyncio.run(judged.with_training(outcome)).facts.get(name, -1.0) for name in ("swapped",)}


LABELS = ["yes"] * 20 + ["no"] * 2
GENEROUS = "def score(task, messages):\n    return 10.0 * messages[-1]['content'].isalpha()\n"
TEN = "def score(task, messages):\n    return 3.0 + 7.0 * (messages[-1]['content'] == task.payload['answer'])\n"
NEAR = """
def score(task, messages):
    return 1.0 - abs(int(messages[-1]["content"]) - int(task.payload["answer"])) / 9
"""
LAST = """
def score(task, messages):
    return float(messages[-1]["content"].split()[-1] == task.payload["answer"].split()[-1])
"""


@pytest.mark.parametrize(
    ("judge", "answers", "labels", "scale", "leaks"),
    [
        ("", LABELS, LABELS, {}, False),  # 91 % of the labels are equal
        ("", ["yes"] * 22, LABELS, {}, False),
        (LAST, LABELS, [f"proof {n}: {label}" for n, label in enumerate(LABELS)], {}, False),
        (TEN, list("abcdefgh"), list("abcdefgh"), {"best": 10.0}, False),
        (NEAR, list("45654565"), list("45654565"), {}, None),  # other answers are nearly right
        (NEAR, list("55555555"), list("19284756"), {}, None),  # the middle is never far
        (GENEROUS, list("abcdefgh"), list("abcdefgh"), {"best": 10.0}, True),
        (GENEROUS, ["yes"] * 22, LABELS, {"best": 10.0}, True),
    ],
)
def test_a_leak_is_what_other_answers_would_not_earn(
    judge: str, answers: list[str], labels: list[str], scale: dict[str, float], leaks: bool | None, subject: Subject
) -> None:
    """None: no answer shows it."""
    rows = [{"q": n, "answer": label} for n, label in enumerate(labels)]
    found = swapped(with_held_out(subject, *rows, judge=judge, **scale), answers)
    assert found["swapped"] == -1.0 if leaks is None else (found["swapped"] > 0.9) is leaks and found["swapped"] >= 0.0


@pytest.mark.parametrize(("best", "worst", "score"), [(10.0, 0.0, 0.5), (0.0, 10.0, 0.5), (20.0, 0.0, 0.25)])
def test_scores_are_shares_of_the_declared_scale(best: float, worst: float, score: float, subject: Subject) -> None:
    """Less is better if the worst score is the highest."""
    ten = JUDGE.replace("float(", "10.0 * float(")
    rows = [{"q": n, "answer": str(n)} for n in range(2)]
    judged = judged_by(
        with_held_out(subject, *rows, judge=ten, best=best, worst=worst),
        Recorder([("eval", "h0", "0", 0.0), ("eval", "h1", "9", 0.0)]),
    )
    assert asyncio.run(judged.score(0, seed=1)).mean == score


def test_a_score_outside_of_the_scale_names_the_way_out(subject: Subject) -> None:
    outside = with_held_out(subject, {"q": 1, "answer": "1"}, judge=JUDGE.replace("float(", "10.0 * float("))
    with pytest.raises(ConfigError, match=r"score = 10 of task 'h0' is outside of worst = 0 to best = 1: declare the"):
        asyncio.run(judged_by(outside, Recorder([("eval", "h0", "1", 0.0)])).score(0, seed=1))


@pytest.mark.parametrize(
    ("pairs", "rejected", "overpaid"),
    [
        ([(0.0, 1.0), (0.0, 0.0)], 0.5, 0.0),
        ([(1.0, 1.0), (1.0, 0.0)], 0.0, 0.5),
        ([(10.0, 1.0), (0.0, 0.0), (5.0, 0.5)], 0.0, 0.0),  # another scale teaches the same
        ([(-1.0, 0.0), (1.0, 1.0)], 0.0, 0.0),
        ([(-1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 0.0)], 0.25, 0.25),
        ([(0.0, 0.3), (0.0, 0.0), (1.0, 1.0)], 0.0, 0.0),  # coarser than the judge
        ([(0.2, 0.0), (0.0, 0.0), (1.0, 1.0)], 0.0, 0.0),  # finer
        ([(1.0, 1.0), (0.6, 0.8), (0.0, 0.0)], 0.0, 0.0),  # not in proportion
        ([(-1.0, 0.3), (-1.0, 0.1), (-1.0, 0.0)], 2 / 3, 0.0),  # nothing is paid, and the judge tells them apart
        ([(-1.0, 0.1), (-1.0, 0.0)], 0.0, 0.0),  # perhaps noise of the judge
        ([(-1.0, 0.8), (-1.0, 0.1), (1.0, 1.0)], 0.0, 0.0),  # only the best is paid
        ([(0.0, 1.0), (0.0, 0.1), (1.0, 1.0)], 1 / 3, 0.0),
        ([(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)], 0.0, 1 / 3),
    ],
)
def test_rewards_may_have_another_scale_and_other_steps(
    pairs: list[tuple[float, float]], rejected: float, overpaid: float
) -> None:
    facts = paid_facts(pairs)
    assert (facts["rejected"], facts["overpaid"]) == pytest.approx((rejected, overpaid))


TRAINING = tuple(
    Task(f"t{n}", payload={"q": f"{n} + {n}", "answer": str(2 * n), "label": str(2 * n), "solution": [f"{2 * n}"]})
    for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("shown", "code", "prompts", "unseen"),
    [
        ((), "task.payload['q']", ["?"] * 8, {}),  # it may be metadata, or the answer
        ((), "task.payload['q']", [f"{n} + {n}" for n in range(1, 5)] + ["?"] * 4, {}),  # shown on purpose
        (("q",), "task.payload['q']", [f"{n} + {n}" for n in range(1, 5)] + ["?"] * 4, {"q": 0.5}),
        (("q",), "", ["?"] * 8, {"q": 1.0}),
        (("q",), "", [f"task x{n}" for n in range(1, 9)], {"q": 1.0}),
        (("q",), "task.payload['q']", [f"number x{n}" for n in range(1, 9)], {}),  # perhaps in another form
        (("q",), "", [f"{n}+{n} = ?" for n in range(1, 9)], {}),
        (("q",), "", [f"{n} + {n}" for n in range(1, 9)], {}),
    ],
)
def test_a_declared_input_that_prompts_lack(
    shown: tuple[str, ...], code: str, prompts: list[str], unseen: dict[str, float], subject: Subject, tmp_path: Path
) -> None:
    """Keys whose value the judge pays are neither inputs nor in what proposers read."""

    class Prompting(Recorder):
        async def episode_tree(self, episode: str) -> SimpleNamespace:
            tree = await super().episode_tree(episode)
            tree.calls[0].messages = [{"role": "user", "content": prompts[int(episode)]}]
            return tree

    (tmp_path / "agent.py").write_text(f"{code}\n")
    given = replace(subject, shown=shown, agent=f"{tmp_path / 'agent.py'}:agent")
    swarm = Prompting([("train", f"t{n + 1}", "x", 0.0) for n in range(8)], tasks=TRAINING)
    run = asyncio.run(judged_by(given, swarm).with_training(Outcome("t", "completed", 0.5)))
    assert {name.removeprefix(UNSEEN): share for name, share in run.facts.items() if name.startswith(UNSEEN)} == unseen
    assert all(transcript.task.keys() == {"q"} for transcript in run.transcripts)


def judged_by(subject: Subject, swarm: Recorder) -> JudgedEpisodes:
    return JudgedEpisodes(subject, subject.held_out_tasks(), cast(AsyncSwarm, swarm), cast(ArmClient, swarm))


def trial_of(subject: Subject, swarm: Recorder, folder: Path) -> TrialProcess:
    trial = Trial("s", "a", {}, 1, "explore")
    order = TrialOrder(trial, subject, Address("http://127.0.0.1:9", "x"), str(folder), str(folder / "o"))
    return TrialProcess(order, cast(AsyncSwarm, swarm), cast(ArmClient, swarm))


EVALS = [("eval", "x", "3", 0.0), ("train", "a", "1", 1.0), ("eval", "y", "5", 9.0), ("eval", "y", "4", 9.0)]


def test_the_judge_scores_what_the_server_recorded(subject: Subject) -> None:
    swarm = Recorder(EVALS)
    found = asyncio.run(judged_by(subject, swarm).score(0, seed=1))
    assert (found.mean, found.least, found.plays) == (0.5, 0.0, 2), "the agent's own rewards do not count"
    assert [task.payload for task in swarm.played] == [
        {"id": "x", "q": 3, "answer": "1"},
        {"id": "y", "q": 4, "answer": "2"},
    ]


def test_a_task_that_was_not_played_has_no_score(subject: Subject, tmp_path: Path) -> None:
    ended = asyncio.run(trial_of(subject, Recorder(EVALS[:2]), tmp_path).run())
    assert (ended.end, ended.note) == ("infra_failed", "held-out task 'y' was not played: no episode ended")


def test_an_agent_that_makes_no_call_has_failed(subject: Subject, tmp_path: Path) -> None:
    work = trial_of(subject, Recorder([*EVALS[:2], ("eval", "y", "", 1.0)]), tmp_path)
    ended = asyncio.run(work.run())
    assert (ended.end, ended.note) == ("arm_failed", "held-out task 'y': the agent made no call of the model")


def test_a_judge_that_fails_stops_the_work(subject: Subject, tmp_path: Path) -> None:
    broken = replace(subject, evaluator=subject.evaluator.replace(":score", ":broken"))
    with pytest.raises(
        ConfigError, match=r"failed at task 'x': KeyError: 'contents' \(.*judge\.py:6 in broken\)\. .* another --out"
    ):
        asyncio.run(trial_of(broken, Recorder(EVALS), tmp_path).run())


def test_what_is_seen_of_the_training_episodes(subject: Subject, tmp_path: Path) -> None:
    episodes = [("train", "a", "1", 0.0), ("train", "a", "1", 1.0), ("train", "b", "9", 0.5), ("train", "b", "", 0.0)]
    judged = judged_by(subject, Recorder([*EVALS[:1], *EVALS[2:], *episodes]))
    asyncio.run(judged.score(0, seed=1))
    ended = Outcome("t", "completed", 0.5, (0.1, 0.5), {"reward/mean": (0.1, 0.2)}, facts={"tasks_shared": 3.0})
    run = asyncio.run(judged.with_training(ended))
    assert run.by_task == {"a": (0.0, 1.0, 2), "b": (0.0, 0.5, 2)}
    shares = {"rejected": 1 / 3, "overpaid": 1 / 3}
    assert run.facts == pytest.approx({"training_reward": 0.5, "judged_reward": 2 / 3, "tasks_shared": 3.0, **shares})
    assert [(one.place, one.reward) for one in run.transcripts] == [("best", 1.0), ("median", 0.5), ("worst", 0.0)]
    assert run.transcripts[0].task == {"q": "i"} and Outcome.from_json(run.to_json()) == run
    assert (run.score, run.signals) == (ended.score, ended.signals)


def test_of_the_episodes_that_are_paid_the_least_the_oldest_are_compared(subject: Subject) -> None:
    """A policy varies most at its start: later it may not give the answers any more that training rejects."""
    wrong, paid, rejected = (("train", "a", answer, reward) for answer, reward in (("9", 0.0), ("1", 1.0), ("1", 0.0)))
    judged = judged_by(subject, Recorder([*EVALS[:1], *EVALS[2:], *[wrong, paid] * 40, rejected]))
    asyncio.run(judged.score(0, seed=1))
    run = asyncio.run(judged.with_training(Outcome("t", "completed", 0.5, (0.1, 0.5))))
    assert run.facts["rejected"] == 1 / 64


# ---- the arm's process -----------------------------------------------------------------------------------------------

CODE = """
print("hello")

def agent(task, episode):
    return 1.0

def tasks():
    from agentjet import Task
    return [Task("a", payload={"q": {1}})]
"""


def order(folder: Path, code: str) -> ArmOrder:
    file = folder / "agent.py"
    file.write_text(code)
    subject = Subject("m", f"{file}:agent", f"{file}:tasks", "held_out.jsonl", concurrency=1)
    return ArmOrder.of(subject, Address("http://127.0.0.1:9", ""), folder)


def test_an_arm_is_loaded_in_its_process(tmp_path: Path) -> None:
    assert arm_process.checked(order(tmp_path, CODE)) == [Task("a", payload={"q": "{1}"})]


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(("reward", "paid"), [(None, 0.25), (lambda task, messages: len(messages) / 2, 0.5)])
def test_an_agent_reaches_the_server_from_inside(
    is_async: bool, reward: Judge | None, paid: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sandbox the server has another address. A reward replaces what the agent returns."""
    places = []

    def play(task: Task, episode: Episode) -> float:
        places.append((episode.base_url, episode.url_with_key))
        return 0.25

    async def play_async(task: Task, episode: AsyncEpisode) -> float:
        return play(task, cast(Episode, episode))

    class Recorded:
        async def episode_tree(self, episode: str) -> str:
            return episode

    async def played() -> object:
        url, begun = "http://10.0.0.7:80/f0/v1", {"episode_id": "e", "api_key": "k", "model": "m", "policy_version": 0}
        answer = BeginResponse.model_validate({**begun, "base_url": url, "lease_seconds": 9.0, "expires_at": 9.0})
        episode = AsyncEpisode(cast(Any, object()), answer, BeginRequest(task_id="a"))
        agent = arm_process.reaching(
            "http://127.0.0.1:9/f0", play_async if is_async else play, cast(AsyncSwarm, Recorded()), reward
        )
        return await call_agent(agent, Task("a"), episode)

    monkeypatch.setattr(arm_process, "conversation", lambda tree: [tree])
    assert asyncio.run(played()) == paid
    assert places == [("http://127.0.0.1:9/f0/v1", "http://127.0.0.1:9/f0/k/k/v1")]


@pytest.mark.parametrize("output", [1, 2])
def test_an_arm_that_prints_without_end_is_ended(
    output: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its output goes to the trial's log."""
    endless = f"import os\nwhile True: os.write({output}, b'x' * 9999)\n"
    with pytest.raises(ArmFailed, match="the agent was ended, because it printed more than 64 MiB"):
        arm_process.checked(order(tmp_path, endless))
    assert len(capfd.readouterr().err) <= arm_process.LONGEST_OUTPUT


@pytest.mark.parametrize(
    "without",
    [
        lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # a shell script starts its background jobs so
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}),  # it never arrives, or at another thread
    ],
)
def test_the_process_ends_with_its_input_also_without_sigint(without: Callable[[], object], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "agentjet.research.arm_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=without,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(order(tmp_path, CODE).to_json()).encode() + b"\n")
    process.stdin.flush()
    assert b"tasks" in process.stdout.readline()
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


FORGED = """
import json, os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, json.dumps({}).encode() + b"\\n")
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"{CODE}\nimport no_such_module\n", r"ModuleNotFoundError: .* \(.*agent\.py:11 in <module>\)"),
        (f"{CODE}\ndef agent(task):\n", r"SyntaxError|IndentationError.* \(.*agent\.py:"),
        (CODE.replace("task, episode", "task"), "cannot be called as agent"),
        (CODE.replace('return [Task("a", payload={"q": {1}})]', "return [1 / 0]"), r"ZeroDivisionError.*agent\.py:9"),
        (f"{CODE}\nimport os\nos._exit(7)\n", "the agent's process ended with exit code 7"),
        (f"{CODE}\n{FORGED.format('[]')}", "wrote to the answers of its process"),
        (f"{CODE}\n{FORGED.format('{}')}", "gave no training tasks"),
        (f"{CODE}\n{FORGED.format({'tasks': [{'id': []}]})}", "wrote to the answers of its process"),
        (f"{CODE}\n{FORGED.format({'error': 'lost', 'own': False})}", "lost"),
    ],
)
def test_an_arm_that_does_not_load(code: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match=message):
        arm_process.checked(order(tmp_path, code))


@pytest.mark.parametrize("endless", ["import time; time.sleep(600)", "while True: pass"])
def test_an_import_that_never_ends_is_refused(endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_process, "LOADING_SECONDS", 1.0)
    with pytest.raises(ArmFailed, match=r"agent\.py:agent: loading it and its tasks took longer than 1 s"):
        arm_process.checked(order(tmp_path, endless))


def test_what_an_arm_starts_ends_with_it(tmp_path: Path) -> None:
    started = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
"""
    arm_process.checked(order(tmp_path, started + CODE))
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 30.0
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "it outlives the arm"
        time.sleep(0.01)
