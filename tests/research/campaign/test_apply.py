"""`agentjet research apply`.

1. The confirmed changes are a commit on a new branch of the user's repository. Its working tree and index stay, and
   subject.toml keeps its spelling. Without a repository they are a patch.
2. What cannot be applied is refused with the way out.
3. The policy of the newest confirming run is exported with a model card.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Intervention
from agentjet.research.campaign.subject_repo import SubjectRepo, respelled
from agentjet.research.journal import Notebook
from agentjet.research.models import Outcome, canonical
from agentjet.research.swarm_runner import POLICY, kept_policy
from tests.cli.test_commands import run
from tests.research.campaign.campaign_world import FakeClock, FormulaRunner
from tests.research.campaign.subjects import WORDS, write_subject
from tests.research.campaign.test_subject_repo import loads, patch_of

SAID = "PROMPT = 'Say it.'\n"
CHANGE = Intervention(
    "say it, slower", "prompt", {"job.optimizer.lr": 1e-3, "job.max_tokens": 40}, patch_of("words.py", WORDS, SAID)
)


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


class Once:
    """Proposes one change of the subject as given."""

    name = "once"

    def __init__(self, made: Intervention) -> None:
        self.made = made

    def propose(self, view: object, most: int) -> list[Intervention]:
        return [self.made]


class Runner(FormulaRunner):
    """Scores of commits of a real repository: the change helps."""

    def collect(self, key: str) -> Outcome:
        trial, repo = self.trial(key), self.commits
        assert isinstance(repo, SubjectRepo)
        score = (0.8 if "Say it" in repo.files(trial.arm)["words.py"] else 0.2) + 0.001 * (trial.seed % 7)
        settings = {**repo.subject(trial.arm).settings, "model.name": "smollm2-135m"}
        return Outcome(trial.id, "completed", score, (0.1, score), settings=settings, machine={"AgentJet": "0.2"})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the subject in a folder of it, and a campaign that confirms a change."""
    place = tmp_path_factory.mktemp("world")
    folder = place / "project" / "agents"
    write_subject(folder)
    git(place / "project", "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "mine")
    conducted(folder, place / "campaign", CHANGE)
    conducted(folder, place / "idle", None)
    return place


@pytest.fixture
def user(world: Path, tmp_path: Path) -> Path:
    """The subject's folder in a copy of the world."""
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    for name in ("campaign", "idle"):
        source = tmp_path / name / "source.json"
        source.write_text(source.read_text().replace(str(world), str(tmp_path)))
    return tmp_path / "project" / "agents"


def conducted(user: Path, folder: Path, made: Intervention | None) -> None:
    """Conducts a campaign, with the policy of its newest run if it confirms a change."""
    repo = SubjectRepo.create(folder, user / "subject.toml", loads)
    with Notebook(folder) as notebook:
        runner, proposers = Runner(repo), [Once(made)] if made else []  # type: ignore[arg-type]
        question = Question("why is it slow?", Budget(runs=20.0), **repo.rules)
        done = Campaign(question, notebook, repo, runner, proposers, FakeClock()).run()  # type: ignore[arg-type]
    if made:
        kept = kept_policy(folder, done["base"], {})
        (kept / POLICY).mkdir(parents=True)
        (kept / POLICY / "config.json").write_text("{}")
        outcome = Outcome("t", "completed", 0.81, settings={"model.name": "smollm2-135m", "job.seed": 5})
        (kept / "run.json").write_text(canonical({"seed": 5, "outcome": outcome.to_json()}))


def test_the_changes_are_a_branch_and_nothing_else_moves(user: Path) -> None:
    folder, out = user.parent.parent / "campaign", user.parent.parent / "policy"
    (user / "untracked.py").write_text("x = 1\n")
    before = git(user, "status", "--porcelain"), (user / "subject.toml").read_text()
    text = run("research", "apply", str(folder), "--checkpoint", str(out))
    assert "branch agentjet/campaign of" in text
    assert (git(user, "status", "--porcelain"), (user / "subject.toml").read_text()) == before
    assert git(user, "show", "agentjet/campaign:agents/words.py") == SAID
    changed = before[1].replace("optimizer.lr = 0.01", "optimizer.lr = 0.001")
    assert (
        git(user, "show", "agentjet/campaign:agents/subject.toml") == f'{changed}\n[settings]\n"job.max_tokens" = 40\n'
    )
    assert git(user, "diff", "--name-only", "HEAD...agentjet/campaign").split() == [
        "agents/subject.toml",
        "agents/words.py",
    ]
    assert git(user, "log", "-1", "--format=%s%n%as", "agentjet/campaign").split("\n")[1] != "2000-01-01"
    card = (out / "README.md").read_text()
    assert (out / "config.json").exists() and "base_model: smollm2-135m" in card
    for said in (
        "why is it slow?",
        "with seed 5, scored 0.81",
        "to +0.6",
        "say it, slower",
        "AgentJet 0.2",
        "job.seed",
    ):
        assert said in card, said
    git(user, "checkout", "--quiet", "agentjet/campaign")
    again = SubjectRepo.create(user.parent.parent / "next", user / "subject.toml", loads)
    assert again.subject(again.first).settings["job.max_tokens"] == 40


def test_without_a_repository_the_changes_are_a_patch(user: Path) -> None:
    folder = user.parent.parent / "campaign"
    shutil.rmtree(user.parent / ".git")
    assert "is not in a git repository: the changes are in" in run("research", "apply", str(folder))
    subprocess.run(["patch", "-p1", "-s", "-i", folder / "confirmed.patch"], cwd=user, check=True)
    assert (user / "words.py").read_text() == SAID and "0.001" in (user / "subject.toml").read_text()


@pytest.mark.parametrize(
    ("do", "options", "message"),
    [
        ("", ["--branch", "main"], r"--branch 'main': there is such a branch in .*: give another name"),
        ("", ["--branch", "a..b"], r"--branch 'a\.\.b': git takes no such name"),
        ("", ["--to", "/nowhere"], r"--to /nowhere is not a folder in a git repository: omit it, and apply .*patch"),
        ("dirty", [], r"agents has changes without a commit \(\['agents/words.py'\]\): commit or stash them first"),
        ("moved on", [], r"is not as it was when the campaign began \(.*words\.py.*\): check out the commit of that"),
        ("no policy", ["--checkpoint", "new"], r"--checkpoint new: .* has no policy of the confirmed change"),
        ("there", ["--checkpoint", "."], r"\. exists: move it away"),
        ("nothing", [], "the campaign has confirmed no change, so there is nothing to apply"),
        ("archived", [], "an archived campaign without its subject"),
        ("empty", [], "there is no campaign in this folder"),
    ],
)
def test_what_cannot_be_applied(do: str, options: list[str], message: str, user: Path) -> None:
    folder = user.parent.parent / ("idle" if do == "nothing" else "campaign")
    if do in ("dirty", "moved on"):
        (user / "words.py").write_text("PROMPT = 'Mine.'\n")
    if do == "moved on":
        git(user, "commit", "--quiet", "--all", "--message", "mine, too")
    if do == "no policy":
        next(folder.glob("policies/*/run.json")).unlink()
    if do == "archived":
        (folder / "source.json").unlink()
    if do == "empty":
        (folder / "notebook.sqlite").unlink()
    with pytest.raises(ConfigError, match=message):
        run("research", "apply", str(folder), *options)
    assert git(user, "branch", "--list").split() == ["*", "main"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[settings]\njob.optimizer.lr = 1e-2  # mine\n", "[settings]\njob.optimizer.lr = 0.5  # mine\n"),
        ("[settings.job.optimizer]\nlr=1e-2\n", "[settings.job.optimizer]\nlr=0.5\n"),
        ('[settings]\n"job.optimizer.lr" = 0.01\n', '[settings]\n"job.optimizer.lr" = 0.5\n'),
        ("[settings]\n# none\n", '[settings]\n"job.optimizer.lr" = 0.5\n# none\n'),
        ("settings = {job = {optimizer = {lr = 0.01}}}\n", None),
    ],
)
def test_the_users_spelling_is_kept(text: str, expected: str | None, tmp_path: Path) -> None:
    """A spelling with values that have no line is written flat."""
    head = "".join(line for line in write_subject(tmp_path).read_text().splitlines(True)[:5])
    from agentjet.research.campaign.subject_repo import flat_toml, parse_subject

    before = parse_subject(head + text, "subject.toml")
    given = dict(before.settings)
    after = parse_subject(head + '[settings]\n"job.optimizer.lr" = 0.5\n', "subject.toml")
    assert json.loads(json.dumps(given)) in ({}, {"job.optimizer.lr": 0.01})
    assert respelled(head + text, before, after) == (flat_toml(after) if expected is None else head + expected)
