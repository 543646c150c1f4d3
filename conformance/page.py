"""`docs/compatibility.md`, made of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions

from conformance import evaluation
from conformance.child import AIDER, CREWAI, NODE, OPENHANDS, PRODUCTS, PYTHON, VERIFIERS
from conformance.episode import Exercise
from conformance.exercises import PACKAGES

HEAD = """# Compatibility

Made by `make conformance`; do not edit.

This page is for readers who want to train an existing agent unchanged: it lists the libraries and products that were
tried. The blocks at its end show the settings of each product.

Each client below ran an agent through an episode of a real server, as a process that got an address and a key. The
agents use tools and take several turns. The policy's answers were scripted. The run checked the *trained* tokens:

* Every sampled token is trained once, behind exactly the sampler's context, with the advantage of the episode's reward.
* Each prompt has exactly the words that a faithful history adds. A new timeline begins only where this page lists it.
* With strict tools, a tool that must be called, or JSON, the sampler followed a grammar, and the sets of allowed tokens
  are trained with the answer.
* With an agent role in the model's name (`policy@reckoner`), the calls and the advantage are those of that role.
* A product edited a real file with its own tools and ran a command; the run checked the files.

"""
FOOT = """
**Timelines.** A client that sends back its history unchanged continues one timeline, and every token is computed once.
A client that rewrites its history makes another prompt. There the timeline forks, and every branch is trained in its
exact context. It costs speed, not exactness. The reason is counted:

* `edit`: the policy's answer came back in other words;
* `template`: the model's template wrote it in other words;
* `tools`: the request has other tools;
* `branch`: the request has another prompt.

**Side calls.** Some products ask for a title or a summary beside the conversation. The column "calls" counts them after
a plus. They are trained like the rest, unless a [rule](black-box.md) of the job gives them a role or leaves them out.
"""
NETWORK = """
**Network.** A guard in the interpreter of each Python and Node client refuses and records every connection that leaves
the machine. Native programs (Claude Code, Codex, opencode) cannot load it. Each product has a proxy that refuses and
records every target. {namespace}
Only the server answered a client. The remarks name each host that a product requests with any settings.
"""
NAMESPACE = {
    True: "The whole run, server included, was in a network namespace with the loopback interface only.",
    False: "There was no network namespace: a native program that ignores its proxy was not held back.",
}
EVALUATION = """
**Evaluated, not trained.** lm-eval {version} (`local-completions`) is {state}. In an evaluation episode it scored
answers by log-likelihood and let the policy answer. The run compared its results with the log-probabilities that the
policy gave to exactly these tokens, and with the policy's word. Nothing was trained, and it is not counted above.
"""
SETUP = """
## How to point a product at an episode

Each block is the script that the run started, with a prompt as `$1`. It needs the environment that `agentjet run`
gives to a program ([black-box.md](black-box.md)): `OPENAI_BASE_URL` and the others, and a `HOME` of the episode, where
it may write configuration files. To train, put the block in a file:

```bash
agentjet run --task-file tasks.jsonl --reward reward.py:score -- sh {here}/product.sh {task.prompt}
```

[Claude Code](black-box.md#train-a-model-through-claude-code) is a whole example.
"""


@dataclass(frozen=True)
class Result:
    """An exercise that was run, and what was wrong with it."""

    exercise: Exercise
    problems: tuple[str, ...]
    num_timelines: int
    forks: tuple[str, ...] = ()
    """Why calls began a timeline, as the server counted."""


def versions() -> dict[str, str]:
    """Installed packages and their versions; those of npm begin with `npm `."""
    bins = (VERIFIERS, CREWAI, AIDER, OPENHANDS, PYTHON.parent)
    sites = [str(site) for each in bins for site in each.parent.glob("lib/python*/site-packages")]
    found = {one.name.lower().replace("_", "-"): one.version for each in sites for one in distributions(path=[each])}
    wanted = json.loads((NODE / "package.json").read_text(encoding="utf-8"))
    for package in (*wanted["dependencies"], *wanted["optionalDependencies"]):
        installed = NODE / "node_modules" / package / "package.json"
        if installed.exists():
            found[f"npm {package}"] = json.loads(installed.read_text(encoding="utf-8"))["version"]
    return found


def green(results: Sequence[Result]) -> dict[str, bool]:
    """Clients in the order they ran."""
    clients: dict[str, bool] = {}
    for result in results:
        clients[result.exercise.client] = clients.get(result.exercise.client, True) and not result.problems
    return clients


def page(
    results: Sequence[Result],
    installed: Mapping[str, str],
    evaluated: tuple[str, ...] | None = None,
    *,
    in_namespace: bool = True,
) -> str:
    """The whole page, with a line for each exercise and a block for each product."""
    clients = green(results)
    summary = f"{sum(clients.values())} of {len(clients)} clients are green.\n\n"
    table = "\n".join(_rows(results, installed)) + "\n"
    network = NETWORK.format(namespace=NAMESPACE[in_namespace])
    products = dict.fromkeys(one.exercise.command[0] for one in results if one.exercise.is_product)
    names = {one.exercise.command[0]: one.exercise.client for one in results}
    blocks = "".join(_block(names[script], script) for script in products)
    if evaluated is not None:
        state = f"red: {evaluated[0]}" if evaluated else "green"
        table += EVALUATION.format(version=installed.get(evaluation.CLIENT, "?"), state=state)
        blocks += _block(evaluation.CLIENT, evaluation.SCRIPT)
    return HEAD + summary + table + FOOT + network + (SETUP + blocks if blocks else "")


def _block(client: str, script: str) -> str:
    text = (PRODUCTS / script).read_text(encoding="utf-8").strip()
    return f"\n### {client}\n\n```{'sh' if script.endswith('.sh') else 'py'}\n{text}\n```\n"


def _rows(results: Sequence[Result], installed: Mapping[str, str]) -> Iterator[str]:
    yield "| client | version | dialect | exercised | calls | timelines | | remarks |"
    yield "|---|---|---|---|---|---|---|---|"
    last = ""
    for result in results:
        exercise = result.exercise
        name = exercise.client if exercise.client != last else ""
        numbers = _numbers(exercise.client, installed) if name else ""
        last = exercise.client
        remarks = exercise.remark if not result.problems else re.sub(r"[|\n]", " ", result.problems[0])[:300]
        state = "red" if result.problems else "green"
        cells = (name, numbers, exercise.dialect, exercise.name, _calls(exercise), _timelines(result))
        yield "| " + " | ".join(map(str, (*cells, state, remarks))) + " |"


def _numbers(client: str, installed: Mapping[str, str]) -> str:
    packages = PACKAGES.get(client, (client,))
    if len(packages) == 1:
        return installed.get(packages[0], "?")
    return ", ".join(f"{package.removeprefix('npm ')} {installed.get(package, '?')}" for package in packages)


def _calls(exercise: Exercise) -> str:
    sides = sum(bool(turn.asked_by) for turn in exercise.turns)
    return f"{len(exercise.turns) - sides}{f' + {sides}' if sides else ''}"


def _timelines(result: Result) -> str:
    """The number of timelines, and the reasons why calls began one."""
    forks = result.forks
    reasons = ", ".join(f"{forks.count(reason)} `{reason}`" for reason in sorted(set(forks)))
    return f"{result.num_timelines} ({reasons})" if forks else str(result.num_timelines)
