"""The parts of a replica that run inside vLLM's processes: new weights, restricted distributions, and steps on a CPU.

vLLM imports this module by name (`vllm_engine`). Restrictions are ours, so that a set is exactly the embedded backend's
and is known: `Restrictions` masks the logits of a completion with a grammar, `top_p` or `top_k` and sends each set to
the replica over a Unix socket, before vLLM samples the token. vLLM itself gets neither grammar nor truncation.

V is the size of the vocabulary.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from agentjet.compute.token_choice import Grammars, Guide, restrict
from agentjet.errors import GrammarError
from agentjet.types import ModelInfo

log = logging.getLogger(__name__)

SETTINGS = "agentjet"
"""Key of our settings in vLLM's `additional_config`: `socket` and `info`, the fields of a `ModelInfo`."""
RESTRICTION = "agentjet"
"""Key of a `Restriction` in the `extra_args` of a request."""
FRAME = struct.Struct("<QIBI")
"""Header of a message: id of the completion, position of the token, kind, length of the content that follows."""
STEP_TOKENS = 256
"""Tokens of a step on a CPU. More are not faster each, and all running completions wait for the step."""
SET, ERROR = 0, 1
"""Kinds of content: an encoded set, or the reason why the grammar allows no token here."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """Grammar and truncation of a completion. `sampled` are its tokens that were sampled by another replica."""

    id: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    grammar: str = ""
    sampled: list[int] = field(default_factory=list)


class WeightsLoader:
    """Methods that vLLM adds to its worker. The names must not be those of vLLM's own."""

    model_runner: Any

    def agentjet_load(self, path: str) -> list[str]:
        """Replace the weights by those of a safetensors file; returns the names of parameters that it lacks."""
        runner = self.model_runner
        model = runner.get_model()
        names = {name for name, _ in model.named_parameters()}
        with torch.inference_mode():
            initialize_layerwise_reload(model)
            loaded = model.load_weights(_tensors(path))
            finalize_layerwise_reload(model, runner.model_config)
            self._refresh_tied_head(model)
        return sorted(names - (names if loaded is None else set(loaded)))

    def _refresh_tied_head(self, model: Any) -> None:
        """Process a tied head again. The file has no weight for it, so vLLM keeps its packed copy of the old weight."""
        for module in model.modules():
            head = getattr(module, "lm_head", None)
            method = getattr(head, "quant_method", None)
            if head is not None and method is not None and hasattr(head, "weight"):
                method.process_weights_after_loading(head)


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


class Restrictions(AdapterLogitsProcessor):  # type: ignore[misc]
    """Masks the logits of restricted completions. Other completions cost nothing."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        settings: Mapping[str, Any] = vllm_config.additional_config[SETTINGS]
        info = dict(settings["info"])
        info["end_tokens"] = tuple(info["end_tokens"])
        self._grammars = Grammars(ModelInfo(**info), vllm_config.model_config.get_vocab_size())
        self._connection: socket.socket | None = None
        if get_tensor_model_parallel_rank() == 0:  # All ranks sample the same token, so one of them sends its set.
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(settings["socket"])

    def is_argmax_invariant(self) -> bool:
        return False  # A grammar changes what is likeliest.

    def new_req_logits_processor(self, params: Any) -> _Restricted | None:
        restriction = (params.extra_args or {}).get(RESTRICTION)
        return None if restriction is None else _Restricted(Restriction(**restriction), self)

    def guide(self, grammar: str) -> Guide | None:
        return self._grammars.guide(grammar)

    def send(self, id: int, position: int, kind: int, content: bytes) -> None:
        """Send a message to the replica."""
        if self._connection is not None:
            self._connection.sendall(FRAME.pack(id, position, kind, len(content)) + content)


class _Restricted:
    """The restriction of one completion. vLLM makes another one if it computes a completion again."""

    def __init__(self, restriction: Restriction, owner: Restrictions) -> None:
        self._restriction = restriction
        self._owner = owner
        self._num_consumed = 0
        self._guide: Guide | None = None
        self._error = ""
        try:
            self._guide = owner.guide(restriction.grammar)
            for token in restriction.sampled:
                self._consume(token)
        except GrammarError as error:  # It must not end the engine, which serves other completions.
            self._error = str(error)

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        """Mask `logits` [V] in place, for the token after `output_ids`."""
        rule, position = self._restriction, len(output_ids)
        for token in output_ids[self._num_consumed :]:
            self._consume(token)
        self._num_consumed = position
        if self._error:
            self._owner.send(rule.id, position, ERROR, self._error.encode())
            return logits
        mask = self._guide.mask if self._guide else b""
        tempered = logits / rule.temperature if rule.temperature not in (0, 1) else logits.clone()
        top_k, top_p = (rule.top_k, rule.top_p) if rule.temperature else (0, 1.0)
        support = restrict(tempered, top_k, top_p, mask)
        logits.masked_fill_(tempered == -torch.inf, -torch.inf)
        self._owner.send(rule.id, position, SET, support)
        return logits

    def _consume(self, token: int) -> None:
        if self._guide is not None and not self._error:
            self._error = self._guide.advance(token)
