"""An MCP server for the tests, with tools that work and tools that do not."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp_types import ImageContent

server = MCPServer("shop", instructions="Use the shop.", log_level="ERROR")
calls: list[str] = []


@server.tool()
def price(item: str) -> str:
    """Price of an item."""
    calls.append(item)
    if item == "nothing":
        raise ValueError("there is no such item")
    return f"{len(item) * 7} dollars"


@server.tool()
def count() -> str:
    return f"{len(calls)} calls, variable {os.environ.get('SHOP', 'unset')}, key {'OPENAI_API_KEY' in os.environ}"


@server.tool()
def picture() -> ImageContent:
    return ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")


@server.tool()
def long(number: int) -> str:
    return "x" * number


@server.tool()
def hang() -> str:
    time.sleep(600)
    return ""


@server.tool()
def crash() -> str:
    print("the shop burns", file=sys.stderr, flush=True)
    os._exit(3)


if "--broken" in sys.argv:
    sys.exit("the shop is closed")
if "--silent" in sys.argv:
    time.sleep(600)
if sys.argv[-1].startswith("--port="):
    server.run(transport="streamable-http", port=int(sys.argv[-1].removeprefix("--port=")))
else:
    server.run()
