"""Steps of learners on a device that does not exist: shapes, types and devices without numbers.

Run as a program by `test_offload.py`, because torch registers the device for the whole process. An operation that mixes
tensors of the CPU and of the device raises here, as it does with a GPU. Ranks are two in name: collectives return at
once. Not covered: files, NCCL, streams and pinned memory.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration

from agentjet.compute import learner as embedded
from agentjet.compute.group import Sharding
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import summed
from agentjet.config import OptimizerConfig

DEVICE = "fake"


class Event:
    def record(self) -> None: ...


class Stream:
    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self) -> Event:
        return Event()


class Device(backend_registration._DummyBackendModule):
    """What FSDP asks of the module of a device."""

    Event = Event

    def Stream(self, *, priority: int = 0) -> Stream:
        return Stream()

    def current_stream(self) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Any:
        return nullcontext()

    def current_device(self) -> int:
        return 0


def weight(*shape: int, dtype: torch.dtype, learns: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=DEVICE, dtype=dtype), requires_grad=learns)


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype, *, has_frozen: bool) -> None:
        super().__init__()
        self.first = weight(5, 4, dtype=dtype, learns=not has_frozen)
        self.second = weight(4, 5, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden @ self.first.T @ self.second.T


class Decoder(nn.Module):
    def __init__(self, dtype: torch.dtype, *, has_frozen: bool) -> None:
        super().__init__()
        self.embeddings = weight(7, 4, dtype=dtype)
        self.layers = nn.ModuleList([Layer(dtype, has_frozen=has_frozen) for _ in range(2)])
        self.scale = weight(dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embeddings[tokens]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * self.scale


class Norm:
    """The norm of a gradient, which has no value here."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __float__(self) -> float:
        return 1.0


class Steps(PolicyLearner):
    """The parts of a learner that need no number."""

    def logprobs(self, forest: Any) -> Tensor:
        return self.policy.decoder(torch.zeros(3, dtype=torch.long, device=DEVICE))

    def _make_pass(self) -> Any:
        return None

    def _norm(self, tensors: Any) -> Any:
        return Norm(super()._norm(tensors))

    def make_step(self) -> None:
        for _ in range(2):
            hidden = self.logprobs(None)
            assert hidden.device.type == DEVICE
            hidden.sum().backward()
            self._gather_gradients()
        self._reduce_gradients()
        self._contributed = True
        self.optim_step(OptimizerConfig(lr=1.0, max_grad_norm=1.0), 0)
        self.weights_changed()


def fingerprint(weights: Any, ranks: Any, known: Any) -> int:
    for kind in (True, False):
        parts = [w.to_local() if kind else w for w in weights if isinstance(w, DTensor) == kind]
        if parts:
            summed(torch.stack([summed(part) for part in parts]))
    return 0


def check(dtype: torch.dtype, sharding: Sharding | None, mesh: DeviceMesh, *, has_frozen: bool) -> None:
    """Learn, restore and exchange the reference. A learner without `sharding` is that of the embedded backend."""
    decoder = Decoder(dtype, has_frozen=has_frozen)
    policy: Any = SimpleNamespace(
        model=decoder,
        decoder=decoder,
        dtype=dtype,
        device=torch.device(DEVICE),
        config=SimpleNamespace(num_hidden_layers=2),
        offloads_optimizer=True,
        has_adapters=False,
        trainable=lambda: {name: p for name, p in decoder.named_parameters() if p.requires_grad},
    )
    if sharding is None:
        learner: Steps = Steps(policy)
    else:
        group: Any = SimpleNamespace(mesh=mesh, rank=0, num_ranks=2)
        learner = Steps(policy, group, sharding)
    learner.make_step()
    learner.restore(learner.new_state())
    whole = {name: torch.empty(m.shape, dtype=m.dtype) for name, m in learner.state()["masters"].items()}
    if sharding is not None:
        learner.restore({"masters": whole, "optimizer": {"state": {}}})
    reference = {name: p.to(DEVICE, dtype) for name, p in whole.items()}
    for _ in range(2):
        learner._exchange_reference(reference)
    learner.make_step()
    for name, p in decoder.named_parameters():
        in_layer = sharding == "sharded" and name.startswith("layers.")
        assert p.device.type == ("cpu" if in_layer else DEVICE), name
    state = learner.state()
    for name, master in state["masters"].items():
        for tensor in (master, *state["moments"][name].values()):
            assert (tensor.to_local() if isinstance(tensor, DTensor) else tensor).device.type == "cpu", name


def main() -> None:
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, Device())
    torch.accelerator.current_stream = Stream
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh(DEVICE, (2,))
    embedded.fingerprint = fingerprint
    clip = embedded.clip_grads_with_norm_
    embedded.clip_grads_with_norm_ = lambda masters, largest, norm: clip(masters, largest, norm.tensor)
    with FakeTensorMode():
        try:
            torch.ones(2, device=DEVICE) + torch.ones(2)
        except RuntimeError:
            pass
        else:
            sys.exit("tensors of two devices were added")
        for dtype in (torch.float32, torch.bfloat16):
            for sharding in (None, "gathered", "sharded"):
                for has_frozen in (False, True):
                    check(dtype, sharding, mesh, has_frozen=has_frozen)


if __name__ == "__main__":
    main()
