"""The port: an answer in several pieces does not wait for acknowledgements."""

from __future__ import annotations

import socket

import pytest

from agentjet.server.listening import listen


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
