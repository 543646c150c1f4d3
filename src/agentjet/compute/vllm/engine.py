"""The engine of a replica: vLLM, with exact tokens in and out. Only a replica imports it, in vLLM's own venv.

* vLLM gets token ids, and never text. Prompts are checked before, because some requests end the whole engine.
* Log-probabilities are those of the sampled distribution. Restrictions are ours, so that a set is exactly the embedded
  backend's and is known. vLLM itself gets neither grammar nor truncation.
* On GPUs vLLM starts a step before it has the tokens of the last one, by its own default. Only a restriction waits for
  them, beside the computation of the step. Tests do the same on a CPU; it has not run on a GPU.
* A change of weights drops every cached key. Completions that run are computed again under the new weights.
* Weights arrive through vLLM's own interface for weight transfer: see `Transfer`.
* An adapter is read into the one adapter that vLLM has. vLLM keeps the keys of the old one: see above.

`VllmEngine` runs in the replica's process. vLLM's own processes import this module by name, for `Transfer`,
`ShortSteps` and `Restrictions`. The last masks the logits of completions with a grammar, `top_p` or `top_k`, and sends
the sets over a Unix socket to `Sets` before vLLM samples the tokens.

V is the size of the vocabulary. Versions are tested with vLLM 0.32. CUDA paths are written with care and not tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import struct
import tempfile
import traceback
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

# Imports of vLLM are slow. What vLLM reads from the environment at its import is set by `VllmEngine.start`.
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from agentjet.compute.memory import BLOCK_TOKENS, EXTRA_REQUESTS, cache_size, replica_limits, size_from_config
from agentjet.compute.samplers import reason_in
from agentjet.compute.token_choice import Grammars, Guide, restrict
from agentjet.compute.transfers import received, shared_weights
from agentjet.compute.weights import MODULES, PROBE_DECODED, USE_FILE, as_folder, publishes_adapter, size_in_engine
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig, SamplerLimits
from agentjet.config.loader import cache_dir
from agentjet.errors import ComputeError, ConfigError, GrammarError, OutOfCache
from agentjet.timeline.forest import EVERYTHING
from agentjet.types import ModelInfo, SamplingParams, TokenScore

log = logging.getLogger(__name__)

ADAPTER = "policy"
"""Name of the only adapter."""
PROBE_ID = 2**64 - 1
"""Id of the probe among those of completions."""
SEED_BITS = 2**63 - 1
CONNECT_SECONDS = 10.0
DEATH_SECONDS = 0.5
"""Time between two looks at whether vLLM is dead."""
RECEIVE_BYTES = 1 << 20
OUTPUT_TOKENS = 4
"""Tokens of an output of vLLM for a completion that is not streamed. An output costs 36 µs beside 32 for a token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of a completion: as `Sampled`, with the version of each."""

    tokens: list[int]
    logprobs: list[float]
    support: list[bytes]
    versions: list[int]
    ended: bool


class Sets:
    """Receives the support sets of restricted completions, and log-probabilities of the probe, from vLLM's worker.

    The worker sends a set before it samples the token. So the set is in the socket when the token arrives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._known: dict[int, dict[int, tuple[int, bytes]]] = {}
        self._unread = bytearray()
        connection.setblocking(False)
        asyncio.get_running_loop().add_reader(connection, self._receive)

    def begin(self, id: int) -> None:
        self._known[id] = {}

    def end(self, id: int) -> None:
        self._known.pop(id, None)

    def take(self, id: int, position: int) -> bytes:
        """Returns the content for a token. Raises `GrammarError` if its grammar could not be followed."""
        self._receive()
        kind, content = self._known[id].pop(position)
        if kind == ERROR:
            raise GrammarError(content.decode())
        return content

    def _receive(self) -> None:
        unread = self._unread
        with contextlib.suppress(BlockingIOError):
            while part := self._connection.recv(RECEIVE_BYTES):
                unread += part
            asyncio.get_running_loop().remove_reader(self._connection)  # The worker ended, and the engine with it.
        start = 0
        while len(unread) - start >= FRAME.size:
            id, position, kind, length = FRAME.unpack_from(unread, start)
            stop = start + FRAME.size + length
            if stop > len(unread):
                break
            if id in self._known:
                self._known[id][position] = kind, bytes(unread[start + FRAME.size : stop])
            start = stop
        del unread[:start]


