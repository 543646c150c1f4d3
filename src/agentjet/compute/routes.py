"""Routes of experts in a pass: which experts each router chose, and the replay of choices that were recorded before.

Other kernels or another type round otherwise, so two passes over the same tokens may choose other experts. Sampling
records the choices, and learning repeats them. Only the choice is repeated: the weights of the experts come from the
present router, with gradient.

Every router of `transformers` calls `topk` over the scores of the experts, and its last call makes the choice. During
a pass this module answers that call of a router. The scores of chosen experts are read from the dense scores. Some
routers choose groups of experts first and mask the other groups (DeepSeek V2): a replay chooses the groups of the
recorded experts, so that none of them is masked.

Shapes: N tokens in the order of the pass, L routers, K choices, E experts.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentjet.compute.attention import running_layer
from agentjet.compute.policy import PROBE_TOKENS, Policy, distance, first_line, probe_tokens, tolerance
from agentjet.types import RouteShape

ROUTER = re.compile(r"(Router|Gate|Gating)$")
"""End of the class names of routers. Gates of another kind do not call `topk`."""
TOPK = (torch.topk, torch.Tensor.topk)
ROUTE_MISMATCH = "moe/route_mismatch"
"""Share of the repeated choices that the learner's routers would not have made."""
OWN_ROUTES_KL = "policy/mismatch_kl_own_routes"
"""The mismatch without repeated choices."""


