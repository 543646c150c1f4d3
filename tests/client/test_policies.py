"""Runs with named policies. 1. Rewards by policy, and their refusals. 2. `train`, `evaluate` and their reports.
3. Programs. 4. Rows of a data set."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentjet.client import AgentFailing, AsyncEpisode, AsyncSwarm, Endpoint, Episode, Swarm
from agentjet.client.command import environment
from agentjet.client.episode import checked_reward, finish_body
from agentjet.client.report import EpisodeResult, Progress, Step, TrainReport, rows
from agentjet.errors import InvalidRequest
from agentjet.protocol import CallView, EpisodeTree, status_of
from agentjet.types import Reward, Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

POLICIES = ("planner", "coder")
TASKS = [Task(f"t{number}", payload=number) for number in range(4)]


def connect(server: FakeServer) -> AsyncSwarm:
    return AsyncSwarm(URL, TOKEN, retry=FakeTime().retry(), transport=server.transport())


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.5, Reward(0.5)),
        (Reward(0.5, metrics={"turns": 2}), Reward(0.5, metrics={"turns": 2})),
        ({"coder": 0.5, "planner": 1}, Reward(0.75, {"planner": 1.0, "coder": 0.5})),
        (
            {"planner": Reward(1.0, {"critic": 0.25}, {"turns": 2}), "coder": Reward(0.0, metrics={"lines": 9})},
            Reward(0.5, {"planner": 1.0, "planner/critic": 0.25, "coder": 0.0}, {"turns": 2, "lines": 9}),
        ),
        ({"planner": 1, "coder": 0, "coder/judge": 1}, Reward(0.5, {"planner": 1, "coder": 0, "coder/judge": 1})),
        (
            Reward(0.25, {"planner": 1.0, "coder": 0.5, "planner/critic": 0.0}),
            Reward(0.25, {"planner": 1.0, "coder": 0.5, "planner/critic": 0.0}),
        ),
    ],
)
def test_rewards_of_a_run_with_policies(returned: Any, reward: Reward) -> None:
    assert checked_reward(returned, POLICIES) == reward


@pytest.mark.parametrize(
    ("returned", "param", "sentence"),
    [
        ({"planner": 1.0}, "coder", "no reward for policy 'coder': give one for each of planner, coder"),
        ({"planer": 1.0, "coder": 0.5}, "planer", r"the run has no policy 'planer'\. Did you mean 'planner'\?"),
        ({"planner": 1.0, "coder": 0.5, "zzz": 0}, "zzz", r"no policy 'zzz'\. The policies are planner, coder"),
        ({"planner/critic": 1.0, "coder": 0}, "planner", "no reward for policy 'planner'"),
        (Reward(1.0, {"planner": 1.0}), "coder", "by_role has no reward for policy 'coder'"),
        (Reward(1.0, {"planner": 1.0, "codr/x": 0.0}), "codr/x", "no policy 'codr'.*Did you mean 'coder'"),
        ({"planner": 1.0, "coder": float("nan")}, "reward['coder']", r"reward\['coder'\] is nan: .*finite"),
        ({"planner": "1", "coder": 0}, "reward['planner']", r"reward\['planner'\] is '1': an agent returns a number"),
        ({}, "planner", "the reward is empty: give a number for each of planner, coder"),
    ],
)
def test_rewards_that_are_refused(returned: Any, param: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as raised:
        checked_reward(returned, POLICIES)
    assert (raised.value.code, raised.value.param, status_of(raised.value)) == ("invalid_reward", param, 422)


def test_a_run_without_named_policies_takes_no_reward_by_policy() -> None:
    server = FakeServer()

    async def scenario() -> None:
        swarm = connect(server)
        async with swarm.episode("t") as episode:
            for end in (episode.finish({"planner": 1.0}), swarm.finish(episode.id, {"planner": 1.0})):
                with pytest.raises(InvalidRequest, match=r"\(planner\).*return a number, or Reward\(number, by_role="):
                    await end
        assert (episode.policies, episode.model) == ((), "tiny")

    asyncio.run(scenario())
    assert server.requests["POST finish"] == 0


def test_an_endpoint_has_no_policies() -> None:
    async def agent(task: Task, episode: AsyncEpisode) -> dict[str, float]:
        return dict.fromkeys(POLICIES, 1.0)

    endpoint = Endpoint("http://127.0.0.1:1/v1", "other")
    with pytest.raises(AgentFailing, match="no named policies: return a number"):
        asyncio.run(connect(FakeServer()).evaluate(agent, TASKS, endpoint=endpoint, concurrency=1, progress=False))


def test_finish_takes_rewards_by_policy() -> None:
    server = FakeServer(policies=POLICIES)
    with Swarm(URL, TOKEN, transport=server.transport()) as swarm:
        with swarm.episode("t", group="g") as episode:
            assert (episode.policies, episode.model) == (POLICIES, "")
            episode.finish({"planner": 1.0, "coder": 0.5})
        other = swarm.begin("t", group="g")
        swarm.finish(other.id, {"planner": 0.0, "coder": 0.5})
    rewards = [(view.reward, view.by_role) for view in server.episodes.values()]
    assert rewards == [(0.75, {"planner": 1.0, "coder": 0.5}), (0.25, {"planner": 0.0, "coder": 0.5})]


@pytest.mark.parametrize("reload", [False, True])
def test_training_with_rewards_by_policy(reload: bool) -> None:
    server = FakeServer(policies=POLICIES)
    report = asyncio.run(connect(server).train(plan_and_code, TASKS, steps=2, progress=False, reload=reload))
    assert len(report.rewards_of("planner")) == 2
    by_policy = zip(report.rewards_of("planner"), report.rewards_of("coder"), strict=True)
    assert [((planner + coder) / 2, coder) for planner, coder in by_policy] == [(r, 0.5) for r in report.rewards]
    assert report.finished[0].by_role.keys() == set(POLICIES)


async def plan_and_code(task: Task, episode: AsyncEpisode) -> dict[str, float | Reward]:
    return {"planner": Reward(float(task.payload % 2)), "coder": 0.5}


def test_an_evaluation_reports_each_policy() -> None:
    def agent(task: Task, episode: Episode) -> dict[str, float]:
        return {"planner": 1.0, "coder": float(task.payload == 3)}

    server = FakeServer(policies=POLICIES)
    with Swarm(URL, TOKEN, transport=server.transport()) as swarm:
        report = swarm.evaluate(agent, TASKS, repeats=2, progress=False)
    assert (report.policies, report.mean_reward) == (POLICIES, 0.625)
    assert report.of_policy("coder").mean_at_k.value == 0.25
    assert report.of_policy("planner").pass_at(2).value == 1.0
    assert "\n  reward of planner: 1.000 (95 %" in str(report)
    with pytest.raises(ValueError, match="names no policy 'coda'; did you mean 'coder'"):
        report.of_policy("coda")


def test_progress_shows_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("training", 1, wanted=True)
    progress.policies = POLICIES
    progress.step({"reward/mean": 0.75, "planner/reward/mean": 1.0, "coder/reward/mean": 0.5})
    assert capsys.readouterr().out == "training 1/1  reward 0.750  planner 1.000  coder 0.500\n"


def test_steps_of_other_clients_are_not_shown_as_own_work(capsys: pytest.CaptureFixture[str]) -> None:
    Progress("training", 1, wanted=True).step({"reward/mean": 0.75}, "no episode of this client")
    assert capsys.readouterr().out == "training 1/1  reward 0.750  no episode of this client\n"
    finished = EpisodeResult("t", "", "finished", 0, reward=1.0)
    steps = (Step(1, {"batch/episodes": 2.0}), Step(2, {"batch/episodes": 2.0}))
    few, own = TrainReport((finished,) * 2, steps, 9.0), TrainReport((finished,) * 4, steps, 9.0)
    assert str(few).startswith("2 steps in 9 s with 4 episodes of all clients, 2 of this client finished, 0 aborted")
    assert str(own).startswith("2 steps in 9 s, 4 episodes finished, 0 aborted")


def test_a_program_gets_the_names_of_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(server: FakeServer) -> AsyncEpisode:
        return await connect(server).begin("t")

    monkeypatch.setenv("OPENAI_MODEL", "planner")
    given = environment(TASKS[0], asyncio.run(begin(FakeServer(policies=POLICIES))))
    assert (given["AGENTJET_POLICIES"], given["OPENAI_MODEL"]) == ("planner,coder", "planner")
    assert "ANTHROPIC_MODEL" not in given
    given = environment(TASKS[0], asyncio.run(begin(FakeServer())))
    assert (given["OPENAI_MODEL"], given["ANTHROPIC_MODEL"]) == ("tiny", "tiny")
    assert "AGENTJET_POLICIES" not in given


def test_a_row_has_the_reward_of_its_role_else_of_its_policy() -> None:
    calls = [call(role) for role in ("planner", "planner/critic", "coder/critic")]
    by_role = {"planner": 1.0, "coder": 0.5, "planner/critic": 0.0}
    facts = {"status": "finished", "mode": "train", "task_id": "t", "task_set": "", "group": "t", "client_id": "c"}
    tree = EpisodeTree(episode_id="e", policy_version=0, reward=0.75, by_role=by_role, calls=calls, **facts)  # type: ignore[arg-type]
    assert [row["reward"] for row in rows(tree)] == [1.0, 0.0, 0.5]


def call(role: str) -> CallView:
    message = {"role": "user", "content": "?"}
    empty: dict[str, Any] = {name: [] for name in ("tools", "tokens", "texts", "mask", "logprobs", "versions")}
    absent: dict[str, Any] = {"parent": None, "after": None, "retry_of": None, "orphan": "", "fork": ""}
    response = {"role": "assistant", "content": "!"}
    sampled: dict[str, Any] = {"temperature": 1.0, "finish_reason": "stop", "created": 0.0, "kept": 0}
    return CallView(call_id=role, role=role, messages=[message], response=response, **empty, **absent, **sampled)


def test_rewards_of_turns_reach_the_request_by_role() -> None:
    assert finish_body(checked_reward(Reward(1.0, by_turn=[0.0, 0.5]))).by_turn == {"": [0.0, 0.5]}
    returned = {
        "planner": Reward(1.0, by_turn=[1.0]),
        "coder": Reward(0.0, by_turn={"critic": [0.5]}, by_call={"c": 2}),
    }
    body = finish_body(checked_reward(returned, POLICIES))
    assert body.by_turn == {"planner": [1.0], "coder/critic": [0.5]} and body.by_call == {"c": 2}
    with pytest.raises(InvalidRequest, match=r"by_turn\[1\]"):
        checked_reward(Reward(1.0, by_turn=[0.0, float("nan")]))
