"""Logs of processes: one that grows without end is shortened to its end, and its writer goes on there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentjet.server import monitoring
from agentjet.server.monitoring import limit_process_logs, shorten_logs

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", ["serve.log", "logs/worker.log", "logs/worker-2.log", "logs/policy/rank-0.log"])
def test_a_log_without_end_is_shortened(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(monitoring, "KEPT_LOG_BYTES", 100)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    other = tmp_path / "journal.sqlite"
    other.write_bytes(b"x" * 2000)
    with path.open("ab", buffering=0) as written:
        for number in range(200):
            written.write(f"line {number:04}\n".encode())
            shorten_logs(tmp_path)
            assert path.stat().st_size <= 1000
    lines = path.read_text().splitlines()
    assert lines[0].startswith("[the log exceeded 1000 bytes") and "\0" not in path.read_text()
    last = [int(line.removeprefix("line ")) for line in lines[1:]]
    assert last == [*range(last[0], 200)] and len(last) >= 10
    assert other.stat().st_size == 2000


async def test_logs_are_shortened_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with its reason."""
    checks = []

    def failing(data_dir: Path) -> None:
        checks.append(data_dir)
        if len(checks) < 4:
            raise PermissionError("the folder of logs")

    monkeypatch.setattr(monitoring, "LOG_CHECK_SECONDS", 0.001)
    monkeypatch.setattr(monitoring, "shorten_logs", failing)
    limiter = asyncio.create_task(limit_process_logs(tmp_path))
    async with asyncio.timeout(30):
        while len(checks) < 6:
            await asyncio.sleep(0.001)
    limiter.cancel()
    assert caplog.text.count("could not be shortened") == 1 and "PermissionError: the folder of logs" in caplog.text
