"""Publications: the weights of one version, as rank 0 writes and serves them and as replicas fetch them. No torch.

Rank 0 writes one safetensors file, into shared memory if it fits there. A replica on the same machine opens that file;
any other fetches it over TCP, after the handshake. The two newest files stay, because replicas may adopt one
after another. A fetched file has a second name, so it stays readable after rank 0 removed the first.

A LoRA policy publishes its adapter: a replica loads the base from the model's own files and reads new adapter weights
into the one adapter that it has. A policy that vLLM cannot hold so publishes merged weights instead. Both ends decide
by the names in `publishes_adapter`.

The owner of a file in shared memory may be killed. It locks its folder while it lives, so an unlocked folder is
abandoned, and its guardian removes it.

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
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agentjet.compute.channel import encode, read
from agentjet.compute.cluster.guardian import LOCK, PREFIX, places, remove_abandoned
from agentjet.compute.cluster.handshake import dial, listen, verify
from agentjet.config import LoraConfig
from agentjet.errors import ComputeError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
FETCHED = "model.safetensors"
NUM_KEPT = 2
"""Files that stay: of the present version, and of the one before."""
CHUNK_BYTES = 1 << 20
STALL_SECONDS = 60.0
"""Limit of a fetch without a byte."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose adapters were compared between vLLM and the learner."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Their linear layers, which `all-linear` stands for."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of an adapter in vLLM. A smaller one is padded."""
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter in the format of `peft`."""
_fetched: dict[Path, SharedFolder] = {}
"""The folders of files that were not released."""


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of a policy version: its adapter, or all weights with the names and types of the model's files."""

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
    adapter: str = ""
    """The adapter's config in JSON, as `peft` writes it. Empty for all weights, where an adapter is folded in."""


class WeightsServer:
    """Writes the files of rank 0 and serves them to replicas that know the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listens on a free port of `host`."""
        self._secret = secret
        self._folder: SharedFolder | None = None
        self._files: list[Path] = []
        self._listener, self.address = listen(host)
        threading.Thread(target=self._accept, daemon=True).start()

    def write(self, version: int, num_bytes: int, save: Callable[[Path], None]) -> tuple[Path, str]:
        """Write the file of a version with `save`; returns its path and digest. Removes files that are not needed.

        Raises `ComputeError` if it cannot be written.
        """
        try:
            while len(self._files) >= NUM_KEPT:
                self._files.pop(0).unlink(missing_ok=True)
            if self._folder is None:
                self._folder = _folder_for((NUM_KEPT + 1) * num_bytes)
            path = self._folder.path / f"{version}-{os.urandom(4).hex()}.safetensors"
            save(path)
            path.chmod(0o600)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, SafetensorError) as error:
            raise ComputeError(
                f"the weights of version {version} cannot be written for the replicas: {error}"
            ) from error
        self._files.append(path)
        return path, digest

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
                    wanted = read(stream)
                path = next((path for path in self._files if str(path) == wanted), None)
                if path is None:
                    connection.sendall(encode(0))
                    return
                with path.open("rb") as content:
                    connection.sendall(encode(path.stat().st_size))
                    connection.sendfile(content)
            except Exception as error:
                log.warning("a fetch of weights failed: %s", error)


def fetch(publication: Publication, name: str, secret: bytes) -> Path:
    """Returns a file with the weights, linked on this machine or downloaded; `release` it after use.

    `name` is that of this process. Raises `ComputeError` if the file was removed or its learner is gone.
    """
    try:
        folder = _linked(publication) or _downloaded(publication, name, secret)
    except (OSError, EOFError, ComputeError) as error:
        raise ComputeError(
            f"the weights of version {publication.version} cannot be fetched from {publication.address}: {error}"
        ) from error
    path = folder.path / FETCHED
    _fetched[path] = folder
    return path


def release(path: Path) -> None:
    """Remove the file that `fetch` returned."""
    _fetched.pop(path).close()


def _linked(publication: Publication) -> SharedFolder | None:
    """Returns a folder with another name of the file, if that is on this machine; else None."""
    for place in places():
        folder = SharedFolder(place)
        with contextlib.suppress(OSError):  # It is elsewhere, or on another file system than this place.
            os.link(publication.path, folder.path / FETCHED)
            if (folder.path / FETCHED).stat().st_size == publication.num_bytes:
                return folder
        folder.close()
    return None


def _downloaded(publication: Publication, name: str, secret: bytes) -> SharedFolder:
    folder = _folder_for(publication.num_bytes)
    try:
        _download(publication, name, secret, folder.path / FETCHED)
    except BaseException:
        folder.close()
        raise
    return folder


def _download(publication: Publication, name: str, secret: bytes, path: Path) -> None:
    digest = hashlib.sha256()
    with dial(publication.address, name, secret) as connection, path.open("wb") as file:
        connection.settimeout(STALL_SECONDS)
        connection.sendall(encode(publication.path))
        with connection.makefile("rb") as stream:
            left = read(stream)
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


def _folder_for(num_bytes: int) -> SharedFolder:
    """Returns a new folder in the first place with so much room, else in the last one. Raises `OSError`."""
    found = places()
    return SharedFolder(next((place for place in found if shutil.disk_usage(place).free > num_bytes), found[-1]))


class SharedFolder:
    """A folder that this process locks until `close`."""

    def __init__(self, parent: Path) -> None:
        """Removes abandoned folders first. Raises `OSError`."""
        remove_abandoned()
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


# ---- adapters --------------------------------------------------------------------------------------------------------


def publishes_adapter(lora: LoraConfig, architectures: Sequence[str] | None) -> bool:
    """True if a policy with these settings publishes its adapter. `architectures`: from the model's `config.json`."""
    modules = [module.strip() for module in lora.target_modules.split(",")]
    return (
        0 < lora.rank <= RANKS[-1]
        and (lora.target_modules == "all-linear" or set(modules) <= set(MODULES))
        and bool(architectures)
        and set(architectures or ()) <= set(ARCHITECTURES)
    )


def write_adapter(model: Any, weights: dict[str, Tensor] | None, path: Path) -> str:
    """Write a `peft` model's adapter to a safetensors file; returns its config in JSON.

    `weights` are those to write, for a model whose own are elsewhere.
    """
    folder = path.with_suffix("")
    model.save_pretrained(folder, state_dict=weights)
    (folder / WEIGHTS_FILE).rename(path)
    config = (folder / CONFIG_FILE).read_text()
    shutil.rmtree(folder)
    return config


def as_folder(path: Path, config: str) -> Path:
    """Returns the folder of an adapter's file, as `peft` reads it."""
    (path.parent / CONFIG_FILE).write_text(config)
    (path.parent / WEIGHTS_FILE).hardlink_to(path)
    return path.parent


def size_in_engine(rank: int) -> int:
    """Returns the size that vLLM reserves for an adapter of that rank."""
    return next(size for size in RANKS if size >= rank)
