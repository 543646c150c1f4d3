"""The event loop parses no calls of the journal, except a few once: an episode may have megabytes of them.

1. After a restart a thread reads the calls of a live episode for its next request, in every dialect. A new role and the
   limit of turns read none.
2. A thread encodes a large call before it is recorded.
3. Statuses of a run whose batches have no variance read the shown answers once for each batch.
"""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.front import calls
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.swarm import Journal
from agentjet.swarm.journal import encode_call
from tests.fakes import RUN
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


class ManyTurns(Grpo):
    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        return replace(default, max_turns=50)


def watch_reads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Returns the threads of the reads of calls by a method of the journal, in order."""
    reads: list[int] = []
    read = getattr(Journal, name)

    def watched(journal: Journal, *given: Any) -> Any:
        reads.append(threading.get_ident())
        return read(journal, *given)

    monkeypatch.setattr(Journal, name, watched)
    return reads


@pytest.mark.parametrize("route", ["chat", "responses", "messages", "count_tokens"])
async def test_a_thread_reads_the_calls_of_a_live_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    job = {"recipe": f"{__name__}:ManyTurns"}
    asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    async with serving(tmp_path / "d", job=job) as served:
        episode = await served.begin()
        first = await served.openai(episode).responses.create(model="policy", input="hello")
    reads = watch_reads(monkeypatch, "calls")
    async with serving(tmp_path / "d", job=job) as served:
        key = served.keys.sign(episode["episode_id"], served.run.clock())
        again = {"base_url": f"{served.url}/v1", "api_key": key}
        if route == "chat":
            await served.openai(again).chat.completions.create(**asked)
        elif route == "responses":
            await served.openai(again).responses.create(model="policy", input="again", previous_response_id=first.id)
        elif route == "messages":
            await served.anthropic(again).messages.create(**asked, max_tokens=8)
        else:
            await served.anthropic(again).messages.count_tokens(**asked)
        await served.openai(again).chat.completions.create(**{**asked, "model": "policy@critic"})
        assert len(served.run.gateway.swarm.tree(episode["episode_id"], "").calls) >= 1
    assert len(reads) == 1 and reads[0] != threading.get_ident()


@pytest.mark.parametrize("token_bytes", [4, 2**16])
async def test_a_thread_encodes_a_large_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_bytes: int) -> None:
    threads: list[int] = []

    def encode(*given: Any) -> bytes:
        threads.append(threading.get_ident())
        return encode_call(*given)

    monkeypatch.setattr(calls, "encode_call", encode)
    monkeypatch.setattr(calls, "TOKEN_BYTES", token_bytes)
    async with serving(tmp_path / "d") as served:
        call = await served.run.say((await served.begin())["episode_id"])
        with closing(Journal.open_read_only(tmp_path / "d" / RUN / "journal.sqlite")) as journal:
            assert [recorded for recorded, *_ in journal.calls(call.episode_id)] == [call]
    assert [thread == threading.get_ident() for thread in threads] == [token_bytes == 4]


async def test_statuses_read_the_shown_answers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [watch_reads(monkeypatch, name) for name in ("first_call", "last_call")]
    async with serving(tmp_path / "d") as served:
        run, swarm = served.run, served.run.gateway.swarm
        for version in range(1, 5):
            for group in range(2):
                for _ in range(2):
                    await run.episode(0.0, task=f"t{group}")
            await run.until(lambda version=version: swarm.policy_version == version)
        for _ in range(5):
            status = (await served.http.get("/swarm/v1/status")).json()
            assert status["zero_variance"]["batches"] == 4
    assert [len(each) for each in reads] == [2, 4], "one group of two members, after the third batch and the fourth"
