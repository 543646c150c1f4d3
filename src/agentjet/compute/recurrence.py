"""Layers that carry a state along a path, over a forest: convolutions, delta rules and state-space scans.

The state of a token depends on its path alone. So an unbranched run starts from the final state of its parent run, and
every node is computed once. `transformers` writes these layers around a few functions of fixed names. During a pass
this module computes those functions; projections, norms and gates stay the model's own:

* A causal convolution reads the last inputs of a node's path: one gather.
* A recurrence computes the runs of one level of the tree as a padded batch with initial states. The model's own
  function computes each batch, and its padding changes no state.

Shapes: N nodes, R runs of a batch, L nodes of its longest run, C channels, W width of a convolution.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from agentjet.timeline.forest import Forest

States = dict[tuple[int, str], Tensor]
"""The last inputs [W - 1, C] of a path or its state, by layer and kind."""

Step = Callable[[list[Tensor], Tensor | None], tuple[Tensor, Tensor]]
"""Maps inputs [R, L, ...] and initial states [R, ...] to outputs [R, L, ...] and final states [R, ...]."""


class RecurrencePlan(Protocol):
    """Computes the recurrent layers of one forward pass over a flat row of tokens."""

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns [N, C] for inputs [N, C] and the weight [C, W] of a causal convolution by channel."""

    def scan(self, layer: int, inputs: Sequence[Tensor], step: Step) -> Tensor:
        """Returns [N, ...] of a recurrence over inputs [N, ...]; a step must keep the state where its inputs are 0."""


class Recurrence:
    """The recurrent layers of one forward pass over a forest. Every layer reuses its tables."""

    def __init__(self, forest: Forest, past: States | None = None) -> None:
        """`past` are the states of the path above the forest's roots; gradients flow to them."""
        self._parent = forest.parent.astype(np.int64)
        self._past = past or {}
        self._computed: States | None = {}
        # The last node of a kept path is repeated by the pieces below it. So it is a run of its own.
        self._is_path = forest.num_nodes > 0 and len(forest.run_stops()) == 1
        stops = forest.run_stops()
        if self._is_path and forest.num_nodes > 1:
            stops = np.array([forest.num_nodes - 1, forest.num_nodes])
        self._runs = list(zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True))
        self._above = [
            int(np.searchsorted(stops, above, side="right")) if above >= 0 else -1
            for above in (int(forest.parent[start]) for start, _ in self._runs)
        ]
        self._batches = list(batches(self._runs, self._above))
        self._windows: dict[int, NDArray[np.int64]] = {}

    def take_computed(self) -> States:
        """Returns the states before the last node of a path, and records no more: a layer may be computed again."""
        computed, self._computed = self._computed or {}, None
        return computed

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        past = self._past.get((layer, "convolution"))
        if past is None:
            past = inputs.new_zeros(weight.shape[1] - 1, inputs.shape[1])
        window = torch.from_numpy(self._window(weight.shape[1])).to(inputs.device)
        rows = torch.cat([past, inputs])
        carried = rows[window[-1, :-1]]  # Always: a layer that is computed again must save as many tensors.
        if self._computed is not None and self._is_path:
            self._computed[layer, "convolution"] = carried
        out = (rows[window].to(weight.dtype) * weight.T).sum(1)
        return out if bias is None else out + bias

    def scan(self, layer: int, inputs: Sequence[Tensor], step: Step) -> Tensor:
        past = self._past.get((layer, "state"))
        finals: list[Tensor | None] = [None] * len(self._runs)
        outputs: list[Tensor] = [inputs[0]] * len(self._runs)
        for batch in self._batches:
            length = max(stop - start for start, stop in (self._runs[run] for run in batch))
            padded = [torch.stack([_padded(rows[slice(*self._runs[run])], length) for run in batch]) for rows in inputs]
            initial = [past if self._above[run] < 0 else finals[self._above[run]] for run in batch]
            states = None if initial[0] is None else torch.stack([state for state in initial if state is not None])
            out, final = step(padded, states)
            for i, run in enumerate(batch):
                start, stop = self._runs[run]
                outputs[run], finals[run] = out[i, : stop - start], final[i]
        if self._computed is not None and self._is_path:
            carried = finals[0] if len(finals) > 1 else past
            if carried is not None:
                self._computed[layer, "state"] = carried
        return torch.cat(outputs)

    def _window(self, width: int) -> NDArray[np.int64]:
        """Returns the rows [N, W] that each node's convolution reads, of those of the past and its own."""
        if width not in self._windows:
            past = width - 1
            # One row up the path. Above the roots lies the past, whose first row ends it.
            up = np.concatenate([np.maximum(np.arange(past) - 1, 0), self._parent + past])
            up[past:][self._parent < 0] = past - 1
            columns = [np.arange(len(self._parent)) + past]
            for _ in range(past):
                columns.append(up[columns[-1]])
            self._windows[width] = np.stack(columns[::-1], 1)
        return self._windows[width]


def batches(runs: Sequence[tuple[int, int]], above: Sequence[int]) -> Iterator[list[int]]:
    """Yields runs that are computed together: of one level, and of lengths within a factor of two."""
    level: list[int] = []
    for parent in above:  # A run stands after its parent.
        level.append(level[parent] + 1 if parent >= 0 else 0)
    batches: dict[tuple[int, int], list[int]] = {}
    for run, (start, stop) in enumerate(runs):
        batches.setdefault((level[run], (stop - start - 1).bit_length()), []).append(run)
    yield from (batches[key] for key in sorted(batches))


