"""Environments against the real application over a scripted sampler.

1. A game is trained and evaluated: turn rewards, metrics, texts and enforced actions reach the server.
2. A kind of an installed package that is not AgentJet's is found by its name. Its file is the example of the page.
3. In a sandbox an environment reaches the model and nothing else.
4. Several environments in one run have the shares that are set. One that crashes does not stop the others.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from agentjet import environments
from agentjet.client import AsyncSwarm, Retry
from agentjet.environments.registry import installed
from agentjet.errors import ConfigError
from tests.fakes import recent_episodes, saying
from tests.server.serving import ADMIN, Served, serving

pytestmark = pytest.mark.anyio
TOY = "tests.environments.toy/Corridor"
PLUGIN = Path(__file__).parents[1] / "plugins" / "guess_number.py"
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def client(served: Served) -> AsyncSwarm:
    return AsyncSwarm(served.url, ADMIN, retry=Retry(patience=5.0))


def bisecting(prompt: str) -> str:
    """Goes right in a corridor, and guesses numbers by the hints so far."""
    low, high = 1, 20
    if "corridor" in prompt:
        return '"right"'
    for guess, hint in re.findall(r"(\d+)\D*The number is (\w+)", prompt.partition("to 20.")[2]):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


async def test_a_game_is_trained_and_evaluated(tmp_path: Path) -> None:
    corridor = environments.load(f"{TOY}:", length=3, system_prompt="Walk.", processes=2)
    with corridor:
        async with serving(tmp_path / "data", saying(bisecting)) as served, client(served) as swarm:
            report = await swarm.train(corridor.agent, corridor.tasks, steps=2, concurrency=4, progress=False)
            assert (report.num_aborted, report.rewards) == (0, (1.5, 1.5))
            assert report.steps[-1].metrics[f"reward/{corridor.name}/mean"] == 1.5
            evaluated = await swarm.evaluate(corridor.agent, corridor.held_out, progress=False)
            assert (evaluated.mean_reward, evaluated.metric_at_k("place").value) == (1.5, 3.0)
            [trained, *_] = recent_episodes(served.run.gateway.swarm, 20, status="finished")[2:]
    facts = (trained.task_set, trained.reward_text, trained.metrics["turns"])
    assert facts == (corridor.name, "the end is reached", 3.0)
    assert list(trained.call_rewards.values()) == [0.5, 0.5, 0.5]
    assert {'"enum": ["left", "right"]' in str(asked.params.grammar) for asked in served.run.compute.asked} == {True}


async def test_a_kind_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "site" / "guess_number-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copy(PLUGIN, tmp_path / "site")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: guess-number\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[agentjet.environments]\nguess = guess_number:GuessNumber\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert list(installed()) == ["guess"]
    with environments.load("guess:20", guesses=5) as guess:
        assert guess.kind.guesses == 5 and len(guess.tasks) + len(guess.held_out) == 20
        async with serving(tmp_path / "data", saying(bisecting)) as served, client(served) as swarm:
            report = await swarm.evaluate(guess.agent, [*guess.tasks, *guess.held_out], progress=False)
    assert (report.mean_reward, report.num_aborted) == (1.0, 0)
    source = PLUGIN.read_text()
    assert len(source.splitlines()) <= 60 and source.partition("\n\n")[2] in PAGE.read_text()


@pytest.mark.needs("bubblewrap")
async def test_an_environment_in_a_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key")
    async with serving(tmp_path / "data", saying(bisecting)) as served, client(served) as swarm:
        port = int(served.url.rpartition(":")[2])
        with environments.load(
            "tests.environments.toy/Prying", secret=str(secret), port=port, held_out=0, sandbox=True
        ) as prying:
            report = await swarm.evaluate(prying.agent, prying.tasks, repeats=2, concurrency=1, progress=False)
    assert [(result.error, result.reward_text) for result in report.results] == [("", '"right" True')] * 2


async def test_shares_of_a_cocktail_of_which_one_crashes(tmp_path: Path) -> None:
    weights = {"sound": 1.0, "crashing": 1.0, "heavy": 2.0}
    crashes = {"crashing": 0.3}
    made = [environments.load(TOY, task_set=name, crash_share=crashes.get(name, 0), processes=2) for name in weights]
    job = {"task_weights": weights, "batch_size": 4}
    with environments.mixture(made) as mixed:
        async with serving(tmp_path / "data", saying(bisecting), job=job) as served, client(served) as swarm:
            async with asyncio.timeout(60):
                report = await swarm.train(mixed.agent, mixed.tasks, steps=5, concurrency=32, progress=False)
    for name, weight in weights.items():
        shares = [step.metrics.get(f"batch/share/{name}", 0.0) for step in report.steps]
        assert abs(sum(shares[1:]) / 4 - weight / 4) <= 0.05, "the first batch may begin without a set"
    assert {result.task_set for result in report.results if result.outcome == "aborted"} == {"crashing"}


async def test_an_environment_that_only_fails_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its failures come first, and do not end the run of the others."""
    made = [environments.load(TOY, task_set=name, crash_share=share) for name, share in (("bad", 2.0), ("good", 0.0))]
    with environments.mixture(made) as mixed:
        async with serving(tmp_path / "data", saying(bisecting)) as served, client(served) as swarm:
            async with asyncio.timeout(60):
                report = await swarm.train(mixed.agent, mixed.tasks, steps=20, concurrency=4)
    failed = sum(result.task_set == "bad" for result in report.results)
    assert failed < 16 + 3 * 4 and report.rewards == (1.0,) * 20
    assert "task set 'bad' is left out for 300 s, because its last 16 episodes failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("names", "error"),
    [([], "a mixture needs at least one environment"), (["a", "a"], "there are two environments 'a': give one of")],
)
def test_a_mixture_that_cannot_be(names: list[str], error: str) -> None:
    made = [environments.load(TOY, task_set=name) for name in names]
    try:
        with pytest.raises(ConfigError, match=error):
            environments.mixture(made)
    finally:
        for environment in made:
            environment.close()
