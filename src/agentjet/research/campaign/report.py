"""The facts of a campaign's report, from its notebook and a note of people. Its studies have the facts of
`research.report`, which prints both kinds of reports.

`LivePage` keeps the page of a campaign that works: `live.html` in its folder, from the notebook and from what the
servers do now. Each time it is a whole file without scripts, which asks a browser to read it again.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from agentjet.errors import ConfigError
from agentjet.research import report
from agentjet.research.campaign.campaign import PROMISING
from agentjet.research.campaign.strategist import WORTH
from agentjet.research.journal import (
    AGAIN,
    NOTEBOOK,
    JournalEntry,
    Notebook,
    StudyLog,
    described,
    proposer_of,
    write_whole,
)
from agentjet.research.models import Outcome, Study, Trial, refuse, shortened
from agentjet.research.report import Facts, Launched, StudyView, number, trial_facts
from agentjet.research.scheduler import amount
from agentjet.research.swarm_runner import RunningTrial

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
    """Writes the files of the report into the campaign's folder. Raises `ConfigError` without a campaign."""
    with Notebook(folder, writer=False) as notebook:
        facts = gather(notebook)
    claims = [
        {**found, "claim": one["name"] if one["is_whole"] else found["claim"]}
        for one in facts["studies"]
        for found in one["findings"]
    ]
    drawings = {"effects": report.effects(claims, facts["question"]["sesoi"])}
    for place, one in enumerate(facts["studies"], 1):
        drawings[f"curves{place}"] = report.curves_of(one, facts["evaluation_steps"])
    files = report.files_of("campaign.md.jinja", facts, drawings)
    page = report.write_files({**files, "report.html": with_links(files["report.html"], facts["steps"])}, folder)
    return [page.with_suffix(".md"), page]


def with_links(page: str, steps: Sequence[Mapping[str, Any]]) -> str:
    """The page with references to entries as links to their rows in the table of steps."""
    known = {f"#{step['entry']}" for step in steps}

    def linked(found: re.Match[str]) -> str:
        one_by_one = found[1].split(", ")
        links = [f'<a href="#entry-{one[1:]}">{one}</a>' if one in known else one for one in one_by_one]
        return f"({', '.join(links)})"

    return REFERENCE.sub(linked, ROW.sub(r'<tr id="entry-\1">\n<td>\1</td>', page))


def gather(notebook: Notebook) -> Facts:
    """Every fact of the report, each from an entry. Raises `ConfigError` if nothing was observed."""
    started, ended = notebook.known("started"), notebook.ending()
    reason = ended.content["reason"] if ended else ""
    observed = [entry for entry in notebook.of("observed") if entry.content["outcome"]["score"] is not None]
    if started is None or not observed:
        raise ConfigError(f"{notebook.path}: nothing was observed yet: {reason or 'the campaign has just begun'}")
    question = started.content["question"]
    runs = [(Trial.from_json(e.content["trial"]), Outcome.from_json(e.content["outcome"])) for e in observed]
    ran = {e.content["trial"]["arm"] for e in notebook.of("observed") if e.content["outcome"]["end"] != "infra_failed"}
    names = {started.content["first"]: "as given"}
    names |= {entry.content["commit"]: entry.content["name"] for entry in notebook.of("hypothesis")}
    untried = {entry.number for entry in notebook.of("hypothesis") if entry.content["commit"] not in ran}
    views = [
        (entry, *learned_by(entry, notebook)) for entry in notebook.of("study", "ablation") if "commit" in entry.content
    ]
    titles = numbered({entry.content["commit"]: entry.content["name"] for entry, _, _ in views})
    studies = [study(*of, titles[of[0].content["commit"]], notebook) for of in views]
    in_studies = [one for _, _, view in views for of_trial in view.log.outcomes.values() for one in of_trial]
    accepted = [each for each in studies if each["accepted"]]
    base = accepted[-1]["commit"] if accepted else started.content["first"]
    whole = [entry for entry in observed if entry.content["trial"]["fidelity"] == 1.0]
    first = whole[0] if whole else observed[0]
    last = next((entry for entry in whole if entry.content["trial"]["arm"] == base), first)
    moments = [("Before", first), *([("After", last)] if last != first else [])]
    return {
        "topic": question["topic"],
        "question": question,
        "rules": started.content.get("rules"),
        "twice": any(entry.content["why"] == AGAIN for entry in observed),
        "asks": started.content["asks"],
        "planned": bool(started.content.get("planned")),
        **chapters(notebook),
        "subject": {**subject(first.content["outcome"]), "commit": started.content["first"]},
        "budget": budget(notebook),
        "answer": answer(studies, first, reason, question["sesoi"], bool(started.content.get("planned"))),
        "promising": PROMISING * question["sesoi"],
        "worth": WORTH,
        "ended": reason,
        "studies": studies,
        "accepted": [each["name"] for each in accepted],
        "base": base,
        "signs": last.content["signs"],
        "first": first.number,
        "last": last.number,
        "steps": list(filter(None, (row(entry, untried) for entry in notebook.entries))),
        "runs": [
            {
                **trial_facts(Launched(f"R{n}", trial, 1, run), trial.arm[:12]),
                "arm": names.get(trial.arm, trial.arm[:12]),
            }
            for n, (trial, run) in enumerate(runs, 1)
        ],
        "evaluation_steps": evaluation_steps(first),
        "transcripts": [moment(title, entry) for title, entry in moments],
        "cost": {
            **notebook.spending(),
            **volume(runs, notebook),
            "observed": len(observed),
            "hypotheses": len(notebook.of("hypothesis")),
            "untried": len(untried),
            "refused": len(notebook.of("refused")),
        },
        "record": report.record(notebook.entries, [*(run for _, run in runs), *in_studies]),
        "limits": [*LIMITS, *limits(studies, notebook, first)],
        "following": following(studies, last, notebook),
        "simulated": report.SIMULATED,
        "record_kept": (notebook.path / "llm.jsonl").is_file(),
        "commits_kept": (notebook.path / "subject").is_dir(),
        "notebook": NOTEBOOK,
        "folder": notebook.path.name,
    }


