"""A taskset without a reward."""

import verifiers.v1 as vf

__all__ = ["NoRewardTaskset"]


class NoRewardTaskset(vf.Taskset[vf.Task]):
    def load(self) -> list[vf.Task]:
        return [vf.Task(vf.TaskData(id="only", prompt="Say something."))]