class RoutePass:
    """The choices of one forward pass."""

    def __init__(self, replayed: Tensor | None = None) -> None:
        """`replayed` [N, L, K] are choices to repeat; -1 where the router chooses itself."""
        self._replayed = replayed
        self._chosen: dict[int, list[Tensor]] = {}
        """By router; a sampling step may call the decoder several times."""
        self._differing: dict[int, Tensor] = {}

    @property
    def chosen(self) -> Tensor:
        """The recorded choices [N, L, K]."""
        return torch.stack([torch.cat(self._chosen[number]) for number in sorted(self._chosen)], 1)

    def keep_last(self, count: int) -> None:
        """Drop the choices of the decoder's last call except those of its last tokens."""
        for calls in self._chosen.values():
            calls[-1] = calls[-1][-count:]

    def repeat(self, captured: RoutePass, count: int) -> None:
        """Record the first `count` choices of a captured pass, which a CUDA graph has computed again."""
        for number, calls in captured._chosen.items():
            self._chosen.setdefault(number, []).append(calls[-1][:count])

    @property
    def counts(self) -> tuple[int, int]:
        """The number of repeated choices that the routers would not have made, and that of all repeated choices."""
        if self._replayed is None:
            return 0, 0
        return int(sum(self._differing.values())), int((self._replayed >= 0).sum())

    def record(self, number: int, chosen: Tensor) -> None:
        """Add the choices [..., K] of the next tokens of a router."""
        self._chosen.setdefault(number, []).append(chosen.reshape(-1, chosen.shape[-1]))

    def choose(self, number: int, scores: Tensor, own: Any) -> Any:
        """Returns the result of `topk` over scores [..., E] of experts, given the router's own one."""
        found: Tensor = own.indices
        if self._replayed is None:
            self.record(number, found)
            return own
        wanted = self._replayed[:, number].view(found.shape)
        is_other = (wanted[..., None] != found[..., None, :]).all(-1) & (wanted >= 0)
        self._differing[number] = is_other.sum()
        found = torch.where(wanted < 0, found, wanted)
        return torch.return_types.topk((scores.gather(-1, found), found))

    def choose_groups(self, number: int, scores: Tensor, own: Any, group: int) -> Any:
        """Returns the result of `topk` over scores [N, G] of groups of experts, with the groups of repeated choices."""
        if self._replayed is None:
            return own
        wanted = self._replayed[:, number, :, None]
        groups = torch.arange(scores.shape[-1], device=scores.device)
        is_needed = ((wanted // group == groups) & (wanted >= 0)).any(1)
        return scores.masked_fill(is_needed, torch.inf).topk(own.indices.shape[-1], dim=-1)


@dataclass(slots=True)
class _Router:
    """A router's place, and its calls of `topk`. Copies of a module have a copy of it."""

    number: int
    sizes: list[int] = field(default_factory=list)
    """Last dimension of the scores of each call in order; of the last one, the number of experts."""
    num_choices: int = 0


class _Answers(TorchFunctionMode):
    """Answers the calls of `topk` within one router; observes them the first time."""

    def __init__(self, router: _Router, present: RoutePass) -> None:
        super().__init__()
        self._router = router
        self._present = present
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return own
        router, scores = self._router, cast(Tensor, args[0] if args else (kwargs or {})["input"])
        self._num_calls += 1
        if self._present is _OBSERVING:
            router.sizes.append(scores.shape[-1])
            router.num_choices = own.indices.shape[-1]
            return own
        if self._present is _COMPILING:
            if self._num_calls < len(router.sizes):
                return own
            return torch.return_types.topk((own.values, record_opaquely(own.indices)))
        size, num_experts = scores.shape[-1], router.sizes[-1]
        if self._num_calls == len(router.sizes):
            return self._present.choose(router.number, scores, own)
        if scores.dim() == 2 and num_experts % size == 0:
            return self._present.choose_groups(router.number, scores, own, num_experts // size)
        return own


_OBSERVING = RoutePass()
_COMPILING = RoutePass()
"""Stands for the pass that runs the compiled code. Compiled layers record and do not repeat."""


_present: ContextVar[RoutePass | None] = ContextVar("routes", default=None)
"""The choices of the pass that a thread computes."""


@contextmanager
def routing(present: RoutePass | None) -> Iterator[None]:
    """Context in which the routers of this thread record or repeat choices; with None they do neither."""
    before = _present.set(present)
    try:
        yield
    finally:
        _present.reset(before)


def present_routes() -> RoutePass | None:
    """Returns the choices of the pass that this thread computes; None if they are not recorded or repeated."""
    return _present.get()


@torch.library.custom_op("agentjet::record_routes", mutates_args=())
def record_opaquely(chosen: Tensor) -> Tensor:
    """Records choices of the running layer's router, as one operator of compiled code. Returns them."""
    if (present := present_routes()) is not None:
        router = next(one for part in running_layer.get()[0].modules() if (one := vars(part).get("agentjet_router")))
        present.record(router.number, chosen.clone())  # Compiled code reuses the memory of its results.
    return chosen.clone()


@record_opaquely.register_fake
def _(chosen: Tensor) -> Tensor:
    return torch.empty_like(chosen)


def install(decoder: nn.Module) -> dict[str, nn.Module]:
    """Let the routers of a decoder record and repeat choices inside `routing`. Returns them by name, in order."""
    routers = {name: module for name, module in decoder.named_modules() if _chooses(module)}
    for number, router in enumerate(routers.values()):
        kind: Any = type(router)
        if not hasattr(kind.forward, "answers_topk"):
            kind.forward = _replaced(kind.forward)
        router.agentjet_router = _Router(number)
    return routers


def _chooses(module: nn.Module) -> bool:
    if not (ROUTER.search(type(module).__name__) or hasattr(module, "experts")):
        return False
    methods = (inspect.unwrap(one) for one in vars(type(module)).values() if inspect.isfunction(one))
    return any("topk" in method.__code__.co_names for method in methods)


def _replaced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        router = self.__dict__.get("agentjet_router")
        present = _COMPILING if torch.compiler.is_compiling() else present_routes()
        if router is None or present is None:
            return original(self, *args, **kwargs)
        with _Answers(router, present):
            return original(self, *args, **kwargs)

    forward.answers_topk = True  # type: ignore[attr-defined]
    return forward


def route_shape(policy: Policy, routers: dict[str, nn.Module]) -> RouteShape | str:
    """Returns the sizes of a route, found by a trial, or the reason why routes cannot be recorded.

    Boundary: any exception of the model's code becomes a reason.
    """
    try:
        return _by_trial(policy, routers)
    except Exception as error:
        return f"its routers do not run: {type(error).__name__}: {first_line(error)}"


@torch.inference_mode()
def _by_trial(policy: Policy, routers: dict[str, nn.Module]) -> RouteShape | str:
    """Record a pass, repeat its choices, and repeat those of other tokens."""
    tokens = probe_tokens(policy, PROBE_TOKENS)[None]

    def logits(present: RoutePass) -> Tensor:
        with routing(present):
            hidden = cast(Any, policy.decoder)(input_ids=tokens, use_cache=False).last_hidden_state[0]
        return policy.head(hidden).float()

    places: list[_Router] = [cast(Any, router).agentjet_router for router in routers.values()]
    for place in places:
        place.sizes.clear()
    plain = logits(_OBSERVING)
    if silent := [name for name, place in zip(routers, places, strict=True) if not place.sizes]:
        return f"{silent[0]} chooses no experts"
    if len(numbers := {place.num_choices for place in places}) > 1:
        return f"its routers choose {', '.join(map(str, sorted(numbers)))} experts"
    recorded = RoutePass()
    logits(recorded)
    chosen = recorded.chosen
    if chosen.shape != (PROBE_TOKENS, len(places), places[0].num_choices):
        return f"its choices have the shape {tuple(chosen.shape)}"
    again, other = RoutePass(chosen), RoutePass(chosen.roll(1, 0))
    difference = distance(logits(again), plain)
    if not difference <= tolerance(policy.dtype, plain) or not bool(logits(other).isfinite().all()):
        return f"logits with repeated choices differ by {difference:.3f}"
    layers = tuple(int(number[0]) if (number := re.findall(r"\d+", name)) else 0 for name in routers)
    return RouteShape(layers, places[0].num_choices, max(place.sizes[-1] for place in places))
