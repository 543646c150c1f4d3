"""The dashboard `docs/grafana.json`: every metric and label in it exists, and every metric is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentjet.protocol import FrontView
from tests.server.serving import serving

pytestmark = pytest.mark.anyio
DOCS = Path(__file__).parents[2] / "docs"
OF_PROMETHEUS = {"instance", "run"}
"""Labels that a scrape adds, and that of further runs."""


def queries() -> list[str]:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


async def test_the_dashboard_shows_every_metric_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path / "d") as served:
        await served.run.batch()
        front = FrontView(front=0, ready=True, calls=1, load=0.5, lag=0.01, starts=2)
        status = served.run.gateway.status().model_copy(update={"fronts": [front]})
        monkeypatch.setattr(served.run.gateway, "status", lambda: status)
        families = text_string_to_metric_families((await served.http.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]
    labels = {sample.name: OF_PROMETHEUS | set(sample.labels) for sample in samples}
    shown = {name for query in queries() for name in re.findall(r"agentjet_\w+", query)}
    assert shown == set(labels)
    for query in queries():
        for name, selector in re.findall(r"(agentjet_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", selector)) <= labels[name], query


def test_its_metrics_of_steps_are_documented() -> None:
    known = (DOCS / "operations.md").read_text()
    named = {name for query in queries() for name in re.findall(r'metric="([^"]+)"', query)}
    assert len(named) > 8 and [name for name in sorted(named) if f"`{name}`" not in known] == []


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells)) and all(p["x"] + p["w"] <= 24 for p in places)
