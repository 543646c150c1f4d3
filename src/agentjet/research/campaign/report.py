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
from agentjet.research.campaign.notebook import NAME, Entry, Notebook
from agentjet.research.campaign.runs import volume
from agentjet.research.campaign.strategist import WORTH, table
from agentjet.research.confirmation import DIRECTIONAL
from agentjet.research.report.document import files_of, number, write_files
from agentjet.research.report.facts import SIMULATED
from agentjet.research.report.figures import curves, effects

KNOWN_AS = {
    "llm": "a language model or the record of one (llm)",
    "strategist": "the strategist (rules, without a language model)",
}
NOTE = "note.txt"
"""A file of the campaign's folder with remarks of people, a line each. The report begins with them."""
LENGTHS = ("batch/episodes", "held_out/plays")
FILE_LINES = 30
"""Lines of a patch that are shown of a file."""
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
    observed = [entry for entry in notebook.of("observed") if entry.content["outcome"]["score"] is not None]
    started, ended = notebook.known("started"), notebook.known("ended")
    if started is None or not observed:
        raise ConfigError(f"{notebook.path}: nothing was observed yet: {end_of(ended)}")
    question, note = started.content["question"], notebook.path / NOTE
    claims = [claim(entry, notebook) for entry in notebook.of("study")]
    accepted = [each for each in claims if each["accepted"]]
    together = [each for each in claims if each["parts"]]
    base = accepted[-1]["commit"] if accepted else started.content["first"]
    whole = [entry for entry in observed if entry.content["trial"]["fidelity"] == 1.0]
    first = whole[0] if whole else observed[0]
    last = next((entry for entry in whole if entry.content["trial"]["arm"] == base), first)
    usual = len(first.content["outcome"]["curve"])
    moments = [("Before", first), *([("After", last)] if last != first else [])]
    return {
        "topic": question["topic"],
        "question": question,
        "asks": started.content["asks"],
        "subject": subject(first.content["outcome"]),
        "proposers": proposers(notebook),
        "screens": screens(observed),
        "budget": ", ".join(f"{value:g} {name}" for name, value in question["budget"].items() if value),
        "answer": answer(claims, first, ended, question["sesoi"]),
        "promising": PROMISING * question["sesoi"],
        "claims": claims,
        "accepted": [each["name"] for each in accepted],
        "base": base,
        "signs": [{**sign, "left": why_left(sign, last, ended)} for sign in last.content["signs"]],
        "first": first.number,
        "last": last.number,
        "steps": [step for entry in notebook.entries if (step := row(entry, notebook)) is not None],
        "curves": [(title, curves_of(entry, observed, usual)) for title, entry in moments],
        "evaluation_steps": evaluation_steps(first),
        "transcripts": [moment(title, entry) for title, entry in moments],
        "cost": costs(notebook, observed),
        "limits": [
            *(
                f"{quoted(each['name'])} was studied as one change, which does not separate its parts."
                for each in together
            ),
            *LIMITS,
            *notes(notebook),
        ],
        "following": following(claims, last, ended, notebook),
        "level": next((each["confidence"] for each in claims if each["confidence"]), None),
        "simulated": SIMULATED,
        "remarks": note.read_text(encoding="utf-8").splitlines() if note.is_file() else [],
        "record_kept": (notebook.path / "llm.jsonl").is_file(),
        "commits_kept": (notebook.path / "subject").is_dir(),
        "notebook": NAME,
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


def end_of(ended: Entry | None) -> str:
    return str(ended.content["reason"]) if ended else "the campaign has just begun"


def claim(entry: Entry, notebook: Notebook) -> dict[str, Any]:
    """A study with its result; `learned` may be missing while it is conducted."""
    learned = notebook.known(f"learned {entry.key.removeprefix('study ')}")
    asked = next(notebook.entries[n - 1] for n in entry.because if notebook.entries[n - 1].kind == "hypothesis").content
    finding = learned.content["finding"] if learned else {}
    return {
        "parts": parts(asked["name"], entry, notebook),
        "doubts": doubts(finding, entry, learned.content["outcomes"], notebook) if learned else {},
        "name": asked["name"],
        "why": f"{sentence(asked['why'])} (#{', #'.join(map(str, asked['evidence'])) or entry.number})",
        "predicts": asked["predicts"],
        "refutes": asked["refutes"],
        "changes": asked["changes"],
        "patch": shown(asked["patch"]),
        "commit": entry.content["commit"],
        "verdict": finding.get("verdict", "under way"),
        "accepted": bool(learned and learned.content["accepted"]),
        "meaning": sentence(learned.content["meaning"]) if learned else "The study is under way",
        "entry": (learned or entry).number,
        "fixed": entry.number,
        "outcomes": learned.content["outcomes"] if learned else {},
        "spent": learned.content["spent"] if learned else 0.0,
        **{name: finding.get(name) for name in ("estimate", "low", "high", "confidence", "p_value", "reason")},
    }


def parts(name: str, study: Entry, notebook: Notebook) -> str:
    """The gains of the parts of a combined change alone, from the base of the study; empty for a single change."""
    base = study.content["study"]["arms"][0]["code"]
    screened = [entry for entry in notebook.of("screened") if entry.content["base"]["commit"] == base]
    alone: dict[str, list[str]] = {part: [] for part in name.split(" + ")}
    for entry in screened:
        for each in entry.content["full"]:
            alone.get(each["name"], []).append(f"{each['gain']:+.3g} in a full run (#{entry.number})")
    if len(alone) == 1:
        return ""
    return "; ".join(f"{quoted(part)} {', '.join(gains) or 'was not run in full'}" for part, gains in alone.items())


def doubts(finding: Mapping[str, Any], study: Entry, outcomes: Mapping[str, Any], notebook: Notebook) -> dict[str, Any]:
    """The look of an early verdict; the range of a difference if the interval leaves it; arms without spread."""
    looks, before = study.content["study"]["looks"], math.fsum(outcomes["base"]) / max(1, len(outcomes["base"]))
    seen = [entry.content["outcome"]["score"] for entry in notebook.of("observed")]
    scores = [score for score in (*seen, *outcomes["base"], *outcomes["changed"]) if score is not None]
    early = finding["verdict"] in DIRECTIONAL and finding["seeds"] in looks[:-1]
    inside = finding["estimate"] is None or -before <= finding["low"] <= finding["high"] <= 1 - before
    return {
        "look": f"{looks.index(finding['seeds']) + 1} of {len(looks)}" if early else "",
        "room": [before, 0 - before, 1 - before] if not inside and 0 <= min(scores) <= max(scores) <= 1 else [],
        "flat": [arm for arm, values in outcomes.items() if values and min(values) == max(values)],
    }


def answer(claims: Sequence[Mapping[str, Any]], first: Entry, ended: Entry | None, sesoi: float) -> tuple[str, str]:
    """Two sentences: what raised the score, and what stays open."""
    accepted = [each for each in claims if each["accepted"]]
    reason, score = end_of(ended), first.content["outcome"]["score"]
    if accepted:
        before, after = accepted[0], accepted[-1]
        found = (
            f"The mean score rises from {mean(before['outcomes']['base'])} (#{before['entry']}) to "
            f"{mean(after['outcomes']['changed'])} (#{after['entry']}) with "
            f"{' and '.join(quoted(each['name']) for each in accepted)}, confirmed with fresh seeds."
        )
    elif "judge pays" in reason or "cannot run" in reason:
        found = f"The question cannot be answered: {reason}."
    elif ended is None:
        found = f"No change is confirmed yet; the score is {number(score)} (#{first.number})."
    else:
        found = f"No change is confirmed to raise the score of {number(score)} (#{first.number}) by {sesoi:g} or more."
    undecided = [quoted(each["name"]) for each in claims if each["verdict"] == "inconclusive"]
    rest = f"The campaign ended because: {reason}." if ended else "The campaign is not finished."
    return found, f"Open: {' and '.join(undecided)}." if undecided else rest


def proposers(notebook: Notebook) -> dict[str, list[str | None]]:
    """By proposer, for each request the error if it did not answer, else None."""
    asked: dict[str, list[str | None]] = {}
    for entry in notebook.of("intent"):
        if "proposals" in entry.content:
            name = entry.key.partition(" asked ")[2]
            asked.setdefault(sentence(KNOWN_AS.get(name, name)), []).append(entry.content.get("away"))
    return asked


def screens(observed: Sequence[Entry]) -> dict[str, int]:
    """Runs of proposals that ended with a score: short ones, full ones, and full ones with a second seed."""
    kinds = Counter(
        "short" if entry.content["trial"]["fidelity"] < 1 else "again" if why.endswith(" again") else "full"
        for entry in observed
        if (why := entry.content["why"]).startswith("round ")
    )
    return {kind: kinds[kind] for kind in ("short", "full", "again")}


def not_tried(hypothesis: Entry, notebook: Notebook) -> str:
    """The reason if no run of a proposal ended, else ""."""
    runs = [e.content for e in notebook.of("observed") if e.content["trial"]["arm"] == hypothesis.content["commit"]]
    if any(run["outcome"]["end"] != "infra_failed" for run in runs):
        return ""
    if runs:
        return "its runs were lost"
    later = [entry.number for kind in ("screened", "ended") for entry in notebook.of(kind)]
    return "the budget" if max(later, default=0) > hypothesis.number else "it waits for its run"


def row(entry: Entry, notebook: Notebook) -> dict[str, Any] | None:
    """A line of the table of steps; None for entries that need none."""
    content = entry.content
    match entry.kind:
        case "started":
            what, result = "began", content["question"]["topic"]
        case "observed":
            trial, run = content["trial"], content["outcome"]
            if trial["fidelity"] < 1 and run["score"] is not None:
                return None
            causes = ", ".join(sign["cause"].replace("_", " ") for sign in content["signs"]) or "no sign"
            what = f"observed {trial['arm'][:8]} ({content['why']})"
            result = run["note"] if run["score"] is None else f"score {number(run['score'])}; shows: {causes}"
        case "hypothesis":
            what = f"proposed by {content['origin']}: {content['name']}"
            result = content["why"] or "no reason was given"
            if reason := not_tried(entry, notebook):
                what, result = f"proposed, not tried ({reason}): {content['name']}", f"{content['origin']}: {result}"
        case "refused":
            what, result = "refused a proposal", content["reason"]
        case "screened":
            tried = [each for each in content.get("short", ()) if each["score"] is not None]
            short = [f"{each['name']} {number(each['score'])}" for each in tried]
            gains = [f"{each['name']} {each['gain']:+.3f}" for each in content["full"]]
            what, result = "screened", f"gain of one full run: {'; '.join(gains) or 'no run came back'}"
            result += f" (scores after a third: {'; '.join(short)})" if short else ""
        case "study":
            what, result = "fixed a study, before its data", content["name"]
        case "learned":
            what, result = f"learned: {content['name']}", content["meaning"]
        case "followed":
            what, result = "followed up", content["reason"]
        case "ended":
            what, result = "ended", content["reason"]
        case _:
            return None
    return {"entry": entry.number, "what": what, "result": result[:1000]}


def curves_of(of: Entry, observed: Sequence[Entry], usual: int) -> list[list[float]]:
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


def evaluation_steps(entry: Entry) -> list[int]:
    """The steps of a run's evaluations; empty if its length is unknown."""
    run = entry.content["outcome"]
    steps, last = run["settings"].get("job.max_steps"), len(run["curve"]) - 1
    return [round(steps * place / last) for place in range(last + 1)] if steps and last > 0 else []


def moment(title: str, entry: Entry) -> dict[str, Any]:
    said = [
        {name: transcript[name] for name in ("place", "reward", "judged")}
        | {"text": "\n".join(f"{each.get('role', '?')}: {each.get('content')}" for each in transcript["messages"])}
        for transcript in entry.content["outcome"]["transcripts"]
    ]
    return {"title": title, "entry": entry.number, "said": said}


def costs(notebook: Notebook, observed: Sequence[Entry]) -> dict[str, Any]:
    """Spending of the whole campaign. A longer run continues the shorter one of its commit and seed."""
    spent = [entry.content for entry in notebook.of("spent")]
    runs = {(one["trial"]["arm"], one["trial"]["seed"]): one["outcome"] for one in (e.content for e in observed)}
    seen, learned = volume(run["signals"] for run in runs.values()), notebook.of("learned")
    return {
        "runs": math.fsum(entry["runs"] for entry in spent),
        "hours": math.fsum(entry["hours"] for entry in spent),
        "observed": len(observed),
        "with_studies": all("episodes" in entry.content for entry in learned),
        "untried": sum(bool(not_tried(entry, notebook)) for entry in notebook.of("hypothesis")),
        "hypotheses": len(notebook.of("hypothesis")),
        "refused": len(notebook.of("refused")),
        **{
            part: math.fsum([amount, *(entry.content.get(part, 0.0) for entry in learned)])
            for part, amount in seen.items()
        },
    }


def why_left(sign: Mapping[str, Any], last: Entry, ended: Entry | None) -> str:
    """The reason for which the strategist proposes nothing more for a sign; empty if the campaign ended otherwise."""
    if end_of(ended) != "nothing is worth trying":
        return ""
    facts = last.content["facts"]
    if all(row.prior * facts.get("left", 1.0) < WORTH for row in table()[1] if row.cause == sign["cause"]):
        return f"at a score of {number(facts['score'])}, no remedy for it is expected to gain {WORTH:g} or more"
    return "its remedies were tried, or do not apply"


def following(claims: Sequence[Mapping[str, Any]], last: Entry, ended: Entry | None, notebook: Notebook) -> list[str]:
    """Questions for a next campaign."""
    open_claims = [
        f"Does {each['name']} raise the score? {sentence(each['reason'])} (#{each['entry']})."
        for each in claims
        if each["verdict"] == "inconclusive"
    ]
    combined = [
        f"What does each part of {quoted(each['name'])} give? Alone, with one seed: {each['parts']}."
        for each in claims
        if each["accepted"] and each["parts"]
    ]
    left = [
        f"What mends this: {sign['seen']} (#{last.number})?"
        for sign in last.content["signs"]
        if not why_left(sign, last, ended).startswith("at a score")
    ]
    gains: dict[str, list[float]] = {}
    entries: dict[str, int] = {}
    for entry in notebook.of("screened"):
        for each in entry.content["full"]:
            gains.setdefault(each["name"], []).append(each["gain"])
            entries[each["name"]] = entry.number
    studied = " + ".join(str(each["name"]) for each in claims)  # a part of what was studied is not open
    least = PROMISING * notebook.entries[0].content["question"]["sesoi"]
    promising = [
        f"{sentence(name)} gained {mean(gain)} in screens (#{entries[name]}), and was not studied"
        + (f": a study begins at {least:g}." if math.fsum(gain) / len(gain) < least else ".")
        for name, gain in gains.items()
        if math.fsum(gain) > 0 and name not in studied
    ]
    return [*open_claims, *combined, *left, *promising]


def notes(notebook: Notebook) -> list[str]:
    """Further limits, from the notebook."""
    edited = notebook.known("files changed")
    found = [f"{sentence(limit)} (#1)." for limit in notebook.entries[0].content.get("limits", ())]
    if edited:
        found.append(f"{sentence(edited.content['meaning'])} (#{edited.number}).")
    for entry in notebook.of("observed"):
        if shared := entry.content["outcome"]["facts"].get("tasks_shared"):
            return [*found, f"{shared:g} held-out tasks are also trained on, so scores are too high (#{entry.number})."]
    return found


def mean(values: Sequence[float]) -> str:
    return number(math.fsum(values) / len(values) if values else None)


def shown(patch: str) -> str:
    """A patch with the first lines of each file."""
    parts: list[str] = []
    for file in re.split(r"(?m)^(?=--- )", patch.strip()):
        lines = file.splitlines()
        more = len(lines) - FILE_LINES
        parts += [*lines[:FILE_LINES], *([f"... {more} more lines"] if more > 0 else [])]
    return "\n".join(parts)


def quoted(name: object) -> str:
    return f"“{name}”"


def sentence(text: object) -> str:
    """A text as the beginning of a sentence, without its full stop."""
    line = " ".join(str(text).split()).rstrip(".")
    return line[:1].upper() + line[1:]
