"""Starts a front: see `agentjet.fronts.process`."""

import asyncio

from agentjet.fronts.process import serve

asyncio.run(serve())