def _padded(rows: Tensor, length: int) -> Tensor:
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, length - len(rows)))


# ---- the functions of `transformers` ---------------------------------------------------------------------------------


_present: ContextVar[RecurrencePlan | None] = ContextVar("recurrence", default=None)
"""The pass that a thread computes."""
_layer: ContextVar[int] = ContextVar("layer", default=0)
"""The recurrent layer that it computes."""


@contextmanager
def computing(recurrence: RecurrencePlan | None) -> Iterator[None]:
    """Context in which the recurrent layers of this thread compute a forest; with None, rows as the model does."""
    before = _present.set(recurrence)
    try:
        yield
    finally:
        _present.reset(before)


def install(decoder: nn.Module) -> int:
    """Let the recurrent layers of a decoder compute forests inside `computing`. Returns their number."""
    layers = [module for module in decoder.modules() if _functions(type(module))]
    for number, layer in enumerate(layers):
        for names, name in _functions(type(layer)):
            if not hasattr(names[name], "computes_forests"):
                names[name] = _replaced(names[name], FUNCTIONS[name])
        layer.register_forward_pre_hook(functools.partial(_enter, number))
    return len(layers)


def _enter(number: int, *_: Any) -> None:
    _layer.set(number)


def _functions(kind: type[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Returns the functions of `FUNCTIONS` that the methods of a class call: a method's globals, and the name."""
    kinds = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [inspect.unwrap(one) for base in kinds for one in vars(base).values() if inspect.isfunction(one)]
    found = ((one.__globals__, FUNCTIONS.keys() & {*one.__code__.co_names}) for one in methods)
    return [(names, name) for names, called in found for name in called & names.keys()]


def _replaced(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if (recurrence := _present.get()) is None:
            return original(*args, **kwargs)
        return ours(recurrence, _layer.get(), original, *args, **kwargs)

    replaced.computes_forests = True  # type: ignore[attr-defined]
    return replaced


def _convolution(
    recurrence: RecurrencePlan,
    layer: int,
    original: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn`: [1, C, N] to [1, C, N]."""
    out = recurrence.convolve(layer, hidden[0].T, weight, bias)
    assert activation in (None, "silu", "swish"), activation
    return (F.silu(out) if activation else out).to(hidden.dtype).T[None]


DELTA_RULE_CHUNK = 64
"""Size of the chunks in `transformers`, and in kernels, which take no other one."""


def _delta_rule(
    recurrence: RecurrencePlan,
    layer: int,
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule and Kimi's delta attention: [1, N, H, D] each, gate and rate [1, N, H, ...]."""

    def step(inputs: list[Tensor], states: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, gate, rate = inputs
        options["chunk_size"] = _chunk_size(q, DELTA_RULE_CHUNK)
        found: tuple[Tensor, Tensor] = original(
            q, k, v, g=gate, beta=rate, initial_state=states, output_final_state=True, **options
        )
        return found

    return recurrence.scan(layer, [x[0] for x in (query, key, value, g, beta)], step)[None], None


def _chunk_scan(
    recurrence: RecurrencePlan,
    layer: int,
    original: Callable[..., Any],
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Mamba-2: [1, N, H, D] to [1, N, H, D]. Steps of time are made here, so that those of padding are 0."""
    assert z is None, "the gate is the layer's own"
    dt = _time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)

    def step(inputs: list[Tensor], states: Tensor | None) -> tuple[Tensor, Tensor]:
        x, steps, b, c = inputs
        size = _chunk_size(x, chunk_size)
        found: tuple[Tensor, Tensor] = original(
            x, steps, A, b, c, chunk_size=size, D=D, initial_states=states, return_final_states=True
        )
        return found

    return recurrence.scan(layer, [x[0] for x in (hidden, dt, B, C)], step)[None]


def _chunk_size(inputs: Tensor, most: int) -> int:
    """Returns the size of the chunks for inputs [R, L, ...]. The functions for CPUs pad a shorter run to a chunk."""
    return most if inputs.is_cuda else min(most, 1 << (inputs.shape[1] - 1).bit_length())


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _selective_scan(
    recurrence: RecurrencePlan,
    layer: int,
    original: Callable[..., Any],
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    """Mamba: [1, C, N] to [1, C, N]. The function of `transformers` takes no initial state, so ours is written here."""

    def step(inputs: list[Tensor], states: Tensor | None) -> tuple[Tensor, Tensor]:
        x, steps, b, c = (part.float() for part in inputs)
        decay = torch.exp(A * steps[..., None])  # [R, L, C, S]
        added = (steps * x)[..., None] * b[:, :, None]
        state = torch.zeros_like(added[:, 0]) if states is None else states
        outputs = []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + added[:, at]
            outputs.append((state * c[:, at, None]).sum(-1))
        return torch.stack(outputs, 1), state

    steps = _time_steps(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    out = recurrence.scan(layer, [x[0].T for x in (hidden, steps, B, C)], step).T[None]
    out = out if D is None else out + hidden * D[:, None]
    out = (out if z is None else out * F.silu(z)).to(hidden.dtype)
    return (out, None) if return_last_state else out


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
}
"""Replacements of functions of `transformers` during a pass, by their names there."""
