"""Rewards as agents return them.

1. All that Python takes for a number is one, and is sent as a float. The rest is refused by name.
2. Runs with named policies: rewards by policy and their refusals, `train`, `evaluate`, reports, programs, rows.
3. The text of a reward reaches the server by every way, and all readers of the episode. One that is too long is cut by
   a client, and refused over HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentjet.cli.run import reward_source
from agentjet.client import AgentFailing, AsyncEpisode, AsyncSwarm, Command, Endpoint, Episode
from agentjet.client.command import environment
from agentjet.client.episode import checked_reward, finish_body
from agentjet.client.report import EpisodeResult, Progress, Step, TrainReport, rows
from agentjet.errors import InvalidRequest
from agentjet.protocol import FinishRequest, status_of
from agentjet.types import MAX_REWARD_TEXT, Reward, Task
from tests.client.server import FakeServer
from tests.client.test_real_server import client
from tests.fakes import call_view, episode_tree
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio


class Scalar:
    """A number with a shape but without axes, as a 0-dimensional tensor."""

    shape = ()

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    "one",
    [True, 1, 1.0, np.bool_(True), np.float32(1), np.float64(1), np.int64(1), np.array(1.0), Decimal(1), Scalar()],
)
@pytest.mark.parametrize(
    "place", ["returned", "value", "by_role", "metrics", "by_turn", "by_turn of a role", "by_call"]
)
def test_numbers_are_numbers(one: Any, place: str) -> None:
    rewards: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "returned": (one, {"reward": 1.0}),
        "value": (Reward(one), {"reward": 1.0}),
        "by_role": (Reward(0.5, by_role={"critic": one}), {"by_role": {"critic": 1.0}}),
        "metrics": (Reward(0.5, metrics={"solved": one}), {"metrics": {"solved": 1.0}}),
        "by_turn": (Reward(0.5, by_turn=[one, 0]), {"by_turn": {"": [1.0, 0.0]}}),
        "by_turn of a role": (Reward(0.5, by_turn={"critic": [one]}), {"by_turn": {"critic": [1.0]}}),
        "by_call": (Reward(0.5, by_call={"c": one}), {"by_call": {"c": 1.0}}),
    }
    returned, sent = rewards[place]
    body = finish_body(checked_reward(returned)).model_dump()
    for name, value in sent.items():
        assert body[name] == value and "True" not in repr(body[name])


def test_rewards_of_turns_may_be_an_array() -> None:
    assert finish_body(checked_reward(Reward(1.0, by_turn=np.array([0.5, 1.0])))).by_turn == {"": [0.5, 1.0]}


@pytest.mark.parametrize("wrong", ["1", None, float("nan"), float("inf"), [1.0], np.array([1.0]), b"1", 10**400])
def test_anything_else_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^reward is "):
        checked_reward(wrong)
    with pytest.raises(InvalidRequest, match=r"^reward\['coder'\] is "):
        checked_reward({"coder": wrong}, ("coder",))


PLACES: Mapping[str, Callable[[Any], Reward]] = {
    "reward": Reward,
    "by_role['critic']": lambda wrong: Reward(1.0, by_role={"critic": wrong}),
    "metrics['solved']": lambda wrong: Reward(1.0, metrics={"solved": wrong}),
    "by_turn[1]": lambda wrong: Reward(1.0, by_turn=[0.0, wrong]),
    "by_turn['critic'][0]": lambda wrong: Reward(1.0, by_turn={"critic": [wrong]}),
    "by_call['c']": lambda wrong: Reward(1.0, by_call={"c": wrong}),
}


@pytest.mark.parametrize("wrong", ["1", None, float("nan"), float("-inf"), 1e13, [1.0], np.array([1.0]), b"1", 10**400])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_number_is_refused_where_the_reward_is_made(place: str, wrong: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"^{re.escape(place)} is .*: (it must be a finite|an agent returns)"
    ) as no:
        PLACES[place](wrong)
    assert (no.value.code, no.value.param, status_of(no.value)) == ("invalid_reward", place, 422)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": [1]}, r"^metrics is \[1\]: give numbers by name"),
        ({"by_role": 1}, r"^by_role is 1: give numbers by name"),
        ({"by_turn": 0.5}, r"^by_turn is 0\.5: give a list of numbers"),
        ({"by_turn": {"critic": 0.5}}, r"^by_turn\['critic'\] is 0\.5: give a list of numbers"),
        ({"metrics": {"": 1}}, r"^metrics has an empty name"),
        *(
            ({"text": wrong}, "^text is .*: give the reason for the reward as text")
            for wrong in (30, None, b"30", ["30"])
        ),
    ],
)
def test_the_fields_of_a_reward_have_their_form(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Reward(1.0, **fields)


def test_a_reward_that_was_changed_is_checked_again() -> None:
    reward = Reward(1.0, metrics={"solved": 1})
    dict.update(reward.metrics, solved=float("nan"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^metrics\['solved'\] is nan"):
        checked_reward(reward)


def test_booleans_are_numbers_over_http_and_text_is_not() -> None:
    body = FinishRequest.model_validate_json(
        '{"reward": true, "metrics": {"solved": false}, "by_turn": {"": [true]}, "by_call": {"c": true}}'
    )
    assert (body.reward, body.metrics, body.by_turn, body.by_call) == (1.0, {"solved": 0.0}, {"": [1.0]}, {"c": 1.0})
    for wrong in ('"1"', "null", "[1]", "NaN"):
        with pytest.raises(ValidationError):
            FinishRequest.model_validate_json(f'{{"reward": {wrong}}}')


POLICIES = ("planner", "coder")
TASKS = [Task(f"t{number}", payload=number) for number in range(4)]


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


async def test_a_run_without_named_policies_takes_no_reward_by_policy() -> None:
    server = FakeServer()
    swarm = server.connect()
    async with swarm.episode("t") as episode:
        for end in (episode.finish({"planner": 1.0}), swarm.finish(episode.id, {"planner": 1.0})):
            with pytest.raises(InvalidRequest, match=r"\(planner\).*return a number, or Reward\(number, by_role="):
                await end
    assert (episode.policies, episode.model) == ((), "tiny")
    assert server.requests["POST finish"] == 0


def test_an_endpoint_has_no_policies() -> None:
    async def agent(task: Task, episode: AsyncEpisode) -> dict[str, float]:
        return dict.fromkeys(POLICIES, 1.0)

    endpoint = Endpoint("http://127.0.0.1:1/v1", "other")
    with pytest.raises(AgentFailing, match="no named policies: return a number"):
        asyncio.run(FakeServer().connect().evaluate(agent, TASKS, endpoint=endpoint, concurrency=1, progress=False))


def test_finish_takes_rewards_by_policy() -> None:
    server = FakeServer(policies=POLICIES)
    with server.client() as swarm:
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
    report = asyncio.run(server.connect().train(plan_and_code, TASKS, steps=2, progress=False, reload=reload))
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
    with server.client() as swarm:
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
    one = TrainReport((finished,), (Step(1, {"batch/episodes": 1.0}),), 9.0)
    assert str(one).startswith("1 step in 9 s, 1 episode finished, 0 aborted")


def test_a_program_gets_the_names_of_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(server: FakeServer) -> AsyncEpisode:
        return await server.connect().begin("t")

    monkeypatch.setenv("OPENAI_MODEL", "planner")
    given = environment(TASKS[0], asyncio.run(begin(FakeServer(policies=POLICIES))))
    assert (given["AGENTJET_POLICIES"], given["OPENAI_MODEL"]) == ("planner,coder", "planner")
    assert "ANTHROPIC_MODEL" not in given
    given = environment(TASKS[0], asyncio.run(begin(FakeServer())))
    assert (given["OPENAI_MODEL"], given["ANTHROPIC_MODEL"]) == ("tiny", "tiny")
    assert "AGENTJET_POLICIES" not in given


def test_a_row_has_the_reward_of_its_role_else_of_its_policy() -> None:
    message, response = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    roles = ("planner", "planner/critic", "coder/critic")
    calls = [call_view(role, role=role, messages=[message], response=response) for role in roles]
    by_role = {"planner": 1.0, "coder": 0.5, "planner/critic": 0.0}
    tree = episode_tree(*calls, reward=0.75, by_role=by_role)
    assert [row["reward"] for row in rows(tree)] == [1.0, 0.0, 0.5]


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


TEXT = 'expected "30",\ngot <b>31</b> – ☂'
PRINTS = "import json, sys; print(json.dumps({'reward': 0, 'text': sys.argv[1]}))"


async def returned(served: Served, swarm: AsyncSwarm) -> None:
    report = await swarm.evaluate(lambda task, episode: Reward(0.0, text=TEXT), [Task("t")], progress=False)
    assert [result.reward_text for result in report.results] == [TEXT]


async def printed(served: Served, swarm: AsyncSwarm) -> None:
    judge, _ = reward_source("stdout")
    await swarm.evaluate(Command([sys.executable, "-c", PRINTS, TEXT], judge), [Task("t")], progress=False)


async def of_the_handle(served: Served, swarm: AsyncSwarm) -> None:
    async with swarm.episode("t", mode="eval") as episode:
        await episode.finish(Reward(0.0, text=TEXT))


async def of_another_process(served: Served, swarm: AsyncSwarm) -> None:
    episode = await swarm.begin("t", mode="eval")
    await swarm.finish(episode.id, Reward(0.0, text=TEXT))


async def over_http(served: Served, swarm: AsyncSwarm) -> None:
    path = f"/swarm/v1/episodes/{(await served.begin(mode='eval'))['episode_id']}/finish"
    too_long = await served.http.post(path, json={"reward": 0, "text": "x" * (MAX_REWARD_TEXT + 1)})
    assert too_long.status_code == 422 and "text" in too_long.text
    assert (await served.http.post(path, json={"reward": 0, "text": TEXT})).json()["reward_text"] == TEXT
    again = await served.http.post(path, json={"reward": 0, "text": TEXT})
    assert (again.status_code, again.json()["reward_text"]) == (200, TEXT)
    other = await served.http.post(path, json={"reward": 0, "text": "expected 31"})
    assert (other.status_code, other.json()["code"]) == (409, "episode_finished")


@pytest.mark.parametrize("way", [returned, printed, of_the_handle, of_another_process, over_http])
async def test_the_text_is_read_where_the_reward_is(
    way: Callable[[Served, AsyncSwarm], Awaitable[None]], tmp_path: Path
) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm:
        await way(served, swarm)
        [listed] = (await swarm.episodes()).episodes
        assert (listed.reward, listed.reward_text) == (0.0, TEXT)
        assert (await swarm.episode_tree(listed.episode_id)).reward_text == TEXT
        found = [(await swarm.episodes(text=text)).episodes for text in (TEXT[3:20], "31</b> – ☂", "expected 30")]
        assert found == [[listed], [listed], []]


@pytest.mark.parametrize(
    ("given", "policies", "sent"),
    [
        (Reward(0.0), (), ""),
        (1.0, (), ""),
        (Reward(0.0, text="broken \ud800"), (), "broken ?"),
        (
            {"planner": Reward(0.0, text="no plan"), "coder": 1.0, "judge": Reward(1.0, text="fair")},
            ("planner", "coder", "judge"),
            "planner: no plan\njudge: fair",
        ),
    ],
)
def test_the_text_that_is_sent(given: float | Reward | Mapping[str, Any], policies: tuple[str, ...], sent: str) -> None:
    assert finish_body(checked_reward(given, policies)).text == sent


def test_a_long_text_is_cut_and_this_is_printed_once_for_the_line_that_made_it() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        rewards = [Reward(0.0, text=letter * (MAX_REWARD_TEXT + number)) for number, letter in enumerate("abcd")]
        texts = [finish_body(checked_reward(reward)).text for reward in rewards]
    assert texts == [letter * MAX_REWARD_TEXT for letter in "abcd"]
    [one] = shown
    assert str(one.message) == "the text of a reward is cut to its first 10000 characters"
    assert (one.filename, one.lineno) == (__file__, line)


def test_texts_that_are_too_long_together_show_their_cut() -> None:
    long, short = Reward(0.0, text="x" * MAX_REWARD_TEXT), Reward(0.0, text="short")
    both = checked_reward({"one": long, "two": long, "three": short}, ("one", "two", "three")).text
    first, second, third = both.split("\n")
    assert first.startswith("one: xxx") and first.endswith("x…") and second == first.replace("one", "two")
    assert third == "three: short" and 6_000 < len(both) <= MAX_REWARD_TEXT
