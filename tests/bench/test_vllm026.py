"""The layer for vLLM 0.26, as far as it works without vLLM. Its docstring has the command of the tests with one.

1. versions change between the outputs that were received before and after;
2. an interpreter with the layer runs the replica's own `sitecustomize`, too, also in processes that it starts;
3. `bench.gpu` takes it for vLLM 0.26 only, and says which vLLM it needs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from agentjet.compute.samplers import REPLICA_PATH
from bench import gpu
from bench.vllm026.sitecustomize import divided, update_weight_version

pytestmark = pytest.mark.anyio


async def test_a_version_begins_after_the_outputs_that_were_received_before() -> None:
    """Two outputs wait when the version changes, and two follow. One request has begun, and one begins during it."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    processor = SimpleNamespace(request_states={}, weight_version="1")
    engine = SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=queue), output_processor=processor)
    tokens: dict[str, list[str]] = {"early": [], "late": []}

    def begin(name: str) -> None:
        detokenizer = SimpleNamespace(num_output_tokens=lambda: len(tokens[name]))
        starts = [(processor.weight_version, 0)]
        processor.request_states[name] = SimpleNamespace(detokenizer=detokenizer, weight_version_starts=starts)

    begin("early")
    for output in ({"early": "ab"}, {"early": "c"}):
        queue.put_nowait(output)
    await update_weight_version(engine, "2")
    queue.put_nowait({"early": "d", "late": "xy"})
    await update_weight_version(engine, "3")
    queue.put_nowait({"early": "e", "late": "z"})
    get = divided(queue.get)
    for number in range(4):
        for name, new in (await get()).items():
            tokens[name] += new
        if number == 0:
            begin("late")
    assert processor.request_states["early"].weight_version_starts == [("1", 0), ("2", 3), ("3", 4)]
    assert processor.request_states["late"].weight_version_starts == [("1", 0), ("2", 0), ("3", 2)]
    assert processor.weight_version == "3" and queue.empty()


PROGRAM = """
import os, subprocess, sys

def layers():
    return [one.__name__ for one in sys.meta_path if getattr(one, "__name__", "") in ("BeforeEngine", "ServersCopy")]

print(*layers(), "AGENTJET_PARENT" in os.environ)
if len(sys.argv) < 2:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_an_interpreter_with_the_layer_runs_the_next_one_too(tmp_path: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPLICA_PATH), "VLLM026_PYTHON": sys.executable}
    line = [gpu.OLDER_VLLM, tmp_path / "program.py"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ServersCopy BeforeEngine True"] * 2, done.stderr


VERSIONS: dict[str, tuple[str | None, str | None, str]] = {
    "no interpreter": (None, None, "there is none"),
    "no Python": ("/a/python", None, "/a/python has none"),
    "no vLLM": ("/a/python", "", "/a/python has none"),
    "too old": ("/a/python", "0.25.1", "/a/python has 0.25.1"),
    "between": ("/a/python", "0.31.0", "/a/python has 0.31.0"),
    "the older one": ("/a/python", "0.26.0+cu130", ""),
    "the older one by name": (str(gpu.OLDER_VLLM), "0.26.0", ""),
    "ours": ("/a/python", "0.32.0", ""),
    "newer": ("/a/python", "1.0.0rc1", ""),
}
"""By case: the interpreter of the samplers, its vLLM, and the fault."""


@pytest.mark.parametrize("case", VERSIONS)
def test_the_interpreter_fits_to_its_vllm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    python, version, fault = VERSIONS[case]
    monkeypatch.setenv("VLLM026_PYTHON", "")
    monkeypatch.setattr(gpu, "sampler_python", lambda: python)
    monkeypatch.setattr(gpu, "vllm_version", lambda _: version)
    if fault:
        with pytest.raises(LookupError, match=rf"{fault}: run `agentjet cluster install`.* vllm==0\.26\.0 does"):
            gpu.replica_python()
        return
    is_older = "older" in case
    assert gpu.replica_python() == (str(gpu.OLDER_VLLM) if is_older else python, version)
    assert os.environ["VLLM026_PYTHON"] == ("/a/python" if case == "the older one" else "")
