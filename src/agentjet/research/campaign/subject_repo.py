"""`SubjectRepo`: the commits of a campaign's subject, in a private git repository; and its description, subject.toml.

    CAMPAIGN/subject/     the repository. Its first commit is the subject as the user gave it
    CAMPAIGN/judge/       a copy of the user's folder, with the held-out tasks: read by the judge's process only
    CAMPAIGN/arms/COMMIT/ the files of a commit, in which its agent runs
    CAMPAIGN/source.json  hashes of the copies, and the user's folder

An intervention becomes a commit. A change of settings is an edit of `[settings]` in subject.toml; everything else is a
unified diff. Equal interventions on equal commits are equal commits, on every machine. Refused are interventions that
do not apply or import, change nothing, or touch the judge's part.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Container, Mapping, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from agentjet.client.agent_source import file_and_function, hash_of, one_line
from agentjet.config.loader import leaves, parse_config
from agentjet.errors import ConfigError
from agentjet.research import arm_process
from agentjet.research.arm_process import ArmFailed, ArmOrder
from agentjet.research.campaign.strategist import Intervention
from agentjet.research.journal import write_whole
from agentjet.research.models import (
    Address,
    Refused,
    Setting,
    Subject,
    Trial,
    digest_of,
    files_below,
    refuse,
    unknown_key,
)
from agentjet.research.scheduler import work_of
from agentjet.research.swarm_runner import check_changes
from agentjet.research.trial_process import TaskJudge
from agentjet.types import Task

# ---- subject.toml ----------------------------------------------------------------------------------------------------

REQUIRED = {
    "model": "smollm2-135m",
    "agent": "agent.py:agent",
    "tasks": "tasks.jsonl",
    "held_out": "held_out.jsonl",
    "evaluator": "judge.py:score",
}
"""Examples by key."""
OPTIONAL = (
    *("reward", "deployed", "hidden", "shown", "best", "worst", "readable", "equal", "steps", "evaluations"),
    *("repeats", "concurrency", "floor", "patience", "settings"),
)
KEYS = (*REQUIRED, *OPTIONAL)
"""The keys of subject.toml, which are fields of `Subject`. Names of files are relative to its folder."""
CODE = ("agent", "tasks", "reward", "deployed")
"""Keys that name files of an arm."""
ARM_KEYS = frozenset({"agent", "tasks", "reward", "concurrency", "settings"})
"""Keys that an intervention may change. The others are the judge's."""
METRIC = "score of the judge on the held-out tasks, at the last step"
HIDDEN = ["answer"]
RESERVED = {*sys.stdlib_module_names, "agentjet", "sitecustomize", "usercustomize"}
"""Modules that a subject may not replace, besides those of installed packages."""
NAMED_CODE = ("recipe", "loss", "name")
"""Last parts of the settings that name a recipe or a loss, perhaps by an import path."""
DEFAULTS = {"hidden": HIDDEN, "concurrency": 16}
"""Where they are not those of `Subject`."""


