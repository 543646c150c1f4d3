"""HTTPS, and what is refused without it.

1. With a certificate the server uses HTTPS, and the base URL of an episode is an https URL; also behind a proxy that
   terminates TLS.
2. A non-loopback address needs a certificate or `server.insecure`, and the error names both.
3. The client trusts the certificate in `SSL_CERT_FILE`, and uses no proxy for a server on its own machine.
4. A certificate that is missing, or has another key, is refused before the server starts.
"""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from agentjet.cli.server_process import check_certificate
from agentjet.client import AsyncSwarm, Retry
from agentjet.config import ServerConfig, load_config
from agentjet.errors import ConfigError, Unreachable
from tests.needs import need
from tests.server.serving import TOKEN, serving

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def make_certificate(folder: Path, *, passphrase: str = "") -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder.mkdir()
    cert, key = folder / "cert.pem", folder / "key.pem"
    protection = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    need("openssl")
    subprocess.run(
        [*command, *names, *protection, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    return cert, key


@pytest.mark.anyio
async def test_https(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path / "tls")
    check_certificate(ServerConfig(tls_cert=str(cert), tls_key=str(key)))
    async with serving(tmp_path / "d", server={"tls_cert": str(cert), "tls_key": str(key)}) as served:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=served.url, verify=trusting, headers=HEADERS, trust_env=False) as http:
            begun = (await http.post("/swarm/v1/episodes", json={"task_id": "t"})).json()
            assert begun["base_url"] == f"{served.url}/v1" and begun["base_url"].startswith("https://")
            models = await http.get(
                f"{begun['base_url']}/models", headers={"Authorization": f"Bearer {begun['api_key']}"}
            )
            assert models.status_code == 200
        async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as distrusting:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await distrusting.get(f"{served.url}/healthz")
        async with httpx.AsyncClient(verify=False, trust_env=False) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(served.url.replace("https", "http") + "/healthz")


@pytest.mark.anyio
async def test_our_client_trusts_the_certificate_it_is_told_and_asks_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = make_certificate(tmp_path / "tls")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(tmp_path / "d", server={"tls_cert": str(cert), "tls_key": str(key)}) as served:
        async with AsyncSwarm(served.url, TOKEN, retry=Retry(first_patience=0.0)) as distrusting:
            with pytest.raises(Unreachable, match=r"certificate.* SSL_CERT_FILE"):
                await distrusting.status()
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        async with AsyncSwarm(served.url, TOKEN) as trusting:
            assert (await trusting.status()).state == "sampling"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match=r"'SSL_CERT_FILE': '.*none'.*}: .*No such file.*; set it to a file"):
            AsyncSwarm(served.url, TOKEN)


@pytest.mark.anyio
async def test_behind_a_proxy_that_ends_tls(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"allowed_hosts": "box.example"}) as served:
        forwarded = {"Host": "box.example", "X-Forwarded-Proto": "https"}
        begun = await served.http.post("/swarm/v1/episodes", json={"task_id": "t"}, headers=forwarded)
        assert begun.json()["base_url"] == "https://box.example/v1"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "box.example"])
def test_other_addresses_take_tls_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [f"server.host={host}"])
    for way_out in ("server.tls_cert", "server.insecure", "--insecure", "tunnel"):
        assert way_out in str(refused.value)
    assert f"server.host = {host!r}" in str(refused.value)
    for granted in (["server.insecure=true"], ["server.tls_cert=c.pem", "server.tls_key=k.pem"]):
        assert load_config(None, [f"server.host={host}", *granted]).server.host == host


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_half_a_certificate_is_refused(given: str) -> None:
    missing = {"tls_cert": "tls_key", "tls_key": "tls_cert"}[given]
    with pytest.raises(ConfigError, match=f"{given} = 'x.pem' needs {missing}"):
        load_config(None, [f"server.{given}=x.pem"])


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path / "a")
    _, foreign = make_certificate(tmp_path / "b")
    locked = make_certificate(tmp_path / "c", passphrase="open sesame")
    for wrong in ((cert, foreign), (cert, cert), locked):
        with pytest.raises(ConfigError, match=r"tls_cert = .* and server\.tls_key = .* cannot be used together"):
            check_certificate(ServerConfig(tls_cert=str(wrong[0]), tls_key=str(wrong[1])))
    with pytest.raises(ConfigError, match=r"server\.tls_cert = .*nowhere.* cannot be used .*No such file"):
        check_certificate(ServerConfig(tls_cert=str(tmp_path / "nowhere"), tls_key=str(key)))
