"""`create_app` assembles the FastAPI application: routes, error handlers, the `Host` check and the paths of runs."""

from __future__ import annotations

from fastapi import FastAPI

from agentjet import __version__
from agentjet.gateway.runs import Runs
from agentjet.server import inference, monitoring, page, records, routes, sessions
from agentjet.server.auth import Keys
from agentjet.server.error_handlers import HANDLED, respond_to_error
from agentjet.server.http import RunMiddleware, allowed_hosts
from agentjet.server.limits import Limits
from agentjet.server.runs import ServedRuns


def create_app(runs: Runs, keys: Keys) -> FastAPI:
    """Returns the application of the runs. The caller starts and closes them. `keys` are those of the default run."""
    server = runs.default.config.server
    served = ServedRuns(runs, keys, Limits.of(server))
    app = FastAPI(
        title="AgentJet",
        version=__version__,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        docs_url=None,
        redoc_url=None,
        root_path_in_servers=False,  # A run that somebody used would appear in everybody's /openapi.json.
        # FastAPI's own traces would contain request paths, and thus episode keys.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        exception_handlers=dict.fromkeys(HANDLED, respond_to_error),
    )
    app.state.deps = served.default
    # Routes are tried in this order: the most frequent ones come first. They are shared, because `include_router` would
    # build all of them again at the first request.
    for module in (inference, routes, records, sessions, monitoring, page):
        app.routes.extend(module.router.routes)
    app.add_middleware(RunMiddleware, runs=served, allowed=allowed_hosts(server))
    return app
