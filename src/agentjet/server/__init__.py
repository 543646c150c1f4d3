"""HTTP around the gateway: thin routes, dialects, authentication. `create_app(gateway, keys)`."""

from agentjet.server.app import create_app
from agentjet.server.auth import Keys

__all__ = ["Keys", "create_app"]
