"""The scheduler of `sitecustomize`."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from agentjet.compute.vllm.engine import ShortSteps


class AsyncShortSteps(ShortSteps, AsyncScheduler):  # type: ignore[misc]
    pass
