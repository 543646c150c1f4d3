"""The read routes.

1. Steps: columns by version, pages, chosen metrics.
2. Episodes: fields, pages, and unknown or wrong filters refused by name.
3. An episode as runs has the same tokens; 10,000 of them are at most 130 kB. Each call has its duration.
4. Groups and batches: pages, advantages, states.
5. Ticks, and reads that share their answers.
6. Too many reads at once are told to come later; a journal that cannot be read is named.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import Later, RequestError
from agentjet.protocol import EpisodeQuery, status_of
from agentjet.server.read import MOST_READS, RunReader
from agentjet.types import Call, Message
from tests.server.serving import VIEWER, serving

pytestmark = pytest.mark.anyio
V = "/swarm/v1"


async def test_steps_are_columns(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        served.http.headers["Authorization"] = f"Bearer {VIEWER}"
        assert (await served.http.get(f"{V}/steps")).json() == {"versions": [], "times": [], "metrics": {}}
        for _ in range(3):
            await served.run.batch()
        found = (await served.http.get(f"{V}/steps")).json()
        assert found["versions"] == [1, 2, 3] and found["times"] == [served.run.clock()] * 3
        assert found["metrics"]["reward/mean"] == [0.5, 0.5, 0.5]
        assert {len(values) for values in found["metrics"].values()} == {3}
        newest = (await served.http.get(f"{V}/steps", params={"limit": 1, "metric": ["reward/mean", "none"]})).json()
        assert newest == {"versions": [3], "times": [served.run.clock()], "metrics": {"reward/mean": [0.5]}}
        following = (await served.http.get(f"{V}/steps", params={"after": 1, "limit": 1})).json()
        assert following["versions"] == [2]
        assert (await served.http.get(f"{V}/steps", params={"after": -1})).status_code == 422


async def test_pages_of_episodes(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={"batch_size": 3}) as served:
        live = await served.begin(task_set="s", group="g", client_id="me")
        for number in range(4):
            await served.run.episode(float(number), task=f"t{number // 2}")
        page = (await served.http.get(f"{V}/episodes", params={"limit": 2, "count": True})).json()
        assert (len(page["episodes"]), page["total"], page["next"]) == (2, 5, page["episodes"][1]["episode_id"])
        rest = (await served.http.get(f"{V}/episodes", params={"limit": 4, "before": page["next"]})).json()
        assert len(rest["episodes"]) == 3 and rest["next"] is None and rest["total"] is None
        view = rest["episodes"][-1]
        assert view["episode_id"] == live["episode_id"] and view["expires_at"] == live["expires_at"]
        assert view["begun"] == served.run.clock() and view["ended"] is None and view["group_id"] == 1
        assert page["episodes"][0]["num_tokens"] > 0 and page["episodes"][0]["expires_at"] is None
        for wrong, name in (
            ("statsu=live", "statsu"),
            ("limit=0", "limit"),
            ("sort=best", "sort"),
            ("batch=x", "batch"),
        ):
            refused = await served.http.get(f"{V}/episodes?{wrong}")
            assert refused.status_code == 422 and name in refused.json()["detail"], refused.text
        gone = await served.http.get(f"{V}/episodes", params={"before": "ep_gone"})
        assert (gone.status_code, gone.json()["code"]) == (404, "episode_not_found")


def long_call(episode_id: str, num_tokens: int) -> tuple[Call, list[bytes]]:
    """A call with that many sampled tokens, as a text model would sample them, and their bytes."""
    draw = random.Random(1)
    words = [b" the", b" of", b" carry", b" 17", b"\n", b"=", b" answer", b" number", b",", "é".encode(), b" so"]
    face = "😀".encode()
    pieces = [draw.choice(words) for _ in range(num_tokens - 2)] + [face[:2], face[2:]]
    call = Call(
        "c1", episode_id, "", None, 0, (1, 2), tuple(draw.randrange(150_000) for _ in pieces),
        tuple(-draw.expovariate(1.5) for _ in pieces), (3,) * 4000 + (4,) * (num_tokens - 4000), 1.0, "stop",
        Message("assistant", ""), "prompt", 0.0,
    )  # fmt: skip
    return call, pieces


async def test_an_episode_as_runs(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        begun = await served.begin()
        call, pieces = long_call(begun["episode_id"], 10_000)
        served.run.gateway.swarm.record_call(call, [b"<", b">"], pieces)
        path = f"{V}/episodes/{begun['episode_id']}"
        whole = (await served.http.get(path)).json()
        answer = await served.http.get(path, params={"form": "runs"})
        short = answer.json()
        assert len(answer.content) <= 130_000, len(answer.content)
        assert (await served.http.get(path, params={"form": "short"})).status_code == 422
    [tokens], [runs] = whole.pop("calls"), short.pop("calls")
    assert whole == short and whole["num_tokens"] == 10_000
    same = tokens.keys() & runs.keys() - {"mask", "versions", "logprobs"}
    assert {name: tokens[name] for name in same} == {name: runs[name] for name in same}
    assert runs["num_context"] == 2 and runs["text"] == "".join(tokens["texts"]) and runs["text"].endswith("😀")
    text, ends = runs["text"].encode("utf-16-le"), [2 * end for end in accumulate(runs["lengths"], initial=0)]
    cut = [text[start:end].decode("utf-16-le") for start, end in pairwise(ends)]
    assert cut == tokens["texts"] and tokens["texts"][-2:] == ["😀", ""]
    assert runs["logprobs"] == [round(value, 3) for value in tokens["logprobs"][2:]]
    assert runs["versions"] == [[3, 4000], [4, 6000]] and runs["mask"] == [[1, 10_000]]
    assert runs["allowed"] == [[None, 10_000]]


async def test_the_duration_of_a_call_is_recorded(tmp_path: Path) -> None:
    """From the arrival of the request, so a wait for the sampler counts."""
    async with serving(tmp_path / "d") as served:
        begun = await served.begin()
        compute = served.run.compute
        compute.may_sample.clear()
        call = asyncio.create_task(served.run.say(begun["episode_id"]))
        await served.run.until(lambda: bool(compute.asked))
        served.run.clock.advance(2.5)
        compute.may_sample.set()
        assert (await call).seconds == 2.5
    async with serving(tmp_path / "d") as served:
        for form in ("", "?form=runs"):
            [shown] = (await served.http.get(f"{V}/episodes/{begun['episode_id']}{form}")).json()["calls"]
            assert shown["seconds"] == 2.5, form


async def test_reads_that_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        reader, asked = served.run.gateway.reader, [EpisodeQuery()] * (MOST_READS + 1)
        answers = await asyncio.gather(*map(reader.episodes, asked), return_exceptions=True)
        [refused] = [answer for answer in answers if not isinstance(answer, bytes)]
        assert isinstance(refused, Later) and (status_of(refused), refused.code) == (503, "too_many_reads")
        journal = served.run.folder / "journal.sqlite"
        beside = RunReader.at(served.run.folder)  # Another process reads while the server writes.
        assert await beside.steps(None, 10) == await reader.steps(None, 10)
        await beside.close()
    with pytest.raises(Later, match="was closed"):
        await reader.episodes(EpisodeQuery())
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.close()
    await unreadable(served.run.folder, "has journal schema 99, this AgentJet reads")
    await unreadable(tmp_path / "nothing", "is not a data dir of AgentJet")
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 1000)
    await unreadable(tmp_path, "cannot be read as a journal")


async def test_a_read_that_does_not_end_does_not_outlive_its_reader(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        reader = RunReader.at(served.run.folder)
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
        reading = asyncio.create_task(reader.read(lambda journal: journal.file.db.execute(endless).fetchone()))
        await asyncio.sleep(0)
        await reader.close()
        with pytest.raises(Later, match="interrupted"):
            await reading


async def unreadable(folder: Path, why: str) -> None:
    reader = RunReader.at(folder)
    with pytest.raises(RequestError, match=why) as refused:
        json.loads(await reader.steps(None, 10))
    assert (status_of(refused.value), refused.value.code) == (500, "journal_unreadable")
    await reader.close()


async def test_groups_and_batches(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        for _ in range(3):
            await served.run.batch()
        waiting = await served.begin(task_id="next")
        listed = (await served.http.get(f"{V}/batches", params={"limit": 2})).json()
        assert [batch["id"] for batch in listed["batches"]] == [2, 1] and listed["next"] == 1
        assert listed["batches"][0] == {
            "id": 2, "state": "learned", "composed": served.run.clock(), "groups": 2, "episodes": 4, "reward_mean": 0.5
        }  # fmt: skip
        rest = (await served.http.get(f"{V}/batches", params={"before": 1})).json()
        assert [batch["id"] for batch in rest["batches"]] == [0] and rest["next"] is None
        batch = (await served.http.get(f"{V}/batches/2")).json()
        first, second = batch["groups"][0]["members"]
        assert (first["reward"], second["reward"]) == (0, 1) and -first["advantage"] == second["advantage"] > 0
        assert batch["groups"][0]["zero_variance"] is False and batch["metrics"]["reward/mean"] == 0.5
        assert batch["dropped"] == batch["job_changes"] == [] and batch["advantages_note"] == ""
        group = (await served.http.get(f"{V}/groups/{batch['groups'][0]['id']}")).json()
        assert (group["state"], group["batch"], group["task_id"]) == ("batched", 2, "t0")
        assert [(e["episode_id"], e["advantage"]) for e in group["episodes"]] == [
            (member["episode_id"], member["advantage"]) for member in (first, second)
        ]
        live = (await served.http.get(f"{V}/groups/7")).json()
        assert (live["state"], live["size"], live["batch"]) == ("open", 2, None)
        assert live["episodes"][0]["expires_at"] == waiting["expires_at"]
        for noun, code in (("groups", "group_not_found"), ("batches", "batch_not_found")):
            for number in (99, 2**63 - 1):
                gone = await served.http.get(f"{V}/{noun}/{number}")
                assert (gone.status_code, gone.json()["code"]) == (404, code)
        assert (await served.http.get(f"{V}/batches/x")).status_code == 422


async def test_ticks_and_shared_answers(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        await served.run.batch()
        status = (await served.http.get(f"{V}/status")).json()
        async with served.http.stream("GET", f"{V}/events", params={"form": "tick"}) as stream:
            lines = stream.aiter_lines()
            missed = json.loads((await data_of(lines)).removeprefix("data: "))
            assert missed["last_event"] >= status["last_event"] and missed["kinds"]["step"] == 1
            await served.begin()
            tick = missed
            while tick is missed or "episode" not in tick["kinds"]:  # The state may change after the batch.
                tick = json.loads((await data_of(lines)).removeprefix("data: "))
            assert tick["kinds"]["episode"] == 1 and tick["last_event"] > missed["last_event"]
        at = {"at": tick["last_event"]}
        first, second = [(await served.http.get(f"{V}/status", params=at)).content for _ in range(2)]
        assert first == second and json.loads(first)["episodes"]["live"] == 1
        listed = await served.http.get(f"{V}/episodes", params={**at, "limit": 1})
        assert listed.json() == (await served.http.get(f"{V}/episodes", params={"limit": 1})).json()
        assert listed.headers["content-type"] == "application/json"
        for path, wrong in (("/status", "x"), ("/job", "1")):
            refused = await served.http.get(f"{V}{path}", params={"at": wrong})
            assert (refused.status_code, refused.json()["param"]) == (422, "at")
        gone = await served.http.get(f"{V}/episodes/ep_none", params=at)
        assert gone.status_code == 404
        closed = await served.http.get(f"{V}/status", params=at, headers={"Authorization": "Bearer nothing"})
        assert closed.status_code == 401


async def data_of(lines: Any) -> str:
    """The next line with data."""
    async for line in lines:
        if line.startswith("data: "):
            return str(line)
    raise AssertionError("the stream ended")
