"""`Desk`: the tools by which a language model reads a campaign and proposes. An invalid call is answered with the
reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.research.campaign.model_api import ToolCall
from agentjet.research.campaign.models import KINDS, Finish, Intervention, Proposal, View
from agentjet.research.campaign.strategist import facts_of
from agentjet.research.records import shortened

REPAIRS = 2
"""Number of times that prose, or an invalid proposal, is sent back."""
LONGEST_RESULT = 20_000
"""Maximum characters of a tool's result."""


def tool(name: str, description: str, required: Sequence[str] = (), /, **parameters: str) -> dict[str, Any]:
    """The schema of a tool; parameters are `NAME="TYPE: description"`."""
    properties = {}
    for key, text in parameters.items():
        kind, _, meaning = text.partition(": ")
        properties[key] = {"type": kind, "description": meaning}
    schema = {"type": "object", "properties": properties, "required": [*required]}
    return {"name": name, "description": description, "parameters": schema}


TOOLS = [
    tool(
        "notebook", "Entries of the notebook, oldest first.", first="integer: first entry", last="integer: last entry"
    ),
    tool("files", "Names and sizes of the subject's files at the present base, and of the papers."),
    tool(
        "read", "A file of the subject, the evaluator (judge), or a paper.", ["name"], name="string: name of the file"
    ),
    tool(
        "curves", "Signals of the newest run, a value a step.", name="string: a signal; empty: all names and the score"
    ),
    tool("transcripts", "Best, median and worst training episodes of the newest run."),
    tool(
        "propose",
        "Proposes an intervention.",
        ["name", "kind", "why", "predicts", "refutes"],
        name="string: short name",
        kind=f"string: one of {', '.join(KINDS)}",
        changes='object: settings by dotted name, such as {"job.optimizer.lr": 1e-5}',
        patch="string: a unified diff of the subject's files, with a/ and b/ prefixes",
        why="string: reason in the evidence",
        predicts="string: expected result",
        refutes="string: result that would refute it",
        evidence="array: numbers of the notebook's entries",
    ),
    tool("finish", "Ends the proposals.", ["reason"], reason="string: why nothing further is worth a try"),
]


@dataclass
class Desk:
    """The tools over a campaign's view, and the proposals made so far."""

    view: View
    most: int
    papers: Path | None = None
    proposals: list[Proposal | str] = field(default_factory=list)
    finished: bool = False
    invalid: int = 0

    def use(self, call: ToolCall) -> str:
        """The result of a tool, or the reason why the call is invalid."""
        try:
            arguments = json.loads(call.arguments or "{}", parse_constant=str)
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are not an object")
            if call.name not in (names := [one["name"] for one in TOOLS]):
                raise ValueError(f"there is no tool {call.name!r}; the tools are {', '.join(names)}")
            result = getattr(self, call.name)(**arguments)
            return shortened(result if isinstance(result, str) else json.dumps(result, default=str), LONGEST_RESULT)
        except (ValueError, TypeError, RecursionError, ConfigError) as error:
            if call.name == "propose":
                self.invalid += 1
                if self.invalid > REPAIRS:
                    self.proposals.append(shortened(f"{error}: {call.arguments}"))
            return f"invalid: {shortened(str(error))}"

    def notebook(self, first: int = 1, last: int = 1_000_000) -> object:
        listed = [entry for entry in self.view.notebook if int(first) <= entry.number <= int(last)]
        return [[e.number, e.kind, shortened(json.dumps(e.content, default=str), 1500)] for e in listed]

    def files(self) -> object:
        papers = [path.name for path in self._papers()]
        return {"subject": {name: len(text) for name, text in self.view.files().items()}, "papers": papers}

    def read(self, name: str) -> str:
        files = self.view.files()
        if name in files:
            return files[name]
        if name == "judge":
            return self.view.judge_source()
        for path in self._papers():
            if path.name == name:
                return path.read_text(encoding="utf-8", errors="replace")
        raise ValueError(f"there is no file {name!r}; call files for the names")

    def curves(self, name: str = "") -> object:
        run = self.view.observation
        if name:
            return run.signals.get(name) or f"there is no signal {name!r}; call curves without a name"
        return {"signals": sorted(run.signals), "curve": run.curve, "facts": facts_of(run), "by_task": run.by_task}

    def transcripts(self) -> object:
        return [one.to_json() for one in self.view.observation.transcripts]

    def propose(self, **fields: Any) -> str:
        proposal = Intervention.from_json({"changes": {}, "patch": "", **fields})
        if len(self.proposals) >= self.most:
            raise ValueError(f"{self.most} proposals are the most; call finish")
        self.proposals.append(proposal)
        return f"noted as proposal {len(self.proposals)} of at most {self.most}"

    def finish(self, reason: str) -> str:
        self.finished = True
        if not self.proposals:
            self.proposals.append(Finish(str(reason)[:2000]))
        return "finished"

    def _papers(self) -> list[Path]:
        return sorted(path for path in self.papers.glob("*") if path.suffix in (".md", ".txt")) if self.papers else []
