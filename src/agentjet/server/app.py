"""`create_app` assembles the FastAPI application: routes, error handlers, and the `Host` check."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from agentjet import __version__
from agentjet.gateway import Gateway
from agentjet.server import error_handlers, inference, monitoring, routes
from agentjet.server.auth import Keys
from agentjet.server.deps import AppDeps
from agentjet.server.http import HostCheck, allowed_hosts
from agentjet.server.limits import Limits
from agentjet.server.server_lease import LEASE_FILE, RunSwitcher, ServerLease, SingleRun


def create_app(runs: Gateway | RunSwitcher, keys: Keys) -> FastAPI:
    """Returns the application of a gateway or of several runs. The caller starts and closes them."""
    if isinstance(runs, Gateway):
        runs = SingleRun(runs)
    server = runs.gateway.config.server
    app = _App(
        title="AgentJet",
        version=__version__,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        docs_url=None,
        redoc_url=None,
        # FastAPI's own traces would contain request paths, and thus episode keys.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.deps = AppDeps(runs, keys, ServerLease(server.data_dir / LEASE_FILE, keys.clock), Limits.of(server))
    app.include_router(inference.router)  # Routes are tried in this order: the most frequent ones come first.
    app.include_router(routes.router)
    app.include_router(monitoring.router)
    app.add_middleware(HostCheck, allowed=allowed_hosts(server))
    error_handlers.install(app)
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Removes FastAPI's default 422 from inference routes, which answer a malformed body with 400."""
        schema = super().openapi()
        for path, operations in schema["paths"].items():
            if error_handlers.INFERENCE_PATH.match(path):
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        return schema
