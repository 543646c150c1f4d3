"""`RunSwitcher`: the gateway of the run that a server serves, and the change from one run to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentjet.compute.embedded import EmbeddedCompute
from agentjet.config import JobConfig, ServeConfig
from agentjet.gateway import Gateway
from agentjet.protocol import JobBody


class RunSwitcher:
    """The server's own run lies in its data dir, others in `runs/NAME/` there, each a data dir of the same kind."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._entering = asyncio.Lock()
        self.name = ""
        self.gateway = self._opened("", None)

    async def enter(self, name: str, job: JobConfig | None) -> None:
        """Raises `ConfigError` when the run's folder cannot be had."""
        async with self._entering:
            left = self.gateway
            if name == self.name:
                if job is not None:
                    await left.replace_job(JobBody(revision=left.job().revision, job=job.model_dump(mode="json")))
                return
            self.gateway, self.name = self._opened(name, job), name
            self.gateway.tracing.tracer = left.tracing.tracer
            try:
                await left.close()
            finally:  # A repeat of the same request finds the run entered: it must be up by then.
                await self.gateway.start()

    async def close(self) -> None:
        async with self._entering:
            await self.gateway.close()

    def _opened(self, name: str, job: JobConfig | None) -> Gateway:
        config = self._config
        if name:
            server = config.server.model_copy(update={"data_dir": config.server.data_dir / "runs" / name})
            config = config.model_copy(update={"server": server, "job": job})
        return Gateway(config, EmbeddedCompute(config), clock=self._clock)
