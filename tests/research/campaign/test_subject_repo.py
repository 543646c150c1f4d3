"""Commits of a campaign's subject.

1. The copy is the campaign's: later edits of the user's files are listed, and change nothing. Held-out tasks are not in
   it.
2. A commit is a function of its base and its intervention. Settings, patches and new files become commits.
3. A patch that does not apply or import, or that touches the judge, is refused with the reason.
4. The judge's copy is locked.
5. A subject that cannot run is refused with its first error, with file and line; a wrong key with the way out.
6. Behind the fence, an arm's code reads neither the judge's copy nor the user's folder.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.arm_process import ArmFailed, ArmOrder
from agentjet.research.campaign.strategist import Intervention
from agentjet.research.campaign.subject_repo import SubjectRepo, read_subject
from agentjet.research.models import Refused, Trial
from agentjet.types import Task
from tests.research.campaign.subjects import AGENT, JUDGE, SUBJECT, WORDS, write_subject

SLOWER = Intervention("slower", "settings", changes={"job.optimizer.lr": 1e-3})


def loads(order: ArmOrder) -> list[Task]:
    """Takes any code."""
    return [Task("a", payload={"answer": "2"})]


def patch_of(path: str, before: str, after: str) -> str:
    old, new = ("/dev/null" if not text else f"{side}/{path}" for side, text in (("a", before), ("b", after)))
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, new))


def patch(path: str, before: str, after: str) -> Intervention:
    return Intervention("a patch", "agent", patch=patch_of(path, before, after))


@pytest.fixture
def repo(tmp_path: Path) -> SubjectRepo:
    return SubjectRepo.create(tmp_path / "campaign", write_subject(tmp_path / "user"), loads)


def test_the_copy_is_the_campaigns(repo: SubjectRepo, tmp_path: Path) -> None:
    files = repo.files(repo.first)
    assert files.keys() == {"subject.toml", "agent.py", "words.py", "judge.py", "tasks.jsonl"}
    assert repo.changed_outside() == []
    (tmp_path / "user" / "words.py").write_text("PROMPT = ''")
    assert repo.changed_outside() == ["words.py"]
    again = SubjectRepo.create(tmp_path / "campaign", tmp_path / "user" / "subject.toml", loads)
    assert again.files(again.first) == files and repo.judge_source() == JUDGE
    subject = repo.subject(repo.first)
    assert subject.held_out == str(tmp_path / "campaign" / "judge" / "held_out.jsonl") and subject.judged
    assert subject.agent == str(tmp_path / "campaign" / "arms" / repo.first / "agent.py:agent")


def test_a_person_may_name_other_files_for_an_arm(repo: SubjectRepo) -> None:
    """The rule by which proposals cannot change what the judge plays holds for other commits."""
    arm = repo.arm(repo.first, "noise", keys={"deployed": "words.py:agent"})
    assert repo.subject(arm).deployed.endswith(f"{arm}/words.py:agent") and repo.subject(repo.first).deployed == ""
    trial = Trial("s", arm, {"steps": 3, "tasks.number": 1, "job.temperature": 0.5}, 1, "confirm")
    assert (repo.subject_of(trial).steps, repo.subject_of(trial).num_tasks) == (3, 1)
    assert repo.num_tasks() == 1
    with pytest.raises(Refused, match=r"there is no file 'none\.py'"):
        repo.arm(repo.first, "missing", keys={"agent": "none.py:agent"})
    text = (repo.worktree(repo.first) / "subject.toml").read_text()
    with pytest.raises(Refused, match=r"deployed = 'words\.py:agent': it is the judge's"):
        repo.commit(
            repo.first, patch("subject.toml", text, text.replace('deployed = ""', 'deployed = "words.py:agent"'))
        )


def test_a_commit_is_a_function_of_its_base_and_its_change(repo: SubjectRepo, tmp_path: Path) -> None:
    warm = AGENT.replace(", temperature=0.1", "")
    first = repo.commit(repo.first, SLOWER)
    second = repo.commit(first, patch("agent.py", AGENT, warm))
    assert repo.subject(second).settings["job.optimizer.lr"] == 1e-3
    assert (repo.worktree(second) / "agent.py").read_text() == warm
    other = SubjectRepo.create(tmp_path / "elsewhere", tmp_path / "user" / "subject.toml", loads)
    assert other.commit(other.first, SLOWER) == first
    assert other.commit(first, patch("agent.py", AGENT, warm)) == second
    reason = replace(SLOWER, why="another reason")
    assert repo.commit(repo.first, reason) == first


def test_attributes_of_git_hide_nothing(repo: SubjectRepo) -> None:
    hidden = patch_of(".gitattributes", "", "judge.py export-ignore\n.gitattributes export-ignore\n")
    changed = patch_of("judge.py", JUDGE, JUDGE.replace("float(", "1.0 or float("))
    with pytest.raises(Refused, match=r"judge\.py: the judge's files are fixed"):
        repo.commit(repo.first, Intervention("a patch", "agent", patch=hidden + changed))


def test_a_patch_may_have_wrong_numbers_and_no_prefix(repo: SubjectRepo) -> None:
    text = '--- words.py\n+++ words.py\n@@ -7,3 +9,9 @@\n-PROMPT = "Answer with a number."\n+PROMPT = "Say it."'
    commit = repo.commit(repo.first, Intervention("short", "prompt", patch=text))
    assert repo.files(commit)["words.py"] == 'PROMPT = "Say it."\n'


def test_a_patch_may_change_several_files(repo: SubjectRepo) -> None:
    text = patch_of("pay.py", "", JUDGE) + patch_of("words.py", WORDS, "PROMPT = 'Say it.'\n")
    files = repo.files(repo.commit(repo.first, Intervention("two files", "reward", patch=text)))
    assert (files["pay.py"], files["words.py"]) == (JUDGE, "PROMPT = 'Say it.'\n")


def test_a_change_without_one_of_its_parts(repo: SubjectRepo) -> None:
    """A setting, another key, a changed file and a new one. A part that others need cannot be left out."""
    before = repo.files(repo.first)["subject.toml"]
    text = patch_of("pay.py", "", JUDGE) + patch_of("words.py", WORDS, "PROMPT = 'Say it.'\n")
    text += patch_of("subject.toml", before, before.replace('reward = ""', 'reward = "pay.py:score"'))
    made = Intervention("all", "reward", {"job.optimizer.lr": 1e-3, "job.temperature": 0.5}, text)
    whole = repo.commit(repo.first, made)
    parts = repo.parts(repo.first, whole)
    assert parts == ["job.optimizer.lr", "job.temperature", "pay.py", "reward", "words.py"]
    for part in {*parts} - {"pay.py"}:
        one = repo.without(repo.first, whole, part)
        assert repo.parts(one, whole) == [part] and repo.parts(repo.first, one) == [p for p in parts if p != part]
    assert repo.subject(repo.without(repo.first, whole, "job.temperature")).settings == {
        **repo.subject(repo.first).settings,
        "job.optimizer.lr": 1e-3,
    }
    with pytest.raises(Refused, match=r"there is no file 'pay\.py'"):
        repo.without(repo.first, whole, "pay.py")


def test_equal_episodes_shorten_the_run_of_a_larger_batch(repo: SubjectRepo) -> None:
    larger = Intervention("groups of 8", "settings", changes={"job.group_size": 8})
    assert repo.subject(repo.first).steps == 12
    assert repo.subject(repo.commit(repo.first, larger)).steps == 6


@pytest.mark.parametrize(
    ("intervention", "reason"),
    [
        (patch("words.py", "PROMPT = 1\n", "PROMPT = 2\n"), r"the patch does not apply: .*words\.py"),
        (patch("judge.py", JUDGE, "def score(task, messages):\n    return 1.0\n"), r"judge\.py: the judge's files"),
        (patch("held_out.jsonl", "", '{"id": "x"}\n'), r"held_out\.jsonl: the judge's files"),
        (patch("random.py", "", "x = 1\n"), r"random\.py: 'random' is the name of an installed module"),
        (patch("httpx/__init__.py", "", "x = 1\n"), "'httpx' is the name of an installed module"),
        (patch("agentjet/__init__.py", "", "x = 1\n"), "'agentjet' is the name of an installed module"),
        (patch("a" * 300 + ".py", "", "x = 1\n"), "a name has at most 255 bytes"),
        (patch("d/" * 600 + "a.py", "", "x = 1\n"), "a path 1000 characters"),
        (
            Intervention("many", "agent", patch="".join(patch(f"f{n}.py", "", "x = 1\n").patch for n in range(201))),
            "it changes 201 files: change at most 200",
        ),
        (patch("sitecustomize.py", "", "x = 1\n"), "'sitecustomize' is the name of an installed module"),
        (patch(".git/hooks/pre-commit", "", "x\n"), "does not apply|begin with a dot"),
        (patch("../judge/judge.py", "", "x = 1\n"), "the patch does not apply: .*"),
        (patch(".env", "", "x\n"), "does not begin with a dot"),
        (Intervention("link", "agent", patch="--- /dev/null\n+++ b/x\nnew file mode 120000\n"), "the patch"),
        (Intervention("same", "settings", changes={"job.optimizer.lr": 0.01}), "it changes nothing"),
        (Intervention("typo", "settings", changes={"job.optimizer.lrr": 0.1}), r"\[settings\]: job\.optimizer\.lrr"),
        (Intervention("model", "settings", changes={"model.name": "other"}), r"\[settings\]: model\.name = 'other'"),
        (Intervention("prose", "agent", patch="Make the prompt shorter."), "the patch does not apply"),
    ],
)
def test_what_is_refused(repo: SubjectRepo, intervention: Intervention, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        repo.commit(repo.first, intervention)


@pytest.mark.parametrize(
    "line", ['evaluator = "agent.py:ask"', "steps = 99", "repeats = 3", 'model = "large"', "floor = 1.0"]
)
def test_the_judges_keys_are_fixed(repo: SubjectRepo, line: str) -> None:
    before = repo.files(repo.first)["subject.toml"]
    key = line.partition(" =")[0]
    after = "".join(f"{line}\n" if own.startswith(f"{key} =") else own for own in before.splitlines(True))
    with pytest.raises(Refused, match=f"{key} = .*: it is the judge's, and stays"):
        repo.commit(repo.first, patch("subject.toml", before, after))


@pytest.mark.parametrize("key", ["job.recipe.name", "job.recipe", "job.recipe.loss", "job.recipe.loss.name"])
def test_a_proposal_names_no_code_to_import(repo: SubjectRepo, key: str, tmp_path: Path) -> None:
    """A server imports it outside of a sandbox, and so would a check of the settings."""
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\n")
    for path in ("planted:X", "typer.__main__:X"):
        made = Intervention("code", "recipe", changes={key: path})
        with pytest.raises(Refused, match=rf"{key} = '{path}': it is code outside of a sandbox"):
            repo.commit(repo.first, made)
    before = repo.files(repo.first)["subject.toml"]
    with pytest.raises(Refused, match="it is code outside of a sandbox"):
        repo.commit(repo.first, patch("subject.toml", before, f'{before}"{key}" = "planted:X"\n'))
    built_in = Intervention("built in", "recipe", changes={"job.recipe.name": "rloo"})
    assert repo.subject(repo.commit(repo.first, built_in)).settings["job.recipe.name"] == "rloo"


def test_code_that_does_not_load_is_refused(repo: SubjectRepo) -> None:
    def fails(order: ArmOrder) -> list[Task]:
        raise ArmFailed("agent.py: ImportError: no module (agent.py:1)")

    strict = SubjectRepo(repo.folder, fails)
    shorter = patch("words.py", WORDS, "PROMPT = 'Say it.'\n")
    with pytest.raises(Refused, match=r"it does not load: .* \(agent\.py:1\)"):
        strict.commit(repo.first, shorter)
    assert SubjectRepo(repo.folder, loads).commit(repo.first, shorter)
    with pytest.raises(Refused, match=r"it does not load: .*SyntaxError: '\(' was never closed \(.*words\.py:1\)"):
        SubjectRepo(repo.folder, unsafe=True).commit(repo.first, patch("words.py", WORDS, "PROMPT = (\n"))
    assert strict.commit(repo.first, SLOWER), "settings need no check"


def test_the_judge_is_locked(repo: SubjectRepo) -> None:
    (repo.folder / "judge" / "judge.py").write_text("def score(task, messages):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"judge/judge\.py was changed, and the judge is fixed"):
        repo.subject(repo.first)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps = 12", "stepps = 12", r"subject\.toml: stepps: unknown key; did you mean steps\?"),
        ("steps = 12", "steps = 0", r"steps = 0: a run learns at least 1 batch"),
        ("steps = 12", 'steps = "many"', r"steps = 'many': input should be a valid integer"),
        ('evaluator = "judge.py:score"\n', "", r"evaluator: is required; add a line such as evaluator ="),
        ("judge.py:score", "judge:score", r"evaluator = 'judge:score': give FILE\.py:FUNCTION"),
        ("judge.py:score", "none.py:score", r"there is no file 'none\.py'"),
        ("held_out.jsonl", "tasks.jsonl", r"held_out = .*: tasks is in the same file"),
        ("judge.py:score", "judge.py:grade", r"there is no function 'grade'"),
        ("optimizer.lr = 0.01", "optimizer.lr = [1]", r"settings\.job\.optimizer\.lr.*it must be text, a number"),
        (
            "optimizer.lr",
            "max_token = 5\noptimizer.lr",
            r"\[settings\]: job\.max_token = 5: .*did you mean job\.max_tokens",
        ),
        ("optimizer.lr", 'max_tokens = "ten"\noptimizer.lr', r"\[settings\]: job\.max_tokens = 'ten'"),
        (
            "steps = 12",
            'steps = 12\nhidden = ["anwser"]',
            r"no held-out task has 'anwser': unknown key; did you mean answer\?",
        ),
        ("steps = 12", "steps =", r"subject\.toml: .*line 6"),
        ("steps = 12", "steps = 12\nbest = 0", r"worst = 0, best = 0: give the lowest and the highest score"),
        ("steps = 12", "steps = 12\nbest = inf", r"best = inf: give a finite number"),
        ("optimizer.lr = 0.01", "optimizer.lr = nan", r"job\.optimizer\.lr = nan: give a finite number"),
        ("steps = 12", "steps = 12\nfloor = -1", r"floor = -1 is outside of the judge's scale, worst = 0, best = 1"),
        ("steps = 12", 'steps = 12\nshown = ["answer"]', r"\['answer'\] is hidden and shown"),
        ("steps = 12", 'steps = 12\nshown = ["qestion"]', r"no held-out task has 'qestion'.*did you mean question"),
    ],
)
def test_a_wrong_subject_file(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u", subject=SUBJECT.replace(before, after)), loads)
    assert not (tmp_path / "c" / "source.json").exists(), "the next start begins anew"


HELD = [{"id": str(n), "question": f"{n} + {n}", "answer": str(2 * n)} for n in range(6)]


def subject_with(folder: Path, key: str, values: Sequence[object], line: str = "") -> Path:
    rows = "".join(f"{json.dumps({**row, key: value})}\n" for row, value in zip(HELD, values, strict=True))
    return write_subject(folder, held_out=rows, subject=SUBJECT.replace("steps", f"{line}\nsteps", 1))


@pytest.mark.parametrize(
    "values",
    [[str(2 * n) for n in range(6)], [[str(2 * n)] for n in range(6)], ["2"] + [str(2 * n) for n in range(1, 6)]],
)
def test_a_key_that_holds_the_answer_is_refused(values: Sequence[object], tmp_path: Path) -> None:
    """The judge pays its value. Else an arm could show it to the policy, and any subject would be mended so."""
    way_out = r"'label' holds the answer, .*hidden = \[\"answer\", \"label\"\].* to shown"
    with pytest.raises(ConfigError, match=way_out):
        SubjectRepo.create(tmp_path / "c", subject_with(tmp_path / "u", "label", values), loads)
    for number, line in enumerate(('shown = ["label"]', 'hidden = ["answer", "label"]')):
        SubjectRepo.create(tmp_path / f"{number}", subject_with(tmp_path / "u", "label", values, line), loads)


@pytest.mark.parametrize(
    "values", [[3] * 6, [True, False] * 3, ["a", "b", "4", "c", "d", "e"], [["0", "2", "4"]] * 6, [None] * 6]
)
def test_other_keys_are_no_answers(values: Sequence[object], tmp_path: Path) -> None:
    SubjectRepo.create(tmp_path / "c", subject_with(tmp_path / "u", "level", values), loads)


def test_the_scale_of_the_judge(tmp_path: Path) -> None:
    declared = write_subject(tmp_path / "u", subject=f"best = 10\nworst = -2\n{SUBJECT}")
    repo = SubjectRepo.create(tmp_path / "c", declared, loads)
    assert repo.rules["metric"].endswith("as a share of its scale, -2 to 10") and repo.subject(repo.first).floor == -2


def test_a_text_file_is_utf_8(tmp_path: Path) -> None:
    subject = write_subject(tmp_path / "u")
    (tmp_path / "u" / "photo.bin").write_bytes(b"\xe9")
    (tmp_path / "u" / "agent.py").write_bytes(b"# \xe9t\xe9\n" + AGENT.encode())
    with pytest.raises(ConfigError, match=r"u/agent\.py: invalid UTF-8 at byte 2: save the file as UTF-8"):
        SubjectRepo.create(tmp_path / "c", subject, loads)
    (tmp_path / "u" / "agent.py").write_text(AGENT)
    SubjectRepo.create(tmp_path / "c", subject, loads)


def test_campaigns_inside_the_folder_are_not_copied(tmp_path: Path) -> None:
    subject = write_subject(tmp_path / "u")
    first = SubjectRepo.create(tmp_path / "u" / "c", subject, loads)
    (tmp_path / "u" / "c" / "notebook.sqlite").touch()
    assert SubjectRepo.create(tmp_path / "u" / "d", subject, loads).first == first.first


def test_the_judge_is_loaded_in_its_own_process(tmp_path: Path) -> None:
    for text, message in (("import os\nos._exit(3)", "loading them ended the process"), ("1 / 0", "ZeroDivisionError")):
        subject = write_subject(tmp_path / "u", judge=f"{JUDGE}\n{text}\n")
        with pytest.raises(ConfigError, match=rf"{tmp_path}/u/judge\.py.*{message}"):
            SubjectRepo.create(tmp_path / "c", subject, loads)
    first = os.getpid()
    judge = f"import os\nassert os.getpid() != {first}\n{JUDGE}"
    SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u", judge=judge), loads)


def test_a_missing_subject_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--subject .*: No such file or directory: give a subject\.toml"):
        read_subject(tmp_path / "subject.toml")


def test_a_subject_that_cannot_run(tmp_path: Path) -> None:
    broken = AGENT.replace("\n\ndef ask", "\n\nLIMIT = 1 / 0\n\n\ndef ask")
    with pytest.raises(ConfigError, match=r"the subject cannot run: .*ZeroDivisionError.*/u/agent\.py:8 in <module>"):
        SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u", agent=broken), unsafe=True)


@pytest.mark.needs("bubblewrap")
def test_the_sandbox_hides_the_judge(tmp_path: Path) -> None:
    target = tmp_path / "c" / "judge" / "held_out.jsonl"
    spying = f"{AGENT}\nopen({str(target)!r})\n"
    with pytest.raises(ConfigError, match=r"FileNotFoundError: .*held_out\.jsonl.*agent\.py:11"):
        SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u", agent=spying))
    mine = f"{AGENT}\nimport os\nopen('words.py').read()\nopen(os.environ['HOME'] + '/x', 'w').write('')\n"
    SubjectRepo.create(tmp_path / "d", write_subject(tmp_path / "u", agent=mine))


SPY = f"""{AGENT}
import os, pathlib, subprocess
for path in (*pathlib.Path("/proc").glob("[0-9]*/environ"), pathlib.Path("/etc/shadow")):
    try:
        text = path.read_bytes()
    except OSError:
        continue
    assert b"PROVIDER_KEY" not in text and path.name != "shadow", path
subprocess.Popen(["sleep", "98765.4321"], start_new_session=True)
"""


@pytest.mark.needs("bubblewrap")
def test_an_arm_reads_no_secret_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "secret")
    SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u", agent=SPY))
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [words for words in commands if b"98765.4321" in words]


def test_a_folder_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.research.campaign.subject_repo.MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="a campaign copies the subject's folder"):
        SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "u"), loads)


def test_a_moved_campaign_goes_on(repo: SubjectRepo, tmp_path: Path) -> None:
    commit = repo.commit(repo.first, SLOWER)
    shutil.move(repo.folder, tmp_path / "moved")
    moved = SubjectRepo(tmp_path / "moved", loads)
    assert moved.commit(moved.first, SLOWER) == commit
    assert moved.subject(commit).agent == str(tmp_path / "moved" / "arms" / commit / "agent.py:agent")
