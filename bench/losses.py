"""Losses and gradients against TRL's, on the same logits in float64: `python -m bench.losses`.

`GRPOTrainer._compute_loss` runs as it is installed; the only thing that it does not compute is the model: the logits
are the parameters. Ours are the hooks `weights` and `token_loss` of the recipe. Both differentiate to the logits.

The last line is one JSON object. `losses` is the number of losses that both have, `worst` the largest relative
difference of loss and gradient.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentjet.recipes.recipe import Recipe
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import build_forest, call_row

ROWS, LENGTH, VOCABULARY = 6, 9, 13
BOUND = 1e-6
MAX_COMPLETION = 16.0
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}

CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip, mean over tokens": ({"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    "clip, mean over sequences": ({"aggregation": "sequence_mean"}, {"loss_type": "grpo"}),
    "clip, constant divisor": ({"aggregation": "constant", "constant": MAX_COMPLETION}, {"loss_type": "dr_grpo"}),
    "clip, DAPO's normaliser": ({"aggregation": "token_mean"}, {"loss_type": "dapo"}),
    "dual clip": ({"aggregation": "token_mean", "loss": {"name": "clip", "dual_clip": 1.5}}, {"loss_type": "bnpo"}),
    "gspo": ({"loss": {"name": "gspo"}}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": ({"loss": {"name": "cispo"}}, {"loss_type": "cispo", "epsilon_high": 1 + BOUNDS["clip_high"]}),
    "kl k3": ({"aggregation": "token_mean", "kl_coef": 0.1}, {"loss_type": "bnpo", "beta": 0.1}),
}
"""By name: the parameters of our recipe, and those of TRL's loss."""


class Samples:
    """The same tokens for both: logits of the policy, log-probabilities at sampling and of the reference."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.logits = torch.from_numpy(rng.normal(size=(ROWS, LENGTH, VOCABULARY))).requires_grad_()
        self.tokens = torch.from_numpy(rng.integers(VOCABULARY, size=(ROWS, LENGTH)))
        self.lengths = rng.integers(3, LENGTH + 1, size=ROWS)
        self.mask = torch.from_numpy((np.arange(LENGTH) < self.lengths[:, None]).astype(np.int64))
        # As the forest stores them, so that both read the same numbers.
        self.advantages = torch.from_numpy(rng.normal(size=ROWS).astype(np.float32)).double()
        present = self.logprobs().detach()
        self.old, self.reference = (
            (present + torch.from_numpy(0.3 * rng.normal(size=(ROWS, LENGTH)))).float().double() for _ in range(2)
        )

    def logprobs(self) -> Tensor:
        """Returns the log-probabilities [ROWS, LENGTH] of the tokens, with gradient."""
        return self.logits.log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]


def ours(recipe: Recipe, samples: Samples) -> tuple[float, Tensor]:
    """Returns the loss and its gradient in the logits, by the hooks of a recipe."""
    rows = [
        call_row(
            np.array([row, *samples.tokens[row, :length].tolist()], np.int32),
            samples.old[row, :length].numpy().astype(np.float32),
            np.zeros(length, np.int32),
            float(samples.advantages[row]),
            1.0,
            row,
        )
        for row, length in enumerate(samples.lengths)
    ]
    forest = build_forest(rows)
    logp = torch.cat([samples.logprobs()[row, :length] for row, length in enumerate(samples.lengths)])
    sequence = torch.from_numpy(forest["sequence"]).long()
    columns = {name: torch.from_numpy(forest[name]).double() for name in ("logprob", "advantage")}
    gaps = (logp - columns["logprob"]).detach()
    columns["sequence_log_ratio"] = torch.stack([gaps[sequence == row].mean() for row in range(ROWS)])[sequence]
    columns["reference"] = torch.cat([samples.reference[row, :length] for row, length in enumerate(samples.lengths)])
    losses, _ = recipe.token_loss(logp, columns)
    loss = (losses * torch.from_numpy(recipe.weights(forest).astype(np.float64))).sum()
    return _with_gradient(loss, samples)


def theirs(settings: Mapping[str, Any], samples: Samples) -> tuple[float, Tensor]:
    """Returns the same by `GRPOTrainer._compute_loss`."""
    from trl import GRPOConfig, GRPOTrainer

    chosen = {"epsilon_low": BOUNDS["clip_low"], "epsilon_high": BOUNDS["clip_high"], "beta": 0.0, **settings}
    arguments = GRPOConfig(
        output_dir="unused",
        delta=chosen.pop("delta", None),
        use_bias_correction_kl=False,  # It weights the KL term by the ratio, which our k3 does not.
        use_cpu=True,
        report_to="none",
    )
    trainer = SimpleNamespace(
        importance_sampling_level="token",
        args=arguments,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda values: values, reduce=lambda values, reduction: values
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=arguments.steps_per_generation or 1,
        max_completion_length=MAX_COMPLETION,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            samples.logprobs(),
            torch.zeros(ROWS, LENGTH, dtype=torch.float64),
            None,
        ),
    )
    for name, value in chosen.items():
        setattr(trainer, name, value)
    arguments.steps_per_generation = trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": samples.tokens[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": samples.tokens,
        "completion_mask": samples.mask,
        "advantages": samples.advantages,
        "old_per_token_logps": samples.old,
        "ref_per_token_logps": samples.reference,
        "num_items_in_batch": samples.mask.sum(),
    }
    return _with_gradient(GRPOTrainer._compute_loss(trainer, None, inputs), samples)


def compare(name: str) -> float:
    """Returns the largest relative difference of loss and gradient."""
    parameters, settings = CASES[name]
    loss = {"name": "clip", **parameters.get("loss", {})}
    lower = {} if loss["name"] == "cispo" else {"clip_low": BOUNDS["clip_low"]}  # TRL's CISPO has no lower bound.
    recipe = make_recipe({**parameters, "loss": {**lower, "clip_high": BOUNDS["clip_high"], **loss}})
    samples = Samples()
    delta = loss.get("dual_clip")
    mine, other = ours(recipe, samples), theirs({**settings, **({"delta": delta} if delta else {})}, samples)
    of_loss = abs(mine[0] - other[0]) / abs(other[0])
    return max(of_loss, float((mine[1] - other[1]).norm() / other[1].norm()))


def _with_gradient(loss: Tensor, samples: Samples) -> tuple[float, Tensor]:
    (gradient,) = torch.autograd.grad(loss, samples.logits)
    return float(loss.detach()), gradient


def main() -> int:
    found = {name: compare(name) for name in CASES}
    for name, difference in found.items():
        print(f"{name:<28} {difference:.1e}")
    worst = max(found.values())
    print(json.dumps({"bench": "losses", "losses": len(found), "worst": worst, "bound": BOUND, "differences": found}))
    return int(worst > BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
