"""How gateway and worker talk: length-prefixed msgpack over the worker's standard input and output. No torch."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, BinaryIO

import msgpack

_LENGTH = struct.Struct("<Q")

Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Frame | None:
    """The next frame of a blocking stream; None at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(header)[0])
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


async def read_async(stream: asyncio.StreamReader) -> Frame | None:
    """The next frame of an asyncio stream; None at its end, however it ended."""
    try:
        header = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame
