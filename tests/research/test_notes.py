"""A shortened note keeps the event and its cause: whole sentences of the beginning, and the end."""

from __future__ import annotations

from agentjet.research.records import in_a_line, shortened

LOG = (
    "the server ended with exit code 1. The end of its log, serve.log:\n" + "    loading\n" * 300 + "    no such model"
)


def test_a_long_note_keeps_its_beginning_and_its_cause() -> None:
    cut = shortened(LOG)
    assert (
        len(cut) <= 2000
        and cut.startswith("the server ended with exit code 1. [...] ")
        and cut.endswith("no such model")
    )
    assert shortened("short") == "short"


def test_a_line_for_the_terminal_ends_with_the_cause() -> None:
    assert in_a_line(LOG) == "the server ended with exit code 1. The end of its log, serve.log: no such model"
    assert in_a_line("Nobody answers. " + "Mend it; see there. " * 40).endswith(" see there.")
    assert in_a_line("") == ""
    assert in_a_line("a" * 500) == "a" * 400 + " ..."
