"""Commits on real servers, with the subject of `agentjet research demo`.

1. A commit is trained and judged as deployed. A longer trial continues the shorter one. What ended is known without a
   server.
2. A mended subject scores higher than the given one, with transcripts, overrides and both rewards.
3. A runner that was killed is continued, and launches nothing twice.
4. A commit whose agent raises is an observation with the error's file and line.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentjet.cli import example, load_example
from agentjet.cli.trial_servers import local_slots
from agentjet.research.campaign.strategist import Intervention, facts_of
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Trial
from agentjet.research.swarm_runner import SwarmRunner
from tests.e2e.server import is_running
from tests.research.campaign.test_subject_repo import patch_of

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.needs("bubblewrap")]


@pytest.fixture
def repo(tmp_path: Path) -> SubjectRepo:
    shutil.copytree(example("digits") / "campaign", tmp_path / "given")
    load_example("digits", "random_model").make_random_model(tmp_path / "given" / "model")
    short = (tmp_path / "given" / "subject.toml").read_text().replace("steps = 20", "steps = 8")
    (tmp_path / "given" / "subject.toml").write_text(short)
    return SubjectRepo.create(tmp_path / "campaign", tmp_path / "given" / "subject.toml")


def runner_of(repo: SubjectRepo, local: int) -> SwarmRunner:
    return SwarmRunner(repo.subject_of, repo.folder, local_slots(local) if local else [])


def trial(commit: str, share: float) -> Trial:
    return Trial("campaign", commit, {}, 7, "explore", share)


def mended(repo: SubjectRepo) -> str:
    """The subject without its two troubles."""
    files = repo.files(repo.first)
    free = files["agent.py"].replace('            "max_tokens": 3,\n', "")
    paid = files["subject.toml"].replace('reward = ""', 'reward = "pay.py:score"')
    patch = patch_of("agent.py", files["agent.py"], free) + patch_of("subject.toml", files["subject.toml"], paid)
    patch += patch_of("pay.py", "", repo.judge_source())
    return repo.commit(repo.first, Intervention("both", "reward", patch=patch))


def test_commits_are_trained_and_judged_as_deployed(repo: SubjectRepo) -> None:
    better = mended(repo)
    with runner_of(repo, 2) as runner:
        for key, commit, share in (("given", repo.first, 1.0), ("half", better, 0.5), ("full", better, 1.0)):
            runner.launch(key, trial(commit, share))
        given, half, full = (runner.collect(key) for key in ("given", "half", "full"))
    assert facts_of(given)["overridden_max_tokens"] > 0.9, "a limit shows only in answers that end there"
    assert given.facts["training_reward"] == 0.0 and "rejected" in given.facts
    assert given.signals["groups/zero_variance"] == (1.0,) * 8
    assert full.facts["training_reward"] == full.facts["judged_reward"]
    assert full.facts["rejected"] == full.facts["overpaid"] == facts_of(full)["overridden_max_tokens"] == 0.0
    assert full.curve[:2] == half.curve[:2] and len(full.curve) == 3
    assert full.score is not None and given.score is not None and full.score > given.score
    assert [one.place for one in full.transcripts] == ["best", "median", "worst"]
    assert full.transcripts[0].messages[-1]["role"] == "assistant" and len(full.by_task) == 8
    with runner_of(repo, 0) as later:
        assert later.has("full") and later.collect("full") == full


KILLED = """
import sys
from pathlib import Path
from agentjet.cli.trial_servers import local_slots
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.models import Trial
from agentjet.research.swarm_runner import SwarmRunner
repo = SubjectRepo(Path(sys.argv[1]))
with SwarmRunner(repo.subject_of, repo.folder, local_slots(1)) as runner:
    runner.launch("k", Trial("campaign", repo.first, {}, 7, "explore"))
    print("launched", flush=True)
    runner.collect("k")
"""


def test_a_killed_runner_is_continued(repo: SubjectRepo) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(repo.folder)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"launched\n"
        first.send_signal(signal.SIGKILL)
    assert not is_running(first.pid)
    with runner_of(repo, 1) as runner:
        assert runner.has("k")
        assert runner.collect("k").score is not None
    assert len(list((repo.folder / "runs").iterdir())) == 1


def test_a_commit_that_raises_is_an_observation(repo: SubjectRepo) -> None:
    before = repo.files(repo.first)["agent.py"]
    broken = before.replace("return 1.0 if answer(task, episode).isdigit()", "return 1.0 if task.payload['solution']")
    assert broken != before
    commit = repo.commit(repo.first, Intervention("broken", "agent", patch=patch_of("agent.py", before, broken)))
    with runner_of(repo, 1) as runner:
        runner.launch("k", trial(commit, 0.25))
        found = runner.collect("k")
    assert found.end == "arm_failed"
    assert "KeyError" in found.note and "agent.py:10 in agent" in found.note
