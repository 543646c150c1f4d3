"""The progress of a download: growth of a folder, and nothing for a model that is on the disk."""

from __future__ import annotations

from pathlib import Path

from agentjet.compute.embedded.model import DownloadMeter
from agentjet.compute.embedded.model import reported_download as reported
from agentjet.types import SlowWork
from tests.fakes import Clock


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


def test_an_unknown_size_and_a_missing_folder(tmp_path: Path) -> None:
    meter = DownloadMeter("org/model", tmp_path / "blobs", Clock())
    assert meter.look(lambda: 0.0) is None
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "new").write_bytes(b"x" * 1_000_000)
    found = meter.look(lambda: 0.0)
    assert found is not None and (found.done, found.total) == (1.0, 0.0)


def test_a_hub_that_sends_nothing_is_named(tmp_path: Path) -> None:
    clock = Clock()
    meter = DownloadMeter("org/model", tmp_path, clock)
    clock.advance(9)
    assert meter.look(lambda: 0.0) is None
    clock.advance(1)
    found = meter.look(lambda: 0.0)
    assert found is not None and found.text == "downloading the model org/model (the hub has sent nothing yet)"


def test_a_model_on_the_disk_is_not_reported(tmp_path: Path) -> None:
    reports: list[SlowWork] = []
    for name in (str(tmp_path), "smollm2-135m", "default@40"):
        with reported(name, reports.append):
            pass
    assert not reports
