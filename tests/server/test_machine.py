"""The machine of the server, for people.

1. The route has cores, load and memory of this machine; a second request within seconds has the same measurement.
2. Lines of `nvidia-smi` are read; one without a figure is left out.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from agentjet.protocol import GpuView
from agentjet.server.monitoring import read_gpu
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


async def test_the_route_measures_this_machine(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served:
        first, second = [(await served.http.get("/swarm/v1/machine")).json() for _ in range(2)]
        assert first == second
        assert first["cores"] == psutil.cpu_count() and 0 <= first["cpu"] <= 1
        assert 0 < first["memory_used"] < first["memory_total"] == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("NVIDIA H100, 87, 1024, 81559", ("NVIDIA H100", 0.87, 1024 * 2**20, 81559 * 2**20)),
        ("A, B, 0, 0, 16", ("A, B", 0.0, 0, 16 * 2**20)),
        ("MIG, [N/A], 10, 20", None),
        ("", None),
        ("no devices were found", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, gpu: tuple[str, float, int, int] | None) -> None:
    fields = ("name", "load", "memory_used", "memory_total")
    assert read_gpu(line) == (None if gpu is None else GpuView(**dict(zip(fields, gpu, strict=True))))
