"""The output of `status` and `watch`: recent clients, and for a file one text for each change."""

from __future__ import annotations

from typing import Any

from agentjet.cli.status import changes, status_lines
from agentjet.protocol import StatusResponse


def seen(
    *, step: int = 0, clients: dict[str, float] | None = None, holding: dict[str, int] | None = None, **more: Any
) -> StatusResponse:
    return StatusResponse(
        version="0", state="sampling", waiting_for="somebody", model="tiny", policy_version=step, batch_size=1,
        group_size=2, max_steps=0, groups_complete=0, groups_open=0, episodes={}, calls_active=0,
        clients=clients or {}, holding=holding or {}, last_event=0, uptime=1.0, **{"last_step": {}, **more},
    )  # fmt: skip


def test_clients_of_long_ago_are_counted() -> None:
    clients = {"new": 3.0, "holder": 5000.0, "old": 601.0, "older": 9000.0}
    assert dict(status_lines(seen(clients=clients, holding={"holder": 2})))["clients"] == (
        "new (seen 3 s ago), holder (holds 2, seen 5000 s ago), 2 seen over 10 minutes ago"
    )
    assert dict(status_lines(seen()))["clients"] == "none yet"


def test_a_run_with_policies_has_a_line_for_each() -> None:
    step = {"reward/mean": 0.5, "planner/policy/entropy": 1.25, "coder/policy/entropy": 2.5, "coder/reward/mean": 0.25}
    lines = status_lines(seen(run="other", policies=("planner", "coder"), last_step=step))
    assert ("run", "other") in lines and ("policies", "planner, coder") in lines and "model" not in dict(lines)
    assert lines[-3:] == [
        ("last step", "reward/mean 0.5"),
        ("  planner", "policy/entropy 1.25"),
        ("  coder", "reward/mean 0.25, policy/entropy 2.5"),
    ]
    assert [name for name, _ in status_lines(seen(last_step={"reward/mean": 1.0}))][-1] == "last step"
    assert "run" not in dict(status_lines(seen())) and dict(status_lines(seen()))["model"] == "tiny"


def test_a_file_gets_a_text_for_each_change() -> None:
    looks = [seen(clients={"a": age}) for age in (1.0, 2.0)] + [seen(step=1), seen(step=1), seen()]
    texts = list(changes(map(status_lines, looks)))
    assert [dict(lines)["step"] for lines in texts] == ["0", "1", "0"]
    assert dict(texts[0])["clients"] == "a (seen 1 s ago)"
