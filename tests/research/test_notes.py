"""A shortened note keeps the event and its cause: the beginning and the end."""

from __future__ import annotations

from agentjet.research.records import shortened

LOG = (
    "the server ended with exit code 1. The end of its log, serve.log:\n" + "    loading\n" * 300 + "    no such model"
)


def test_a_long_note_keeps_its_beginning_and_its_cause() -> None:
    cut = shortened(LOG)
    assert len(cut) <= 2000 and " ... " in cut
    assert cut.startswith("the server ended with exit code 1. The end") and cut.endswith("no such model")
    assert shortened("short") == "short"
