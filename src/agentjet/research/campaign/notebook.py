"""`Notebook`: the journal of a campaign, with everything that it saw and decided; and its entries in words.

A campaign resumes by running again over its notebook. Each step has a key, and a step whose key is known is not made
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.journal import Entry, Journal

NAME = "notebook.sqlite"


class Notebook(Journal):
    """`path` is the campaign's folder. Raises `ConfigError` if another process writes it, or without a campaign to
    read.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        if not options.get("writer", True) and not (path / NAME).exists():
            raise ConfigError(f"{path}: there is no campaign in this folder (no {NAME})")
        super().__init__(path / NAME, **options)


def described(entry: Entry) -> tuple[str, str] | None:
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


def spending(notebook: Notebook) -> dict[str, float]:
    """Full runs and hours of work."""
    runs = [(entry.content["cost"], entry.content["hours"]) for entry in notebook.of("observed")]
    studies = [(entry.content["spent"], entry.content["hours"]) for entry in notebook.of("learned")]
    return {"runs": math.fsum(cost for cost, _ in runs + studies), "hours": math.fsum(h for _, h in runs + studies)}


def standing(notebook: Notebook) -> dict[str, Any]:
    """Tries, findings, spending and the newest decision of a campaign."""
    started, ended = notebook.known("started"), notebook.known("ended")
    if started is None:
        return {"stage": "begun"}
    present = "working" if notebook.has_writer() else "interrupted; agentjet research resume continues it"
    learned = [entry.content for entry in notebook.of("learned")]
    steps = {entry.number: ": ".join(step) for entry in notebook.entries if (step := described(entry))}
    away = [steps[entry.number] for entry in notebook.of("intent") if entry.number in steps]
    spent = spending(notebook)
    [(unit, most)] = [(unit, most) for unit, most in started.content["question"]["budget"].items() if most]
    return {
        "topic": started.content["question"]["topic"],
        "stage": f"ended: {ended.content['reason']}" if ended else present,
        "tried": [entry.content["name"] for entry in notebook.of("hypothesis")],
        "found": [each["meaning"] for each in learned if each["accepted"]],
        "ruled out": [each["meaning"] for each in learned if not each["accepted"]],
        "refused": len(notebook.of("refused")),
        **({"away": list(dict.fromkeys(away))} if away else {}),
        "newest": [*steps.values()][-1],
        "spent": f"{spent['runs']:.1f} full runs, {spent['hours']:.1f} h",
        "left": f"{max(0.0, most - spent[unit]):.1f} {unit}",
    }