def read_subject(path: Path) -> Subject:
    """The subject of a file that a user wrote. Raises `ConfigError`."""
    try:
        given = parse_subject(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--subject {path}: {getattr(error, 'strerror', error)}: give a subject.toml") from None
    return resolved(given, path.parent.absolute())


def parse_subject(text: str, name: str) -> Subject:
    """Raises `ConfigError` with the first wrong key, its value and the way out."""
    try:
        content = tomllib.loads(text)
        for key in content.keys() - set(KEYS):
            raise ConfigError(unknown_key(key, key, KEYS))
        for key in REQUIRED.keys() - content.keys():
            raise ConfigError(f"{key}: is required; add a line such as {key} = {REQUIRED[key]!r}")
        if isinstance(content.get("settings"), dict):
            content["settings"] = dict(leaves(content["settings"]))
        numbers = {**content, **content["settings"]} if isinstance(content.get("settings"), dict) else content
        for key, value in numbers.items():
            refuse(isinstance(value, float) and not math.isfinite(value), f"{key} = {value}: give a finite number")
        if isinstance(content.get("steps"), int):
            content.setdefault("evaluations", max(1, min(4, content["steps"])))
        content.setdefault("floor", content.get("worst", 0.0))
        return Subject.from_json({**DEFAULTS, **content, "judged": True})
    except (ConfigError, ValueError, RecursionError) as wrong:
        raise ConfigError(f"{name}: {wrong}") from None


def resolved(given: Subject, folder: Path) -> Subject:
    """With the model as an absolute path if it is a folder. Raises `ConfigError` for a file that is not there, and for
    held-out tasks in a file that arms must read.
    """
    for key in ("agent", "tasks", "held_out", "evaluator", "reward", "deployed"):
        named = getattr(given, key)
        if not named and key in ("reward", "deployed"):
            continue
        file, function = file_and_function(named)
        is_tasks = key in ("tasks", "held_out") and named.endswith(".jsonl")
        wrong = not is_tasks and not (file.endswith(".py") and function.isidentifier())
        refuse(wrong, f"{key} = {named!r}: give FILE.py:FUNCTION{' or FILE.jsonl' * ('ta' in key)}")
        place = (folder / file).resolve()
        wrong = Path(file).is_absolute() or not place.is_relative_to(folder.resolve()) or not place.is_file()
        refuse(wrong, f"{key} = {named!r}: there is no file {file!r} in {folder}: name one of that folder")
        refuse(
            key != "held_out" and file == file_of(given.held_out),
            f"held_out = {given.held_out!r}: {key} is in the same file, which arms read: move the held-out tasks to a "
            "file that holds nothing else",
        )
    model = folder / given.model
    readable = tuple(str((folder / place).resolve()) for place in given.readable)
    return replace(given, model=str(model.resolve()) if model.is_dir() else given.model, readable=readable)


def steps_as(given: Subject, first: Subject) -> int:
    """Steps of a full run, so that it learns from as many episodes as one of the first commit."""
    if first.equal == "steps":
        return first.steps
    return max(1, round(work_of(first.settings, first.steps) / work_of(given.settings, 1)))


def keys_of(given: Subject) -> dict[str, Any]:
    """The keys of subject.toml that arms may change: settings by their dotted names, and others."""
    return {**given.settings, **{key: getattr(given, key) for key in ARM_KEYS - {"settings"}}}


TABLE = re.compile(r"\s*\[([^\[\]]+)\]")
ENTRY = re.compile(r"""(\s*([\w.'" -]+?)\s*=\s*)(.*?)(\s+#[^'"]*)?$""")


def respelled(text: str, before: Subject, after: Subject) -> str:
    """The user's subject.toml with the values that differ. Other lines stay, if each of these values has a line."""
    old, new = keys_of(before), keys_of(after)
    for name in sorted(name for name in {*old, *new} if old.get(name) != new.get(name)):
        text = with_value(text, name if name in ARM_KEYS else f"settings.{name}", new.get(name))
    try:
        given = parse_subject(text, SUBJECT)
    except ConfigError:
        return flat_toml(after)
    return text if keys_of(given) == new else flat_toml(replace(after, model=given.model, readable=given.readable))


def with_value(text: str, name: str, value: Any) -> str:
    """A TOML file with a value under a dotted name; without that line for None."""
    lines, table, tables = text.splitlines(), "", {"": 0}
    for place, line in enumerate(lines):
        if header := TABLE.match(line):
            table = re.sub(r"""[\s'"]""", "", header[1]) + "."
            tables[table] = place + 1
        elif (entry := ENTRY.match(line)) and table + re.sub(r"""[\s'"]""", "", entry[2]) == name:
            lines[place : place + 1] = [] if value is None else [f"{entry[1]}{json.dumps(value)}{entry[4] or ''}"]
            return "\n".join(lines) + "\n"
    outer, _, key = name.partition(".")
    if not key:
        first = next((place for place, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
        lines.insert(first, f"{outer} = {json.dumps(value)}")
    elif f"{outer}." in tables:
        lines.insert(tables[f"{outer}."], f'"{key}" = {json.dumps(value)}')
    else:
        lines += ["", f"[{outer}]", f'"{key}" = {json.dumps(value)}']
    return "\n".join(lines) + "\n"


def flat_toml(given: Subject) -> str:
    """subject.toml in one spelling per content: a key a line, and the settings by their dotted names."""
    lines = [f"{key} = {json.dumps(getattr(given, key))}" for key in KEYS if key != "settings"]
    settings = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in sorted(given.settings.items())]
    return "\n".join([*lines, "", "[settings]", *settings, ""])


# ---- the repository --------------------------------------------------------------------------------------------------

SUBJECT = "subject.toml"
MAX_BYTES = 32 << 20
"""Maximum size of a subject's folder. Weights stay where they are."""
MAX_NAME, MAX_PATH = 255, 1000
"""Bytes of a file's name, and characters of its path. Git takes longer ones, and a file system does not."""
MAX_CHANGED = 200
TEXT = (".py", ".toml", ".jsonl", ".json", ".md", ".txt")
"""Suffixes of files that proposers read and change."""
WHO = {
    "GIT_AUTHOR_NAME": "agentjet",
    "GIT_AUTHOR_EMAIL": "agentjet@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
}
ENVIRONMENT = {
    **WHO,
    **{name.replace("AUTHOR", "COMMITTER"): value for name, value in WHO.items()},
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""Neither the user's settings nor the time are part of a commit."""
SETTINGS = (f"core.hooksPath={os.devnull}", "core.autocrlf=false", "core.attributesFile=", "gc.auto=0")
SAFE = tuple(part for setting in SETTINGS for part in ("-c", setting))

Load = Callable[[ArmOrder], list[Task]]
"""Loads an arm's code and returns its training tasks. Raises `ArmFailed`."""


class SubjectRepo:
    """The commits of a campaign's subject. `open` and `create` make one."""

    def __init__(self, folder: Path, load: Load = arm_process.checked, *, unsafe: bool = False) -> None:
        """`unsafe`: load arms without a sandbox where none can be made."""
        self.folder, self._load, self._unsafe = folder.absolute(), load, unsafe
        source = json.loads((self.folder / "source.json").read_text(encoding="utf-8"))
        self.first: str = source["first"]
        """The commit of the subject as the user gave it."""
        self.user_folder = Path(source["folder"])
        self._given: str = source.get("subject", SUBJECT)
        """Name of the user's file."""
        self._files: Mapping[str, str] = source["files"]
        self._subjects: dict[str, Subject] = {}

    @classmethod
    def create(
        cls, folder: Path, subject: Path, load: Load = arm_process.checked, *, unsafe: bool = False
    ) -> SubjectRepo:
        """Copies the folder of the file `subject`, unless that was done. Raises `ConfigError` if it cannot run."""
        if not (folder / "source.json").exists():
            given = read_subject(subject)
            check_settings(given.settings)
            contents = read_folder(subject.parent.absolute(), Path(given.model))
            held_out = file_of(given.held_out)
            remove_parts(folder)  # left by a start that was killed
            write_files(contents, folder / "judge")
            contents[SUBJECT] = flat_toml(given).encode()
            write_files({name: content for name, content in contents.items() if name != held_out}, folder / "subject")
            git(folder / "subject", "init", "--quiet", "--initial-branch=subject")
            git(folder / "subject", "add", "--all", "--force")
            git(folder / "subject", "commit", "--quiet", "--allow-empty", "--message", "the subject as given")
            source = {
                "folder": str(subject.parent.absolute()),
                "subject": subject.name,
                "first": git(folder / "subject", "rev-parse", "HEAD").decode().strip(),
                "files": {name: hash_of({name: of}) for name, of in sorted(contents.items()) if name != SUBJECT},
            }
            write_whole(folder / "source.json", json.dumps(source))
            try:
                cls(folder, load, unsafe=unsafe).check_runs()
            except ConfigError:
                remove_parts(folder)
                raise
        return cls(folder, load, unsafe=unsafe)

    # ---- commits -----------------------------------------------------------------------------------------------------

    def commit(self, base: str, intervention: Intervention) -> str:
        """Returns the commit of an intervention on top of `base`. Raises `Refused` with the reason."""
        return self.arm(base, intervention.name, intervention.patch, intervention.changes)

    def arm(
        self,
        base: str,
        name: str,
        patch: str = "",
        changes: Setting = MappingProxyType({}),
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The commit of a change on top of `base`. `keys` of subject.toml were set by a person. Raises `Refused`."""

        def change(index: str) -> None:
            if patch:
                self._apply(patch, index)
            if changes or keys:
                given = parse_subject(self._git("show", f":{SUBJECT}", index=index), SUBJECT)
                named: dict[str, Any] = {**keys, "settings": {**given.settings, **changes}}
                self._add(SUBJECT, flat_toml(replace(given, **named)), index)

        return self._changed_commit(base, name, change, loads=bool(patch or keys), keys=keys.keys())

    def _changed_commit(
        self, base: str, name: str, change: Callable[[str], None], *, loads: bool, keys: Set[str] = frozenset()
    ) -> str:
        """The commit of a change of the index of `base`. `loads`: try if its code can be loaded. Raises `Refused`."""
        try:
            with TemporaryDirectory(dir=self.folder) as scratch:
                index = f"{scratch}/index"
                self._git("read-tree", base, index=index)
                change(index)
                tree = self._git("write-tree", index=index).strip()
            self._check_changes(base, tree, ARM_KEYS | keys)
        except ConfigError as error:
            raise Refused(str(error)) from None
        commit = self._git("commit-tree", tree, "-p", base, "-m", name).strip()
        accepted = f"refs/arms/{commit}"
        if not self._git("for-each-ref", accepted):
            if loads:
                self._loaded(commit)
            self._git("update-ref", accepted, commit)
        return commit

    def patch_of(self, commit: str) -> str:
        """The changes of a commit as a patch of the user's folder. Other lines of its subject.toml stay as they are."""
        text = (self.folder / "judge" / self._given).read_text(encoding="utf-8")
        first, after = self.described(self.first), self.described(commit)
        trees = []
        for of, shown in ((self.first, text), (commit, respelled(text, first, after))):
            with TemporaryDirectory(dir=self.folder) as scratch:
                index = f"{scratch}/index"
                self._git("read-tree", of, index=index)
                self._git("update-index", "--force-remove", SUBJECT, index=index)
                self._add(self._given, shown, index)
                trees.append(self._git("write-tree", index=index).strip())
        return self._git("diff", "--binary", "--full-index", *trees)

    def parts(self, base: str, whole: str) -> list[str]:
        """Names of what differs between two commits: settings and keys of subject.toml, and other files."""
        before, after = ({**self._files_of(commit), **keys_of(self.described(commit))} for commit in (base, whole))
        changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        return sorted(changed - {SUBJECT})

    def without(self, base: str, whole: str, part: str) -> str:
        """The commit of `whole` with one of its `parts` as in `base`. Raises `Refused` if it does not load."""
        given, first = self.described(whole), self.described(base)

        def change(index: str) -> None:
            if part in ARM_KEYS:
                self._add(SUBJECT, flat_toml(replace(given, **{part: getattr(first, part)})), index)
            elif part in given.settings or part in first.settings:
                kept = {name: value for name, value in given.settings.items() if name != part}
                before = {part: first.settings[part]} if part in first.settings else {}
                self._add(SUBJECT, flat_toml(replace(given, settings={**kept, **before})), index)
            elif known := self._git("ls-tree", base, "--", part).split():
                self._git("update-index", "--add", "--cacheinfo", f"{known[0]},{known[2]},{part}", index=index)
            else:
                self._git("update-index", "--force-remove", part, index=index)

        return self._changed_commit(whole, f"without {part}", change, loads=True)

    def files(self, commit: str) -> dict[str, str]:
        """Text files of a commit by path."""
        texts = {path: text_of(content) for path, content in self._files_of(commit).items()}
        return {path: text for path, text in texts.items() if text is not None}

    def worktree(self, commit: str) -> Path:
        """The folder with the files of a commit."""
        place = self.folder / "arms" / commit
        if not place.exists():
            with TemporaryDirectory(dir=self.folder) as scratch:
                made = Path(scratch) / "files"
                write_files(self._files_of(commit), made)
                place.parent.mkdir(exist_ok=True)
                try:
                    made.rename(place)
                except OSError:  # another thread was first
                    if not place.exists():
                        raise
        return place

    @property
    def rules(self) -> dict[str, Any]:
        """The fields of a `Question` that the subject gives: the judge's hash, its scale and the equal amount."""
        first = self.described(self.first)
        scale = f", as a share of its scale, {first.worst:g} to {first.best:g}"
        metric = METRIC if (first.worst, first.best) == (0, 1) else f"{METRIC}{scale}"
        return {"evaluator": digest_of(self._files), "equal": first.equal, "metric": metric}

    def subject(self, commit: str) -> Subject:
        """The subject of a commit, with the judge's part from the locked copy. Raises `ConfigError` if that changed."""
        self.check_judge()
        given, first = self.described(commit), self.described(self.first)
        place, judge, steps = self.worktree(commit), self.folder / "judge", steps_as(given, first)
        named: dict[str, Any] = {key: str(place / name) if (name := getattr(given, key)) else "" for key in CODE}
        named |= {key: str(judge / getattr(first, key)) for key in ("held_out", "evaluator")}
        return replace(
            first,
            **named,
            settings=given.settings,
            steps=steps,
            evaluations=min(first.evaluations, steps),
            concurrency=given.concurrency,
            readable=(str(place), *first.readable),
        )

    def subject_of(self, trial: Trial) -> Subject:
        """The subject of a trial whose arm is a commit."""
        return self.subject(trial.arm).varied(trial.setting)

    def num_tasks(self) -> int:
        """Number of the training tasks of the subject as given. Raises `Refused`."""
        return len(self._loaded(self.first))

    def judge_source(self) -> str:
        """Source of the evaluator's file."""
        return (self.folder / "judge" / file_of(self.described(self.first).evaluator)).read_text(encoding="utf-8")

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_judge(self) -> None:
        """Raises `ConfigError` if a file of the judge's copy changed."""
        if changed := self._changed(self.folder / "judge"):
            path = self.folder / "judge" / changed[0]
            raise ConfigError(f"{path} was changed, and the judge is fixed: restore it from {self.user_folder}")

    def changed_outside(self) -> list[str]:
        """Files of the user's folder that differ from the campaign's copy."""
        return self._changed(self.user_folder)

    def _changed(self, folder: Path) -> list[str]:
        return [
            name
            for name, expected in self._files.items()
            if not (folder / name).is_file() or hash_of({name: (folder / name).read_bytes()}) != expected
        ]

    def check_runs(self) -> None:
        """Loads the first commit's code and the judge's. Raises `ConfigError` with the first error and its line."""
        subject = self.subject(self.first)
        try:
            with ProcessPoolExecutor(1, get_context("fork")) as judge:
                held_out = judge.submit(checked_judge, subject).result()
            training = {(task.task_set, task.id) for task in self._load(self._order(subject, "check"))}
        except ArmFailed as error:
            raise ConfigError(self.as_given(f"the subject cannot run: {error}")) from None
        except BrokenProcessPool:
            text = f"evaluator = {subject.evaluator!r}, held_out = {subject.held_out!r}: loading them ended the process"
            raise ConfigError(self.as_given(text)) from None
        except ConfigError as error:
            raise ConfigError(self.as_given(str(error))) from None
        if held_out <= training:
            raise ConfigError(f"held_out: all {len(held_out)} held-out tasks are training tasks: hold out other tasks")

    def as_given(self, text: str) -> str:
        """The text with the user's names of the first commit's files and of the judge's."""
        for copy in (self.folder / "arms" / self.first, self.folder / "judge"):
            text = text.replace(f"{copy}{os.sep}", f"{self.user_folder}{os.sep}")
        return text

    def _check_changes(self, base: str, tree: str, keys: Set[str]) -> None:
        """Raises `Refused` for a forbidden change between a commit and a tree. `keys` of subject.toml may change."""
        before, after = self._files_of(base), self._files_of(tree)
        changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
        if not changed:
            raise Refused("it changes nothing: give another change")
        if len(changed) > MAX_CHANGED:
            raise Refused(f"it changes {len(changed):,} files: change at most {MAX_CHANGED}")
        first = self.described(self.first)
        for path in changed:
            if path in (file_of(first.evaluator), file_of(first.held_out)):
                raise Refused(f"{path}: the judge's files are fixed; an arm may copy the evaluator under another name")
            if path in after and any(part.startswith(".") for part in Path(path).parts):
                raise Refused(f"{path}: give a regular file whose name does not begin with a dot")
            if max(len(os.fsencode(part)) for part in Path(path).parts) > MAX_NAME or len(path) > MAX_PATH:
                raise Refused(f"{path[:80]}...: a name has at most {MAX_NAME} bytes, and a path {MAX_PATH} characters")
            name = path.split("/")[0].removesuffix(".py")
            if path not in before and (name in RESERVED or is_installed_module(name)):
                raise Refused(f"{path}: {name!r} is the name of an installed module: choose another name")
        given = parse_subject(after.get(SUBJECT, b"").decode("utf-8", "replace"), SUBJECT)
        for key in CODE:
            if (named := getattr(given, key)) and (file := file_of(named)) not in after:
                raise Refused(f"{key} = {named!r}: there is no file {file!r} in the subject's folder")
        for key in (key for key in KEYS if key not in keys):
            fixed, wanted = getattr(first, key), getattr(given, key)
            if fixed != wanted:
                raise Refused(f"{SUBJECT}: {key} = {wanted!r}: it is the judge's, and stays {fixed!r}")
        check_imports(given.settings, first.settings)
        check_settings(given.settings)

    def _loaded(self, commit: str) -> list[Task]:
        """Loads the agent and the training tasks in the sandbox. Raises `Refused`."""
        try:
            return self._load(self._order(self.subject(commit), commit))
        except ArmFailed as error:
            raise Refused(f"it does not load: {error}") from None

    def _order(self, subject: Subject, name: str) -> ArmOrder:
        nowhere = Address("http://127.0.0.1:9", "")
        subject = replace(subject, concurrency=1)
        return ArmOrder.of(subject, nowhere, self.folder / "homes" / name, unsafe=self._unsafe)

    # ---- git ---------------------------------------------------------------------------------------------------------

    def _apply(self, patch: str, index: str) -> None:
        """Applies a unified diff to an index. The line counts of its hunks may be wrong if it changes one file."""
        level = "-p1" if "\n+++ b/" in f"\n{patch}" or "\n--- a/" in f"\n{patch}" else "-p0"
        text = patch if patch.endswith("\n") else f"{patch}\n"
        problem = ""
        for recount in ((), ("--recount",)):
            try:
                self._git("apply", "--cached", "--whitespace=nowarn", *recount, level, "-", text=text, index=index)
                return
            except ConfigError as error:
                problem = problem or str(error)
        raise Refused(f"the patch does not apply: {problem}")

    def _add(self, name: str, text: str, index: str) -> None:
        blob = self._git("hash-object", "-w", "--stdin", text=text).strip()
        self._git("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}", index=index)

    def described(self, commit: str) -> Subject:
        """The subject.toml of a commit."""
        if commit not in self._subjects:
            self._subjects[commit] = parse_subject(self.files(commit)[SUBJECT], SUBJECT)
        return self._subjects[commit]

    def _files_of(self, tree: str) -> dict[str, bytes]:
        """The files of a commit or a tree by path. Raises `Refused` for a link."""
        content = git(self.folder / "subject", "archive", "--format=tar", tree)
        found = {}
        with tarfile.open(fileobj=BytesIO(content)) as archive:
            for member in archive:
                if member.issym():
                    raise Refused(f"{member.name}: give a regular file whose name does not begin with a dot")
                if (file := archive.extractfile(member)) is not None:
                    found[member.name] = file.read()
        return found

    def _git(self, *arguments: str, text: str = "", index: str = "") -> str:
        return git(self.folder / "subject", *arguments, text=text, index=index).decode("utf-8", "replace")


def on_branch(patch: str, folder: Path, branch: str, message: str) -> str:
    """Commits a patch of a folder on top of HEAD, as a new branch of its git repository, and returns the commit. The
    working tree and the index stay. Raises `ConfigError`.
    """

    def ours(*arguments: str, index: str = "", text: str = "") -> str:
        return git(folder, *arguments, index=index, text=text, dated=True).decode("utf-8", "replace").strip()

    def holds(*arguments: str) -> bool:
        try:
            return bool(ours(*arguments))
        except ConfigError:
            return False

    given = f"--branch {branch!r}"
    refuse(
        not holds("rev-parse", "--verify", "HEAD"), f"{folder}: its repository has no commit yet: make the first one"
    )
    refuse(not holds("check-ref-format", "--branch", branch), f"{given}: git takes no such name; give one like lr-fix")
    exists = holds("rev-parse", "--verify", "--quiet", f"refs/heads/{branch}")
    refuse(exists, f"{given}: there is such a branch in {folder}: give another name, or delete that one")
    changed = ours("--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", ".")
    refuse(bool(changed), f"{folder} has changes without a commit ({changed.split()[-1:]}): commit or stash them first")
    with TemporaryDirectory() as scratch:
        index, prefix = f"{scratch}/index", ours("rev-parse", "--show-prefix")
        ours("read-tree", "HEAD", index=index)
        try:
            ours("apply", "--cached", "--whitespace=nowarn", f"--directory={prefix}", "-", index=index, text=patch)
        except ConfigError as error:
            raise ConfigError(
                f"{folder} is not as it was when the campaign began ({one_line(error)}): check out the commit of that "
                "time, or apply confirmed.patch by hand"
            ) from None
        commit = ours("commit-tree", ours("write-tree", index=index), "-p", "HEAD", "-m", message)
    ours("branch", branch, commit)
    return commit


def git(
    folder: Path, *arguments: str, text: str = "", index: str = "", codes: Container[int] = (0,), dated: bool = False
) -> bytes:
    """Output of a git command in a folder, without the user's settings and hooks. `index` replaces the file of the
    repository's index. `dated`: commits are of now. Raises `ConfigError` for an exit code that is not in `codes`.
    """
    fixed = {name: value for name, value in ENVIRONMENT.items() if not (dated and name.endswith("_DATE"))}
    known = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), **fixed}
    known |= {"GIT_INDEX_FILE": index} if index else {}
    try:
        done = subprocess.run(
            ["git", *SAFE, *arguments], cwd=folder, env=known, input=text.encode(), capture_output=True
        )
    except FileNotFoundError:
        raise ConfigError("git was not found: install it, because an arm of a campaign is a commit") from None
    if done.returncode not in codes:
        error = done.stderr.decode("utf-8", "replace").strip().removeprefix("error: ")
        raise ConfigError(error or f"git {arguments[0]} failed")
    return done.stdout


def read_folder(folder: Path, model: Path) -> dict[str, bytes]:
    """The user's files by path, without the model's. Raises `ConfigError` for too many, and for unreadable text."""
    found: dict[str, bytes] = {}
    size = 0
    for path in sorted(files_below(folder)):
        if path.is_symlink() or not path.is_file() or path.is_relative_to(model):
            continue
        size += path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                f"{folder}: more than {MAX_BYTES >> 20} MB, up to {path.name}: a campaign copies the subject's folder, "
                "so keep only its agent, tasks and evaluator there"
            )
        content = found[path.relative_to(folder).as_posix()] = path.read_bytes()
        try:
            content.decode("utf-8" if path.suffix in TEXT else "latin-1")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: invalid UTF-8 at byte {error.start}: save the file as UTF-8") from None
    return found


def checked_judge(subject: Subject) -> set[tuple[str, str]]:
    """Loads the judge, in its own process. Returns names of the held-out tasks. Raises `ConfigError`."""
    held_out = subject.held_out_tasks()
    judge = TaskJudge(subject)
    try:
        json.dumps([task.payload for task in held_out], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"held_out = {subject.held_out!r}: payloads must be JSON: {error}") from None
    keys = {key for task in held_out if isinstance(task.payload, dict) for key in task.payload}
    for key, given, usual in (("hidden", subject.hidden, HIDDEN), ("shown", subject.shown, [])):
        for missing in sorted({*given} - keys - {*usual}):
            named = f"{key} = {[*given]}: no held-out task has {missing!r}"
            raise ConfigError(unknown_key(named, missing, [*keys]))
    for key in judge.telling_keys(held_out):
        raise ConfigError(
            f"held_out = {subject.held_out!r}: {key!r} holds the answer, because the judge pays its value: add it to "
            f"hidden (hidden = {json.dumps([*subject.hidden, key])}), so that no arm reads it; or, if prompts may show "
            "it, to shown"
        )
    return {(task.task_set, task.id) for task in held_out}


def remove_parts(folder: Path) -> None:
    """Removes what a start made."""
    (folder / "source.json").unlink(missing_ok=True)
    for name in ("subject", "judge", "arms", "homes"):
        shutil.rmtree(folder / name, ignore_errors=True)


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def text_of(content: bytes) -> str | None:
    """The text of a file; None if it is binary."""
    try:
        return None if b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def is_installed_module(name: str) -> bool:
    """True for the name of a module of an installed package."""
    spec = find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin is not None and "-packages" in spec.origin


def check_imports(settings: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raises `Refused` for code that a server would import and that the subject as given does not name."""
    plug_ins = entry_points(group="agentjet.recipes").names
    for name, value in settings.items():
        is_name = name.startswith("job.recipe") and name.rpartition(".")[2] in NAMED_CODE and isinstance(value, str)
        if is_name and value != first.get(name) and (":" in value or value in plug_ins):
            raise Refused(
                f"{name} = {value!r}: it is code outside of a sandbox, and the subject does not name it: give a "
                "built-in one"
            )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for settings that no server takes."""
    try:
        check_changes({name: value for name, value in settings.items() if name.startswith("model.name")})
        parse_config(dict(settings))
    except ConfigError as error:
        raise ConfigError(f"[settings]: {error}") from None


def file_of(named: str) -> str:
    return file_and_function(named)[0]
