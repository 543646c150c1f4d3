"""CUDA graphs of decoding steps: one token a row, the choice of the next one, and compiled decoder layers.

`torch.compile` fuses the small kernels of a layer: norms, rotary embeddings, activations, additions.

* Captured steps alone run compiled layers. The modules keep their `forward`, for prompts and for the learner. Weights
  are inputs of the compiled code, so it sees a change in place.
* Attention and the record of routes are one operator each, which takes layer and plan from a context. So layers of
  one kind share their compiled code.
* In float32 a fused kernel differs from the model's own ones in the order of sums. In bfloat16 it also rounds where
  they do (`emulate_precision_casts`). So the learner computes the log-probabilities of the sampler within rounding. A
  trial before each capture compares logits, with the tolerance of the trial at load. If it fails, or the compiler does,
  the step is captured without compiled layers.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentjet.compute.attention import AttentionPlan, flat_forward, running_layer
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.cached_attention import MAX_KERNELS, PagedPlan
from agentjet.compute.model import decoder_layers
from agentjet.compute.policy import Policy, distance, first_line, probe_tokens, tolerance
from agentjet.compute.routes import RoutePass, present_routes, routing
from agentjet.compute.token_choice import ChoiceRules, choose_in_graph
from agentjet.errors import ComputeError

log = logging.getLogger(__name__)

COMPILE_SECONDS = 120.0
"""Time after which no further layer of a step is compiled."""
SIZES = (8, 64, 128, 256, 512)
"""Numbers of rows of the graphs, up to the first one that suffices for all completions."""


class DecodeGraphs:
    """CUDA graphs of the steps in which each row of one policy computes and chooses one token.

    A CUDA graph launches a whole step at once. Launched one by one, the kernels of a small model take longer to start
    than to run. Graphs are captured for a few numbers of rows; a step takes the next larger one, and its other rows are
    padding. On a CPU the same steps run without graphs, for tests.
    """

    def __init__(self, cache: KeyValueCache, max_rows: int, context: int) -> None:
        self._cache = cache
        self._sizes = [size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < max_rows]
        self._width = -(-min(context, cache.max_tokens) // BLOCK)
        self._pool = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None
        self._last = torch.zeros(self._sizes[-1], dtype=torch.int32, device=cache.device)
        """The tokens that the last step has chosen."""
        self._graphs: WeakKeyDictionary[Policy, dict[int, DecodeGraph | None]] = WeakKeyDictionary()

    def of(self, policy: Policy, num_rows: int) -> DecodeGraph | None:
        """Returns the graph of steps of this number of rows; None if they cannot be a graph."""
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None:
            return None
        graphs = self._graphs.setdefault(policy, {})
        if size not in graphs:
            graphs[size] = self._captured(policy, size)
        return graphs[size]

    def forget(self, policy: Policy) -> None:
        """Drop the graphs of a policy if its weights are at other addresses than when they were captured."""
        graphs = self._graphs.get(policy, {})
        if any(graph and graph.addresses != _addresses(policy) for graph in graphs.values()):
            del self._graphs[policy]

    def _captured(self, policy: Policy, size: int) -> DecodeGraph | None:
        """Boundary: any exception under a compiler or a capture means that the step does without it."""
        has_failed = any(graph is None or graph.compile_seconds is None for graph in self._graphs[policy].values())
        compiler = None if has_failed else compiler_of(policy.device)
        for attempt in [compiler, None] if compiler else [None]:
            try:
                plan = PagedPlan(self._cache, size, size, self._width)
                return DecodeGraph(policy, plan, self._last, self._pool, attempt)
            except Exception as error:
                lost = "its decoder layers are not compiled" if attempt else "its steps are not CUDA graphs"
                cause = getattr(error, "inner_exception", error)  # A compiler's own error.
                reason = f"{type(cause).__name__}: {first_line(cause)}"
                log.warning("%s: sampling is slower, %s: %s", policy.info.name, lost, reason)
                if self._pool is not None:  # A failed capture may leave the old one open.
                    self._pool = torch.cuda.graph_pool_handle()
        return None


class DecodeGraph:
    """A captured step: decoder, head and choice. It holds no policy, so that a removed one is freed."""

    def __init__(self, policy: Policy, plan: PagedPlan, last: Tensor, pool: Any, compiler: str | None) -> None:
        """`compiler` is a backend of `torch.compile`. Raises `ComputeError` if compiled layers fail the trial."""
        self.addresses = _addresses(policy)
        self.compile_seconds: float | None = None
        """Time in which decoder layers were compiled and tried; None if they are not compiled."""
        self._compiler = compiler
        self._plan = plan
        self._last = last
        self._graph: Any = None
        self._routes = RoutePass() if policy.records_routes else None
        if last.device.type != "cuda":
            if compiler is not None:
                self._warm_up(policy)
            return
        stream: Any = cast(Any, torch.cuda).Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._warm_up(policy)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"), routing(self._routes):
            self._compute(policy, compiler)
        self._graph = graph

    def _warm_up(self, policy: Policy) -> None:
        """Compile attention and layers, and allocate workspaces, which a capture must not."""
        unread = self._last.clone()
        try:
            self._plan.fill_trial(probe_tokens(policy, BLOCK))
            with routing(None):
                self._compute(policy, None)
            if self._compiler is not None:
                self._try_layers(policy, self._compiler)
            with routing(None):
                self._compute(policy, self._compiler)
        finally:
            self._last.copy_(unread)

    def _try_layers(self, policy: Policy, compiler: str) -> None:
        """Compile the decoder layers. Raises `ComputeError` if their logits are not those of the model's own layers."""
        began = time.monotonic()
        with routing(recorded := RoutePass()), warnings.catch_warnings(action="ignore"):
            found = self._compute(policy, compiler, began + COMPILE_SECONDS)[:BLOCK]
        # Rounding changes choices of experts, so the model repeats those of the compiled layers.
        with routing(RoutePass(recorded.chosen) if policy.info.routes is not None else None):
            wanted = self._compute(policy, None)[:BLOCK]
        difference = distance(found, wanted)
        if not difference <= tolerance(policy.dtype, wanted):
            raise ComputeError(f"their logits differ by {difference:.3f}")
        self.compile_seconds = time.monotonic() - began
        reported = policy.info.name, len(self._plan.tokens), self.compile_seconds
        log.info("%s: decoder layers for steps of up to %d rows, compiled and tried in %.1f s", *reported)

    def launch(
        self,
        policy: Policy,
        rows: Sequence[CacheRow],
        rules: ChoiceRules | None = None,
        source: NDArray[np.int64] | None = None,
    ) -> None:
        """Compute the next token of each row, and choose the one after it; see `PagedPlan.fill`."""
        self._plan.fill([(row, 1) for row in rows], rules, source)
        if self._graph is None:
            self._compute(policy, self._compiler)
            return
        self._graph.replay()
        if self._routes is not None and (present := present_routes()) is not None:
            present.repeat(self._routes, len(rows))

    @property
    def logits(self) -> Tensor:
        """Logits [size, V] of the last launch. The next launch of any graph overwrites them."""
        return self._logits

    def chosen(self) -> ReadTokens:
        """Returns a function that waits for the tokens [size] of the last launch, and their log-probabilities."""
        on_host = self._chosen.to("cpu", non_blocking=True)
        copied = cast(Any, torch.cuda).Event() if self._graph is not None else None
        if copied is not None:
            copied.record()

        def read() -> tuple[NDArray[np.int32], NDArray[np.float32]]:
            if copied is not None:
                copied.synchronize()
            tokens, logprobs = on_host.numpy()
            return tokens, logprobs.view(np.float32)

        return read

    def _compute(self, policy: Policy, compiler: str | None, deadline: float = float("inf")) -> Tensor:
        source = self._plan.source
        tokens = torch.where(source >= 0, self._last[source.clamp(min=0)], self._plan.tokens)
        with _compiled_layers(policy, compiler, deadline):
            hidden = flat_forward(policy.decoder, tokens, self._plan.positions, self._plan)
        self._logits = policy.head(hidden)
        self._chosen = choose_in_graph(self._logits, self._plan.temperatures, self._plan.uniforms)
        self._last[: len(tokens)] = self._chosen[0]
        return self._logits


