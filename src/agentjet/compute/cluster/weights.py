"""Publications: the weights of one version, as rank 0 writes and serves them and as replicas fetch them. No torch.

Rank 0 writes one safetensors file, into shared memory if it fits there. A replica on the same machine opens that file;
any other fetches it over TCP, after the handshake. The two newest files stay, because replicas may adopt one
after another. The folder of a process that was killed is removed by its guardian, and by the next process that writes.

The connection is not encrypted: the weights can be read on the network between the machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from agentjet.compute.cluster.guardian import LOCK, PREFIX, places, remove_abandoned
from agentjet.compute.cluster.handshake import dial, verify
from agentjet.errors import ComputeError

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
NUM_KEPT = 2
"""Files that stay: of the present version, and of the one before."""
CHUNK_BYTES = 1 << 20
STALL_SECONDS = 60.0
"""Limit of a fetch without a byte."""
_downloads: dict[Path, WeightsFolder] = {}
"""The folders of downloads that were not released."""
_SIZE = struct.Struct("<Q")
_NAME = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of a policy version, with names and types of the base model's files; adapters are folded in."""

    version: int
    address: str
    """`HOST:PORT` of rank 0, which serves the file."""
    path: str
    """The safetensors file on rank 0's machine. No other file of any machine has this path."""
    num_bytes: int
    digest: str
    """SHA-256 of the file. Equal weights of one policy have equal digests."""
    dtype: str
    probe_tokens: tuple[int, ...]
    """`PROBE_TOKENS` token ids, the same for every version."""
    probe_logprobs: tuple[float, ...]
    """Log-probabilities of the probe tokens except the first, at temperature 1, as the learner computes them."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A written file, with the fields of its publication."""

    path: Path
    num_bytes: int
    digest: str


class WeightsFolder:
    """A folder for files of weights, in shared memory or a temporary place. This process locks it until `close`."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` must fit. Raises `OSError`."""
        remove_abandoned()
        parents = places()
        parent = next((parent for parent in parents if shutil.disk_usage(parent).free > num_bytes), parents[-1])
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = (self.path / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / LOCK).exists():  # Else another process took it for abandoned before it was locked.
                break

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class WeightsServer:
    """Writes the files of rank 0 and serves them to replicas that know the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listens on a free port of `host`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._secret = secret
        self._folder: WeightsFolder | None = None
        self._files: list[WeightsFile] = []
        self._listener = socket.create_server((host, 0), family=family, backlog=64)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def write(self, version: int, num_bytes: int, save: Callable[[Path], None]) -> WeightsFile:
        """Write the file of a version with `save`, and remove files that are no longer needed.

        Raises `ComputeError` if it cannot be written.
        """
        try:
            while len(self._files) >= NUM_KEPT:
                self._files.pop(0).path.unlink(missing_ok=True)
            if self._folder is None:
                self._folder = WeightsFolder((NUM_KEPT + 1) * num_bytes)
            path = self._folder.path / f"{version}-{os.urandom(4).hex()}.safetensors"
            save(path)
            path.chmod(0o600)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            written = WeightsFile(path, path.stat().st_size, digest)
        except (OSError, SafetensorError) as error:
            raise ComputeError(
                f"the weights of version {version} cannot be written for the replicas: {error}"
            ) from error
        self._files.append(written)
        return written

    def close(self) -> None:
        """Stop serving and remove the files. Idempotent."""
        self._listener.close()
        if self._folder is not None:
            self._folder.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # The listener was closed.
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Send one file. Boundary: a malformed request ends that connection only."""
        with connection:
            try:
                verify(connection, self._secret)
                connection.settimeout(STALL_SECONDS)
                with connection.makefile("rb") as stream:
                    (length,) = _NAME.unpack(_exactly(stream, _NAME.size))
                    wanted = _exactly(stream, length).decode()
                file = next((file for file in self._files if str(file.path) == wanted), None)
                if file is None:
                    connection.sendall(_SIZE.pack(0))
                    return
                with file.path.open("rb") as content:
                    connection.sendall(_SIZE.pack(file.num_bytes))
                    connection.sendfile(content)
            except (ComputeError, OSError, EOFError, ValueError, KeyError) as error:
                log.warning("a fetch of weights failed: %s", error)


def fetch(publication: Publication, name: str, secret: bytes) -> Path:
    """Returns the file of a publication: the one of this machine, or a download; `release` it after use.

    `name` is that of this process. Raises `ComputeError` if the file was removed or its learner is gone.
    """
    local = Path(publication.path)
    with contextlib.suppress(OSError):
        if local.stat().st_size == publication.num_bytes:
            return local
    failure = f"the weights of version {publication.version} cannot be fetched from {publication.address}"
    try:
        folder = WeightsFolder(publication.num_bytes)
    except OSError as error:
        raise ComputeError(f"{failure}: {error}") from error
    try:
        path = _download(publication, name, secret, folder.path)
    except (OSError, EOFError, ComputeError) as error:
        folder.close()
        raise ComputeError(f"{failure}: {error}") from error
    _downloads[path] = folder
    return path


def release(path: Path) -> None:
    """Remove the file that `fetch` returned, if it is a download."""
    if (folder := _downloads.pop(path, None)) is not None:
        folder.close()


def _download(publication: Publication, name: str, secret: bytes, folder: Path) -> Path:
    path = folder / "model.safetensors"
    digest = hashlib.sha256()
    with dial(publication.address, name, secret) as connection, path.open("wb") as file:
        connection.settimeout(STALL_SECONDS)
        wanted = publication.path.encode()
        connection.sendall(_NAME.pack(len(wanted)) + wanted)
        with connection.makefile("rb") as stream:
            (left,) = _SIZE.unpack(_exactly(stream, _SIZE.size))
            if left == 0:
                raise ComputeError("it was removed, because two newer versions were published")
            while left:
                part = stream.read(min(left, CHUNK_BYTES))
                if not part:
                    raise EOFError("the connection ended")
                digest.update(part)
                file.write(part)
                left -= len(part)
    if digest.hexdigest() != publication.digest:
        raise ComputeError("its content does not agree with its digest")
    return path


def _exactly(stream: BinaryIO, length: int) -> bytes:
    part = stream.read(length)
    if len(part) < length:
        raise EOFError("the connection ended")
    return part
