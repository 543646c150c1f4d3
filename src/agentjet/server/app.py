"""`create_app`: the gateway with HTTP around it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from agentjet import __version__
from agentjet.gateway import Gateway
from agentjet.server import control, health, inference, leasing, problems, versions
from agentjet.server.auth import Keys
from agentjet.server.hosts import HostCheck, allowed_hosts
from agentjet.server.lease import FILE, Lease
from agentjet.server.limits import Limits
from agentjet.server.runs import OneRun, Runs
from agentjet.server.wiring import Wiring


def create_app(runs: Gateway | Runs, keys: Keys) -> FastAPI:
    """The application of a gateway, or of several runs. It does not start or close them: whoever made them does."""
    if isinstance(runs, Gateway):
        runs = OneRun(runs)
    server = runs.gateway.config.server
    app = _App(
        title="AgentJet",
        version=__version__,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        docs_url=None,
        redoc_url=None,
        # Traces of the framework's own would carry request paths, and so the keys in them.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.wiring = Wiring(runs, keys, Lease(server.data_dir / FILE, keys.clock), Limits.of(server))
    app.include_router(inference.router)  # Tried one by one, in this order: what is asked most comes first.
    app.include_router(control.router)
    app.include_router(leasing.router)
    app.include_router(versions.router)
    app.include_router(health.router)
    app.add_middleware(HostCheck, allowed=allowed_hosts(server))
    problems.install(app)
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's document without the 422 it takes for granted: inference routes answer a malformed body with
        400.
        """
        schema = super().openapi()
        for path, operations in schema["paths"].items():
            if problems.INFERENCE_PATH.match(path):
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        return schema
