"""A taskset of verifiers with a tool."""

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]


class LookupToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "capitals"

    @vf.tool
    def find(self, country: str) -> str:
        """Returns the capital of a country."""
        return {"France": "Paris"}[country]


class LookupTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float("Paris" in trace.last_reply)

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [LookupToolset(vf.ToolsetConfig())]


class LookupTaskset(vf.Taskset[LookupTask]):
    def load(self) -> list[LookupTask]:
        return [LookupTask(vf.TaskData(id="france", prompt="What is the capital of France?"))]


if __name__ == "__main__":
    LookupToolset.run()
