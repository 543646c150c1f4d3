"""The control routes and commands of the processes: who may ask, and refusals by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.client import Swarm
from agentjet.compute.backend import Hosted, ProcessCompute
from agentjet.config import ServeConfig
from agentjet.errors import ConfigError, Forbidden, InvalidRequest
from agentjet.server.run_policies import waiting_for_process
from agentjet.types import PolicyId, ProcessStatus, SamplerBounds
from tests.server.serving import ADMIN, TOKEN, in_thread, serving


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cluster", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_status_and_scale(tmp_path: Path) -> None:
    with in_thread(serving(tmp_path / "data")) as (served, _):
        client, admin = ["--url", served.url, "--token", TOKEN], ["--url", served.url, "--token", ADMIN]
        assert run("status", *client).splitlines() == [
            "replica-0  sampling  version 0  0 completions  here",
            "samplers: 1 wanted, 5 completions run, 2 wait for a place",
        ]
        assert run("scale", "samplers=3", *admin).splitlines()[2].startswith("replica-2")
        assert "samplers: 2 of 2..8 wanted, 5 comp" in run("scale", "samplers = '2..8'", *admin)
        assert '"replica-1"' in run("status", "--json", *client)
        with Swarm(served.url, ADMIN) as swarm, pytest.raises(InvalidRequest, match=r"'8\.\.2' is not.*such as 2\.\.8"):
            swarm.scale("8..2")
        with pytest.raises(Forbidden):
            run("scale", "samplers=3", *client)
        with pytest.raises(InvalidRequest, match=r"samplers = 9: the cluster has 8 GPUs"):
            run("scale", "samplers=9", *admin)
        with pytest.raises(InvalidRequest, match=r"policy = 'other': name one of the policies"):
            run("scale", "samplers=2", "--policy", "other", *admin)
        for given in ("samplers=0", "samplers=1 2", "samplers=many", "samplers=2.5", "samplers"):
            with pytest.raises(InvalidRequest, match=r"such as 2\.\.8"):
                run("scale", given, *admin)
        with pytest.raises(ConfigError, match=r"'ranks=2': only samplers can be scaled, such as samplers=6"):
            run("scale", "ranks=2", *admin)


def test_the_status_names_the_process_that_a_policy_waits_for() -> None:
    def rank(state: str, *, is_ready: bool = True) -> ProcessStatus:
        return ProcessStatus("rank-0", "rank", state, is_ready=is_ready)

    def replica(number: int, state: str, *, is_ready: bool = True) -> ProcessStatus:
        return ProcessStatus(f"replica-{number}", "replica", state, is_ready=is_ready)

    starting, serving = replica(1, "starts", is_ready=False), replica(2, "samples")
    newcomer, loading = replica(3, "loads weights", is_ready=False), replica(2, "loads weights")
    expected = {
        "": [rank("computes gradients"), starting, serving, replace(loading, version=4)],
        "rank-0, which loads the model": [rank("loads the model", is_ready=False), starting],
        "a sampler replica: replica-1 starts": [rank("waits for a batch"), starting],
        "a sampler replica": [rank("waits for a batch")],
        "replica-2, which loads weights": [rank("waits for a batch"), newcomer, replace(loading, version=4)],
    }
    assert {waiting_for_process(processes): processes for processes in expected.values()} == expected
    assert waiting_for_process([ProcessStatus("worker", "worker", "running")]) == waiting_for_process([]) == ""


@pytest.mark.anyio
async def test_the_embedded_backend_has_no_replicas() -> None:
    compute = ProcessCompute(ServeConfig())
    assert compute.processes(PolicyId()) == [] and compute.samplers(PolicyId()) is None
    with pytest.raises(ConfigError, match="is not loaded"):
        await compute.scale(PolicyId(), SamplerBounds(2, 2))
    compute.policies[PolicyId()] = cast(Hosted, SimpleNamespace(samplers=None))
    with pytest.raises(ConfigError, match=r"compute.backend = 'cluster'"):
        await compute.scale(PolicyId(), SamplerBounds(2, 2))
