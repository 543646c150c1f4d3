"""The error that a log gives as the cause of a replica's end: the first one of its process, without the wrapper."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.compute.cluster import launcher
from agentjet.compute.cluster.launcher import cause_of

WORKER = "(Worker pid=8881) ERROR 11-24 04:56:03 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=8870) ERROR 11-24 04:56:03 [core.py:1512] "
WRAPPER = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
UNSUPPORTED = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [f"{WORKER}Traceback (most recent call last):", f"{WORKER}    raise RuntimeError(", WORKER + UNSUPPORTED,
             f"{CORE}RuntimeError: Worker failed with error 'Unsupported'", f"ERROR 11-24 04:56:03 [a.py:9] {WRAPPER}",
             "Traceback (most recent call last):", WRAPPER],
            UNSUPPORTED,
        ),
        (["Traceback:", "torch.OutOfMemoryError: CUDA out of memory  "], "torch.OutOfMemoryError: CUDA out of memory"),
        (["2026 INFO version 0: fetched", f"{CORE}EngineCore encountered a fatal error.", WRAPPER], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_cause(tmp_path: Path, lines: list[str], cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    earlier = "ValueError: of an earlier process\n"
    log.write_text(earlier + "\n".join(lines))
    assert cause_of(log, len(earlier)) == cause
    monkeypatch.setattr(launcher, "LOG_END_BYTES", 3)
    assert cause_of(log, 0) == ""
    assert cause_of(tmp_path / "gone", 0) == ""