def chapters(notebook: Notebook) -> Facts:
    """Facts of a campaign beside its studies: notes of people, related work, and what proposers cost."""
    started, note = notebook.known("started"), notebook.path / NOTE
    of_file = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
    of_notebook = [f"{step[1]} (#{e.number})" for e in notebook.of("note") if (step := described(e))]
    content = started.content if started else {}
    plan = (content.get("planned") or {}).get("asked", {})
    cites = content.get("cites") or plan.get("cites", [])
    return {
        "remarks": [*of_file, *of_notebook],
        "again": [learned.content["meaning"] for learned in notebook.of("learned")[1:]] if plan else [],
        "cites": [
            {"file": c["file"], "title": c["title"] or c["file"], "why": c.get("why") or c["says"]} for c in cites
        ],
        "proposers": proposers(notebook, plan.get("used")),
    }


def subject(run: Mapping[str, Any]) -> Facts:
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


def learned_by(fixed: JournalEntry, notebook: Notebook) -> tuple[JournalEntry | None, StudyView]:
    """The entry with the result of a study, and the study's log. Raises `ConfigError` for an earlier version's."""
    log = StudyLog(now=lambda: fixed.at)
    learned = next((each for each in notebook.of("learned", "ablated") if fixed.number in each.because), None)
    refuse(
        learned is not None and "log" not in learned.content,
        f"{notebook.path}: an earlier version conducted this campaign, and did not keep the runs of its studies: read "
        "its report.md, or make the report with that version",
    )
    for kind, content in learned.content["log"] if learned else ():
        log.entry(kind, content)
    log.open_study(Study.from_json(fixed.content["study"]))
    return learned, StudyView(log)


def budget(notebook: Notebook) -> str:
    """The budget as given, and what people added."""
    (unit, most), added = notebook.budget(), notebook.of("budget", "reopen")
    given = most - math.fsum(entry.content[unit] for entry in added)
    more = (f"{entry.content[unit]:g} were added (#{entry.number})" for entry in added if entry.content[unit])
    return ", ".join([f"{given:g} {unit}", *more])


def numbered(names: Mapping[str, str]) -> dict[str, str]:
    """The names of commits. One that stands again gets a number, because a remedy may help twice."""
    found = dict[str, str]()
    for commit, name in names.items():
        again = sum(names[other] == name for other in found)
        found[commit] = f"{name} ({again + 1})" if again else name
    return found


