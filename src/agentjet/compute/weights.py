"""Publications: the weights of one version, as rank 0 writes and serves them and as replicas fetch them. No torch.

Rank 0 writes one safetensors file, into shared memory if it fits there. A replica on the same machine links that file.
On another machine, one replica fetches its parts over several TCP connections, each after the handshake, and those that
need it at the same time link what that one got. The two newest files of rank 0 stay, because replicas adopt in turns.
A linked file stays readable after rank 0 removed its own. A fetch that has begun goes on, too.

Two settings of `compute.weight_transfer` are other ways for all weights (`compute.transfers`). `ipc` publishes handles
of the rank's memory, and no file. With `nccl` rank 0 sends its file to vLLM's workers. Adapters are always files.

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
import math
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from agentjet.config import LoraConfig
from agentjet.errors import ComputeError
from agentjet.processes.guardian import LOCK, PREFIX, places, remove_abandoned
from agentjet.processes.rpc import Listener, dial, encode, read

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PROBE_TOKENS = 64
PROBE_DECODED = 16
"""The last tokens of the probe, which a replica computes one at a time: old weights may stay in that path only."""
NUM_KEPT = 2
"""Files that stay: of the present version, and of the one before."""
PART_BYTES = 64 << 20
"""Size of a part, which is hashed and fetched as a whole. A smaller file is one part."""
MAX_THREADS = 16
"""Threads that hash a file, at most: one a core. A core does about 1.4 GB/s."""
MAX_CONNECTIONS = 8
"""Connections of a fetch, at most. A core receives and hashes about 0.75 GB/s, and clouds limit a connection to 5 or 10
Gbit/s. More would gain nothing, because Linux lets only one thread at a time write to a file: 2.6 GB/s in all."""
CHUNK_BYTES = 1 << 20
STALL_SECONDS = 60.0
"""Limit of a fetch without a byte."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose adapters were compared between vLLM and the learner."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Their linear layers, which `all-linear` stands for."""
FLOAT32_ERROR = 5e-4
"""Largest difference of a probe's log-probability in float32."""
ROUNDING = 2**-6
"""Largest mean difference in 16 bits, as a part of the mean log-probability: four times the rounding of bfloat16.

SmolLM2-135M in bfloat16 has 0.07 at a mean of -14.8: the tokens are drawn from the vocabulary, so they are improbable.
"""
MEAN_ERROR = 0.05
"""Mean difference in 16 bits that is never too large."""
NEARER = 1.5
"""Ratio of the differences to the published version and to the one before at which a replica has the one before. On
SmolLM2-135M it was at most 1 with the new weights, and 1.6 or more with old ones that differ by 1 % (one deviation).
"""
WAY_OUT = (
    "If the replicas compute this model otherwise than the learner, set model.dtype = 'float32', with a new "
    "server.data_dir, or compute.backend = 'embedded'"
)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of an adapter in vLLM. A smaller one is padded."""
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter in the format of `peft`."""
USE_FILE = "Way out: compute.weight_transfer = 'file'"
StreamedWeight = tuple[str, str, Sequence[int]]
"""Name, type and shape of a weight."""
_fetched: dict[Path, SharedFolder] = {}
"""The folders of files that were not released."""


@dataclass(frozen=True, slots=True)
class Publication:
    """The weights of a policy version: its adapter, or all weights with the names and types of the model's files."""

    version: int
    address: str
    """`HOST:PORT` of rank 0, which serves the file."""
    path: str
    """The safetensors file on rank 0's machine. No other file of any machine has its name. Empty with `handles`."""
    num_bytes: int
    digest: str
    """SHA-256 of the SHA-256s of the file's parts. Equal weights of one policy have equal digests. With `handles` a
    random text."""
    dtype: str
    probe_tokens: tuple[int, ...]
    """`PROBE_TOKENS` token ids, the same for every version."""
    probe_logprobs: tuple[float, ...]
    """Log-probabilities of the probe tokens except the first, at temperature 1, as the learner computes them."""
    adapter: str = ""
    """The adapter's config in JSON, as `peft` writes it. Empty for all weights, where an adapter is folded in."""
    handles: bytes = b""
    """Those of the weights in the rank's memory, see `transfers.SharedWeights`."""

    @property
    def file_name(self) -> str:
        """The name of the file in every folder that has it."""
        return Path(self.path).name


