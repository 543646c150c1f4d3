"""`Runs`: the runs of a server, each a `Gateway` on one common `Compute`.

A run other than the default one has the file `run.json`: its policies, the job settings that it was created with, and
whether it is open. Invariants:

* `run.json` is written before a run is opened and before it is ended, so a restarted server has the same runs;
* the policies of a run may be mistyped: before its first episode they can change, unless the run is up;
* two requests for the same run have their effect one after the other;
* a run that cannot be opened is logged and listed, and stops neither the server nor another run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from agentjet.compute import Compute
from agentjet.config import JobConfig, PolicyConfig, ServeConfig, check_models, first_mistake, parse_config
from agentjet.errors import ConfigError, Conflict, Later, NotFound, Unavailable, Unprocessable
from agentjet.front.tracing import Tracing
from agentjet.protocol import JobBody, RunSettings, RunView, check_run_name
from agentjet.server.checkpoints import flush, write_json
from agentjet.server.fronts import Fronts
from agentjet.server.gateway import Gateway
from agentjet.server.monitoring import LoopLag
from agentjet.swarm import Journal
from agentjet.types import DEFAULT_RUN, JOURNAL, RUN_NAME, EngineState

log = logging.getLogger(__name__)

RECORD = "run.json"


class RunFile(RunSettings):
    """The content of `run.json`: the settings that the run was created with. The journal has the job in force."""

    open: bool = True


class Runs:
    """The runs of a server. `await start()` first, `await close()` at the end."""

    def __init__(
        self,
        config: ServeConfig,
        compute: Compute,
        *,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
        fronts: Fronts | None = None,
    ) -> None:
        """Opens the default run. `fronts` answer the calls of all runs; None if this process does.

        Raises `ConfigError` like `Gateway`, and for a data dir of AgentJet 0.1.
        """
        self._config = config
        self._compute = compute
        self.lag = LoopLag()
        self._fronts = fronts
        self._new_gateway = partial(
            Gateway,
            compute=compute,
            clock=clock,
            stopwatch=stopwatch,
            tracing=tracing,
            lag=self.lag,
            fronts=fronts,
        )
        self._folder = config.server.data_dir / "runs"
        self._gateways: dict[str, Gateway] = {}
        self._failed: dict[str, str] = {}
        """Why runs could not be opened, by name."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks of the runs that requests change now."""
        self._closing = False
        _refuse_first_edition(config.server.data_dir)
        self.default = self._gateways[DEFAULT_RUN] = self._new_gateway(config, run=DEFAULT_RUN)

    def get(self, name: str) -> Gateway:
        """Returns the gateway of an open run. Raises `NotFound`."""
        if name not in self._gateways:
            raise self._not_found(name)
        return self._gateways[name]

    def open_gateways(self) -> list[Gateway]:
        """Returns the gateways of the open runs, the default run first."""
        return list(self._gateways.values())

    def views(self) -> list[RunView]:
        return [self._view(name) for name in (DEFAULT_RUN, *self._names())]

    async def start(self) -> None:
        """Starts the default run, and the other runs that were open when the server stopped."""
        self.lag.start()
        await self.default.start()
        for name in self._names():
            try:
                if (record := self._record(name)) is not None and record.open:
                    await self._open(name, record)
            except ConfigError as error:
                log.error("run %s cannot be opened: %s", name, error)
            except Exception as error:  # The boundary: a damaged row of its journal may raise anything.
                if self._closing:
                    raise
                self._failed[name] = f"the log of the server has the failure, {type(error).__name__}"
                log.exception("run %s cannot be opened", name)
        if self._fronts is not None:
            self._fronts.start()

    async def put(self, name: str, settings: RunSettings) -> RunView:
        """Creates or opens a run, changes its job settings if `settings` has some, starts it if it has failed.

        Idempotent. Raises `InvalidRequest` for an invalid name or setting. Raises `Conflict`: `default_run`;
        `run_policies_changed` if the run has other policies and was used; `run_unusable` if its files cannot be opened.
        """
        async with self._changing(name):
            self._check_not_closing()
            known = self._record(name)
            record = known or self._new_record(settings)
            is_corrected = (
                settings.policies not in ({}, record.policies)
                and not self._is_up(name)
                and await asyncio.to_thread(self._is_unused, name)
            )
            is_open = name in self._gateways and not is_corrected
            if is_corrected:  # Its policies were perhaps mistyped.
                record = await asyncio.to_thread(self._with_policies, name, record, settings.policies)
            # It may import a plug-in.
            job = await asyncio.to_thread(self._checked_job, record, settings, is_open=is_open)
            self._check_base_models(name, self._config_of(settings.policies or record.policies, {}))
            if is_corrected and self._is_up(name):  # A request has started it meanwhile.
                raise _policies_changed(known or record)
            if (known is None or is_corrected) and name in self._gateways:
                await self._gateways.pop(name).close()
            if name not in self._gateways:
                record = record.model_copy(update={"policies": settings.policies or record.policies})
                self._write(name, record, is_open=True)
                try:
                    await self._open(name, record)
                except ConfigError:
                    if known is None:  # The journal of an earlier run may have other policies.
                        (self._folder / name / RECORD).unlink(missing_ok=True)
                    raise
            gateway = self._gateways[name]
            if settings.job is not None and gateway.swarm.job != job:
                await gateway.replace_job(JobBody(revision=gateway.swarm.job_revision, job=job.model_dump(mode="json")))
            if gateway.phase.state == "failed":
                gateway.engine.start()
            return self._view(name)

    async def end(self, name: str) -> RunView:
        """Saves a checkpoint, frees the policies of a run and closes its journal. Its files remain. Idempotent."""
        async with self._changing(name):
            record, gateway = self._record(name), self._gateways.get(name)
            if record is None and gateway is None:
                raise self._not_found(name)
            if record is not None:  # The folder of an open run may have been removed.
                self._write(name, record, is_open=False)
            self._failed.pop(name, None)
            if gateway is not None:
                try:
                    await gateway.drain()
                finally:
                    del self._gateways[name]
                    await gateway.close()
            return self._view(name)

    async def drain(self) -> None:
        self._closing = True
        await _all_of(gateway.drain() for gateway in self.open_gateways())

    async def close(self) -> None:
        """Closes all runs, then the backend. Idempotent."""
        self._closing = True
        try:
            await _all_of(gateway.close() for gateway in self.open_gateways())
        finally:
            self.lag.close()
            if self._fronts is not None:
                await self._fronts.close()
            await self._compute.close()

    # ---- one run ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _changing(self, name: str) -> AsyncIterator[None]:
        """Context of one request at a time that changes a run other than the default one."""
        check_run_name(name)
        if name == DEFAULT_RUN:
            raise Conflict(
                f"The run {DEFAULT_RUN!r} has the settings of the server and ends with it: change its job with "
                "`agentjet job set` (PUT /swarm/v1/job), or choose another run.",
                code="default_run",
            )
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            try:
                yield
            except ConfigError as error:
                raise Conflict(f"The run {name!r} is unusable: {error}", code="run_unusable") from None

    def _new_record(self, settings: RunSettings) -> RunFile:
        job = settings.job
        if job is None:  # Optimisers of policies that the run does not have would be refused.
            own = {name: one for name, one in self._config.job.optimizers.items() if name in settings.policies}
            job = self._config.job.model_copy(update={"optimizers": own}).model_dump(mode="json")
        return RunFile(policies=settings.policies, job=job)

    def _with_policies(self, name: str, record: RunFile, policies: Mapping[str, Any]) -> RunFile:
        """The record of a run with other policies: it keeps its job, without optimisers of the old ones."""
        with closing(Journal.open_read_only(self._folder / name / JOURNAL)) as journal:
            held = journal.job_settings()
        job = dict(record.job or {}) if held is None else held.job.model_dump(mode="json")
        own = {policy: one for policy, one in job.get("optimizers", {}).items() if policy in policies}
        return record.model_copy(update={"policies": dict(policies), "job": {**job, "optimizers": own}})

    def _checked_job(self, record: RunFile, settings: RunSettings, *, is_open: bool) -> JobConfig:
        """Returns the requested job settings. Raises `InvalidRequest`, and `Conflict` for other policies."""
        try:
            policies, job = settings.policies or record.policies, record.job if settings.job is None else settings.job
            config = self._config_of(policies, job, "request")
            if not is_open:
                check_models(config, only_of_policies=True)  # The start of the server has checked `model.name`.
        except ConfigError as error:
            raise Unprocessable(str(error), code="invalid_setting") from None
        before, after = self._config_of(record.policies, {}).policies, config.policies
        if not is_open:
            before, after = _without_workers(before), _without_workers(after)
        if before != after:
            raise _policies_changed(record)
        return config.job

    def _is_up(self, name: str) -> bool:
        """True for an open run whose start did not fail."""
        return name in self._gateways and self._gateways[name].phase.state != "failed"

    def _is_unused(self, name: str) -> bool:
        try:
            with closing(Journal.open_read_only(self._folder / name / JOURNAL)) as journal:
                return journal.is_unused
        except ConfigError:
            return False

    def _check_base_models(self, name: str, config: ServeConfig) -> None:
        """Raises `InvalidRequest` if a worker has adapters of another run on another base model."""
        bases = config.base_models()
        for gateway in self.open_gateways():
            theirs = {} if gateway.run == name or gateway.phase.state == "failed" else gateway.config.base_models()
            for worker in bases.keys() & theirs.keys():
                (ours, model), (_, other) = bases[worker], theirs[worker]
                if model != other:
                    called = f"the worker {worker!r}" if worker else "the worker without a name"
                    raise Unprocessable(
                        f"policies.{ours}.model = {model!r}: {called} has adapters of {other!r} for the "
                        f"run {gateway.run!r}, and the adapters of one worker share one base model; set "
                        f"policies.{ours}.worker to another name.",
                        code="invalid_setting",
                        param="policies",
                    )

    def _config_of(self, policies: Mapping[str, Any], job: Mapping[str, Any] | None, origin: str = "") -> ServeConfig:
        """Returns the settings of the server with those of a run, from `origin`. Raises `ConfigError`."""
        served = self._config.model_dump(include={"model", "sampler", "compute", "server"})
        return parse_config({**served, "policies": policies, "job": job or {}}, origin)

    async def _open(self, name: str, record: RunFile) -> None:
        try:
            config = await asyncio.to_thread(self._config_of, record.policies, record.job)
            await asyncio.to_thread(self._read_recipes, name)
        except ConfigError as error:
            self._failed[name] = str(error)
            raise
        self._check_not_closing()
        try:
            # It opens the journal, and may migrate it.
            gateway = await asyncio.to_thread(self._new_gateway, config, run=name)
        except (ConfigError, Later, OSError) as error:
            self._failed[name] = str(error)
            raise ConfigError(str(error)) from None
        if self._closing:
            await gateway.close()
            self._check_not_closing()
        self._gateways[name] = gateway
        self._failed.pop(name, None)
        await gateway.start()

    def _check_not_closing(self) -> None:
        if self._closing:
            raise Unavailable("The server is being stopped.", code="server_stopping", retry_after=10.0)

    def _read_recipes(self, name: str) -> None:
        """Makes the recipes of the run's present job and batch, so that the event loop runs no code of a plug-in when
        it reads them. Raises `ConfigError`.
        """
        try:
            opened = Journal.open_read_only(self._folder / name / JOURNAL)
        except ConfigError:  # It does not exist yet, or the gateway refuses it with the reason.
            return
        with closing(opened) as journal:
            journal.job_settings()
            journal.batches(journal.read_state().policy_version)

    def _names(self) -> list[str]:
        on_disk = {path.parent.name for file in (RECORD, JOURNAL) for path in self._folder.glob(f"*/{file}")}
        return sorted(({name for name in on_disk if RUN_NAME.fullmatch(name)} | self._gateways.keys()) - {DEFAULT_RUN})

    def _record(self, name: str) -> RunFile | None:
        """Returns None if the file does not exist. Raises `ConfigError` if it is damaged."""
        path = self._folder / name / RECORD
        try:
            return RunFile.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else first_mistake(error)
            raise ConfigError(
                f"{path} cannot be read as the settings of a run ({why}): restore it, or move the folder away"
            ) from None

    def _write(self, name: str, record: RunFile, *, is_open: bool) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        path = self._folder / name / RECORD
        try:
            path.parent.mkdir(0o700, exist_ok=True)
            write_json(path, {**record.model_dump(), "open": is_open})
            flush(self._folder)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def _not_found(self, name: str) -> NotFound:
        return NotFound(f"There is no open run {name!r}; open are: {', '.join(self._gateways)}.", code="run_not_found")

    def _view(self, name: str) -> RunView:
        path = "" if name == DEFAULT_RUN else f"/runs/{name}"
        if (gateway := self._gateways.get(name)) is not None:
            phase, version = gateway.phase, gateway.swarm.policy_version
            return RunView(
                name=name,
                path=path,
                policies=gateway.hosted.names,
                is_open=True,
                state=phase.state,
                reason=phase.reason,
                policy_version=version,
            )
        reason, record = self._failed.get(name, ""), None
        try:
            record = self._record(name)
            if record is None and not reason:
                reason = f"{RECORD} is missing: create the run again with its policies, which opens its journal"
        except ConfigError as error:
            reason = str(error)
        state: EngineState = "failed" if reason else "offline"
        policies = () if record is None else tuple(record.policies)
        return RunView(name=name, path=path, policies=policies, is_open=False, state=state, reason=reason)


def _policies_changed(record: RunFile) -> Conflict:
    return Conflict(
        "The policies of a run cannot change, and their workers only while it is not open; its policies are "
        f"{json.dumps(record.policies)}. Leave `policies` out, choose another run, or end the run to change workers.",
        code="run_policies_changed",
    )


def _without_workers(policies: Mapping[str, PolicyConfig]) -> dict[str, PolicyConfig]:
    """The settings that decide the weights."""
    return {name: policy.model_copy(update={"worker": "", "compute": None}) for name, policy in policies.items()}


async def _all_of(works: Iterable[Awaitable[None]]) -> None:
    """Waits for all, then raises the first error."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _refuse_first_edition(data_dir: Path) -> None:
    """Raises `ConfigError` for files of a run directly in the data dir, where AgentJet 0.1 had them."""
    if (data_dir / JOURNAL).exists():
        raise ConfigError(
            f"server.data_dir = {str(data_dir)!r} is of AgentJet 0.1: finish its run with 0.1 (its `agentjet export` "
            "exports the model), or choose another folder for a new run"
        )
    if (stray := data_dir / "checkpoints").exists():
        raise ConfigError(f"{stray} belongs to no run: move it to {data_dir / 'runs' / DEFAULT_RUN / 'checkpoints'}")
