"""Files of a model that AgentJet does not load unchanged. Pinned here:

1. custom code of a folder is never run, and nothing waits for an answer on standard input; if `transformers` supports
   the architecture, the folder loads;
2. files that lack weights are refused: version 0, the reference of a KL penalty, must be the same each time. Tied
   weights are not missing;
3. a broken folder of the cache is made again;
4. the progress of a download is the growth of a folder; a model that is on the disk has none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentjet.compute.model import DownloadMeter, reported_download
from agentjet.compute.policy import cached_folder
from agentjet.errors import ConfigError
from agentjet.types import SlowWork
from tests.compute.conftest import make_policy
from tests.fakes import Clock

AUTO_MAP = {"AutoConfig": "code.Strange", "AutoModelForCausalLM": "code.StrangeModel"}
CODE = "raise SystemExit('code of the folder was run')"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(tiny_folder, copied)
    (copied / "code.py").write_text(CODE)
    return copied


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_known_architecture_loads_without_the_code_it_brings(folder: Path) -> None:
    edit(folder / "config.json", auto_map=AUTO_MAP)
    assert make_policy(folder).info.num_parameters > 0


def test_an_unknown_architecture_is_refused_in_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> str:
        raise AssertionError(f"standard input was read: {prompt}")

    monkeypatch.setattr("builtins.input", asked)
    edit(folder / "config.json", auto_map=AUTO_MAP, model_type="strange")
    with pytest.raises(ConfigError, match=r"model\.name = .*: it needs custom code \(auto_map\), which AgentJet never"):
        make_policy(folder)


@pytest.mark.parametrize("lacks", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_files_that_lack_weights_are_refused(folder: Path, lacks: str) -> None:
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights, "tied, and not missing"
    del weights[lacks]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"its files lack 1 of the model's weights \({lacks}\)"):
        make_policy(folder)


def test_the_reference_is_version_0(folder: Path) -> None:
    policy = make_policy(folder)
    original = policy.original_weights()
    assert all(torch.equal(p, original[name]) for name, p in policy.trainable().items())


BREAK: dict[str, Callable[[Path], object]] = {
    "a file is missing": lambda folder: (folder / "weights").unlink(),
    "a file is short": lambda folder: (folder / "weights").write_text("w"),
    "all files are missing": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written = []

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("whole")
        (folder / "tokenizer").write_text("whole")
        written.append(folder)

    folder = cached_folder("model", write)
    assert cached_folder("model", write) == folder and len(written) == 1
    BREAK[how](folder)
    assert cached_folder("model", write) == folder and len(written) == 2
    assert (folder / "weights").read_text() == "whole"
    assert [file.name for file in folder.parent.iterdir()] == ["model"]


def test_growth_is_measured(tmp_path: Path) -> None:
    clock, asked = Clock(), list[int]()

    def total() -> float:
        asked.append(1)
        return 10e6

    (tmp_path / "old").write_bytes(b"x" * 2_000_000)
    meter = DownloadMeter("org/model", tmp_path, clock)
    assert meter.look(total) is None and not asked, "nothing was downloaded"
    for seconds, size in ((10, 2_000_000), (10, 4_000_000)):
        clock.advance(seconds)
        (tmp_path / "new.incomplete").write_bytes(b"x" * size)
        found = meter.look(total)
    assert found == SlowWork("downloading the model org/model", 4.0, 8.0, "MB", 20.0) and len(asked) == 1
    assert meter.look(total) is None


@pytest.mark.parametrize(
    ("seconds", "written", "text", "done"),
    [
        (9, 0, None, 0.0),
        (10, 0, "downloading the model org/model (the hub has sent nothing yet)", 0.0),
        (1, 1_000_000, "downloading the model org/model", 1.0),
    ],
)
def test_a_download_of_unknown_size(
    tmp_path: Path, seconds: float, written: int, text: str | None, done: float
) -> None:
    """The folder appears with the first byte. A hub that sends nothing is named."""
    clock = Clock()
    meter = DownloadMeter("org/model", tmp_path / "blobs", clock)
    assert meter.look(lambda: 0.0) is None
    clock.advance(seconds)
    if written:
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "new").write_bytes(b"x" * written)
    found = meter.look(lambda: 0.0)
    assert found == (text and SlowWork(text, done, 0.0, "MB", float(seconds)))


def test_a_model_on_the_disk_is_not_reported(tmp_path: Path) -> None:
    reports: list[SlowWork] = []
    for name in (str(tmp_path), "smollm2-135m", "default@40"):
        with reported_download(name, reports.append):
            pass
    assert not reports
