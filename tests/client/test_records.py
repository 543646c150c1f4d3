"""The records of a run through the client: episodes by filter and page, batches, steps.

1. `EpisodeFilters` has the fields of `EpisodeQuery`, except those of pages.
2. Filters, orders and pages against the real application; `all_episodes` reads all pages.
3. A wrong filter is refused with key, value and way out, before anything is sent.
4. Batches, one batch, and chosen metrics of steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest

from agentjet.client import AsyncSwarm, Swarm
from agentjet.errors import InvalidRequest, NotFound
from agentjet.protocol import EpisodeFilters, EpisodeQuery
from tests.client.server import TOKEN as FAKE_TOKEN
from tests.client.server import URL, FakeServer
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving

pytestmark = pytest.mark.anyio


def test_the_filters_are_those_of_the_route() -> None:
    assert get_type_hints(EpisodeFilters).keys() | {"limit", "before"} == EpisodeQuery.model_fields.keys()


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"status": "broken"}, "status = 'broken': .*'live', 'finished', 'aborted', 'expired' or 'not_needed'"),
        ({"min_reward": float("nan")}, "min_reward = nan: .*finite"),
        ({"batch": "x"}, "batch = 'x': .*integer"),
        ({"limit": 0}, "limit = 0: .*greater than or equal to 1"),
        ({"statsu": "live"}, "statsu = 'live': this name is unknown; known are .*status"),
    ],
)
def test_a_wrong_filter(filters: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    with Swarm(URL, FAKE_TOKEN, transport=server.transport()) as swarm, pytest.raises(InvalidRequest, match=sentence):
        swarm.episodes(**filters)
    assert not server.requests


def test_episodes_by_filter_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.protocol.MOST_EPISODES", 2)

    async def play(served: Served) -> None:
        for number in range(5):
            await served.run.episode(number / 4, task=f"t{number // 2}")

    with (
        in_thread(serving(tmp_path / "d", saying(lambda prompt: "hi"), job={"batch_size": 8})) as (served, loop),
        Swarm(served.url, TOKEN) as swarm,
    ):
        loop.run(play(served))
        with swarm.episode("lost", task_set="s & t"):
            pass
        assert [view.reward for view in swarm.episodes(2, sort="-reward").episodes] == [1.0, 0.75]
        page = swarm.episodes(2, status="finished", max_reward=0.5, count=True)
        assert (len(page.episodes), page.total) == (2, 3) and page.next is not None
        [last] = swarm.episodes(2, before=page.next, status="finished", max_reward=0.5).episodes
        assert last.reward == 0.0
        assert [view.task_id for view in swarm.episodes(task_set="s & t").episodes] == ["lost"]
        rewards = [view.reward for view in swarm.all_episodes(sort="oldest", status="finished")]
        assert rewards == [0.0, 0.25, 0.5, 0.75, 1.0]
        with pytest.raises(NotFound, match="no episode 'gone'"):
            swarm.episodes(before="gone")


async def test_batches_and_steps(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, AsyncSwarm(served.url, TOKEN) as swarm:
        for _ in range(3):
            await served.run.batch()
        page = await swarm.batches(2)
        assert ([batch.id for batch in page.batches], page.next) == ([2, 1], 1)
        assert [batch.id for batch in (await swarm.batches(before=page.next)).batches] == [0]
        batch = await swarm.batch(0)
        assert batch.metrics["reward/mean"] == 0.5 and len(batch.groups) == 2
        with pytest.raises(NotFound, match="no batch 9"):
            await swarm.batch(9)
        steps = await swarm.steps(0, metrics=["reward/mean", "reward/std"])
        assert steps.versions == [1, 2, 3] and steps.metrics.keys() == {"reward/mean", "reward/std"}