def study(fixed: JournalEntry, learned: JournalEntry | None, view: StudyView, name: str, notebook: Notebook) -> Facts:
    """The facts of a study, those of the change with this name that it is about, and what was learned from it."""
    of_change = [e for e in notebook.of("hypothesis") if e.content["commit"] == fixed.content["commit"]]
    change, found = of_change[0].content, learned.content if learned else {}
    apart = next((e.content for e in notebook.of("parts") if e.number in fixed.because), None)
    facts = report.gather(view)
    if apart is None:  # The claim of a change repeats what its proposer predicts, which may be more than was compared.
        for each in facts["findings"]:
            each["claim"] = f"{name}: a higher score than the base"
    return {
        **facts,
        "name": name if apart is None else f"the parts of {name}",
        "commit": fixed.content["commit"],
        "is_whole": apart is None,
        "inseparable": apart["inseparable"] if apart else {},
        "left_out": apart["left_out"] if apart else [],
        "apart": any(e.content["commit"] == fixed.content["commit"] for e in notebook.of("ablation")),
        "accepted": found.get("accepted", False),
        "meaning": sentence(found.get("meaning", "The study is under way")),
        "spent": found.get("spent", 0.0),
        "why": f"{sentence(change['why'])} (#{', #'.join(map(str, change['evidence'])) or fixed.number})",
        **{name: change[name] for name in ("predicts", "refutes", "changes")},
        "patch": shortened(change["patch"], LONGEST_PATCH),
        "entry": (learned or fixed).number,
        "fixed": fixed.number,
    }


def model_card(facts: Facts, run: Mapping[str, Any]) -> str:
    """The README of an exported policy: that of the last confirmed study's newest run."""
    one = next(each for each in reversed(facts["studies"]) if each["accepted"])
    return report.markdown("card.md.jinja", {**facts, "one": one, "run": run, "arm": one["arms"][1]})


def answer(studies: Sequence[Facts], first: JournalEntry, reason: str, sesoi: float, planned: bool) -> tuple[str, str]:
    """Two sentences: what raised the score, and what stays open. `reason` is that of the end; empty before it.
    `planned`: the topic has a study, which has not begun.
    """
    accepted, score = [each for each in studies if each["accepted"]], first.content["outcome"]["score"]
    if accepted:
        before, after = accepted[0], accepted[-1]
        found = (
            f"The mean score rises from {number(before['arms'][0]['mean'])} (#{before['entry']}) to "
            f"{number(after['arms'][1]['mean'])} (#{after['entry']}) with "
            f"{' and '.join(quoted(each['name']) for each in accepted)}, confirmed with fresh seeds."
        )
    elif planned:
        found = f"The study of the topic has not begun; the score of the subject is {number(score)} (#{first.number})."
    elif not reason:
        found = f"No change is confirmed yet; the score is {number(score)} (#{first.number})."
    else:
        found = f"No change is confirmed to raise the score of {number(score)} (#{first.number}) by {sesoi:g} or more."
    undecided = [quoted(each["name"]) for each in open_studies(studies)]
    rest = f"The campaign ended because: {reason}." if reason else "The campaign is not finished."
    return found, f"Open: {' and '.join(undecided)}." if undecided else rest


def open_studies(studies: Sequence[Facts]) -> list[Facts]:
    return [each for each in studies if each["is_whole"] and each["findings"][0]["verdict"] == "inconclusive"]


def proposers(notebook: Notebook, used: Mapping[str, float] | None) -> list[Facts]:
    """By proposer, requests, answered ones, the first error, and what they cost. `used` is the cost of planning."""
    asked: dict[str, list[dict[str, Any]]] = {"The plan of the topic": [{**used, "used": used}]} if used else {}
    for entry in notebook.of("intent"):
        if "proposals" in entry.content:
            name = proposer_of(entry)
            asked.setdefault(sentence(KNOWN_AS.get(name, name)), []).append(entry.content)
    return [
        {
            "name": name,
            "requests": len(contents),
            "answered": sum("away" not in one for one in contents),
            "error": next((one["away"] for one in contents if "away" in one), ""),
            "seconds": 3600 * math.fsum(one.get("hours", 0.0) for one in contents),
            "tokens": sum(one.get("used", {}).get(side, 0) for one in contents for side in ("read", "written")) or None,
            "price": math.fsum(one.get("used", {}).get("price", 0.0) for one in contents) or None,
        }
        for name, contents in asked.items()
    ]


