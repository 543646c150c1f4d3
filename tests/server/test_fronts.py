"""`FrontProcesses`: the addresses that agents get. `tests/e2e/test_fronts.py` has the processes."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest

from agentjet.compute.backend import ProcessCompute
from agentjet.config import ServeConfig
from agentjet.front.http import listen
from agentjet.fronts.supervision import FrontProcesses


@pytest.mark.parametrize(
    ("front_url", "asked", "address"),
    [
        ("", "http://127.0.0.1:8400/", "http://127.0.0.1:{port}"),
        ("", "https://box.example:8400/runs/other/", "https://box.example:{port}"),
        ("", "https://box.example/", "https://box.example:{port}"),
        ("", "http://[::1]:8400/", "http://[::1]:{port}"),
        ("", "http://[::1]/", "http://[::1]:{port}"),
        ("https://agents.example/f{front}", "http://127.0.0.1:8400/", "https://agents.example/f1"),
        ("https://agents.example/f{front}/", "http://127.0.0.1:8400/", "https://agents.example/f1"),
        ("http://box{front}.example:80", "http://127.0.0.1:8400/", "http://box1.example:80"),
    ],
)
def test_addresses(front_url: str, asked: str, address: str) -> None:
    settings = {"server": {"fronts": 2, "front_url": front_url}, "compute": {"backend": "cluster"}}
    config, compute = ServeConfig.model_validate(settings), cast(ProcessCompute, SimpleNamespace())
    with closing(listen("127.0.0.1", 0)) as first, closing(listen("127.0.0.1", 0)) as second:
        fronts = FrontProcesses(config, compute, [first, second], time.time)
        assert fronts.address(1, asked) == address.replace("{port}", str(second.getsockname()[1]))
