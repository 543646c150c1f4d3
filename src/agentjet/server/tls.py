"""The certificate a server shows, checked before anything slow happens."""

from __future__ import annotations

import ssl
from pathlib import Path

from agentjet.config import ServerConfig
from agentjet.errors import ConfigError


def check_certificate(server: ServerConfig) -> None:
    """Raises `ConfigError` when the certificate or its key is not there, unreadable, or one is not the other's."""
    for name, path in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"server.{name} = {path!r} cannot be read: {error.strerror}") from None
    if server.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a passphrase would make OpenSSL ask for it on the terminal.
            context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise ConfigError(
                f"server.tls_cert = {server.tls_cert!r} and server.tls_key = {server.tls_key!r} cannot be used "
                f"together ({why}): give a certificate chain and its own key without a passphrase, both PEM"
            ) from None
