"""Files of weights, written and fetched on one machine. Pinned here:

1. a process of the same machine links the file, which outlives its removal by rank 0; on another machine, one process
   downloads it, and those that need it at the same time link what that one got;
2. the files of the two newest versions stay; a fetch of an older one fails with the reason;
3. a wrong secret, a damaged part, a learner that is gone and one that ends in the middle fail with `ComputeError`, and
   leave no file; a file that is not a publication is not served;
4. the folder of a process that was killed is removed by the next one;
5. a file of several parts is fetched over several connections; its digest is that of the parts' digests; a fetch that
   has begun outlives the removal of the file;
6. connections without the secret, and errors of `accept`, end neither the server nor the fetches of others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from agentjet.compute import weights
from agentjet.compute.weights import Publication, SharedFolder, WeightsServer, fetch, release
from agentjet.errors import ComputeError
from agentjet.processes import guardian, rpc

SECRET = b"secret"
CONTENT = b"weights " * 400_000


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightsServer]:
    monkeypatch.setattr(guardian, "SHARED_MEMORY", tmp_path)
    server = WeightsServer("127.0.0.1", SECRET)
    yield server
    server.close()
    assert not list(tmp_path.iterdir())


def publish(server: WeightsServer, version: int) -> Publication:
    def save(path: Path) -> None:
        path.write_bytes(CONTENT + bytes([version]))

    path, digest = server.write(version, len(CONTENT) + 1, save)
    return Publication(version, server.address, str(path), len(CONTENT) + 1, digest, "float32", (1,), ())


@pytest.fixture
def elsewhere(
    server: WeightsServer, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """This process is on another machine than rank 0, with a shared memory of its own."""
    server._folder = SharedFolder(guardian.SHARED_MEMORY)
    place = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr(guardian, "SHARED_MEMORY", place)
    yield
    assert not list(place.iterdir())


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has seven parts, the last of one byte, and a fetch has three connections."""
    monkeypatch.setattr(weights, "PART_BYTES", len(CONTENT) // 6)
    monkeypatch.setattr(weights, "MAX_CONNECTIONS", 3)


def test_the_file_of_this_machine_is_linked(server: WeightsServer) -> None:
    path = fetch(publish(server, 3), "replica 0", SECRET)
    for version in (4, 5):
        publication = publish(server, version)
    assert path.read_bytes() == CONTENT + b"\x03"
    release(path)
    assert not path.parent.exists() and Path(publication.path).exists()


@pytest.mark.usefixtures("elsewhere")
def test_another_machine_downloads_the_file(server: WeightsServer) -> None:
    publication = publish(server, 3)
    path = fetch(publication, "replica 0", SECRET)
    assert str(path) != publication.path and path.read_bytes() == CONTENT + b"\x03"
    release(path)
    assert not path.parent.exists() and Path(publication.path).exists()


@pytest.mark.usefixtures("elsewhere")
def test_several_processes_of_another_machine_download_the_file_once(
    server: WeightsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication, downloads = publish(server, 3), list[str]()
    download = weights._download

    def counted(publication: Publication, name: str, secret: bytes, path: Path) -> None:
        downloads.append(name)
        if len(downloads) == 1:
            raise OSError("the first one fails")  # Then the next one downloads it.
        download(publication, name, secret, path)

    monkeypatch.setattr(weights, "_download", counted)
    with ThreadPoolExecutor(4) as pool:
        fetches = [pool.submit(fetch, publication, f"replica {number}", SECRET) for number in range(4)]
    failed = [one for one in fetches if one.exception() is not None]
    paths = [one.result() for one in fetches if one not in failed]
    assert len(failed) == 1 and len(downloads) == 2
    for path in paths:
        assert path.read_bytes() == CONTENT + b"\x03"
        release(path)


@pytest.mark.usefixtures("elsewhere")
def test_the_two_newest_versions_stay(server: WeightsServer) -> None:
    first, second, third = (publish(server, version) for version in range(3))
    for kept in (second, third):
        release(fetch(kept, "replica 0", SECRET))
    with pytest.raises(ComputeError, match=r"weights of version 0 .* was removed, because two newer versions"):
        fetch(first, "replica 0", SECRET)


@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_fetched_fails_with_the_reason(server: WeightsServer) -> None:
    publication = publish(server, 0)
    with pytest.raises(ComputeError, match="does not know the secret"):
        fetch(publication, "replica 0", b"another")
    with pytest.raises(ComputeError, match="does not agree with its digest"):
        fetch(replace(publication, digest="0" * 64), "replica 0", SECRET)
    with pytest.raises(ComputeError, match="was removed"):
        fetch(replace(publication, path=__file__), "replica 0", SECRET)
    server.close()
    with pytest.raises(ComputeError, match=r"cannot be fetched from 127\.0\.0\.1"):
        fetch(publication, "replica 0", SECRET)


STRANGERS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
host, port = sys.argv[1].split(":")
held = [socket.create_connection((host, int(port))) for _ in range(1100)]
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("elsewhere")
def test_strangers_that_say_nothing_take_no_place_of_a_replica(server: WeightsServer) -> None:
    publication = publish(server, 3)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    command = [sys.executable, "-c", STRANGERS, server.address]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as strangers:
            assert strangers.stdin is not None and strangers.stdout is not None
            assert strangers.stdout.readline() == b"connected\n"
            release(fetch(publication, "replica 0", SECRET))
            assert len(server._listener._handshakes) <= rpc.MAX_HANDSHAKES
            strangers.stdin.close()
        release(fetch(publication, "replica 0", SECRET))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("elsewhere")
def test_an_error_of_accept_delays_a_fetch(server: WeightsServer, caplog: pytest.LogCaptureFixture) -> None:
    """Too many files are open for a moment."""
    publication = publish(server, 3)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno(), before[1]))
        try:
            waiting.connect(rpc.host_and_port(server.address))
            deadline = time.monotonic() + 10
            while "Too many open files" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    release(fetch(publication, "replica 0", SECRET))
    assert "none can be accepted: [Errno 24] Too many open files" in caplog.text


