"""A replica of this machine without a backend: its process, its connection, and publications of a model's weights.

`LocalReplica` is for tests and figures, which are not asynchronous: its connection lives in a thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentjet.compute.model import load_policy
from agentjet.compute.policy import Policy, locate_model
from agentjet.compute.rank import file_weights
from agentjet.compute.samplers import REPLICA_PATH
from agentjet.compute.transfers import SharedWeights, send
from agentjet.compute.weights import PROBE_TOKENS, Publication, SharedFolder, WeightsServer, write_adapter
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.config.loader import cache_dir
from agentjet.processes.guardian import Launch, places
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import LocalPlacement, Supervisor
from agentjet.types import FinishReason, ModelInfo, PolicyId, Sampled, SamplingParams, TokenScore

SOURCE = Path(__file__).parents[2] / "src"
POLICY = PolicyId()
MODEL = "smollm2-135m"
CONTEXT, MAX_CONCURRENT = 512, 64
START_SECONDS = 600.0
ANSWER_SECONDS = 600.0


def sampler_python() -> str | None:
    """Returns the interpreter of the sampler's environment, if there is one."""
    named = os.environ.get("AGENTJET_SAMPLER_PYTHON")
    made = cache_dir() / "sampler-venv" / "bin" / "python"
    return named or (str(made) if made.exists() else None)


@dataclass(slots=True)
class Completed:
    """A completion and its pieces."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # Time of arrival of each piece
    sizes: list[int] = field(default_factory=list)  # Tokens of each piece
    finish_reason: FinishReason | None = None

    def add(self, piece: Sampled) -> None:
        count = len(piece.tokens)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.support += piece.support or (b"",) * count
        self.versions += [piece.policy_version] * count
        self.times.append(time.monotonic())
        self.sizes.append(count)
        self.finish_reason = piece.finish_reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for a completion. `num_sampled` of the last tokens are already its own."""

    tokens: Sequence[int]
    params: SamplingParams
    num_sampled: int = 0


