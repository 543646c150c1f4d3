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
from agentjet.research.journal import Notebook, described, proposer_of, write_whole
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
            is_last, begun = self._over.is_set(), time.monotonic()
            try:
                self.write()
            except Exception as error:  # thread boundary: the campaign goes on without its page
                if failed != str(error):
                    self.tell(f"{self.notebook.path / PAGE} is not up to date: {error}")
                failed = str(error)
            if is_last:
                return
            self._over.wait(max(WRITE_SECONDS, 20 * (time.monotonic() - begun)))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def standing(notebook: Notebook, running: Sequence[RunningTrial] = ()) -> dict[str, Any]:
    """The facts of the page."""
    names = {entry.content["commit"]: entry.content["name"] for entry in notebook.of("hypothesis")}
    for study in notebook.of("study"):
        names |= {commit: name for name, commit in study.content.get("commits", {}).items()}
    studies = {entry.key.removeprefix("study "): entry.content["name"] for entry in notebook.of("study")}
    started = notebook.known("started")
    return {
        "topic": started.content["question"]["topic"] if started else "A campaign",
        "facts": {name: value for name, value in notebook.standing().items() if name != "topic"},
        "written": utc(time.time()),
        "running": [
            {
                "what": ", ".join(
                    [
                        names.get(trial.arm, "the subject as given"),
                        *(f"{key} = {value}" for key, value in trial.setting.items()),
                    ]
                ),
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
    found: dict[str, dict[str, Any]] = {}
    tried: dict[object, list[str]] = {}
    """By entry, commit and name of a proposal, and by entry of its study: what came of it."""
    for entry in list(notebook.entries):
        content, step, here = entry.content, described(entry), f"(#{entry.number})"
        line = f"{': '.join(step)} {here}" if step else ""
        if entry.kind == "intent" and "proposals" in content and not line:
            line = f"asked {proposer_of(entry)}: {len(content['proposals'])} proposals {here}"
        name = entry.key.split(" ")[1] if entry.key.startswith("round ") else next(reversed(found), "")
        part = found.setdefault(name.strip(","), {"name": name.strip(","), "proposals": [], "lines": []})
        match entry.kind:
            case "hypothesis":
                steps = list[str]()
                tried |= dict.fromkeys((entry.number, content["commit"], content["name"]), steps)
                said = f"proposed by {content['origin']}: {content['why']} {here}"
                part["proposals"].append({"text": said, "name": content["name"], "steps": steps})
            case "screened":
                short = [each for each in content.get("short", ()) if each["score"] is not None]
                for each in (*short, *content["full"]):
                    value = number(each["gain"], "+.3g") if "gain" in each else number(each["score"])
                    what = "gain of a full run" if "gain" in each else "score after a third of a run"
                    tried.get(each["name"], []).append(f"{what} {value} {here}")
            case "study" | "learned":
                steps = next((tried[cause] for cause in entry.because if cause in tried), part["lines"])
                tried[entry.number] = steps
                steps.append(line)
            case "intent" | "refused" | "followed" | "ended" | "note" | "veto" | "budget" | "reopen" if line:
                part["lines"].append(line)
    return [part for part in found.values() if part["proposals"] or part["lines"]]
