"""`Notebook`: the journal of a campaign, with everything that it saw and decided; and its entries in words.

A campaign resumes by running again over its notebook. Each step has a key, and a step whose key is known is not made
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.journal import JournalEntry, StudyJournal
from agentjet.research.records import refuse

NAME = "notebook.sqlite"
DAY = 86400.0
RULED_OUT = ("refuted", "practically_equivalent")


class Notebook(StudyJournal):
    """`path` is the campaign's folder. Raises `ConfigError` if another process writes it, or without a campaign to
    read.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        if not options.get("writer", True) and not (path / NAME).exists():
            raise ConfigError(f"{path}: there is no campaign in this folder (no {NAME})")
        super().__init__(path / NAME, **options)


def described(entry: JournalEntry) -> tuple[str, str] | None:
    """The step of an entry and its result; None for entries about the machinery."""
    content = entry.content
    match entry.kind:
        case "started":
            return "began", content["asks"]
        case "intent" if content.get("away"):
            return (
                f"{entry.key.partition(' asked ')[2]} did not answer",
                f"{content['away']}; the next proposer goes on",
            )
        case "observed":
            return f"observed {content['trial']['arm'][:8]} ({content['why']})", outcome_of(content)
        case "hypothesis":
            return f"proposed by {content['origin']}: {content['name']}", content["why"] or "no reason was given"
        case "refused":
            return "refused a proposal", content["reason"]
        case "screened":
            short = [
                f"{each['name']} {each['score']:.3g}" for each in content.get("short", ()) if each["score"] is not None
            ]
            gains = "; ".join(f"{each['name']} {each['gain']:+.3g}" for each in content["full"])
            result = f"gain of one full run: {gains}" if gains else "no full run came back"
            return "screened", f"{result} (scores after a third: {'; '.join(short)})" if short else result
        case "study":
            return "fixed a study, before its data", content["name"]
        case "learned":
            return "learned", content["meaning"]
        case "edited":
            return "note", content["meaning"]
        case "followed":
            return "followed up", content["reason"]
        case "ended":
            return "ended", content["reason"]
    return None


def outcome_of(observed: Mapping[str, Any]) -> str:
    run = observed["outcome"]
    if run["score"] is None:  # the error of a first run is the reason for the end
        return "no score" if run["end"] == "arm_failed" and observed["why"] == "the subject" else str(run["note"])
    causes = ", ".join(sign["cause"].replace("_", " ") for sign in observed["signs"])
    return f"score {run['score']:.3g}; shows: {causes or 'no sign'}"


def spending(notebook: Notebook, until: float = math.inf) -> dict[str, float]:
    """Full runs and hours of work, up to a time."""
    runs = [(entry.content["cost"], entry.content["hours"]) for entry in of(notebook, "observed", until)]
    studies = [(entry.content["spent"], entry.content["hours"]) for entry in of(notebook, "learned", until)]
    return {"runs": math.fsum(cost for cost, _ in runs + studies), "hours": math.fsum(h for _, h in runs + studies)}


def of(notebook: Notebook, kind: str, until: float = math.inf) -> list[JournalEntry]:
    """Entries of a kind up to a time."""
    return [entry for entry in notebook.of(kind) if entry.at <= until]


def standing(notebook: Notebook, day: int = 0) -> dict[str, Any]:
    """Tries, findings, spending and the newest decision of a campaign: now, or at the end of a day since its start.

    Raises `ConfigError` for a day that is not over.
    """
    started, until = notebook.known("started"), math.inf
    if started is None:
        return {"stage": "begun"}
    if day:
        until = started.at + day * DAY
        over = int((time.time() - started.at) / DAY)
        refuse(day > over, f"--day {day}: {over} days of this campaign are over; omit --day for the present")
    steps = {e.number: ": ".join(step) for e in notebook.entries if e.at <= until and (step := described(e))}
    ran = {entry.content["trial"]["arm"] for entry in of(notebook, "observed", until)}
    ended, learned = of(notebook, "ended", until), [entry.content for entry in of(notebook, "learned", until)]
    present = "working" if notebook.has_writer() else "interrupted; agentjet research resume continues it"
    away = [steps[entry.number] for entry in notebook.of("intent") if entry.number in steps]
    spent = spending(notebook, until)
    [(unit, most)] = [(unit, most) for unit, most in started.content["question"]["budget"].items() if most]
    return {
        "topic": started.content["question"]["topic"],
        "stage": f"ended: {ended[0].content['reason']}" if ended else f"the end of day {day}" if day else present,
        "tried": [each.content["name"] for each in of(notebook, "hypothesis", until) if each.content["commit"] in ran],
        "found": [each["meaning"] for each in learned if each["accepted"]],
        "ruled out": [each["meaning"] for each in learned if each["verdict"] in RULED_OUT],
        "open": [each["meaning"] for each in learned if each["verdict"] == "inconclusive"],
        "refused": len(of(notebook, "refused", until)),
        **({"away": list(dict.fromkeys(away))} if away else {}),
        "newest": [*steps.values()][-1],
        "spent": f"{spent['runs']:.1f} full runs, {spent['hours']:.1f} h",
        "left": f"{max(0.0, most - spent[unit]):.1f} {unit}",
    }
