"""Transfers: how rank 0's weights reach vLLM's workers without a file. Both ends of each way; see `compute.weights`.

* `ipc`: a worker reads the weights where the rank has them, on the same device: `SharedWeights`, `shared_weights`. A
  worker must read them only while the rank does not change them. `colocated` ensures it: replicas are suspended while a
  batch is learned. A new replica that reads while a checkpoint is loaded may get a mixture, and fails its probe.
* `nccl`: rank 0 broadcasts its file to the workers of one replica, one tensor after the other: `send`, `received`. A
  group of NCCL on GPUs, of gloo on CPUs, lasts for one adoption. Its traffic is neither authenticated nor encrypted.
  No digest is computed of what arrives: the probe is the test of the weights.

Never run on a GPU. On CPUs tests run all of this except the lines for CUDA.
"""

from __future__ import annotations

import math
import pickle
import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import reductions

from agentjet.compute.weights import STALL_SECONDS, USE_FILE, StreamedWeight
from agentjet.errors import ComputeError
from agentjet.processes.rpc import UNANSWERED_SECONDS, encode, host_and_port, tune

LIMIT = timedelta(seconds=STALL_SECONDS)
"""Limit of a wait for the other processes of a stream: until they join, and for each tensor."""
AHEAD = 3
"""Broadcasts that begin before the present one ends."""
POLL_MS = 1.0
"""Milliseconds between two looks at a broadcast that runs."""
_CUDA: Any = reductions
"""Torch's own handles of tensors on a GPU. They have no types."""


# ---- ipc -------------------------------------------------------------------------------------------------------------


class SharedWeights:
    """Weights of this process that others read from the same device. A weight has one handle, which stays valid.

    Torch counts the readers of a handle and expects one. So a handle must not be made for each publication: memory
    that has too few readers is never freed, and memory that has too many is freed too early.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        """Weights that are not memory of the model, such as those with an adapter folded in."""
        self._handles: dict[str, tuple[int, tuple[Any, ...]]] = {}
        """By name, with the address of the weight."""

    def handles(self, weights: Mapping[str, Tensor], model: nn.Module) -> bytes:
        """Returns handles for `shared_weights`. Weights that are memory of the model are not copied.

        Raises `ComputeError` if memory cannot be shared.
        """
        own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
        copied = {name for name, weight in weights.items() if weight.untyped_storage().data_ptr() not in own}
        for name, weight in weights.items():
            tensor = weight.detach()
            if name in copied:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(tensor)
                tensor = self._copies[name].copy_(tensor)
            if self._handles.get(name, (0,))[0] != tensor.data_ptr():
                try:
                    handle = _handle(tensor)
                except RuntimeError as error:
                    raise ComputeError(f"{name} cannot be shared: {error}. {USE_FILE}") from error
                self._handles[name] = tensor.data_ptr(), handle  # On a CPU the memory has moved.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return pickle.dumps({name: self._handles[name][1] for name in weights})


def _handle(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the handle of a tensor. On a CPU its memory moves into shared memory, under all tensors that have it."""
    if tensor.is_cuda:
        arguments: tuple[Any, ...] = _CUDA.reduce_tensor(tensor)[1]
        return arguments
    storage: Any = tensor.untyped_storage()
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return (*storage._share_filename_cpu_(), tensor.dtype, *place)


def shared_weights(handles: bytes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of `SharedWeights` of another process, by name. They are its memory: never write there."""
    for name, handle in pickle.loads(handles).items():
        if device.type == "cuda":  # The rank's number of the device may be another one.
            yield name, _CUDA.rebuild_cuda_tensor(*handle[:6], device.index, *handle[7:])
        else:
            manager, file, num_bytes, dtype, *place = handle
            storage = torch.UntypedStorage._new_shared_filename_cpu(manager, file, num_bytes)
            yield name, torch.empty(0, dtype=dtype).set_(storage, *place)


# ---- nccl ------------------------------------------------------------------------------------------------------------


def send(connection: socket.socket, path: Path, num_workers: int, host: str, device: torch.device) -> None:
    """Broadcast the weights of a file to the workers of a replica; returns when it closes the connection.

    Sends it the address at which they meet, on `host`, and the weights in their order. Raises `ComputeError` if the
    replica ends before it has them, or takes too long.
    """
    from agentjet.compute.group import Rendezvous  # With libraries that vLLM's environment lacks.

    tune(connection, unanswered_seconds=UNANSWERED_SECONDS)
    end = select.poll()
    end.register(connection, select.POLLIN)  # It sends nothing more until it closes the connection.
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    meeting = Rendezvous(host)
    described = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]
    connection.sendall(encode((meeting.address, described)))
    group = None
    try:
        side: Any = torch.cuda.Stream  # Copies to a GPU do not wait for the learner's kernels.
        with torch.cuda.stream(side(device) if device.type == "cuda" else None):
            group = _join(meeting.store, 0, num_workers, host, device)
            sent = (tensor.reshape(-1).view(torch.uint8).to(device) for tensor in tensors.values())
            for _, broadcast in _broadcasts(group, sent):
                while not broadcast.is_completed():
                    if end.poll(POLL_MS):
                        raise ComputeError("the replica ended")
                broadcast.wait(LIMIT)
        end.poll()  # The workers may still read.
    except (RuntimeError, ComputeError) as error:
        raise ComputeError(f"{path.name} was not sent to a replica: {error}") from error
    finally:
        if group is not None:
            group.abort()


def received(
    address: str, host: str, weights: Sequence[StreamedWeight], *, worker: int, num_workers: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that rank 0 sends, by name; every worker gets all of them.

    `host` is the address of this machine. Raises `RuntimeError` if rank 0 or another worker ends or takes too long.
    """
    store = TCPStore(*host_and_port(address), is_master=False, timeout=LIMIT)
    group = _join(store, 1 + worker, num_workers, host, device)
    try:
        types = [(getattr(torch, dtype), shape) for _, dtype, shape in weights]
        sizes = (dtype.itemsize * math.prod(shape) for dtype, shape in types)
        broadcasts = _broadcasts(group, (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes))
        for (name, *_), (dtype, shape), (raw, broadcast) in zip(weights, types, broadcasts, strict=True):
            broadcast.wait(LIMIT)
            yield name, raw.view(dtype).view(tuple(shape))
        if device.type == "cuda":
            torch.cuda.synchronize()
    finally:
        group.abort()


def _join(store: Any, rank: int, num_workers: int, host: str, device: torch.device) -> Any:
    """Returns a new process group of rank 0 and some workers. Raises `RuntimeError` if they do not meet."""
    distributed: Any = torch.distributed
    store.set_timeout(LIMIT)
    if device.type == "cuda":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = LIMIT
        return distributed.ProcessGroupNCCL(store, rank, 1 + num_workers, options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout, options._devices = LIMIT, [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, 1 + num_workers, options)


def _broadcasts(group: Any, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    """Begins to broadcast tensors of rank 0 in their order; yields each with its work, in which others have begun."""
    begun: deque[tuple[Tensor, Any]] = deque()
    for tensor in tensors:
        begun.append((tensor, group.broadcast(tensor, 0)))
        if len(begun) > AHEAD:
            yield begun.popleft()
    yield from begun