class WeightsServer:
    """Writes the files of rank 0 and serves them to replicas that know the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        """Listens on a free port of `host`."""
        self._folder: SharedFolder | None = None
        self._files: list[Path] = []
        self._listener = Listener(host, secret, lambda name: self._serve)
        self.address = self._listener.address
        self.send: Callable[[socket.socket, Path, int], None] | None = None
        """Sends a file to so many workers of a replica, see `transfers.send`."""

    def write(self, version: int, num_bytes: int, save: Callable[[Path], None]) -> tuple[Path, str]:
        """Write the file of a version with `save`; returns its path and digest. Removes files that are not needed.

        Raises `ComputeError` if it cannot be written.
        """
        try:
            while len(self._files) >= NUM_KEPT:
                self._files.pop(0).unlink(missing_ok=True)
            if self._folder is None:
                self._folder = _folder_for((NUM_KEPT + 1) * num_bytes)
            path = self._folder.path / f"{version}-{os.urandom(8).hex()}.safetensors"
            save(path)
            path.chmod(0o600)
            digest = _digest_of(path)
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

    def _serve(self, connection: socket.socket) -> None:
        """Send one file in a thread, until the other end closes the connection.

        The other end requests its parts, or a stream by the number of workers.
        """
        connection.settimeout(STALL_SECONDS)
        with connection, connection.makefile("rb") as stream, contextlib.suppress(EOFError):
            wanted = read(stream)
            path = next((path for path in self._files if str(path) == wanted), None)
            connection.sendall(encode(path is not None))
            if path is None:
                return
            with path.open("rb") as content:
                while True:
                    wanted = read(stream)
                    if isinstance(wanted, int):
                        assert self.send is not None, "both ends have the same settings"
                        return self.send(connection, path, wanted)
                    start, num_bytes = wanted
                    if connection.sendfile(content, start, num_bytes) < num_bytes:
                        raise ComputeError(f"{path.name} is shorter than {start + num_bytes} bytes")


def fetch(publication: Publication, name: str, secret: bytes) -> Path:
    """Returns a file with the weights, linked on this machine or downloaded; `release` it after use.

    Waits while another process of this machine downloads it. `name` is that of this process.
    Raises `ComputeError` if the file was removed or its learner is gone.
    """
    with _named(publication):
        folder = _linked(publication) or _downloaded_once(publication, name, secret)
    path = folder.path / publication.file_name
    _fetched[path] = folder
    return path


def release(path: Path) -> None:
    """Remove the file that `fetch` returned."""
    _fetched.pop(path).close()


@contextlib.contextmanager
def weights_of(
    publication: Publication, name: str, secret: bytes, num_streamed: int = 0
) -> Iterator[tuple[dict[str, Any], socket.socket | None]]:
    """Yields where vLLM's workers find the weights: the fields of `engine.WeightSource`. They are valid inside only.

    `num_streamed` is the number of workers that a stream of rank 0 goes to; with 0 there is a file, if not handles.
    A stream has a connection, too, at which nothing arrives: it ends if rank 0 does, or gives up. Raises
    `ComputeError`, as `fetch`.
    """
    if publication.handles:
        yield {"handles": publication.handles}, None
    elif not num_streamed or publication.adapter:
        path = fetch(publication, name, secret)
        try:
            yield {"path": str(path)}, None
        finally:
            release(path)
    else:
        with contextlib.ExitStack() as opened:
            with _named(publication):
                connection = _connected(publication, name, secret, opened)
                connection.sendall(encode(num_streamed))
                address, weights = read(opened.enter_context(connection.makefile("rb")))
            host = connection.getsockname()[0]
            stream = {"address": address, "host": host, "weights": weights, "num_workers": num_streamed}
            yield {"stream": stream}, connection


@contextlib.contextmanager
def _named(publication: Publication) -> Iterator[None]:
    """Raises `ComputeError` with the version and rank 0 for an error of a connection."""
    try:
        yield
    except (OSError, EOFError, ComputeError) as error:
        raise ComputeError(
            f"the weights of version {publication.version} cannot be fetched from {publication.address}: "
            f"{error or 'the connection ended'}"
        ) from error


def _linked(publication: Publication) -> SharedFolder | None:
    """Returns a new folder with the file, if a process of this machine has it; else None."""
    for place in places():
        for found in place.glob(f"{PREFIX}*/{publication.file_name}"):
            folder = SharedFolder(place)
            path = folder.path / publication.file_name
            with contextlib.suppress(OSError):  # It was removed.
                os.link(found, path)
                if path.stat().st_size == publication.num_bytes:
                    return folder
            folder.close()
    return None


def _downloaded_once(publication: Publication, name: str, secret: bytes) -> SharedFolder:
    """Returns a new folder with the file. One process of this machine at a time downloads it."""
    lock = SharedFolder(places()[0], f"fetch-{publication.file_name}")
    try:
        return _linked(publication) or _downloaded(publication, name, secret)
    finally:
        lock.close()


def _downloaded(publication: Publication, name: str, secret: bytes) -> SharedFolder:
    folder = _folder_for(publication.num_bytes)
    try:
        part = folder.path / "part"
        _download(publication, name, secret, part)
        part.rename(folder.path / publication.file_name)
    except BaseException:
        folder.close()
        raise
    return folder


def _download(publication: Publication, name: str, secret: bytes, path: Path) -> None:
    """Receive the file. Each connection carries one part after the other, so a slow one gets fewer."""
    size = publication.num_bytes
    starts = range(0, size, PART_BYTES)
    free = SimpleQueue[socket.socket]()
    path.touch()
    with contextlib.ExitStack() as connections, ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        for _ in starts[:MAX_CONNECTIONS]:
            free.put(_connected(publication, name, secret, connections))

        def receive(start: int) -> bytes:
            connection = free.get()
            try:
                return _receive_part(connection, path, start, min(start + PART_BYTES, size))
            except BaseException:
                connection.close()  # The next part fails at once. It could wait for another timeout.
                raise
            finally:
                free.put(connection)

        digest = _joined(pool.map(receive, starts))  # An error cancels the parts that have not begun.
    if digest != publication.digest:
        raise ComputeError("its content does not agree with its digest")


def _connected(publication: Publication, name: str, secret: bytes, connections: contextlib.ExitStack) -> socket.socket:
    """Returns a connection to rank 0, which waits for a request about the file. `connections` closes it."""
    connection = connections.enter_context(dial(publication.address, name, secret))
    connection.settimeout(STALL_SECONDS)
    connection.sendall(encode(publication.path))
    with connection.makefile("rb") as stream:
        if not read(stream):
            raise ComputeError("it was removed, because two newer versions were published")
    return connection


def _receive_part(connection: socket.socket, path: Path, start: int, end: int) -> bytes:
    """Request a part and write it to its place in the file; returns its SHA-256."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    connection.sendall(encode((start, end - start)))
    with connection.makefile("rb") as stream, path.open("r+b") as file:
        file.seek(start)
        while start < end:
            chunk = buffer[: stream.readinto(buffer[: end - start])]
            if not chunk:
                raise EOFError("the connection ended")
            digest.update(chunk)
            file.write(chunk)
            start += len(chunk)
    return digest.digest()