def _has_states(config: Any) -> bool:
    """True if layers of a model carry a state, by vLLM's config of it."""
    return bool(config.is_hybrid or config.is_attention_free)


def _innermost(error: BaseException) -> str:
    """Returns the reason of the error that others wrap."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return reason_in(lines) or lines[0]


class VllmEngine:
    """vLLM with one model. The weights are random until the first `load`."""

    def __init__(
        self, engine: Any, info: ModelInfo, sets: Sets, limits: SamplerLimits, max_tokens: int, *, keeps_base: bool
    ) -> None:
        """`keeps_base`: publications are adapters, and vLLM loaded the base model itself."""
        self._engine = engine
        self._keeps_base = keeps_base
        self._is_suspended = False
        self._info = info
        self._sets = sets
        self.limits = limits
        self.max_tokens = max_tokens
        """Limit of a prompt and its completion together."""
        self._adapter: Any = None
        """The `LoRARequest` of every request, for weights that are an adapter."""
        self.vocabulary = int(engine.vllm_config.model_config.get_vocab_size())
        self._grammars = Grammars(info, self.vocabulary)
        self._num_scores = 0

    @classmethod
    async def start(
        cls, model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig, folder: Path
    ) -> Self:
        """Start vLLM with the model of these settings. Raises `ConfigError` if it cannot hold the model.

        Sockets are made in `folder`.
        """
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        set_environment(model, compute)
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
        tempfile.gettempdir()  # This process keeps it: weights are looked for there.
        os.environ["TMPDIR"] = str(folder)  # vLLM's processes leave `vllm_dist_*` behind.
        path = str(folder / "sets")
        ours: dict[str, Any] = {
            "scheduling_policy": "priority",  # The probe comes before completions that are computed again.
            "logits_processors": [f"{__name__}:Restrictions"],  # vLLM's worker imports this module before it loads.
            "additional_config": {SETTINGS: {"socket": path, "info": dataclasses.asdict(info)}},
            "enable_log_requests": False,
        }
        limits = limits_of(model, info, sampler, compute)
        settings = engine_settings(model, info, limits, compute)
        if not settings.get("enable_lora"):
            ours["load_format"] = "dummy"  # Each version comes as a publication, also the first one.
            ours["weight_transfer_config"] = WeightTransferConfig(backend=TRANSFER)
        if settings.get("enable_chunked_prefill") is False:
            ours["scheduler_cls"] = f"{__name__}.ShortSteps"
            # vLLM computes on a CPU in one more process, and waits for it in a loop that uses a second core. It does
            # so for "uni", too, because it binds threads there. `set_environment` binds none.
            ours["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(CONNECT_SECONDS)
            try:
                arguments = AsyncEngineArgs(**settings, **ours)
                if settings.get("enable_chunked_prefill") is False and _has_states(arguments.create_model_config()):
                    arguments.enable_prefix_caching = False  # vLLM keeps states at the ends of chunks only.
                engine = AsyncLLM.from_engine_args(arguments)
                sets = Sets(listener.accept()[0])  # vLLM's worker connects while it starts.
            except Exception as error:  # Boundary: vLLM raises many kinds.
                cause = _innermost(error)
                raise ConfigError(
                    f"model.name = {model.name!r}: vLLM cannot hold the model with these settings ({cause}). "
                    "compute.backend = 'embedded' holds every model of transformers"
                ) from error
        is_hot = bool(settings.get("enable_lora"))
        return cls(engine, info, sets, limits, settings["max_model_len"], keeps_base=is_hot)

    async def died(self) -> BaseException:
        """Wait until vLLM is dead; returns its error."""
        while not self._engine.errored:
            await asyncio.sleep(DEATH_SECONDS)
        error: BaseException = self._engine.dead_error
        return error

    async def check(self, tokens: NDArray[np.int32], params: SamplingParams, num_sampled: int) -> None:
        """Raises `ComputeError`, `OutOfCache` or `GrammarError` for a request that cannot be served."""
        self._check_tokens(tokens)
        if not 0 <= num_sampled < len(tokens):
            raise ComputeError(f"{num_sampled} of {len(tokens)} tokens cannot be those of the completion")
        if params.max_tokens < 1:
            raise ComputeError(f"max_tokens = {params.max_tokens} is not positive")
        if len(tokens) + params.max_tokens > self.max_tokens:
            raise OutOfCache(
                f"{len(tokens)} prompt tokens + max_tokens = {params.max_tokens} exceed what a replica can hold "
                f"({self.max_tokens}: the smaller one of the model's context and sampler.cache_tokens)"
            )
        if params.grammar:
            await asyncio.to_thread(self._grammars.guide, params.grammar)

    async def sample(
        self, id: int, tokens: NDArray[np.int32], params: SamplingParams, num_sampled: int
    ) -> AsyncGenerator[Delta]:
        """Yields the new tokens of a checked request. Raises `GrammarError`, or what vLLM raises."""
        from vllm import SamplingParams as EngineParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        is_restricted = bool(params.grammar) or (params.temperature > 0 and (params.top_k > 0 or params.top_p < 1))
        prompt = tokens.tolist()
        rule = Restriction(
            id, params.temperature, params.top_k, params.top_p, params.grammar, prompt[len(prompt) - num_sampled :]
        )
        wanted = EngineParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            # A generator for each request costs a loop in Python and a launch for each token.
            seed=params.seed & SEED_BITS if params.is_reproducible else None,
            stop_token_ids=[token for token in self._info.end_tokens if token < self.vocabulary],
            ignore_eos=True,  # Else the tokens of the model's `generation_config.json` end completions, too.
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=min(OUTPUT_TOKENS, params.piece_tokens) if params.stream_seconds is None else 1,
            detokenize=False,
            extra_args={RESTRICTION: dataclasses.asdict(rule)} if is_restricted else None,
        )
        self._sets.begin(id)
        name, position = f"sample-{id}", 0
        try:
            stream = self._engine.generate(tokens_input(prompt), wanted, name, lora_request=self._adapter)
            async for output in stream:
                (completion,) = output.outputs
                new = list(completion.token_ids)
                logprobs = [at[token].logprob for at, token in zip(completion.logprobs or [], new, strict=True)]
                support = [EVERYTHING] * len(new)
                if is_restricted:
                    support = [self._sets.take(id, position + i) for i in range(len(new))]
                if output.finished and completion.finish_reason not in ("stop", "length"):
                    raise ComputeError(f"the engine ended the completion: {completion.finish_reason}")
                starts = self._version_starts(name, completion if output.finished else None)
                versions = [_version_at(starts, position + i) for i in range(len(new))]
                position += len(new)
                yield Delta(new, logprobs, support, versions, output.finished)
        finally:
            self._sets.end(id)

    async def score(self, tokens: NDArray[np.int32], num_likeliest: int) -> list[TokenScore]:
        """Returns the score of each token except the first, given those before it. Raises `ComputeError`."""
        return await (await self._queue_scores(tokens, num_likeliest))

    async def queue_probe(self, tokens: NDArray[np.int32]) -> Awaitable[list[float]]:
        """Request the log-probabilities of the probe's tokens except the first, before all other requests.

        Returns their awaitable. The last `PROBE_DECODED` ones are computed one at a time, as those of completions are.
        """
        head, forced = tokens[: -PROBE_DECODED - 1], tokens[-PROBE_DECODED - 1 :].tolist()
        scores = await self._queue_scores(head, 0, forced)

        async def logprobs() -> list[float]:
            try:
                scored = [score.logprob for score in await scores]
                return scored + [LOGPROB.unpack(self._sets.take(PROBE_ID, i))[0] for i in range(len(forced))]
            finally:
                self._sets.end(PROBE_ID)

        return logprobs()

    async def _queue_scores(
        self, tokens: NDArray[np.int32], num_likeliest: int, forced: Sequence[int] = ()
    ) -> Awaitable[list[TokenScore]]:
        """As `score`, which begins here; returns its awaitable result. `forced`: the tokens that are sampled then."""
        from vllm import SamplingParams as EngineParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._check_tokens(tokens)
        if len(tokens) >= self.max_tokens:
            raise ComputeError(f"a replica scores at most {self.max_tokens - 1} tokens; the request has {len(tokens)}")
        self._num_scores += 1
        rule = Restriction(PROBE_ID, temperature=0, forced=[*forced])
        wanted = EngineParams(
            max_tokens=len(forced) or 1,
            temperature=0,
            prompt_logprobs=num_likeliest,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            ignore_eos=True,
            extra_args={RESTRICTION: dataclasses.asdict(rule)} if forced else None,
        )
        if forced:
            self._sets.begin(PROBE_ID)
        outputs = await self._engine.add_request(
            f"score-{self._num_scores}",
            tokens_input(tokens.tolist()),
            wanted,
            lora_request=self._adapter,
            priority=-1 if forced else 0,
        )

        async def scores() -> list[TokenScore]:
            after = (await outputs.get()).prompt_logprobs[1:]
            return [
                _token_score(token, at, num_likeliest) for token, at in zip(tokens[1:].tolist(), after, strict=True)
            ]

        return scores()

    async def pause(self) -> None:
        """Stop all sampling and drop every cached key."""
        if not self._is_suspended:
            await self._engine.pause_generation(mode="keep", clear_cache=True)

    async def suspend(self) -> None:
        """Pause, and free the memory of weights and cache until `load` and `resume`. On CPUs vLLM frees nothing."""
        await self._engine.sleep(level=1 if self._keeps_base else 2, mode="keep")  # Level 2 keeps no weights.
        self._is_suspended = True

    async def load(self, source: Mapping[str, Any], adapter: str) -> None:
        """Replace the weights while paused. Raises `ComputeError` if some of them are missing.

        `source` has the fields of a `WeightSource`. `adapter`: the config of `Publication`.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._is_suspended:
            await self._engine.wake_up(tags=["weights"])
        if adapter:
            await self._load_adapter(Path(source["path"]), adapter)
            return
        try:
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(dict(source)))
            await self._engine.finish_weight_update()
        except Exception as error:  # Boundary: vLLM raises `Exception` with the worker's text.
            way_out = "" if "path" in source else f". {USE_FILE}"
            raise ComputeError(f"vLLM cannot load the published weights: {error}{way_out}") from error

    async def _load_adapter(self, path: Path, config: str) -> None:
        from vllm.lora.request import LoRARequest

        folder = str(as_folder(path, config))
        # A request with `load_inplace` would read the file again at each step.
        await self._engine.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))
        self._adapter = LoRARequest(ADAPTER, 1, folder)

    async def resume(self, version: int) -> None:
        """Sample again; new tokens have this version."""
        await self._engine.update_weight_version(str(version))
        if self._is_suspended:
            await self._engine.wake_up(tags=["kv_cache"])  # vLLM samples from here on.
            self._is_suspended = False
        await self._engine.resume_generation()

    def _version_starts(self, name: str, ended: Any | None) -> list[tuple[str, int]]:
        """Returns vLLM's record of a request's versions: (version, first token). `ended` is its last output, if it is.

        vLLM gives a completion's versions with its last output only, but they are noted step by step.
        """
        if ended is not None:
            return [(span.version, span.start) for span in ended.weight_versions]
        known = self._engine.output_processor
        (id,) = known.external_req_ids[name]
        found: list[tuple[str, int]] = known.request_states[id].weight_version_starts
        return found

    def _check_tokens(self, tokens: NDArray[np.int32]) -> None:
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise ComputeError(f"a prompt needs token ids between 0 and {self.vocabulary - 1}")


