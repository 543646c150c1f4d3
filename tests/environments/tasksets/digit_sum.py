"""A taskset of verifiers, as its users write them."""

import asyncio
import re

import verifiers.v1 as vf

__all__ = ["DigitSumTaskset"]


class DigitSumConfig(vf.TasksetConfig):
    split: str = "train"
    size: int = 4
    replies: tuple[str, ...] = ()
    """The results of the reward function, one a task: nothing, nan, error or hang. Empty: numbers."""


class DigitSumData(vf.TaskData):
    answer: int = 0
    reply: str = "number"


class DigitSumTask(vf.Task[DigitSumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply)
        match self.data.reply:
            case "nothing":
                return None
            case "nan":
                return float("nan")
            case "error":
                raise KeyError("answers.json")
            case "hang":
                await asyncio.sleep(60)
        return float(bool(found) and int(found[-1]) == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class DigitSumTaskset(vf.Taskset[DigitSumTask, DigitSumConfig]):
    def load(self) -> list[DigitSumTask]:
        first = 10 if self.config.split == "train" else 90
        replies = self.config.replies or ["number"] * self.config.size
        return [DigitSumTask(self._row(first + i, reply)) for i, reply in enumerate(replies)]

    def _row(self, number: int, reply: str) -> DigitSumData:
        prompt = f"What is the sum of the digits of {number}?"
        return DigitSumData(prompt=prompt, answer=sum(map(int, str(number))), reply=reply)
