"""The server's numbers in Prometheus' text format. Read when asked for; nothing is counted here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from agentjet.gateway import Gateway
from agentjet.types import EngineState

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
