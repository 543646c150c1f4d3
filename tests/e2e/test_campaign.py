"""A campaign's laboratory on real servers, with the subject of `agentjet research demo`.

1. A commit is trained and judged as deployed. A longer order continues the shorter one. What ended is known without a
   server.
2. A mended subject scores higher than the given one, with transcripts, overrides and both rewards.
3. A laboratory that was killed is continued, and launches nothing twice.
4. A commit whose agent raises is an observation with the error's file and line.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.cli import example, load_example
from agentjet.cli.research.execution import local_slots
from agentjet.research.campaign.models import Intervention, Order
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.campaign.swarm_laboratory import SwarmLaboratory
from tests.e2e.server import is_running
from tests.research.campaign.test_subject_repo import patch_of

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


@pytest.fixture
def repo(tmp_path: Path) -> SubjectRepo:
    shutil.copytree(example("digits") / "campaign", tmp_path / "given")
    load_example("digits", "random_model").make_random_model(tmp_path / "given" / "model")
    short = (tmp_path / "given" / "subject.toml").read_text().replace("steps = 20", "steps = 8")
    (tmp_path / "given" / "subject.toml").write_text(short)
    return SubjectRepo.create(tmp_path / "campaign", tmp_path / "given" / "subject.toml")


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
    with SwarmLaboratory(repo, local_slots(2)) as laboratory:
        for key, commit, share in (("given", repo.first, 1.0), ("half", better, 0.5), ("full", better, 1.0)):
            laboratory.launch(key, Order(commit, 7, share))
        given, half, full = (laboratory.collect(key) for key in ("given", "half", "full"))
    assert given.overrides["job.max_tokens"] > 0.9, "a limit shows only in answers that end there"
    assert given.training_reward == 0.0 and given.rejected is not None
    assert given.signals["groups/zero_variance"] == (1.0,) * 8
    assert full.training_reward == full.judged_reward and full.rejected == full.overpaid == 0.0
    assert full.overrides == {} and full.curve[:2] == half.curve[:2] and len(full.curve) == 3
    assert full.score is not None and given.score is not None and full.score > given.score
    assert [one.place for one in full.transcripts] == ["best", "median", "worst"]
    assert full.transcripts[0].messages[-1]["role"] == "assistant" and len(full.by_task) == 8
    with SwarmLaboratory(repo, []) as later:
        assert later.has("full") and later.collect("full") == full


KILLED = """
import sys
from pathlib import Path
from agentjet.cli.research.execution import local_slots
from agentjet.research.campaign.models import Order
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.campaign.swarm_laboratory import SwarmLaboratory
repo = SubjectRepo(Path(sys.argv[1]))
with SwarmLaboratory(repo, local_slots(1)) as laboratory:
    laboratory.launch("k", Order(repo.first, 7))
    print("launched", flush=True)
    laboratory.collect("k")
"""


def test_a_killed_laboratory_is_continued(repo: SubjectRepo) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(repo.folder)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"launched\n"
        first.send_signal(signal.SIGKILL)
    assert not is_running(first.pid)
    with SwarmLaboratory(repo, local_slots(1)) as laboratory:
        assert laboratory.has("k")
        assert laboratory.collect("k").score is not None
    assert len(list((repo.folder / "runs").iterdir())) == 1


def test_a_commit_that_raises_is_an_observation(repo: SubjectRepo) -> None:
    before = repo.files(repo.first)["agent.py"]
    broken = before.replace("return 1.0 if answer(task, episode).isdigit()", "return 1.0 if task.payload['solution']")
    assert broken != before
    commit = repo.commit(repo.first, Intervention("broken", "agent", patch=patch_of("agent.py", before, broken)))
    with SwarmLaboratory(repo, local_slots(1)) as laboratory:
        laboratory.launch("k", replace(Order(commit, 7), share=0.25))
        found = laboratory.collect("k")
    assert found.subject_fails and found.score is None
    assert "KeyError" in found.error and "agent.py:10 in agent" in found.error