def _digest_of(path: Path) -> str:
    """Returns the digest of a file. Threads hash its parts, because SHA-256 releases the GIL."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
        ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool,
    ):
        starts = range(0, len(view), PART_BYTES)
        return _joined(pool.map(lambda start: hashlib.sha256(view[start : start + PART_BYTES]).digest(), starts))


def _joined(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _folder_for(num_bytes: int) -> SharedFolder:
    """Returns a new folder in the first place with so much room, else in the last one. Raises `OSError`."""
    found = places()
    return SharedFolder(next((place for place in found if shutil.disk_usage(place).free > num_bytes), found[-1]))


class SharedFolder:
    """A folder that this process locks until `close`."""

    def __init__(self, parent: Path, name: str = "") -> None:
        """A new folder. With a name, it waits while another process has the folder of that name.

        Removes abandoned folders first. Raises `OSError`.
        """
        remove_abandoned()
        while True:
            if name:
                self.path = parent / f"{PREFIX}{name}"
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(0o700)
            else:
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with contextlib.suppress(FileNotFoundError):  # Its owner removed it, or one who found it unlocked.
                self._lock = (self.path / LOCK).open("wb")
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.fstat(self._lock.fileno()).st_nlink:
                    return
                self._lock.close()

    def close(self) -> None:
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


# ---- the probe -------------------------------------------------------------------------------------------------------

# After each adoption a replica scores fixed tokens, the last ones one at a time, and the learner scored them, too. In
# float32 both agree to a few digits. In 16 bits rounding is larger than what one batch changes, so a replica must also
# not be much nearer to the version before: an engine may report success and keep old weights.


def probe_failure(publication: Publication, logprobs: Sequence[float], before: Publication | None = None) -> str:
    """Returns the reason why a replica with these log-probabilities does not have the published weights, or ''.

    `before` is the publication that it had.
    """
    expected = publication.probe_logprobs
    if len(logprobs) != len(expected):
        return f"it scored {len(logprobs)} tokens instead of {len(expected)}"
    too_large = "the {} error of its log-probabilities is {:.2g} (limit {:.2g})".format
    if publication.dtype == "float32":
        error = probe_error(publication, logprobs)
        return too_large("largest", error, FLOAT32_ERROR) if error > FLOAT32_ERROR else ""
    limit = max(MEAN_ERROR, ROUNDING * _mean([abs(value) for value in expected if math.isfinite(value)]))
    errors = _errors(publication, logprobs)
    for kind, error in (("mean", _mean(errors)), ("decoded tokens' mean", _mean(errors[-PROBE_DECODED:]))):
        if error > limit:
            return too_large(kind, error, limit)
    if before is not None and _mean(errors) > max(MEAN_ERROR, NEARER * _mean(_errors(before, logprobs))):
        return f"its log-probabilities are nearer to those of version {before.version}"
    return ""


def probe_error(publication: Publication, logprobs: Sequence[float]) -> float:
    """Returns the largest difference to the learner's log-probabilities; infinite if only one is finite."""
    return max(_errors(publication, logprobs), default=0.0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _errors(publication: Publication, logprobs: Sequence[float]) -> list[float]:
    """Returns the differences; 0 where neither value is finite, because the policy has diverged at both ends."""
    errors = []
    for ours, theirs in zip(logprobs, publication.probe_logprobs, strict=False):
        if math.isfinite(ours) and math.isfinite(theirs):
            errors.append(abs(ours - theirs))
        else:
            errors.append(math.inf if math.isfinite(ours) or math.isfinite(theirs) else 0.0)
    return errors
