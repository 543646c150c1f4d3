"""The socket: an answer in several pieces does not wait for acknowledgements; the address is reported correctly.

Requests that arrive together take turns. Writes of one turn of the loop reach the socket together.
"""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from agentjet.cli.server_process import all_addresses_line, run
from agentjet.config import load_config
from agentjet.errors import ConfigError
from agentjet.front.http import REQUESTS_A_ROUND, JoinedWrites, RunMiddleware, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_at_once(host: str) -> None:
    try:
        listener = listen(host, 0)
    except OSError:
        pytest.skip(f"there is no {host} here")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_server_bound_everywhere_says_so() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert all_addresses_line(listener).startswith(
            f"Bound to 0.0.0.0 port {listener.getsockname()[1]}: every address"
        )
    with listen("127.0.0.1", 0) as listener:
        assert all_addresses_line(listener) == ""


@pytest.mark.parametrize("host", ["foo.invalid", "192.0.2.7"])
def test_a_host_that_is_no_address_is_named(host: str, tmp_path: Path) -> None:
    config = load_config(None, [f"server.host={host}", "server.insecure=true", f"server.data_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=f"server.host = '{host}' is not an address"):
        run(config)


@pytest.mark.anyio
async def test_requests_that_arrive_together_take_turns() -> None:
    """The loop would otherwise be held for as long as the first steps of all of them take."""
    begun: list[int] = []
    rounds = [0]

    async def app(scope: object, receive: object, send: object) -> None:
        begun.append(len(begun))

    async def request(number: int) -> None:
        scope = {"type": "http", "method": "GET", "headers": [(b"host", b"127.0.0.1")], "path": f"/{number}"}
        await entry(scope, None, None)  # type: ignore[arg-type]

    async def watch() -> None:
        while len(begun) < 100:
            rounds.append(len(begun))
            await asyncio.sleep(0)

    entry = RunMiddleware(app, None, frozenset())  # type: ignore[arg-type]
    gone = asyncio.create_task(request(100))
    gone.cancel()
    await asyncio.gather(watch(), *map(request, range(100)), gone, return_exceptions=True)
    assert max(later - earlier for earlier, later in pairwise([*rounds, 100])) == REQUESTS_A_ROUND


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("parts", "closes", "sent"),
    [
        ([b"head", b"body"], False, [b"headbody"]),
        ([b"head", b"body"], True, [b"headbody", b"closed"]),
        ([b"head", bytes(JoinedWrites.MAX_BYTES), b"rest"], False, [b"head" + bytes(JoinedWrites.MAX_BYTES), b"rest"]),
    ],
)
async def test_writes_of_a_turn_are_sent_together(parts: list[bytes], closes: bool, sent: list[bytes]) -> None:
    class Recorded(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[bytes] = []

        def write(self, part: object) -> None:
            assert isinstance(part, bytes)
            self.sent.append(part)

        def close(self) -> None:
            self.sent.append(b"closed")

    recorded = Recorded()
    joined = JoinedWrites(recorded, asyncio.get_running_loop())
    for part in parts:
        joined.write(part)
    if closes:
        joined.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert recorded.sent == sent
