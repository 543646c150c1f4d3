"""HTTP around the gateway: control routes, dialects, authentication. Entry point: `create_app(gateway, keys)`."""

from agentjet.server.app import create_app
from agentjet.server.auth import Keys

__all__ = ["Keys", "create_app"]
