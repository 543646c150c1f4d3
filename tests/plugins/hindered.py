"""A recipe that hinders the process which learns with it, beside its hooks: the hooks have a limit of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentjet.recipes.baselines import Grpo


class Hindered(Grpo):
    """GRPO. The first process that removes the file `sign` goes on as `way` says, for about `seconds`."""

    way: str = "learner spins"
    seconds: float = 0.0
    sign: str = ""

    def columns(self, batch: Any, outputs: Any) -> Any:
        try:
            Path(self.sign).unlink()
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            pass
        else:
            WAYS[self.way](self.seconds)
        return super().columns(batch, outputs)


def spin(seconds: float) -> None:
    """Use a whole core, as a wait for a GPU does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def hinder(owner: Any, name: str, before: Callable[[], Any]) -> None:
    """Call something before a function."""
    function = getattr(owner, name)

    def hindered(*arguments: Any, **more: Any) -> Any:
        before()
        return function(*arguments, **more)

    setattr(owner, name, hindered)


def learner_spins(seconds: float) -> None:
    from agentjet.compute.learner import PolicyLearner

    hinder(PolicyLearner, "_reduce_gradients", lambda: spin(1e6))


def sampler_spins(seconds: float) -> None:
    from agentjet.compute import sampler

    hinder(sampler, "sample_tokens", lambda: spin(1e6))


def learner_is_slow(seconds: float) -> None:
    """Without CPU time: only the steps show that it goes on."""
    from agentjet.compute.learner import PolicyLearner

    hinder(PolicyLearner, "_accumulate", lambda: time.sleep(seconds))


def model_loads_long(seconds: float) -> None:
    from agentjet.compute import rank

    hinder(rank, "BaseModel", lambda: spin(seconds))


def learner_compiles_long(seconds: float) -> None:
    import torch

    from agentjet.compute.attention import compiled_flex
    from agentjet.compute.learner import PolicyLearner

    def compiler(graph: Any, inputs: Any) -> Any:
        spin(seconds)
        return graph.forward

    compiled_flex()
    compiled = torch.compile(lambda x: x + 1, backend=compiler)
    hinder(PolicyLearner, "_reduce_gradients", lambda: compiled(torch.zeros(1)))


WAYS = {
    "learner spins": learner_spins,
    "sampler spins": sampler_spins,
    "learner is slow": learner_is_slow,
    "model loads long": model_loads_long,
    "learner compiles long": learner_compiles_long,
}
