"""The report of a campaign as a short paper: its facts, from the notebook and a note of people. `research.report`
prints them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.campaign.campaign import PROMISING
from agentjet.research.campaign.runs import amount
from agentjet.research.campaign.strategist import WORTH
from agentjet.research.journal import NOTEBOOK, JournalEntry, Notebook, described, proposer_of
from agentjet.research.models import Trial, shortened
from agentjet.research.report import SIMULATED, curves, effects, files_of, number, write_files
from agentjet.research.scheduler import DIRECTIONAL
from agentjet.research.statistics import welch

KNOWN_AS = {
    "llm": "a language model or the record of one (llm)",
    "strategist": "the strategist (rules, without a language model)",
}
NOTE = "note.txt"
"""A file of the campaign's folder with remarks of people, a line each. The report begins with them."""
LENGTHS = ("batch/episodes", "held_out/plays")
LONGEST_PATCH = 4000
REFERENCE = re.compile(r"\((#\d+(?:, #\d+)*)\)")
ROW = re.compile(r"<tr>\n<td>(\d+)</td>")
"""A row of the table of steps, which begins with the number of an entry."""
LIMITS = (
    "The result is about this model, these tasks and this evaluator. Another subject may answer otherwise.",
    "Screens use one seed, so a change that gains little can be missed. Only studies rule a change out.",
    "What was studied had been chosen for its gain. A study uses other seeds, so its estimate does not have that bias.",
    "Remedies are tried in the order of their expected value; others than those of the notebook were not tried.",
    "Transcripts are of training tasks. Held-out tasks were read by the judge only.",
)


def build(folder: Path) -> list[Path]:
    """Writes `report.md`, `report.html`, `facts.json` and `figures/` into the campaign's folder.

    Raises `ConfigError` without a campaign.
    """
    with Notebook(folder, writer=False) as notebook:
        facts = gather(notebook)
    drawings = {
        "effects": effects([{**one, "claim": one["name"]} for one in facts["claims"]], facts["question"]["sesoi"]),
        "curves": curves(facts["curves"], facts["evaluation_steps"]),
    }
    files = files_of("campaign.md.jinja", facts, drawings)
    page = write_files({**files, "report.html": with_links(files["report.html"], facts["steps"])}, folder)
    return [page.with_suffix(".md"), page]


