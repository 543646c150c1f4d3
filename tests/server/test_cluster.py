"""The control routes and commands of the processes: who may ask, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentjet.cli.cluster import _samplers
from agentjet.cli.main import app
from agentjet.compute.embedded import EmbeddedCompute
from agentjet.config import ServeConfig
from agentjet.errors import ConfigError, Forbidden, InvalidRequest
from agentjet.types import PolicyId
from tests.server.serving import ADMIN, TOKEN, in_thread, serving


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cluster", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_status_and_scale(tmp_path: Path) -> None:
    with in_thread(serving(tmp_path / "data")) as (served, _):
        client, admin = ["--url", served.url, "--token", TOKEN], ["--url", served.url, "--token", ADMIN]
        assert run("status", *client) == "replica-0  sampling  version 0  0 completions  here\n"
        assert run("scale", "samplers=3", *admin).splitlines()[2].startswith("replica-2")
        assert '"replica-2"' in run("status", "--json", *client)
        with pytest.raises(Forbidden):
            run("scale", "samplers=3", *client)
        with pytest.raises(InvalidRequest, match=r"samplers = 9: the cluster has 8 GPUs"):
            run("scale", "samplers=9", *admin)
        with pytest.raises(InvalidRequest, match=r"policy = 'other': name one of the policies"):
            run("scale", "samplers=2", "--policy", "other", *admin)


@pytest.mark.parametrize("given", ["samplers=0", "samplers=many", "samplers=2.5", "ranks=2", "samplers"])
def test_what_cannot_be_scaled(given: str) -> None:
    with pytest.raises(ConfigError, match=r"samplers|KEY=VALUE"):
        _samplers([given])


@pytest.mark.anyio
async def test_the_embedded_backend_has_no_replicas() -> None:
    compute = EmbeddedCompute(ServeConfig())
    assert compute.processes(PolicyId()) == []
    with pytest.raises(ConfigError, match=r"compute.backend = 'cluster'"):
        await compute.scale(PolicyId(), 2)
