"""How log records are written: text or JSON, with the episode and batch they are about, and without secrets.

Episode keys stand in paths (`/k/{key}/`), tokens and keys in headers: whatever part of a record or traceback shows one,
it is replaced before it is written.

The server's numbers in Prometheus' text format. Read when asked for; nothing is counted here.

For whoever runs the server: is it alive, may it be sent work, and its numbers. `/healthz`, `/readyz`, `/metrics`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, get_args

from fastapi import APIRouter, Depends
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from agentjet.gateway import Gateway
from agentjet.gateway.observability import LogContextFilter
from agentjet.protocol import Problem
from agentjet.server.deps import BEARER, VIEWER, Deps, GuardedRoute
from agentjet.types import EngineState

LogFormat = Literal["text", "json"]

SECRETS = (
    (re.compile(r"/k/[^/\s\"']+"), "/k/…"),
    (re.compile(r"ajk-[\w.~-]+"), "ajk-…"),
    (re.compile(r"(?i)(bearer\s+)[\w.~+/=-]{8,}"), r"\1…"),
)


class LogFile(RotatingFileHandler):
    """A file of log records that only its owner may read, as those are that follow it when it is full."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).touch(0o600)
        return super()._open()


def redact(text: str) -> str:
    """`text` without keys and tokens."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def configure_handler(handler: logging.Handler, log_format: LogFormat, line: str) -> logging.Handler:
    """`handler`, writing records in a format; `line` is the text's, in `logging`'s percent style."""
    handler.addFilter(LogContextFilter())
    handler.addFilter(_says_something)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines(line))
    return handler


def _says_something(record: logging.LogRecord) -> bool:
    """Not so what asyncio warns of when a client left in the midst of an answer, which is counted elsewhere."""
    return not (record.name == "asyncio" and str(record.msg).startswith("socket.send() raised"))


class TextLines(logging.Formatter):
    """A line for people, ending in what it is about."""

    def format(self, record: logging.LogRecord) -> str:
        about = [
            f"{name}={held}"
            for name in ("episode_id", "batch_id")
            if (held := getattr(record, name, None)) not in (None, "") and str(held) not in record.getMessage()
        ]
        first, newline, rest = super().format(record).partition("\n")
        return redact(" ".join([first, *about]) + newline + rest)


class JsonLines(logging.Formatter):
    """A JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, and `episode_id`, `batch_id`, `event`
    and `traceback` where there are any.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("episode_id", "batch_id", "event"):
            held = getattr(record, name, None)
            if held not in (None, ""):
                line[name] = held
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return redact(json.dumps(line, ensure_ascii=False, default=str))


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
NOW = ("live", "prepared", "waiting")
"""Episode counts that also fall; the others only grow."""


def exposition(gateway: Gateway) -> bytes:
    """What `GET /metrics` answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_GatewayCollector(gateway))
    return generate_latest(registry)


def printable(text: str) -> str:
    """Text with its control characters written as escapes: clients name metrics, and terminals show them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        status, engine = self._gateway.status(), self._gateway.engine
        states = GaugeMetricFamily("agentjet_state", "1 for the state the engine is in.", labels=["state"])
        for state in get_args(EngineState):
            states.add_metric([state], float(state == status.state))
        yield states
        yield GaugeMetricFamily(
            "agentjet_state_seconds", "Seconds the engine has been in it.", engine.seconds_in_state()
        )
        yield from _episodes(status.episodes)
        groups = GaugeMetricFamily("agentjet_groups", "Groups that fill the present batch.", labels=["state"])
        groups.add_metric(["open"], status.groups_open)
        groups.add_metric(["complete"], status.groups_complete)
        yield groups
        step = GaugeMetricFamily("agentjet_step", "Metrics of the newest batch, by name.", labels=["metric"])
        for name, value in status.last_step.items():
            step.add_metric([printable(name)], value)
        yield step
        yield CounterMetricFamily("agentjet_workers_started", "Workers started.", status.workers_started)
        yield CounterMetricFamily(
            "agentjet_workers_hung", "Workers killed because they showed no sign of work.", status.workers_hung
        )
        for name, meaning, value in (
            ("policy_version", "Batches learned.", status.policy_version),
            ("calls_active", "Calls held, sampled, or still being read.", status.calls_active),
            ("clients", "Clients seen since the server began, the newest ones only.", len(status.clients)),
            ("unusable_checkpoints", "Checkpoints that were set aside.", len(status.unusable_checkpoints)),
            ("journal_bytes", "Size of the journal on disk.", self._journal_bytes()),
            ("uptime_seconds", "Seconds since the server began.", status.uptime),
        ):
            yield GaugeMetricFamily(f"agentjet_{name}", meaning, value)

    def _journal_bytes(self) -> int:
        folder = self._gateway.config.server.data_dir
        return sum(path.stat().st_size for path in folder.glob("journal.sqlite*") if path.suffix != ".lock")


def _episodes(counts: dict[str, int]) -> Iterator[Metric]:
    now = GaugeMetricFamily(
        "agentjet_episodes",
        "Episodes that are live, prepared, or finished and waiting to be trained.",
        labels=["status"],
    )
    ever = CounterMetricFamily(
        "agentjet_episodes", "Episodes since the data dir was made, by how they ended.", labels=["status"]
    )
    for name, count in counts.items():
        (now if name in NOW else ever).add_metric([name], count)
    yield from (now, ever)


READY: tuple[EngineState, ...] = ("sampling", "learning")

_PROBLEM: dict[str, Any] = {"model": Problem, "content": {"application/problem+json": {}}}
router = APIRouter(tags=["operations"], route_class=GuardedRoute)


class Health(BaseModel):
    """The process is alive and its event loop turns."""

    status: str = "alive"


class Readiness(BaseModel):
    """Whether calls are answered now."""

    ready: bool
    state: EngineState


@router.get("/healthz", responses={400: _PROBLEM})
async def healthz() -> Health:
    """Whether the process is alive. Needs no token."""
    return Health()


@router.get("/readyz", response_model=Readiness, responses={400: _PROBLEM, 503: {"model": Readiness}})
async def readyz(wired: Deps) -> JSONResponse:
    """200 while the policy can be sampled or learns, and the disk takes what is said; else 503, with the engine's
    state. Needs no token.
    """
    state = wired.gateway.engine.state
    found = Readiness(ready=state in READY and not wired.gateway.swarm.store.journal.refusal, state=state)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


@router.get(
    "/metrics",
    dependencies=[Depends(BEARER), Depends(VIEWER)],
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
        **dict.fromkeys((400, 401, 403, 500), _PROBLEM),
    },
)
async def get_metrics(wired: Deps) -> Response:
    """The server's numbers for Prometheus. Takes any token of the server: the viewer's is meant for this."""
    return Response(exposition(wired.gateway), media_type=CONTENT_TYPE)