def with_links(page: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """The page with references to entries as links to their rows in the table of steps."""
    known = {f"#{step['entry']}" for step in steps}

    def linked(found: re.Match[str]) -> str:
        one_by_one = found[1].split(", ")
        links = [f'<a href="#entry-{one[1:]}">{one}</a>' if one in known else one for one in one_by_one]
        return f"({', '.join(links)})"

    return REFERENCE.sub(linked, ROW.sub(r'<tr id="entry-\1">\n<td>\1</td>', page))


def gather(notebook: Notebook) -> dict[str, Any]:
    """Every fact of the report, each from an entry. Raises `ConfigError` if nothing was observed."""
    started, ended = notebook.known("started"), notebook.known("ended")
    reason = ended.content["reason"] if ended else ""
    observed = [entry for entry in notebook.of("observed") if entry.content["outcome"]["score"] is not None]
    if started is None or not observed:
        raise ConfigError(f"{notebook.path}: nothing was observed yet: {reason or 'the campaign has just begun'}")
    question, note = started.content["question"], notebook.path / NOTE
    ran = {e.content["trial"]["arm"] for e in notebook.of("observed") if e.content["outcome"]["end"] != "infra_failed"}
    untried = {entry.number for entry in notebook.of("hypothesis") if entry.content["commit"] not in ran}
    claims = [claim(entry, notebook) for entry in notebook.of("study")]
    accepted = [each for each in claims if each["accepted"]]
    base = accepted[-1]["commit"] if accepted else started.content["first"]
    whole = [entry for entry in observed if entry.content["trial"]["fidelity"] == 1.0]
    first = whole[0] if whole else observed[0]
    last = next((entry for entry in whole if entry.content["trial"]["arm"] == base), first)
    usual = len(first.content["outcome"]["curve"])
    moments = [("Before", first), *([("After", last)] if last != first else [])]
    return {
        "topic": question["topic"],
        "question": question,
        "rules": started.content.get("rules"),
        "asks": started.content["asks"],
        "subject": subject(first.content["outcome"]),
        "proposers": proposers(notebook),
        "budget": ", ".join(f"{value:g} {name}" for name, value in question["budget"].items() if value),
        "answer": answer(claims, first, reason, question["sesoi"]),
        "promising": PROMISING * question["sesoi"],
        "worth": WORTH,
        "ended": reason,
        "claims": claims,
        "accepted": [each["name"] for each in accepted],
        "base": base,
        "signs": last.content["signs"],
        "first": first.number,
        "last": last.number,
        "steps": list(filter(None, (row(entry, untried) for entry in notebook.entries))),
        "curves": [(title, curves_of(entry, observed, usual)) for title, entry in moments],
        "evaluation_steps": evaluation_steps(first),
        "transcripts": [moment(title, entry) for title, entry in moments],
        "cost": {
            **notebook.spending(),
            **volume(observed, notebook),
            **asking(notebook),
            "observed": len(observed),
            "hypotheses": len(notebook.of("hypothesis")),
            "untried": len(untried),
            "refused": len(notebook.of("refused")),
        },
        "limits": [*LIMITS, *notes(notebook, first)],
        "following": following(claims, last, notebook),
        "level": next((each["confidence"] for each in claims if each["confidence"]), None),
        "simulated": SIMULATED,
        "remarks": note.read_text(encoding="utf-8").splitlines() if note.is_file() else [],
        "record_kept": (notebook.path / "llm.jsonl").is_file(),
        "commits_kept": (notebook.path / "subject").is_dir(),
        "notebook": NOTEBOOK,
        "folder": notebook.path.name,
    }


def subject(run: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the first run about the subject and of a run's length; None or 0 if it lacks one."""
    batches, plays = ([each for each in run["signals"].get(name, ()) if each] for name in LENGTHS)
    return {
        "model": run["settings"].get("model.name"),
        "trained_tasks": len(run["by_task"]),
        "held_out_tasks": run["facts"].get("tasks_held_out"),
        "batches": len(batches),
        "episodes": sum(batches),
        "evaluations": len(run["curve"]),
        "plays": plays[-1] if plays else None,
    }


NO_RESULT = {
    "verdict": "under way",
    "accepted": False,
    "meaning": "The study is under way",
    "outcomes": {},
    "starts": {},
    "spent": 0.0,
}
NO_RESULT |= dict.fromkeys(("estimate", "low", "high", "confidence", "p_value", "reason"))


def claim(entry: JournalEntry, notebook: Notebook) -> dict[str, Any]:
    """A study with its hypothesis and its result; `learned` may be missing while it is conducted."""
    asked = next(notebook.entries[n - 1] for n in entry.because if notebook.entries[n - 1].kind == "hypothesis").content
    known = next((learned for learned in notebook.of("learned") if entry.number in learned.because), None)
    learned = known.content if known else {}
    found = {**asked, **NO_RESULT, **learned, **learned.get("finding", {})}
    found.pop("finding", None)
    return {
        **found,
        "doubts": [*parts(asked["name"], entry, notebook), *(doubts(learned, entry, notebook) if learned else ())],
        "why": f"{sentence(asked['why'])} (#{', #'.join(map(str, asked['evidence'])) or entry.number})",
        "patch": shortened(asked["patch"], LONGEST_PATCH),
        "meaning": sentence(found["meaning"]),
        "entry": (known or entry).number,
        "fixed": entry.number,
    }


def parts(name: str, study: JournalEntry, notebook: Notebook) -> list[str]:
    """A sentence about the parts of a combined change; none for a single change."""
    base = study.content["study"]["arms"][0]["code"]
    alone: dict[str, list[str]] = {part: [] for part in name.split(" + ")}
    for entry in notebook.of("screened"):
        for each in entry.content["full"] if entry.content["base"]["commit"] == base else ():
            alone.get(each["name"], []).append(f"{each['gain']:+.3g} in a full run (#{entry.number})")
    gains = "; ".join(f"{quoted(part)} {', '.join(found) or 'was not run in full'}" for part, found in alone.items())
    return [f"The parts were studied together only. Alone, with one seed: {gains}."] if len(alone) > 1 else []


def doubts(learned: Mapping[str, Any], study: JournalEntry, notebook: Notebook) -> list[str]:
    """Sentences about an early verdict, an interval beyond the range of the scores, runs that have not converged, and
    arms without spread.
    """
    finding, outcomes, looks = learned["finding"], learned["outcomes"], study.content["study"]["looks"]
    found = []
    if finding["verdict"] in DIRECTIONAL and finding["seeds"] in looks[:-1]:
        look = f"The verdict came at look {looks.index(finding['seeds']) + 1} of {len(looks)}."
        found.append(f"{look} A study that stops early overstates a difference on average.")
    seen = [entry.content["outcome"]["score"] for entry in notebook.of("observed")]
    scores = [score for score in (*seen, *outcomes["base"], *outcomes["changed"]) if score is not None]
    if finding["estimate"] is not None and 0 <= min(scores) <= max(scores) <= 1:
        before = math.fsum(outcomes["base"]) / len(outcomes["base"])
        if not -before <= finding["low"] <= finding["high"] <= 1 - before:
            found.append(
                f"All scores are from 0 to 1. If the judge pays nothing beyond, a base of {number(before)} leaves room "
                f"for a difference of {0 - before:+.3g} to {1 - before:+.3g}. The interval reaches beyond, because "
                "Welch's t does not know limits of scores."
            )
    for arm, rises in learned.get("last_rises", {}).items():
        has_room = 1 - math.fsum(outcomes[arm]) / max(1, len(outcomes[arm])) > study.content["study"]["sesoi"]
        if len(rises) > 1 and has_room and (low := welch(rises, [0.0] * len(rises)).interval(0.05)[0]) > 0:
            found.append(
                f"The score of {arm} still rose between the last two evaluations: by {mean(rises)} (at 95 %, "
                f"{number(low)} or more). So its runs have not converged, and longer ones may end otherwise."
            )
    if flat := [arm for arm, values in outcomes.items() if values and min(values) == max(values)]:
        found.append(f"All seeds of {' and '.join(flat)} scored the same. Welch's t assumes about normal scores.")
    return found


def answer(claims: Sequence[Mapping[str, Any]], first: JournalEntry, reason: str, sesoi: float) -> tuple[str, str]:
    """Two sentences: what raised the score, and what stays open. `reason` is that of the end; empty before it."""
    accepted, score = [each for each in claims if each["accepted"]], first.content["outcome"]["score"]
    if accepted:
        before, after = accepted[0], accepted[-1]
        found = (
            f"The mean score rises from {mean(before['outcomes']['base'])} (#{before['entry']}) to "
            f"{mean(after['outcomes']['changed'])} (#{after['entry']}) with "
            f"{' and '.join(quoted(each['name']) for each in accepted)}, confirmed with fresh seeds."
        )
    elif not reason:
        found = f"No change is confirmed yet; the score is {number(score)} (#{first.number})."
    else:
        found = f"No change is confirmed to raise the score of {number(score)} (#{first.number}) by {sesoi:g} or more."
    undecided = [quoted(each["name"]) for each in claims if each["verdict"] == "inconclusive"]
    rest = f"The campaign ended because: {reason}." if reason else "The campaign is not finished."
    return found, f"Open: {' and '.join(undecided)}." if undecided else rest


def proposers(notebook: Notebook) -> dict[str, list[str | None]]:
    """By proposer, for each request the error if it did not answer, else None."""
    asked: dict[str, list[str | None]] = {}
    for entry in notebook.of("intent"):
        if "proposals" in entry.content:
            name = proposer_of(entry)
            asked.setdefault(sentence(KNOWN_AS.get(name, name)), []).append(entry.content.get("away"))
    return asked


def asking(notebook: Notebook) -> dict[str, Counter[str]]:
    """Tokens that language models read and wrote, their price, and the hours of waiting; nothing without a model."""
    used = Counter[str]()
    for content in (entry.content for entry in notebook.of("intent") if "used" in entry.content):
        used.update({"hours": content["hours"], **content["used"]})
    return {"asking": used} if used else {}


def row(entry: JournalEntry, untried: set[int]) -> dict[str, Any] | None:
    """A line of the table of steps; None for entries that need none, such as short runs."""
    step, content = described(entry), entry.content
    if step is None:
        return None
    if entry.kind == "observed" and content["trial"]["fidelity"] < 1 and content["outcome"]["score"] is not None:
        return None
    what = f"not tried, {step[0]}" if entry.number in untried else step[0]
    return {"entry": entry.number, "what": what, "result": step[1][:1000]}


def curves_of(of: JournalEntry, observed: Sequence[JournalEntry], usual: int) -> list[list[float]]:
    """The curves of all full observations of a commit, with `usual` scores each. A run that continued a short one was
    also scored where that ended, and other runs were not.
    """
    commit = of.content["trial"]["arm"]
    runs = [each.content for each in observed if each.content["trial"]["arm"] == commit]
    seeds = [(run["trial"]["seed"], run["trial"]["fidelity"], run["outcome"]["curve"]) for run in runs]
    ends = {seed: len(curve) - 1 for seed, share, curve in seeds if share < 1}
    return [
        [score for place, score in enumerate(curve) if len(curve) == usual or place != ends[seed]]
        for seed, share, curve in seeds
        if share == 1 and (len(curve) == usual or seed in ends)
    ]


def evaluation_steps(entry: JournalEntry) -> list[int]:
    """The steps of a run's evaluations; empty if its length is unknown."""
    run = entry.content["outcome"]
    steps, last = run["settings"].get("job.max_steps"), len(run["curve"]) - 1
    return [round(steps * place / last) for place in range(last + 1)] if steps and last > 0 else []


def volume(observed: Sequence[JournalEntry], notebook: Notebook) -> dict[str, float | None]:
    """Training episodes and sampled tokens of all runs; None for a notebook whose studies lack them. A longer run
    continues the shorter one of its name.
    """
    runs = {Trial.from_json(e.content["trial"]).run: e.content["outcome"]["signals"] for e in observed}
    learned = [entry.content for entry in notebook.of("learned")]
    return {
        name: math.fsum([amount(runs.values(), name), *(each[name] for each in learned)])
        if all(name in each for each in learned)
        else None
        for name in ("episodes", "tokens")
    }


def moment(title: str, entry: JournalEntry) -> dict[str, Any]:
    said = [
        {name: transcript[name] for name in ("place", "reward", "judged")}
        | {"text": "\n".join(f"{each.get('role', '?')}: {each.get('content')}" for each in transcript["messages"])}
        for transcript in entry.content["outcome"]["transcripts"]
    ]
    return {"title": title, "entry": entry.number, "said": said}


def following(claims: Sequence[Mapping[str, Any]], last: JournalEntry, notebook: Notebook) -> list[str]:
    """Questions for a next campaign."""
    undecided = [
        f"Does {each['name']} raise the score? {sentence(each['reason'])} (#{each['entry']})."
        for each in claims
        if each["verdict"] == "inconclusive"
    ]
    left = [f"What mends this: {sign['seen']} (#{last.number})?" for sign in last.content["signs"]]
    screens = [(entry.number, each) for entry in notebook.of("screened") for each in entry.content["full"]]
    newest = {each["name"]: (number, each["gain"]) for number, each in screens}
    studied = " + ".join(str(each["name"]) for each in claims)  # a part of what was studied is not open
    promising = [
        f"{sentence(name)} gained {gain:+.3g} in a full run (#{entry}), and was not studied."
        for name, (entry, gain) in newest.items()
        if gain > 0 and name not in studied
    ]
    return [*undecided, *left, *promising]


def notes(notebook: Notebook, first: JournalEntry) -> list[str]:
    """Further limits, from the notebook."""
    found = [f"{sentence(limit)} (#1)." for limit in notebook.entries[0].content.get("limits", ())]
    found += [f"{sentence(edited.content['meaning'])} (#{edited.number})." for edited in notebook.of("edited")]
    if shared := first.content["outcome"]["facts"].get("tasks_shared"):
        found.append(f"{shared:g} held-out tasks are also trained on, so scores are too high (#{first.number}).")
    return found


def mean(values: Sequence[float]) -> str:
    return number(math.fsum(values) / len(values) if values else None)


def quoted(name: object) -> str:
    return f"“{name}”"


def sentence(text: object) -> str:
    """A text as the beginning of a sentence, without its full stop."""
    line = " ".join(str(text).split()).rstrip(".")
    return line[:1].upper() + line[1:]
