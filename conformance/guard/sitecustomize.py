"""Imported by every client's interpreter before anything else: only this machine can be reached.

A connection that leaves it fails as if the network were down, and is written to the file `CONFORMANCE_REACHED`.
"""

import os
import sys

LOCAL = {"127.0.0.1", "::1", "localhost", "", "0.0.0.0", "::"}
FILE = os.environ["CONFORMANCE_REACHED"]


def refuse_to_leave(event: str, arguments: tuple) -> None:
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else ""
    elif event == "socket.getaddrinfo":
        host = arguments[0] or ""
    else:
        return
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name not in LOCAL:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        raise OSError(f"{name} is not this machine")


sys.addaudithook(refuse_to_leave)
