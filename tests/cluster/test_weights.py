"""Files of weights, written and fetched on one machine. Pinned here:

1. a process of the same machine links the file, which outlives its removal by rank 0; another downloads it;
2. the files of the two newest versions stay; a fetch of an older one fails with the reason;
3. a wrong secret, a damaged file and a learner that is gone fail with `ComputeError`;
4. the folder of a process that was killed is removed by the next one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.compute.cluster import guardian
from agentjet.compute.cluster.weights import Publication, WeightsServer, fetch, release
from agentjet.errors import ComputeError

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


def elsewhere(publication: Publication) -> Publication:
    """The publication as a process of another machine sees it: its own file of that path, if any, is another one."""
    return replace(publication, num_bytes=publication.num_bytes + 1)


def test_the_file_of_this_machine_is_linked(server: WeightsServer) -> None:
    path = fetch(publish(server, 3), "replica 0", SECRET)
    for version in (4, 5):
        publication = publish(server, version)
    assert path.read_bytes() == CONTENT + b"\x03"
    release(path)
    assert not path.parent.exists() and Path(publication.path).exists()


def test_another_machine_downloads_the_file(server: WeightsServer) -> None:
    publication = publish(server, 3)
    path = fetch(elsewhere(publication), "replica 0", SECRET)
    assert str(path) != publication.path and path.read_bytes() == CONTENT + b"\x03"
    release(path)
    assert not path.parent.exists() and Path(publication.path).exists()


def test_the_two_newest_versions_stay(server: WeightsServer) -> None:
    first, second, third = (publish(server, version) for version in range(3))
    for kept in (second, third):
        release(fetch(elsewhere(kept), "replica 0", SECRET))
    with pytest.raises(ComputeError, match=r"weights of version 0 .* was removed, because two newer versions"):
        fetch(first, "replica 0", SECRET)


def test_what_cannot_be_fetched_fails_with_the_reason(server: WeightsServer) -> None:
    publication = elsewhere(publish(server, 0))
    with pytest.raises(ComputeError, match="does not know the secret"):
        fetch(publication, "replica 0", b"another")
    with pytest.raises(ComputeError, match="does not agree with its digest"):
        fetch(replace(publication, digest="0" * 64), "replica 0", SECRET)
    server.close()
    with pytest.raises(ComputeError, match=r"cannot be fetched from 127\.0\.0\.1"):
        fetch(publication, "replica 0", SECRET)


def test_a_file_that_cannot_be_written_is_an_error(server: WeightsServer) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ComputeError, match=r"version 1 cannot be written .* No space left"):
        server.write(1, 10, full)
    assert Path(publish(server, 1).path).exists()


def test_what_a_killed_process_left_is_removed(server: WeightsServer, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from agentjet.compute.cluster import guardian, weights;"
        "guardian.SHARED_MEMORY = place = Path(sys.argv[1]); folder = weights.SharedFolder(place);"
        "(folder.path / 'file').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (abandoned,) = tmp_path.glob("agentjet-*")
    kept = publish(server, 0)
    assert not abandoned.exists() and Path(kept.path).exists()
