"""`create_app` assembles the FastAPI application: routes, error handlers, the `Host` check and the paths of runs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from agentjet import __version__
from agentjet.gateway.runs import Runs
from agentjet.server import error_handlers, inference, monitoring, routes
from agentjet.server.auth import Keys
from agentjet.server.http import HostCheck, RunPaths, allowed_hosts
from agentjet.server.limits import Limits
from agentjet.server.runs import ServedRuns


def create_app(runs: Runs, keys: Keys) -> FastAPI:
    """Returns the application of the runs. The caller starts and closes them. `keys` are those of the default run."""
    server = runs.default.config.server
    served = ServedRuns(runs, keys, Limits.of(server))
    app = _App(
        title="AgentJet",
        version=__version__,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        docs_url=None,
        redoc_url=None,
        root_path_in_servers=False,  # A run that somebody used would appear in everybody's /openapi.json.
        # FastAPI's own traces would contain request paths, and thus episode keys.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.deps = served.default
    app.include_router(inference.router)  # Routes are tried in this order: the most frequent ones come first.
    app.include_router(routes.router)
    app.include_router(monitoring.router)
    app.add_middleware(RunPaths, runs=served)
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
