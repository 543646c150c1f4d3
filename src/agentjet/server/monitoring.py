"""Monitoring of the server: log formats, and the routes `/healthz`, `/readyz` and `/metrics`.

Log records are text or JSON, name their episode and batch, and contain no secrets. Episode keys occur in paths
(`/k/{key}/`), tokens and keys in headers; `redact` replaces them in messages and tracebacks.

`/metrics` is in Prometheus' text format. It reads the gateway's numbers on each request and counts nothing itself.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import get_args

from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from agentjet.config.schema import LogFormat
from agentjet.gateway import Gateway
from agentjet.gateway.observability import LogContextFilter
from agentjet.server.deps import BEARER, VIEWER, Deps, GuardedRoute
from agentjet.server.error_handlers import PROBLEM
from agentjet.types import DEFAULT_RUN, EngineState

SECRET_PATTERNS = (
    (re.compile(r"/k/[^/\s\"']+"), "/k/…"),
    (re.compile(r"ajk-[\w.~-]+"), "ajk-…"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{8,}"), r"\1…"),
)


NOT_SHOWN = (None, "", DEFAULT_RUN)
"""Values of a record's context that are left out."""


class LogFile(RotatingFileHandler):
    """A rotating log file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).touch(0o600)
        return super()._open()


def redact(text: str) -> str:
    """Returns `text` without keys and tokens."""
    for pattern, instead in SECRET_PATTERNS:
        text = pattern.sub(instead, text)
    return text


def configure_handler(handler: logging.Handler, log_format: LogFormat, line: str) -> logging.Handler:
    """Sets filters and format of `handler` and returns it. `line` is the text format in `logging`'s percent style."""
    handler.addFilter(LogContextFilter())
    handler.addFilter(_is_relevant)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(line))
    return handler


def _is_relevant(record: logging.LogRecord) -> bool:
    """False for asyncio's warning about a client that left during a response; the gateway counts these."""
    return not (record.name == "asyncio" and str(record.msg).startswith("socket.send() raised"))


class TextFormatter(logging.Formatter):
    """A text line that ends with the run (not the default one), episode and batch of the record."""

    def format(self, record: logging.LogRecord) -> str:
        about = [
            f"{name}={held}"
            for name in ("run", "episode_id", "batch_id")
            if (held := getattr(record, name, None)) not in NOT_SHOWN and str(held) not in record.getMessage()
        ]
        first, newline, rest = super().format(record).partition("\n")
        return redact(" ".join([first, *about]) + newline + rest)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `time` (Unix seconds), `level`, `logger`, `message`; if known, also `run` (not the
    default one), `episode_id`, `batch_id`, `event` and `traceback`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("run", "episode_id", "batch_id", "event"):
            held = getattr(record, name, None)
            if held not in NOT_SHOWN:
                line[name] = held
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return redact(json.dumps(line, ensure_ascii=False, default=str))


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
GAUGES = ("live", "waiting")
"""Episode counts that can fall. The others only grow."""


def exposition(gateway: Gateway) -> bytes:
    """Returns the body of `GET /metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_GatewayCollector(gateway))
    return generate_latest(registry)


def printable(text: str) -> str:
    """Returns `text` with control characters escaped: clients choose metric names, and terminals show them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. Those of the default run have no label `run`."""
        run = self._gateway.run
        for metric in self._collected():
            if run != DEFAULT_RUN:
                metric.samples = [sample._replace(labels={"run": run, **sample.labels}) for sample in metric.samples]
            yield metric

    def _collected(self) -> Iterator[Metric]:
        status, engine = self._gateway.status(), self._gateway.engine
        states = GaugeMetricFamily("agentjet_state", "1 for the present state of the engine.", labels=["state"])
        for state in get_args(EngineState):
            states.add_metric([state], float(state == status.state))
        yield states
        yield GaugeMetricFamily(
            "agentjet_state_seconds", "Seconds since the engine entered its state.", engine.seconds_in_state()
        )
        yield from _episodes(status.episodes)
        groups = GaugeMetricFamily("agentjet_groups", "Groups of the batch that is being filled.", labels=["state"])
        groups.add_metric(["open"], status.groups_open)
        groups.add_metric(["complete"], status.groups_complete)
        yield groups
        step = GaugeMetricFamily("agentjet_step", "Metrics of the newest batch.", labels=["metric"])
        for name, value in status.last_step.items():
            step.add_metric([printable(name)], value)
        yield step
        yield CounterMetricFamily("agentjet_workers_started", "Workers started.", status.workers_started)
        yield CounterMetricFamily(
            "agentjet_workers_hung", "Workers killed because they made no progress.", status.workers_hung
        )
        for name, meaning, value in (
            ("policy_version", "Number of learned batches.", status.policy_version),
            ("calls_active", "Calls that wait, are sampled, or are being sent.", status.calls_active),
            ("clients", "Most recent clients since the server started.", len(status.clients)),
            ("unusable_checkpoints", "Checkpoints that could not be used.", len(status.unusable_checkpoints)),
            ("journal_bytes", "Size of the journal on disk.", self._journal_bytes()),
            ("uptime_seconds", "Seconds since the server started.", status.uptime),
        ):
            yield GaugeMetricFamily(f"agentjet_{name}", meaning, value)

    def _journal_bytes(self) -> int:
        folder = self._gateway.folder
        return sum(path.stat().st_size for path in folder.glob("journal.sqlite*") if path.suffix != ".lock")


def _episodes(counts: dict[str, int]) -> Iterator[Metric]:
    gauge = GaugeMetricFamily(
        "agentjet_episodes",
        "Episodes that are live, or finished and not yet trained.",
        labels=["status"],
    )
    counter = CounterMetricFamily(
        "agentjet_episodes", "Ended episodes since the data dir was created.", labels=["status"]
    )
    for name, count in counts.items():
        (gauge if name in GAUGES else counter).add_metric([name], count)
    yield from (gauge, counter)


READY: tuple[EngineState, ...] = ("sampling", "learning")

router = APIRouter(tags=["operations"], route_class=GuardedRoute)


class Health(BaseModel):
    """The answer of a process whose event loop runs."""

    status: str = "alive"


class Readiness(BaseModel):
    """True if the server answers calls now."""

    ready: bool
    state: EngineState


@router.get("/healthz", responses={400: PROBLEM})
async def healthz() -> Health:
    """Answers 200 while the process is alive. Needs no token."""
    return Health()


@router.get("/readyz", response_model=Readiness, responses={400: PROBLEM, 503: {"model": Readiness}})
async def readyz(deps: Deps) -> JSONResponse:
    """Answers 200 while the engine samples or learns and the disk can be written, else 503.

    Needs no token for the default run.
    """
    state = deps.gateway.engine.state
    found = Readiness(ready=state in READY and not deps.gateway.swarm.store.file.refusal, state=state)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


@router.get(
    "/metrics",
    dependencies=[Depends(BEARER), Depends(VIEWER)],
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
        **dict.fromkeys((400, 401, 403, 500), PROBLEM),
    },
)
async def get_metrics(deps: Deps) -> Response:
    """Metrics of the run for Prometheus. Needs a token of the run; use the viewer token."""
    return Response(exposition(deps.gateway), media_type=CONTENT_TYPE)
