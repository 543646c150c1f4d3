"""The subjects of `bench.campaign` have their troubles, the healthy ones none, and the world executes their files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentjet.research.campaign.strategist import overridden
from agentjet.research.models import Trial
from bench.campaigning.outcome import gone
from bench.campaigning.planted import DEVELOPED, TROUBLES, Planted, unseen
from bench.campaigning.repo import MemoryRepo
from bench.campaigning.world import SubjectRunner

HEALTHY = Planted("healthy")


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("style", ["format", "f-string", "concatenation", "template"])
def test_a_trouble_is_there_and_gone(trouble: str, style: str) -> None:
    sick = replace(HEALTHY, troubles=(trouble,), style=style)
    assert not gone(trouble, sick.files()) and gone(trouble, sick.healthy().files())


def test_the_unseen_subjects_are_drawn_by_seed() -> None:
    assert unseen(1) == unseen(1) != unseen(2)
    known = {frozenset(planted.troubles) for planted in DEVELOPED}
    drawn = [planted for planted in unseen(1) if planted.troubles not in ((), ("leaking_judge",))]
    assert len(drawn) == 10 and not known & {frozenset(planted.troubles) for planted in drawn}


def runner(planted: Planted) -> tuple[SubjectRunner, str]:
    repo = MemoryRepo(planted.files())
    return SubjectRunner(repo, planted.files()), repo.first


def trial(commit: str, seed: int) -> Trial:
    return Trial("s", commit, {}, seed, "explore", 0.1)


def test_a_run_depends_on_its_files_and_its_seed() -> None:
    world, commit = runner(HEALTHY)
    again, _ = runner(HEALTHY)
    first, second, third = (each.run(trial(commit, seed)) for each, seed in ((world, 1), (again, 1), (world, 2)))
    assert first == second and first.curve != third.curve
    assert (
        first.transcripts[0].task.keys() == {"id", "digits"}
        and "largest" in first.transcripts[0].messages[0]["content"]
    )


def test_the_agents_own_arguments_are_noticed() -> None:
    world, commit = runner(replace(HEALTHY, troubles=("agent_temperature",)))
    ended = world.run(trial(commit, 1))
    assert overridden(ended, "temperature") == 1.0 and overridden(ended, "max_tokens") == 0.0


def test_an_agent_that_fails_is_named_with_its_line() -> None:
    files = HEALTHY.files()
    files["agent.py"] = files["agent.py"].replace("episode.chat", "episode.talk")
    repo = MemoryRepo(files)
    ended = SubjectRunner(repo, files).run(trial(repo.first, 1))
    assert ended.end == "arm_failed" and ended.note.startswith("agent.py:") and "talk" in ended.note