def _token_score(token: int, at: Mapping[int, Any], num_likeliest: int) -> TokenScore:
    """Returns a token's score from vLLM's log-probabilities at its position."""
    best = sorted((one.rank, id, one.logprob) for id, one in at.items() if one.rank <= num_likeliest)
    return TokenScore(at[token].logprob, tuple((id, logprob) for _, id, logprob in best))


def _version_at(starts: Sequence[tuple[str, int]], position: int) -> int:
    """Returns the version of the token at a position."""
    return next(int(version) for version, start in reversed(starts) if start <= position)


def _model_folder(model: ModelConfig) -> str:
    """Returns the folder or hub id with the model's `config.json`. Its weights are read if an adapter is published."""
    from agentjet.compute.policy import BUNDLED, locate_model

    folders = [Path(model.name)]
    if model.name == BUNDLED:  # The server unpacked it, because this environment lacks its package.
        folders += sorted(cache_dir().glob(f"{BUNDLED}-*"))
    known = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    return str(known) if known else locate_model(model.name)


def limits_of(model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig) -> SamplerLimits:
    """Returns the numbers of these settings, by the memory of a GPU if the replica does not share it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or compute.colocated:
        return sampler.limits
    try:
        size = size_from_config(_sizes_of(model))
    except (KeyError, TypeError, AttributeError):  # Its memory cannot be computed before it is loaded.
        return sampler.limits
    return replica_limits(
        sampler,
        size,
        memory=current_platform.get_device_total_memory(),
        tensor_parallel=compute.tensor_parallel,
        value_bytes=getattr(torch, info.dtype).itemsize,
    )


def _config_of(model: ModelConfig) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(_model_folder(model), trust_remote_code=False)


def _sizes_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the config of a model's decoder, with the names that its class translates, such as GPT-2's."""
    config = _config_of(model).get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = config.to_dict()
    return sizes | {name: getattr(config, name) for name in names if hasattr(config, name)}


