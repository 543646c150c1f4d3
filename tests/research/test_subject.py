"""1. A subject defines its evaluation steps. Its code is that of its files and of all beside and below them. A changed
   file is named, also in the model's folder.
2. An error that every trial would have is refused by name before the first trial.
3. A run's record is on disk after every measurement, and gives curves and signals up to a step.
4. A shared server gets the complete job and no settings that need a new server. Arms cannot differ in those.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.cli.trial_servers import check_arms, job_of
from agentjet.errors import ConfigError
from agentjet.research.diagnosis import held_out_counts
from agentjet.research.journal import StudyFolder, StudyLog
from agentjet.research.models import Arm, Knob, Outcome, Study, Subject
from agentjet.research.trial_process import HeldOutScore, RunRecord
from tests.research.world import STUDY

CODE = """
from agentjet import Task
from beside import NAMES

def agent(task, episode):
    return 1.0

def train():
    return [Task(name) for name in NAMES]

def none():
    return []

def wrong():
    return ["a"]
"""


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    (tmp_path / "play.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("NAMES = ['a', 'b']\n")
    (tmp_path / "held.jsonl").write_text('{"id": "c"}\n')
    code = tmp_path / "play.py"
    return Subject("m", f"{code}:agent", f"{code}:train", str(tmp_path / "held.jsonl"), steps=9, evaluations=3)


def test_when_it_is_scored(subject: Subject) -> None:
    assert subject.evaluation_steps(1.0) == [0, 3, 6, 9]
    assert subject.evaluation_steps(1 / 3) == [0, 3]
    assert subject.evaluation_steps(0.5) == [0, 3, 4]
    assert subject.evaluation_steps(1 / 100) == [0, 1]


def test_code_is_the_files_and_what_lies_beside_them(subject: Subject, tmp_path: Path) -> None:
    with_hashes = subject.with_hashes()
    with_hashes.check_code()
    assert {Path(file).name for file in with_hashes.files} == {"play.py", "beside.py", "held.jsonl"}
    for file, content, said in (
        ("beside.py", "NAMES = ['a']\n", "changed"),
        ("held.jsonl", '{"id": "d"}\n', "changed"),
        ("other.py", "", "is new"),
        ("beside.py", None, "is gone"),
    ):
        path = tmp_path / file
        before = path.read_text() if path.exists() else None
        write(path, content)
        with pytest.raises(ConfigError, match=rf"subject\.code: {path} {said}\. .* restore"):
            with_hashes.check_code()
        write(path, before)
        with_hashes.check_code()


def test_code_below_the_agent_counts(subject: Subject, tmp_path: Path) -> None:
    helper = tmp_path / "helpers" / "rub.py"
    helper.parent.mkdir()
    helper.write_text("X = 1\n")
    with_hashes = subject.with_hashes()
    assert str(helper) in with_hashes.files
    helper.write_text("X = 2\n")
    with pytest.raises(ConfigError, match=rf"subject\.code: {helper} changed\. "):
        with_hashes.check_code()
    helper.write_text("X = 1\n")
    for folder, file in ((".hidden", "a.py"), ("__pycache__", "a.py"), ("env", "pyvenv.cfg"), ("study", "study.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
        (tmp_path / folder / "run.py").touch()
    with_hashes.check_code()


def test_a_model_in_a_folder_is_part_of_the_study(subject: Subject, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    weights, unseen = model / "model.safetensors", model / ".cache" / "etag"
    weights.write_bytes(b"0" * 9)
    with_hashes = replace(subject, model=str(model)).with_hashes()
    assert set(with_hashes.weights) == {str(weights)} and with_hashes.code == subject.with_hashes().code
    assert not subject.with_hashes().weights and "weights" not in subject.to_json(), "a model of the hub"
    unseen.touch()
    with_hashes.check_code()
    for content, said in ((b"1" * 9, "changed"), (None, "is gone")):
        weights.write_bytes(content) if content else weights.unlink()
        with pytest.raises(ConfigError, match=rf"subject\.model: {weights} {said}\. .* restore"):
            with_hashes.check_code()


def write(path: Path, content: str | None) -> None:
    """None deletes the file."""
    if content is None:
        path.unlink()
    else:
        path.write_text(content)


def test_files_of_a_package_are_called_by_the_package(subject: Subject) -> None:
    with_hashes = replace(subject, agent="agentjet.cli.serve:serve", tasks="agentjet.cli:train").with_hashes()
    assert with_hashes.code not in ("", subject.with_hashes().code)
    assert {"agentjet/cli/serve.py", "agentjet/cli/main.py"} < with_hashes.files.keys()
    assert not any(Path(file).is_absolute() for file in with_hashes.files if not file.endswith("held.jsonl"))


def test_tasks_and_agents_by_name(subject: Subject) -> None:
    assert [task.id for task in subject.training_tasks()] == ["a", "b"]
    assert [task.id for task in subject.held_out_tasks()] == ["c"]
    assert subject.load_arm_agent("any").__name__ == subject.load_evaluator().__name__ == "agent"
    for change, said in (
        ({"tasks": subject.tasks.replace(":train", ":none")}, "must return a list of `Task`s"),
        ({"tasks": subject.tasks.replace(":train", ":wrong")}, "must return a list of `Task`s"),
        ({"tasks": subject.tasks.replace(":train", ":gone")}, "there is no function 'gone'"),
        ({"held_out": "missing.jsonl"}, r"missing\.jsonl: No such file"),
    ):
        wrong = replace(subject, **change)
        with pytest.raises(ConfigError, match=said):
            wrong.training_tasks() and wrong.held_out_tasks()
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        replace(subject, agent="no_such_module:agent").with_hashes()
    with pytest.raises(ConfigError, match="or package"):
        replace(subject, agent="agent").load_arm_agent("any")


def test_a_study_keeps_its_subject(subject: Subject, tmp_path: Path) -> None:
    study = replace(STUDY, subject=subject)
    assert study.id != STUDY.id and "subject" not in STUDY.to_json()
    folder = StudyFolder(tmp_path / "study")
    folder.write(study, "# plan\n")
    assert folder.study() == study and Study.from_json(json.loads(json.dumps(study.to_json()))).id == study.id
    with StudyLog(folder.journal) as journal:
        journal.open_study(study)
    with pytest.raises(ConfigError, match="holds a started study"):
        folder.write(study, "")
    with pytest.raises(ConfigError, match=r"has no study\.json"):
        StudyFolder(tmp_path).study()


def test_a_study_of_before_files_were_noted_is_the_same_study(subject: Subject) -> None:
    study = replace(STUDY, subject=replace(subject, code="abc"))
    assert "files" not in study.to_json()["subject"] and Study.from_json(study.to_json()) == study
    noted = replace(STUDY, subject=subject.with_hashes())
    assert Study.from_json(noted.to_json()) == noted and noted.to_json()["subject"]["files"]


def test_a_record_is_taken_up(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "record.json")
    record.add_score(0, HeldOutScore(0.25, 0.1, -1.0, 4, 1))
    record.add_metrics({1: {"reward/mean": 0.5, "loss": math.nan}, 3: {"reward/mean": 0.75}})
    record.add_score(3, HeldOutScore(0.5, 0.1, 0.0, 4, 2))
    again = RunRecord(tmp_path / "record.json")
    assert again.scorings == {0: (0.25, 0.1, -1.0, 4, 1), 3: (0.5, 0.1, 0.0, 4, 2)}
    assert (again.curve(2), again.curve(3)) == ((0.25,), (0.25, 0.5))
    signals = {"loss": (None, None, None), "reward/mean": (0.5, None, 0.75)}
    assert again.signals(3) == signals | {"held_out/plays": (None, None, 4), "held_out/failed": (None, None, 2)}
    assert again.signals(1)["reward/mean"] == (0.5,)
    ended = Outcome("t", "completed", 0.5, signals=again.signals(3))
    assert held_out_counts([ended, ended, Outcome("u", "completed", 0.5)]) == (8, 4)


@pytest.mark.parametrize(
    "arm", [Arm("b", {"model.dtype": "float32"}), Arm("b", {}, (Knob("sampler.cache_tokens", (1, 2)),))]
)
def test_arms_that_differ_in_what_a_server_of_others_keeps(arm: Arm) -> None:
    check_arms(replace(STUDY, arms=(Arm("a", {"job.optimizer.lr": 0.1}),), hypotheses=()))
    with pytest.raises(ConfigError, match=r"arm 'b': (model\.dtype|sampler\.cache_tokens) .* omit --server"):
        check_arms(replace(STUDY, arms=(Arm("a"), arm), hypotheses=()))


def test_what_a_server_of_others_is_given() -> None:
    job = job_of({"model.name": "m", "model.threads": 1, "sampler.cache_tokens": 512, "job.optimizer.lr": 0.5})
    assert job["optimizer"]["lr"] == 0.5 and job["group_size"] == 8  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"model\.lora\.rank = 4 cannot be set on a running server"):
        job_of({"model.lora.rank": 4})
    with pytest.raises(ConfigError, match="group_size"):
        job_of({"job.group_size": 1})
