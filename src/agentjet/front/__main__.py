"""Starts a front: see `agentjet.front.process`."""

import asyncio

from agentjet.front.process import serve

asyncio.run(serve())
