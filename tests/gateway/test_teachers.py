"""A teacher that cannot grade the tokens of a policy is refused before the first episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.config import JobConfig
from agentjet.errors import ConfigError
from agentjet.gateway.run_policies import check_model
from agentjet.recipes.registry import make_recipe
from tests.tiny import make_model_info


def job_of(teacher: Path | str) -> JobConfig:
    return JobConfig(recipe=make_recipe({"name": "distill", "teacher": str(teacher)}))


def test_a_teacher_is_a_folder_with_the_tokenizer_of_the_policy(tmp_path: Path) -> None:
    info = make_model_info(tmp_path / "tokenizer")
    for missing in ("", tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="is not the folder of a model on this machine"):
            check_model(job_of(missing), info)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing or damaged \(FileNotFoundError"):
        check_model(job_of(teacher), info)
    with pytest.raises(ConfigError, match="is missing or damaged"):  # Both folders lack it.
        check_model(job_of(teacher), replace(info, tokenizer_path=str(teacher)))
    for damaged in (b'{"model": ', b"\xff", b"[]", b'{"model": {}, "added_tokens": []}'):
        (teacher / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is missing or damaged"):
            check_model(job_of(teacher), info)
    tokenizer = json.loads((Path(info.tokenizer_path) / "tokenizer.json").read_text())
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_model(job_of(teacher), info)
    tokenizer["added_tokens"][0]["id"] += 1
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        check_model(job_of(teacher), info)