def compiler_of(device: torch.device) -> str | None:
    """Returns the backend of `torch.compile` for decoder layers; None if they are not compiled."""
    return "inductor" if device.type == "cuda" else None


@contextmanager
def _compiled_layers(policy: Policy, compiler: str | None, deadline: float) -> Iterator[None]:
    """Context in which the layers of a decoder run compiled. Raises `TimeoutError` for a layer after the deadline."""
    layers: list[Any] = decoder_layers(policy, "compiled layers") if compiler else []
    before = [vars(layer).get("forward") for layer in layers]  # With `model.activation_checkpointing`.
    for layer in layers:
        layer.forward = functools.partial(_run_layer, layer, _compiled(type(layer).forward, compiler), deadline)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _run_layer(
    layer: nn.Module, forward: Callable[..., Any], deadline: float, *args: Any, plan: AttentionPlan, **kwargs: Any
) -> Any:
    if time.monotonic() > deadline:
        raise TimeoutError(f"not all are compiled after {COMPILE_SECONDS:.0f} s")
    before = running_layer.set((layer, plan))
    try:
        return forward(layer, *args, **kwargs)
    finally:
        running_layer.reset(before)


@functools.cache
def _compiled(forward: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """Returns the compiled `forward` of a class of layers: for the first number of rows, then for any number."""
    options = {"emulate_precision_casts": True} if compiler == "inductor" else None
    settings = {"backend": compiler, "options": options, "recompile_limit": MAX_KERNELS}
    return cast(Any, torch.compile)(forward, fullgraph=True, **settings)  # type: ignore[no-any-return]


ReadTokens = Callable[[], tuple[NDArray[np.int32], NDArray[np.float32]]]
"""Returns tokens and log-probabilities, when a device has chosen them."""


def _addresses(policy: Policy) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in policy.sampled_from())