def _cache_bytes(model: ModelConfig, info: ModelInfo, limits: SamplerLimits, compute: ComputeConfig) -> int:
    """Returns the bytes of the cache of each GPU, as `replica_need` counts them. Raises `ConfigError`."""
    value_bytes = getattr(torch, info.dtype).itemsize
    try:
        size = cache_size(_sizes_of(model))
        return size.bytes(limits, tensor_parallel=compute.tensor_parallel, value_bytes=value_bytes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model.name = {model.name!r}: its config.json has no sizes that a replica's cache can be computed from "
            f"({error!r}). compute.backend = 'embedded' holds every model of transformers"
        ) from None


def engine_settings(
    model: ModelConfig, info: ModelInfo, limits: SamplerLimits, compute: ComputeConfig
) -> dict[str, Any]:
    """Returns arguments of vLLM's engine: those that do not depend on how a replica uses it."""
    from vllm.platforms import current_platform

    max_concurrent, cache_tokens = limits
    limit, places = min(info.context_length, cache_tokens), max_concurrent + EXTRA_REQUESTS
    settings: dict[str, Any] = {
        "model": _model_folder(model),
        "dtype": info.dtype,
        "seed": int.from_bytes(os.urandom(4), "little"),  # Else all replicas would draw the same random numbers.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # The model's own defaults would change the distribution.
        "max_model_len": limit,
        "max_num_seqs": places,
        # vLLM plans the blocks. A number of blocks would ignore their size, which a model with states raises.
        "kv_cache_memory_bytes": _cache_bytes(model, info, limits, compute),
        "block_size": BLOCK_TOKENS,
        "tensor_parallel_size": compute.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "disable_log_stats": True,
    }
    if publishes_adapter(model.lora, _config_of(model).architectures):
        settings |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": size_in_engine(model.lora.rank),
            "lora_target_modules": list(MODULES),
        }
    if compute.colocated and not current_platform.is_cpu():
        # vLLM would want its share of what the ranks use, too.
        settings |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.01}
    if current_platform.is_cpu():
        settings |= {
            "enforce_eager": True,
            # A seeded request whose prompt is computed in chunks ends the engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": limit + places,
        }
    return settings


