"""Gives vLLM 0.26, the last release for PyTorch 2.11, what the replica reads of 0.32. Never run on a GPU.

Only benches use it. `bench/vllm026/python` is an interpreter in whose processes Python imports this module at its start;
`bench.gpu` takes it where the samplers' environment has vLLM 0.26. The replica's tests against 0.26, on a CPU:

    VLLM026_PYTHON=/path/to/python AGENTJET_SAMPLER_PYTHON=$PWD/bench/vllm026/python pytest -m vllm tests/cluster

What differs:

* 0.26 knows no versions of weights. Outputs of all steps come over one connection, in the order of the answers to the
  replica's requests. So a mark in the queue of received outputs divides old tokens from new ones, if sampling is paused.
* The interval of outputs is a setting of the engine, not of a request.
* An engine of weight transfer must also have the sender's side, and gets no current config from vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NamedTuple

ENGINE = "agentjet.compute.vllm.engine"
INTERVAL = "stream_interval"
"""Key of the interval in the `extra_args` of a request."""


class BeforeEngine:
    """Changes vLLM before the import of the replica's engine, in vLLM's own processes, too. Finds nothing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == ENGINE:
            sys.meta_path.remove(BeforeEngine)  # type: ignore[arg-type]
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


def change_vllm() -> None:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert vllm.__version__.startswith("0.26."), f"bench/vllm026 is for vLLM 0.26, and not for {vllm.__version__}"
    add, next_output, new_output = (
        OutputProcessor.add_request, AsyncMPClient.get_output_async, RequestState._new_completion_output
    )  # fmt: skip

    def add_request(self: Any, request: Any, *given: Any, **named: Any) -> None:
        add(self, request, *given, **named)
        state = self.request_states[request.request_id]
        state.weight_version_starts = [Start(self.weight_version, 0)]
        state.stream_interval = (request.sampling_params.extra_args or {}).get(INTERVAL, state.stream_interval)

    async def update_weight_version(self: Any, new_version: str) -> None:
        self.engine_core.outputs_queue.put_nowait(Mark(self.output_processor, new_version))

    async def get_output_async(self: Any) -> Any:
        while isinstance(found := await next_output(self), Mark):
            found.pass_by()
        return found

    def new_completion_output(self: Any, *given: Any) -> Any:
        output = new_output(self, *given)
        output.weight_versions = self.weight_version_starts  # The list itself: vLLM may merge this output into another.
        return output

    OutputProcessor.weight_version = ""  # No token is sampled before the first version.
    OutputProcessor.add_request = add_request
    AsyncLLM.update_weight_version = update_weight_version
    AsyncMPClient.get_output_async = get_output_async
    RequestState._new_completion_output = new_completion_output
    change_params()
    change_transfer()


def change_params() -> None:
    import vllm
    from vllm.sampling_params import SamplingParams

    def with_interval(*, stream_interval: int = 1, extra_args: dict[str, Any] | None = None, **given: Any) -> Any:
        return SamplingParams(extra_args={**(extra_args or {}), INTERVAL: stream_interval}, **given)

    vllm.SamplingParams = with_interval


def change_transfer() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory

    create = WeightTransferEngineFactory.create_engine

    def create_engine(config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        engine = create(config, vllm_config, device, model)
        for name in ("start_weight_update", "update_weights", "finish_weight_update"):
            setattr(engine, name, set_current_vllm_config(vllm_config)(getattr(engine, name)))
        return engine

    WeightTransferEngine.__abstractmethods__ -= {"trainer_send_weights"}
    WeightTransferEngineFactory.create_engine = create_engine


def run_next() -> None:
    """Run the `sitecustomize` that this one hides, such as the replica's own."""
    after = sys.path.index(str(Path(__file__).parent)) + 1
    spec = PathFinder.find_spec("sitecustomize", sys.path[after:])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, BeforeEngine)  # type: ignore[arg-type]
    run_next()