@pytest.mark.usefixtures("elsewhere", "parts")
def test_parts_are_fetched_over_several_connections(server: WeightsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    publication, dialled = publish(server, 3), list[socket.socket]()

    def dial(*args: str | bytes) -> socket.socket:
        dialled.append(connection := rpc.dial(*args))  # type: ignore[arg-type]
        return connection

    monkeypatch.setattr(weights, "dial", dial)
    path = fetch(publication, "replica 0", SECRET)
    assert path.read_bytes() == CONTENT + b"\x03" and len(dialled) == 3
    assert all(connection.fileno() == -1 for connection in dialled)
    release(path)
    size = weights.PART_BYTES
    digests = [hashlib.sha256((CONTENT + b"\x03")[size * i : size * (i + 1)]).digest() for i in range(7)]
    assert publication.digest == hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.usefixtures("elsewhere", "parts")
def test_a_fetch_outlives_the_removal_of_its_file(server: WeightsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    publication, receive = publish(server, 3), weights._receive_part

    def removed(connection: socket.socket, path: Path, start: int, end: int) -> bytes:
        Path(publication.path).unlink(missing_ok=True)
        return receive(connection, path, start, end)

    monkeypatch.setattr(weights, "_receive_part", removed)
    path = fetch(publication, "replica 0", SECRET)
    assert path.read_bytes() == CONTENT + b"\x03" and not Path(publication.path).exists()
    release(path)


@pytest.mark.usefixtures("elsewhere", "parts")
def test_a_damaged_part_is_an_error(server: WeightsServer) -> None:
    publication = publish(server, 0)
    with Path(publication.path).open("r+b") as file:
        file.seek(weights.PART_BYTES * 4 + 7)
        file.write(b"?")
    with pytest.raises(ComputeError, match="does not agree with its digest"):
        fetch(publication, "replica 0", SECRET)


@pytest.mark.usefixtures("elsewhere", "parts")
def test_a_server_that_ends_in_the_middle_is_an_error(server: WeightsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part in which it ends, and those that the same connection would carry, fail without a wait."""
    publication = publish(server, 0)
    monkeypatch.setattr(weights, "MAX_CONNECTIONS", 1)
    os.truncate(publication.path, weights.PART_BYTES * 2 + 7)
    with pytest.raises(ComputeError, match=r"cannot be fetched from 127.* the connection ended"):
        fetch(publication, "replica 0", SECRET)


def test_a_file_of_another_size_is_not_linked(server: WeightsServer) -> None:
    publication = publish(server, 0)
    with pytest.raises(ComputeError, match="the connection ended"):  # Rank 0 cannot send so many bytes.
        fetch(replace(publication, num_bytes=publication.num_bytes + 1), "replica 0", SECRET)


def test_a_file_that_cannot_be_written_is_an_error(server: WeightsServer) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ComputeError, match=r"version 1 cannot be written .* No space left"):
        server.write(1, 10, full)
    assert Path(publish(server, 1).path).exists()


def test_what_a_killed_process_left_is_removed(server: WeightsServer, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from agentjet.compute import weights; from agentjet.processes import guardian;"
        "guardian.SHARED_MEMORY = place = Path(sys.argv[1]); folder = weights.SharedFolder(place);"
        "(folder.path / 'file').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (abandoned,) = tmp_path.glob("agentjet-*")
    kept = publish(server, 0)
    assert not abandoned.exists() and Path(kept.path).exists()


def test_a_lock_that_its_owner_removed_does_not_remove_the_next_owner_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guardian, "places", lambda: [tmp_path])
    folders, flock = [SharedFolder(tmp_path, "fetch-x")], fcntl.flock

    def flock_late(file: IO[bytes], how: int) -> None:
        if how & fcntl.LOCK_NB and len(folders) == 1:  # The owner changes after this process opened the lock.
            folders[0].close()
            folders.append(SharedFolder(tmp_path, "fetch-x"))
        flock(file, how)

    monkeypatch.setattr(guardian.fcntl, "flock", flock_late)
    guardian.remove_abandoned()
    assert len(folders) == 2 and folders[1].path.is_dir()
    folders[1].close()
