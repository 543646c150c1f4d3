"""Gives vLLM 0.26, the last release for PyTorch 2.11, what the replica reads of 0.32. Never run on a GPU.

Only benches use it. `bench/vllm026/python` is an interpreter in whose processes Python imports this module first.
`bench.gpu` takes it where the samplers' environment has vLLM 0.26. The replica's tests with 0.26, on a CPU:

    VLLM026_PYTHON=/path/to/python AGENTJET_SAMPLER_PYTHON=$PWD/bench/vllm026/python pytest -m vllm tests/cluster

What differs:

* 0.26 knows no versions of weights. Outputs of all steps come over one connection, in the order of the answers to the
  replica's requests. So a mark in the queue of received outputs divides old tokens from new ones, while sampling is
  paused.
* The interval of outputs is a setting of the engine, not of a request.
* An engine of weight transfer must also have the sender's side, and gets no current config from vLLM.
* Layers of experts report the names of loaded parameters without their prefix.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NamedTuple

ENGINE = "agentjet.compute.vllm.engine"


class BeforeEngine:
    """Changes vLLM before the import of the replica's engine, in vLLM's own processes, too. Finds nothing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == ENGINE:
            sys.meta_path.remove(BeforeEngine)
            change_vllm()


class Start(NamedTuple):
    """A version of weights, and the first token that has it. vLLM 0.32 has two types for it."""

    version: str
    start: int


class Mark(NamedTuple):
    """Stands between the outputs of two versions of weights. `processor` turns outputs into those of requests."""

    processor: Any
    version: str

    def pass_by(self) -> None:
        self.processor.weight_version = self.version
        for state in self.processor.request_states.values():
            state.weight_version_starts.append(Start(self.version, state.detokenizer.num_output_tokens()))


async def update_weight_version(self: Any, new_version: str) -> None:
    """`AsyncLLM.update_weight_version` of vLLM 0.32, while sampling is paused."""
    self.engine_core.outputs_queue.put_nowait(Mark(self.output_processor, new_version))


def divided(get: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The function that returns the next outputs, with marks in their queue. vLLM calls it when it has processed the
    last ones."""

    async def get_output_async(*given: Any) -> Any:
        while isinstance(found := await get(*given), Mark):
            found.pass_by()
        return found

    return get_output_async


def change_vllm() -> None:
    import vllm
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert vllm.__version__.startswith("0.26."), f"bench/vllm026 is for vLLM 0.26, and not for {vllm.__version__}"
    add, new_output = OutputProcessor.add_request, RequestState._new_completion_output

    class WithInterval(SamplingParams):  # type: ignore[misc]
        stream_interval: int = 1

    def add_request(self: Any, request: Any, *given: Any, **named: Any) -> None:
        add(self, request, *given, **named)
        state = self.request_states[request.request_id]
        state.weight_version_starts = [Start(self.weight_version, 0)]
        state.stream_interval = getattr(request.sampling_params, "stream_interval", state.stream_interval)

    def new_completion_output(self: Any, *given: Any) -> Any:
        output = new_output(self, *given)
        output.weight_versions = self.weight_version_starts  # The list itself: vLLM may merge the next output into it.
        return output

    vllm.SamplingParams = WithInterval
    OutputProcessor.weight_version = ""  # No token is sampled before the first version.
    OutputProcessor.add_request = add_request
    RequestState._new_completion_output = new_completion_output
    AsyncMPClient.get_output_async = divided(AsyncMPClient.get_output_async)
    AsyncLLM.update_weight_version = update_weight_version
    change_transfer()


def change_transfer() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    create = WeightTransferEngineFactory.create_engine

    def create_engine(config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        engine = create(config, vllm_config, device, model)
        for name in ("start_weight_update", "update_weights", "finish_weight_update"):
            setattr(engine, name, set_current_vllm_config(vllm_config)(getattr(engine, name)))
        return engine

    def load_weights(self: Any, weights: Any) -> Iterator[str]:
        return (f"routed_experts.{name}" for name in self.routed_experts.load_weights(weights))

    WeightTransferEngine.__abstractmethods__ -= {"trainer_send_weights"}
    WeightTransferEngineFactory.create_engine = create_engine
    MoERunner.load_weights = load_weights


def run_next() -> None:
    """Run the `sitecustomize` that this one hides, such as the replica's own."""
    after = sys.path.index(str(Path(__file__).parent)) + 1
    spec = PathFinder.find_spec("sitecustomize", sys.path[after:])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, BeforeEngine)
    run_next()
