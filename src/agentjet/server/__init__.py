"""HTTP around the gateway: control routes, dialects, authentication. Entry point: `create_app(runs, keys)`."""

from __future__ import annotations

from fastapi import FastAPI

from agentjet.gateway.runs import Runs
from agentjet.server import inference, page, routes
from agentjet.server.access import ServedRuns
from agentjet.server.auth import Keys
from agentjet.server.requests import RunMiddleware, allowed_hosts, new_app

__all__ = ["Keys", "create_app"]


def create_app(runs: Runs, keys: Keys) -> FastAPI:
    """Returns the application of the runs. The caller starts and closes them. `keys` are those of the default run."""
    served = ServedRuns(runs, keys)
    app = new_app(
        served.default,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        root_path_in_servers=False,  # A run that somebody used would appear in everybody's /openapi.json.
    )
    # Routes are tried in this order: the most frequent ones come first. They are shared, because `include_router` would
    # build all of them again at the first request.
    routers = (routes.router, routes.records, routes.sessions, routes.operations)
    for router in (inference.router, *routers, page.router):
        app.routes.extend(router.routes)
    app.add_middleware(RunMiddleware, enter=served.enter, allowed=allowed_hosts(runs.default.config.server))
    return app