class LocalReplica:
    """A replica process and the gateway's end of its connection."""

    def __init__(self, python: str, log_path: Path, *paths: Path) -> None:
        """`paths` come before that of every replica."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._folder = SharedFolder(places()[0])
        self.transfer = "file"
        self._shared: dict[Any, SharedWeights] = {}
        """By model: each is that of a rank."""
        command = (python, "-m", "agentjet.compute.vllm.replica")
        found = os.pathsep.join(map(str, (*paths, REPLICA_PATH)))
        launch = Launch("replica", command, log_path, {"PYTHONPATH": found}, shares_gpus=True)
        self.peer: Peer = self.do(self._start(launch), START_SECONDS)
        pid = int(self._supervisor.place("replica").split()[-1])
        self.process = psutil.Process(pid)
        self._server = WeightsServer("127.0.0.1", self._supervisor.secret)
        self._server.send = partial(send, host="127.0.0.1", device=torch.device("cpu"))

    async def _start(self, launch: Launch) -> Peer:
        self._supervisor = Supervisor("127.0.0.1", LocalPlacement(list))
        return await self._supervisor.start(launch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.peer.close)
        self.process.wait(60)
        self.do(self._supervisor.close())
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.close()

    def do(self, work: Coroutine[Any, Any, Any], seconds: float = ANSWER_SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def load(self, model: ModelConfig, info: ModelInfo, sampler: SamplerConfig, compute: ComputeConfig) -> None:
        self.transfer = compute.weight_transfer
        self.do(self.peer.ask("load", POLICY, model, info, sampler, compute), START_SECONDS)

    def publish(self, model: Any, version: int, *, without: str = "") -> Publication:
        """Returns a publication of a model's weights except one, or of its adapter, as the replica's settings say.

        Those of one model share its memory with `ipc`.
        """
        path = self._folder.path / f"{version}-{os.urandom(8).hex()}.safetensors"
        adapter, handles = "", b""
        if hasattr(model, "peft_config"):
            adapter = write_adapter(model, None, path)
        elif self.transfer == "ipc":
            weights = file_weights(model, model.state_dict())
            weights.pop(without, None)
            handles = self._shared.setdefault(model, SharedWeights()).handles(weights, model)
        else:
            folder = path.with_suffix("")  # As `rank.write_weights`: the names of the model's own files.
            model.save_pretrained(folder, max_shard_size=1 << 62)
            (folder / "model.safetensors").rename(path)
            shutil.rmtree(folder)
            if without:
                save_file({name: one for name, one in load_file(path).items() if name != without}, path)
            self._server._files.append(path)
        probe = np.random.default_rng(0).integers(3, model.config.vocab_size, PROBE_TOKENS).tolist()
        after = raw_logprobs(model, probe)
        return Publication(
            version=version,
            address=self._server.address,
            path=str(path),
            num_bytes=path.stat().st_size if path.exists() else 0,
            digest="",
            dtype=str(model.dtype).removeprefix("torch."),
            probe_tokens=tuple(probe),
            probe_logprobs=tuple(float(after[i, token]) for i, token in enumerate(probe[1:])),
            adapter=adapter,
            handles=handles,
        )

    def adopt(self, publication: Publication) -> list[float]:
        scores: list[float] = self.do(self.peer.ask("adopt", POLICY, publication))
        return scores

    def score(self, tokens: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        found = self.do(self.peer.ask("score", POLICY, np.array(tokens, np.int32), num_likeliest))
        scores: list[TokenScore] = found[1]
        return scores

    def sample(
        self,
        wanted: Mapping[int, Wanted] | Wanted,
        adopting: Mapping[int, Publication] | None = None,
        *,
        suspends: bool = False,
    ) -> Any:
        """Sample requests together; returns the `Completed`, by the request's key if there are several.

        `adopting` has publications by a number of tokens of the first request: it is adopted when they have arrived.
        With `suspends`, the replica is suspended before that.
        """
        many = wanted if isinstance(wanted, Mapping) else {0: wanted}
        found = self.do(self._sample_all(many, dict(adopting or {}), suspends))
        return found if isinstance(wanted, Mapping) else found[0]

    async def _sample_all(
        self, many: Mapping[int, Wanted], adopting: dict[int, Publication], suspends: bool
    ) -> dict[int, Completed]:
        found = {key: Completed() for key in many}
        first = next(iter(many))
        adoptions: list[asyncio.Task[Any]] = []

        one_by_one = asyncio.Lock()  # As the gateway does. Many tokens may arrive at once.

        async def adopt(publication: Publication) -> None:
            async with one_by_one:
                if suspends:
                    await self.peer.ask("suspend", POLICY)
                await self.peer.ask("adopt", POLICY, publication)

        async def run(key: int, wanted: Wanted) -> None:
            tokens = np.array(wanted.tokens, np.int32)
            async for piece in self.peer.sample(POLICY, tokens, wanted.params, wanted.num_sampled):
                found[key].add(piece)
                if key == first:
                    for at in [at for at in adopting if at <= len(found[key].tokens)]:
                        adoptions.append(asyncio.create_task(adopt(adopting.pop(at))))

        await asyncio.gather(*(run(key, wanted) for key, wanted in many.items()))
        await asyncio.gather(*adoptions)
        return found


@dataclass(frozen=True, slots=True)
class Running:
    """A replica that has adopted the weights of `policy` as version 0."""

    replica: LocalReplica
    policy: Policy
    published: Any  # The same model without AgentJet's attention
    model: ModelConfig
    sampler: SamplerConfig


@contextmanager
def running(python: str, dtype: str, *, lora_rank: int = 0) -> Iterator[Running]:
    """Starts a replica on one core, whose completions end only at their `max_tokens`."""
    lora = {"rank": lora_rank}
    config = ModelConfig.model_validate(
        {"name": MODEL, "device": "cpu", "dtype": dtype, "threads": 1, "context_length": CONTEXT, "lora": lora}
    )
    policy = load_policy(config)
    sampler = SamplerConfig(max_concurrent=MAX_CONCURRENT, cache_tokens=16_384)
    with tempfile.TemporaryDirectory() as name, LocalReplica(python, Path(name) / "log") as replica:
        info = dataclasses.replace(policy.info, end_tokens=())
        replica.load(config, info, sampler, ComputeConfig())
        published = AutoModelForCausalLM.from_pretrained(locate_model(MODEL), dtype=getattr(torch, dtype)).eval()
        if lora_rank:
            adapter = PeftConfig(r=lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            published = get_peft_model(published, adapter)
        replica.adopt(replica.publish(published, 0))
        yield Running(replica, policy, published, config, sampler)


def raw_logprobs(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns the log-probabilities [T, V] after each token, by a model of transformers."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)], device=model.device)).logits[0].float()
    return logits.log_softmax(-1)
