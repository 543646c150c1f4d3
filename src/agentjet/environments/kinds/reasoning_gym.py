"""reasoning-gym: `reasoning_gym:basic_arithmetic`. A task is a question of a data set; one answer is an episode.

The data sets are generated: training and held-out questions have different seeds. The score is that of the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from agentjet.environments.kind import EnvironmentFailed, EnvironmentTask, Kind, Split
from agentjet.environments.model import Model
from agentjet.errors import ConfigError, did_you_mean
from agentjet.types import Reward, shown

SIZE = 500
"""Default number of tasks."""
HELD_OUT_SEED = 1_000_003
"""Distance of the seeds. A data set derives the seed of question i as seed + i."""


class ReasoningGym(Kind):
    """A data set of reasoning-gym: a question, and a score of the answer."""

    requires: ClassVar[str] = "reasoning-gym>=0.1,<0.2"
    about: ClassVar[str] = "name of a data set, such as basic_arithmetic or spell_backward"

    config: Mapping[str, Any] = Field(default_factory=dict)
    """Settings of the data set, such as `config.max_word_len=5`."""
    prompt: Literal["default", "simple", "direct", "chain_of_draft", "DeepSeekZero", "none"] = "default"
    """System prompt of the library; `system_prompt` replaces it."""
    seed: int = Field(0, ge=0, lt=1_000_000)
    """Seed of the training questions."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        size = self.num_tasks or SIZE
        num_held_out = round(size * self.held_out)
        yield from self._split("train", size - num_held_out)
        yield from self._split("held_out", num_held_out)

    def _split(self, split: Split, size: int) -> Iterator[EnvironmentTask]:
        seed = self.seed + (HELD_OUT_SEED if split == "held_out" else 0)
        if size:
            self._data_set(seed, size)  # Wrong settings are an error before the run.
        for index in range(size):
            yield EnvironmentTask(f"{split}-{seed}-{index}", {"seed": seed, "size": size, "index": index}, split)

    def _data_set(self, seed: int, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.target not in DATASETS:
            way_out = did_you_mean(self.target, DATASETS, f"there are {', '.join(sorted(DATASETS))}")
            raise ConfigError(f"reasoning_gym has no data set {self.target!r}; {way_out}")
        try:
            return reasoning_gym.create_dataset(self.target, **{**self.config, "seed": seed, "size": size})
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"config = {shown(dict(self.config))}: {self.target} refuses it: {error}") from None

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        data_set = self._data_set(task.payload["seed"], task.payload["size"])
        entry = data_set[task.payload["index"]]
        system = self.system_prompt or SYSTEM_PROMPTS.get(self.prompt, "")
        messages = [{"role": "system", "content": system}] if system else []
        text = model.chat([*messages, {"role": "user", "content": entry["question"]}]).get("content") or ""
        # Without a system prompt nothing asks for tags.
        answer = extract_answer(text) if system else text.strip()
        score, why = self._score(data_set, answer, entry)
        if not 0 <= score <= 1:
            raise EnvironmentFailed(f"{self.target} scored {score}: reasoning-gym's scores are from 0 to 1")
        metrics = {"correct": float(score == 1), "has_answer": float(answer is not None)}
        return Reward(score, metrics=metrics, by_turn=[score], text=why or f"answer {answer!r}: {entry['answer']!r}")

    def _score(self, data_set: Any, answer: str | None, entry: dict[str, Any]) -> tuple[float, str]:
        """The score, and the reason if the scorer could not read the answer."""
        try:
            return float(data_set.score_answer(answer, entry)), ""
        except Exception as error:  # Scorers parse answers, and some raise for one that is malformed.
            if entry["answer"] is None or float(data_set.score_answer(entry["answer"], entry)) != 1:
                raise
            return 0.0, f"answer {answer!r} cannot be read: {type(error).__name__}: {error}"
