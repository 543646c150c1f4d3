"""A shop as an MCP server on standard input and output: `python examples/mcp_tools/server.py`.

Prices and stocks are numbers that a model cannot know. They follow from a hash of the item, so nothing is stored.
"""

import hashlib

from mcp.server import MCPServer

COLOUR_NAMES = """
amber azure beige black blue bronze brown copper coral cream crimson gold gray green indigo ivory jade lemon
lilac lime maroon mint navy olive orange peach pink plum purple red rose ruby silver tan teal violet white yellow"""
THING_NAMES = """
apron basket bell belt bench blanket boat book boot bottle bowl box brush bucket button candle carpet chain
chair clock coat cup curtain desk door drum fan flag fork frame glove hammer hat kettle key kite knife ladder lamp lock
mirror mug needle oven pan pen piano pillow pipe plate pot purse ring rope rug saddle scarf shelf shirt shoe sofa spoon
stool table tent tie towel toy tray vase violin wagon wallet whistle window"""
COLOURS, THINGS = COLOUR_NAMES.split(), THING_NAMES.split()

server = MCPServer("shop", log_level="ERROR")


def number(column: str, item: str) -> int:
    """A number from 10 to 999, the same each time. Raises `ValueError` for an item that the shop does not have."""
    colour, _, thing = item.partition(" ")
    if colour not in COLOURS or thing not in THINGS:
        raise ValueError(f"there is no {item}")
    digest = hashlib.blake2b(f"{column}/{item}".encode(), digest_size=4).digest()
    return 10 + int.from_bytes(digest, "big") % 990


@server.tool()
def price(item: str) -> str:
    """Price of an item in dollars."""
    return f"{number('price', item)} dollars"


@server.tool()
def stock(item: str) -> str:
    """Number of pieces of an item in stock."""
    return f"{number('stock', item)} pieces"


if __name__ == "__main__":
    server.run()
