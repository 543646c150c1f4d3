"""The page of a campaign that works: `live.html` in its folder, from the notebook and from what the servers do now.

It is written again when one of them changed. Each time it is a whole file without scripts, which asks a browser to read
it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

from agentjet.research.campaign.report import row
from agentjet.research.journal import JournalEntry, Notebook, described, proposer_of, write_whole
from agentjet.research.report import html, markdown, number
from agentjet.research.swarm_runner import RunningTrial

PAGE = "live.html"
WRITE_SECONDS = 5.0
EVENTS = 20
"""Newest steps on the page."""
REFRESH = '<meta http-equiv="refresh" content="15">\n<title>'


class LivePage:
    """While inside, the page is kept up to date."""

    def __init__(
        self,
        notebook: Notebook,
        running: Callable[[], Sequence[RunningTrial]],
        as_given: Callable[[str], str] = str,
        tell: Callable[[str], None] = print,
    ) -> None:
        """`as_given` puts names of the user's files into a text."""
        self.notebook, self.running, self.as_given, self.tell = notebook, running, as_given, tell
        self._written: object = None
        self._over = Event()
        self._thread = Thread(target=self._work, name=PAGE, daemon=True)

    def write(self) -> None:
        """Writes the page if anything changed since the last time. Raises `OSError`."""
        running, waiting = self.running(), self.notebook.inbox.waiting()
        state = (len(self.notebook.entries), running, [*waiting])
        if state != self._written:
            text = markdown("live.md.jinja", {**standing(self.notebook, running), "waiting": [*waiting.values()]})
            page = self.as_given(html(text, {}))
            is_over = self.notebook.ending() is not None
            write_whole(self.notebook.path / PAGE, page if is_over else page.replace("<title>", REFRESH, 1))
            self._written = state

    def _work(self) -> None:
        failed = ""
        while True:
            is_last = self._over.wait(WRITE_SECONDS)
            try:
                self.write()
            except Exception as error:  # thread boundary: the campaign goes on without its page
                if failed != str(error):
                    self.tell(f"{self.notebook.path / PAGE} is not up to date: {error}")
                failed = str(error)
            if is_last:
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def standing(notebook: Notebook, running: Sequence[RunningTrial] = ()) -> dict[str, Any]:
    """The facts of the page."""
    names = {entry.content["commit"]: entry.content["name"] for entry in notebook.of("hypothesis")}
    studies = {entry.key.removeprefix("study "): entry.content["name"] for entry in notebook.of("study")}
    started = notebook.known("started")
    return {
        "topic": started.content["question"]["topic"] if started else "A campaign",
        "facts": {name: value for name, value in notebook.standing().items() if name != "topic"},
        "written": utc(time.time()),
        "running": [
            {
                "what": names.get(trial.arm, "the subject as given"),
                "why": f"study of {studies[trial.study]}" if trial.study in studies else "observation",
                "share": trial.fidelity,
                "slot": slot,
                "since": utc(since),
            }
            for trial, slot, since in running
        ],
        "rounds": rounds(notebook),
        "events": list(filter(None, (row(entry, set()) for entry in reversed(notebook.entries))))[:EVENTS],
    }


def utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def rounds(notebook: Notebook) -> list[dict[str, Any]]:
    """The tree of questions: rounds, what was proposed in each, and what came of it."""
    found: dict[int, dict[str, Any]] = {}
    proposals: dict[int, list[str]] = {}
    """By entry of a hypothesis."""
    by_commit: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}

    def of_round(entry: JournalEntry) -> dict[str, Any]:
        at = int(entry.key.split()[1])
        return found.setdefault(at, {"number": at, "asked": [], "proposals": [], "refused": [], "then": []})

    for entry in list(notebook.entries):
        content, here = entry.content, f"(#{entry.number})"
        match entry.kind:
            case "intent" if "proposals" in content:
                says = content.get("away") or f"{len(content['proposals'])} proposals"
                of_round(entry)["asked"].append(f"{proposer_of(entry)}: {says} in {content.get('hours', 0.0):.2g} h")
            case "hypothesis":
                steps = proposals[entry.number] = by_commit[content["commit"]] = names[content["name"]] = []
                made = {"name": content["name"], "by": f"{content['origin']} {here}", "steps": steps}
                of_round(entry)["proposals"].append({**made, "why": content["why"]})
            case "refused":
                of_round(entry)["refused"].append(f"{content['reason']} {here}")
            case "veto":
                for name, steps in names.items():
                    if content["text"] in (name, *name.split(" + ")):
                        steps.append(f"vetoed by people {here}")
            case "screened":
                for each in content.get("short", ()):
                    if each["score"] is not None and each["name"] in names:
                        names[each["name"]].append(f"score after a third of a run {number(each['score'])}")
                for each in content["full"]:
                    by_commit[each["commit"]].append(f"gain of a full run {number(each['gain'], '+.3g')} {here}")
            case "study" | "learned":
                for cause in entry.because:
                    if entry.kind == "study" and cause in proposals:
                        proposals[cause].append(f"study fixed {here}")
                        proposals[entry.number] = proposals[cause]
                if entry.kind == "learned":
                    for cause in entry.because:
                        proposals[cause].append(f"{content['meaning']} {here}")
            case "followed" if entry.key.startswith("round"):
                of_round(entry)["then"].append(f"{content['reason']} {here}")
            case "ended" | "reopen" if found:
                step = described(entry)
                found[max(found)]["then"].append(f"{': '.join(step or ())} {here}")
    return [found[at] for at in sorted(found)]