def row(entry: JournalEntry, untried: set[int]) -> Facts | None:
    """A line of the table of steps; None for entries that need none, such as short runs."""
    step, content = described(entry), entry.content
    if step is None:
        return None
    if entry.kind == "observed" and content["trial"]["fidelity"] < 1 and content["outcome"]["score"] is not None:
        return None
    what = f"not tried, {step[0]}" if entry.number in untried else step[0]
    return {"entry": entry.number, "what": what, "result": step[1][:1000]}


def evaluation_steps(entry: JournalEntry) -> list[int]:
    """The steps of a run's evaluations; empty if its length is unknown."""
    run = entry.content["outcome"]
    steps, last = run["settings"].get("job.max_steps"), len(run["curve"]) - 1
    return [round(steps * place / last) for place in range(last + 1)] if steps and last > 0 else []


def volume(observed: Sequence[tuple[Trial, Outcome]], notebook: Notebook) -> dict[str, float]:
    """Training episodes and sampled tokens of all runs. A longer run continues the shorter one of its name."""
    runs = {trial.run: run.signals for trial, run in observed}
    learned = [entry.content for entry in notebook.of("learned", "ablated")]
    return {
        name: math.fsum([amount(runs.values(), name), *(each[name] for each in learned)])
        for name in ("episodes", "tokens")
    }


def moment(title: str, entry: JournalEntry) -> Facts:
    said = [
        {name: transcript[name] for name in ("place", "reward", "judged")}
        | {"text": "\n".join(f"{each.get('role', '?')}: {each.get('content')}" for each in transcript["messages"])}
        for transcript in entry.content["outcome"]["transcripts"]
    ]
    return {"title": title, "entry": entry.number, "said": said}


def following(studies: Sequence[Facts], last: JournalEntry, notebook: Notebook) -> list[str]:
    """Questions for a next campaign."""
    undecided = [
        f"Does {each['name']} raise the score? {sentence(each['findings'][0]['reason'])} (#{each['entry']})."
        for each in open_studies(studies)
    ]
    left = [f"What mends this: {sign['seen']} (#{last.number})?" for sign in last.content["signs"]]
    screens = [(entry.number, each) for entry in notebook.of("screened") for each in entry.content["full"]]
    newest = {each["name"]: (number, each["gain"]) for number, each in screens}
    studied = " + ".join(str(each["name"]) for each in studies)  # a part of what was studied is not open
    promising = [
        f"{sentence(name)} gained {gain:+.3g} in a full run (#{entry}), and was not studied."
        for name, (entry, gain) in newest.items()
        if gain > 0 and name not in studied
    ]
    return [*undecided, *left, *promising]


def limits(studies: Sequence[Facts], notebook: Notebook, first: JournalEntry) -> list[str]:
    """Further limits, of the studies and from the notebook."""
    found = [*dict.fromkeys(limit for one in studies for limit in one["limitations"])]
    found += [f"{sentence(limit)} (#1)." for limit in notebook.entries[0].content.get("limits", ())]
    found += [f"{sentence(edited.content['meaning'])} (#{edited.number})." for edited in notebook.of("edited")]
    made = [entry.content["outcome"].get("machine", {}).get("hardware", "") for entry in notebook.of("observed")]
    machines = {*made} - {""}
    if len(machines) > 1:
        found.append(
            f"Runs were made on machines whose numbers are rounded differently: {'; '.join(sorted(machines))}."
        )
    if shared := first.content["outcome"]["facts"].get("tasks_shared"):
        found.append(f"{shared:g} held-out tasks are also trained on, so scores are too high (#{first.number}).")
    return found


def quoted(name: object) -> str:
    return f"“{name}”"


def sentence(text: object) -> str:
    """A text as the beginning of a sentence, without its full stop."""
    line = " ".join(str(text).split()).rstrip(".")
    return line[:1].upper() + line[1:]


# ---- the page of a campaign that works -------------------------------------------------------------------------------

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
            text = report.markdown(
                "live.md.jinja", {**standing(self.notebook, running), "waiting": [*waiting.values()]}
            )
            page = self.as_given(report.html(text, {}))
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

    def __exit__(self, *error: object) -> None:
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
