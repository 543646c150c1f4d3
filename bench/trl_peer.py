"""TRL's `GRPOTrainer` on the workload of `bench.step`, in one of its modes. Prints one JSON object as its last line.

TRL is given its fastest fair settings: one micro-batch of the whole step (so it need not score old log-probabilities),
no gradient checkpointing, no reference model, SDPA attention. With continuous batching and autocast TRL 1.16 itself
casts the weights to bfloat16 while it generates, and they stay so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agentjet.compute.model import locate_model
from bench.machine import synchronise
from bench.workload import StepTime, Workload, report, reward

NEVER = -1  # An end token that no vocabulary holds


class TimedTrainer(GRPOTrainer):
    """Notes when a step begins, when its completions are scored, and how many tokens it sampled."""

    scored_at: float
    prompt_tokens: int
    sampled_tokens: int

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        synchronise()
        self.scored_at = time.perf_counter()
        self.prompt_tokens = int(batch["prompt_mask"].sum())
        self.sampled_tokens = int(batch["completion_mask"].sum())
        return batch


class Stopwatch(TrainerCallback):
    """One `StepTime` a step; the optimiser step is part of it."""

    def __init__(self) -> None:
        self.trainer: TimedTrainer | None = None
        self.steps: list[StepTime] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        synchronise()
        trainer, now = self.trainer, time.perf_counter()
        tokens = (trainer.prompt_tokens, trainer.sampled_tokens)
        self.steps.append(StepTime(trainer.scored_at - self._began, now - trainer.scored_at, *tokens))


def run(workload: Workload, generation: str, weights: str) -> dict[str, object]:
    """Train for the workload's steps; arguments as on the command line."""
    torch.set_num_threads(workload.threads)
    folder = locate_model(workload.model)
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    batch = workload.num_prompts * workload.repeats
    stopwatch = Stopwatch()
    chats = [[{"role": "user", "content": question}] for question in workload.questions()]
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=_reward,
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in chats]),
            args=GRPOConfig(
                output_dir=output_dir,
                max_steps=workload.total_steps,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=1,
                num_generations=workload.repeats,
                max_completion_length=workload.new_tokens,
                shuffle_dataset=False,
                learning_rate=workload.lr,
                lr_scheduler_type="constant",
                seed=workload.seed,
                bf16=weights == "autocast",
                gradient_checkpointing=False,
                use_cpu=not torch.cuda.is_available(),
                use_transformers_continuous_batching=generation == "continuous",
                transformers_continuous_batching_config=_continuous_batching(workload),
                disable_tqdm=True,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
            ),
            callbacks=[stopwatch],
        )
        trainer.eos_token_ids = [NEVER]
        trainer.generation_config.eos_token_id = NEVER
        trainer.generation_kwargs["eos_token_id"] = NEVER
        stopwatch.trainer = trainer
        trainer.train()
    return report(workload, stopwatch.steps, device=str(trainer.model.device))


def _continuous_batching(workload: Workload) -> dict[str, Any]:
    """A cache for the whole batch at once; left to itself the library takes half the machine's memory."""
    page, longest = 16, 128 + workload.new_tokens
    batch = workload.num_prompts * workload.repeats
    return {
        "page_size": page,
        "num_blocks": batch * -(-longest // page),
        "max_batch_tokens": batch * longest,
        "auto_switch_to_flash": False,
    }


def _reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [reward(messages[0]["content"]) for messages in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Workload.from_json, default=Workload())
    parser.add_argument("--generation", choices=["generate", "continuous"], default="generate")
    parser.add_argument("--weights", choices=["bfloat16", "autocast", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(json.dumps(run(arguments.workload, arguments.generation, arguments.weights)))


if __name__ == "__main__":
    main()