def set_environment(model: ModelConfig, compute: ComputeConfig) -> None:
    """Set what vLLM's processes read from the environment."""
    from vllm.platforms import current_platform

    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # The second runner does not call `Restrictions`.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # `replica_path` ends processes that are not forks.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if current_platform.is_cpu():
        threads = model.threads or max(1, (os.cpu_count() or 1) // compute.samplers.most)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Else the first log-probabilities are compiled for a minute.


# ---- inside vLLM's processes -----------------------------------------------------------------------------------------

SETTINGS = "agentjet"
"""Key of our settings in vLLM's `additional_config`: `socket` and `info`, the fields of a `ModelInfo`."""
RESTRICTION = "agentjet"
"""Key of a `Restriction` in the `extra_args` of a request."""
FRAME = struct.Struct("<QIBI")
"""Header of a message: id of the completion, position of the token, kind, length of the content that follows."""
LOGPROB = struct.Struct("<f")
"""Content for a token of the probe."""
STEP_TOKENS = 512
"""Tokens of a step on a CPU. More are not faster each, and all running completions wait for the step. With fewer, a
batch of calls takes more steps: each costs about 80 tokens beside those that it computes."""
SET, ERROR = 0, 1
"""Kinds of content: an encoded set or a log-probability, or the reason why the grammar allows no token here."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """Grammar and truncation of a completion. `sampled` are its tokens that were sampled by another replica.

    `forced` are the only tokens that may be sampled, one after the other. Then there are no sets, but log-probabilities
    at temperature 1.
    """

    id: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    grammar: str = ""
    sampled: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing needs to be agreed before the first update."""


@dataclass
class WeightSource(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The place of all weights, under the names of the model's files: one of these."""

    path: str = ""
    """A safetensors file of this machine."""
    handles: bytes = b""
    """Handles of memory of the rank, on the device of this worker."""
    stream: dict[str, Any] | None = None
    """Arguments of `received`, to which rank 0 sends the weights."""


class Transfer(WeightTransferEngine[NoInit, WeightSource]):  # type: ignore[misc]
    """Our engine of vLLM's weight transfer.

    vLLM calls `start`, `receive` and `finish` in its worker, with its config set, while it samples nothing.
    """

    init_info_cls, update_info_cls = NoInit, WeightSource

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    @torch.inference_mode()
    def start_weight_update(self) -> None:
        computed = {name for name, _ in self.model.named_parameters()}
        self._packed = _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        # The first lack the second name of a tied head. The second lack what vLLM derives from weights.
        self._names = computed & {name for name, _ in self.model.named_parameters()}

    @torch.inference_mode()
    def receive_weights(self, update_info: WeightSource) -> None:
        loaded = self.model.load_weights(_weights(update_info, self.device))
        if missing := sorted(self._names - (self._names if loaded is None else set(loaded))):
            raise ComputeError(f"the published weights lack {len(missing)} parameters, such as {missing[0]}")

    @torch.inference_mode()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._packed:  # Of experts that vLLM did not process again.
            method.moe_kernel = method.moe_kernel or kernel
        _refresh_tied_head(self.model)

    def shutdown(self) -> None:
        pass


TRANSFER = "agentjet"
WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)


def _forget_packed_experts(model: Any) -> list[tuple[Any, Any]]:
    """Let a CPU pack experts again: vLLM packs the first weights only, and would compute with raw ones.

    Returns what is forgotten.
    """
    from vllm.platforms import current_platform

    methods: list[Any] = [
        getattr(module, "quant_method", None) for module in model.modules() if current_platform.is_cpu()
    ]
    packed = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in packed:
        method.moe_kernel = None
    return packed


def _refresh_tied_head(model: Any) -> None:
    """Process a tied head again. The file has no weight for it, so vLLM keeps its packed copy of the old weight."""
    for module in model.modules():
        head = getattr(module, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if head is not None and method is not None and hasattr(head, "weight"):
            method.process_weights_after_loading(head)


def _weights(source: WeightSource, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    if source.stream is not None:
        return received(**source.stream, worker=get_tensor_model_parallel_rank(), device=device)
    return shared_weights(source.handles, device) if source.handles else _tensors(source.path)


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            yield name, file.get_tensor(name)


class ShortSteps(Scheduler):  # type: ignore[misc]
    """Spreads prompts over several steps, each prompt whole: on a CPU vLLM cannot compute one in chunks.

    After a change of weights, completions go on one after another, and not when all contexts are computed again.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        longest = self.waiting.peek_request().num_tokens if self.waiting else 0
        wanted = max(STEP_TOKENS, len(self.running) + longest)
        self.max_num_scheduled_tokens = min(wanted, self.scheduler_config.max_num_batched_tokens)
        return super().schedule(throttle_prefills)


class Restrictions(LogitsProcessor):  # type: ignore[misc]
    """Masks the logits of all restricted completions of a step at once. Other completions cost nothing."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        settings: Mapping[str, Any] = vllm_config.additional_config[SETTINGS]
        info = dict(settings["info"])
        info["end_tokens"] = tuple(info["end_tokens"])
        self._grammars = Grammars(ModelInfo(**info), vllm_config.model_config.get_vocab_size())
        self._restricted: dict[int, _Restricted] = {}
        """By row of the logits."""
        self._connection: socket.socket | None = None
        if get_tensor_model_parallel_rank() == 0:  # All ranks sample the same token, so one of them sends its set.
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(settings["socket"])

    def is_argmax_invariant(self) -> bool:
        return False  # A grammar changes what is likeliest.

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._restricted, batch_update, self._new)

    def _new(self, params: Any, prompt: list[int] | None, output: list[int]) -> _Restricted | None:
        """Returns the restriction of a new row. vLLM appends the tokens that it samples to `output`."""
        restriction = (params.extra_args or {}).get(RESTRICTION)
        return None if restriction is None else _Restricted(Restriction(**restriction), self._grammars, output)

    def apply(self, logits: Tensor) -> Tensor:
        """Mask `logits` [R, V] in place, for the tokens after those of each completion."""
        messages: list[bytes] = []
        forced = {row: one for row, one in self._restricted.items() if one.rule.forced}
        if forced:
            messages += _force(logits, forced)
        chosen = {row: one for row, one in self._restricted.items() if row not in forced and one.follow()}
        if chosen:
            messages += _mask(logits, chosen)
        messages += [one.message(ERROR, one.error.encode()) for one in self._restricted.values() if one.error]
        if messages and self._connection is not None:
            self._connection.sendall(b"".join(messages))
        return logits


class _Restricted:
    """The restriction of one completion. vLLM makes another one if it computes a completion again."""

    def __init__(self, rule: Restriction, grammars: Grammars, output: list[int]) -> None:
        self.rule = rule
        self.error = ""
        """The reason why the grammar cannot be followed."""
        self._output = output
        self._num_consumed = 0
        self._guide: Guide | None = None
        try:
            self._guide = grammars.guide(rule.grammar)
            for token in rule.sampled:
                self._consume(token)
        except GrammarError as error:  # It must not end the engine, which serves other completions.
            self.error = str(error)

    @property
    def position(self) -> int:
        """The number of tokens before the next one."""
        return len(self._output)

    @property
    def mask(self) -> bytes:
        return self._guide.mask if self._guide else b""

    def follow(self) -> bool:
        """Consume the tokens that were sampled since the last call; returns whether the grammar allows another one."""
        for token in self._output[self._num_consumed :]:
            self._consume(token)
        self._num_consumed = self.position
        return not self.error

    def message(self, kind: int, content: bytes) -> bytes:
        return FRAME.pack(self.rule.id, self.position, kind, len(content)) + content

    def _consume(self, token: int) -> None:
        if self._guide is not None and not self.error:
            self.error = self._guide.advance(token)


def _mask(logits: Tensor, restricted: Mapping[int, _Restricted]) -> list[bytes]:
    """Set rows of `logits` [R, V] outside their sets to -inf, in place; returns messages with the sets."""
    rules = [one.rule for one in restricted.values()]
    rows = torch.tensor([*restricted], device=logits.device)
    temperatures = torch.tensor([rule.temperature or 1.0 for rule in rules], device=logits.device)
    tempered = logits[rows] / temperatures[:, None]
    # A greedy token is the likeliest one of all that the grammar allows.
    top_ks = np.array([rule.top_k if rule.temperature else 0 for rule in rules])
    top_ps = np.array([rule.top_p if rule.temperature else 1.0 for rule in rules])
    sets = restrict(tempered, top_ks, top_ps, [one.mask for one in restricted.values()])
    logits[rows] = logits[rows].masked_fill_(tempered == -torch.inf, -torch.inf)
    return [one.message(SET, members) for one, members in zip(restricted.values(), sets, strict=True)]


def _force(logits: Tensor, forced: Mapping[int, _Restricted]) -> list[bytes]:
    """Leave one token in rows of `logits` [R, V]; returns messages with its log-probabilities before."""
    messages = []
    for row, one in forced.items():
        token = one.rule.forced[min(one.position, len(one.rule.forced) - 1)]
        messages.append(one.message(SET, LOGPROB.pack(float(logits[row].float().log_softmax(-1)[token]))))
        logits[row] = -torch.inf
        logits[row, token] = 0.0
    return messages
