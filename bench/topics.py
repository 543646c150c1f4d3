"""What the offline planner makes of topics: `python -m bench.topics`.

`bench/cases/topics.toml` has topics with the plan that a researcher would write. A topic is planned *as asked* if form,
factors, named levels, metrics and amounts are those of that plan, or if it is refused because no study can answer it.
`silent_other` counts topics for which another plan was made whose reading names no word that it left out. A plan that
does name some is *doubtful*, and a refusal that asks for other words is neither.

The same topics are planned by a scripted language model over a socket: `as_asked_llm`. The script knows the plan of
each topic, and reads usual levels, types and needs from the prompt, as a competent researcher would. So the figure says
whether the way from such a model to a plan is open, not how good a model is. `sloppy` is the share of every eighth
topic for a script that answers prose first, then a factor that does not exist, then the plan.

Then questions are answered in worlds with a known truth: from the line of the topic to the findings, with scores that
are a formula and noise of the seed. A claim is *decidable* if its true contrast is `CLEAR` standard errors of the last
look away from the smallest effect of interest. `worlds_right` is the share of these with the right verdict,
`worlds_wrong` the share of all claims with a wrong one.

With `--published` these are not read, but conducted by real runs: see `bench.published`.

Prints a line for each topic that is not as asked, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agentjet.errors import ConfigError
from agentjet.research.campaign.planner import plan_study, question_of
from agentjet.research.campaign.proposers import LanguageModel, LlmEndpoint
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.journal import StudyLog
from agentjet.research.models import Hypothesis, Outcome, Setting, Study, Subject, Value, Verdict
from agentjet.research.question import StudyQuestion
from agentjet.research.scheduler import conduct
from agentjet.research.topic import read_topic
from bench import published
from bench.machine import report
from tests.research.campaign.llm_server import Call, LlmServer, openai_answer
from tests.research.world import Formula

CASES = Path(__file__).parent / "cases" / "topics.toml"
Result = Literal["as_asked", "refused", "doubtful", "other"]


def topics() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(CASES.read_text(encoding="utf-8"))["topic"]
    return found


def judged(topic: dict[str, Any], read: Callable[[str], StudyQuestion] = read_topic) -> tuple[Result, str]:
    """Returns what became of a topic, and how it was read or why it was refused."""
    try:
        question = read(topic["text"])
    except ConfigError as error:
        wanted = topic.get("refused")
        return "as_asked" if wanted and f"asks about {wanted}" in str(error) else "refused", str(error)
    wrong: Result = "doubtful" if question.unread else "other"
    return "as_asked" if is_plan(question, topic) else wrong, question.reading()


def is_plan(question: StudyQuestion, topic: dict[str, Any]) -> bool:
    if "refused" in topic or question.form != topic["form"]:
        return False
    levels = {one.factor: {*one.levels} for one in question.varied}
    if levels.keys() != topic["factors"].keys():
        return False
    if any(wanted and levels[name] != {*wanted} for name, wanted in topic["factors"].items()):
        return False
    if question.equal != topic.get("equal", question.equal) or bool(question.needs) != topic.get("needs", False):
        return False
    default = question.metrics if question.form == "trade_off" else ("score",)
    return question.metrics == tuple(topic.get("metrics", default))


# ---- a scripted language model ---------------------------------------------------------------------------------------


def scripted(topic: dict[str, Any], body: dict[str, Any]) -> Call:
    """The call by which a researcher who knows the plan of a topic answers a request."""
    if "refused" in topic:
        return "refuse", {"reason": f"it asks about {topic['refused']}, which no run of this kind shows"}
    lines = [line for line in body["messages"][0]["content"].splitlines() if line.startswith('{"factor"')]
    listed = {factor["factor"]: factor for factor in map(json.loads, lines)}
    varied = [
        {"factor": name, "levels": levels or usual(listed[name], topic["form"])}
        for name, levels in topic["factors"].items()
    ]
    default = ["score", "tokens"] if topic["form"] == "trade_off" else ["score"]
    theirs = [name for name in topic["factors"] if listed[name].get("needs")]
    theirs += ["own_recipe"] if topic["factors"].get("job.recipe") == ["grpo"] else []
    return "plan", {
        "form": topic["form"],
        "varied": varied,
        "metrics": topic.get("metrics", default),
        "equal": topic.get("equal", "episodes"),
        "needs": dict.fromkeys(theirs, "only they have it") if topic.get("needs") else {},
        "expects": "a difference",
        "refutes": "none",
    }


def usual(factor: dict[str, Any], form: str) -> list[Any]:
    """Levels of a factor for which a topic names none: the usual ones, or around the default."""
    levels, default = factor["levels"], factor.get("default")
    if levels or factor.get("needs"):
        return [] if factor.get("needs") else list(levels)
    return [default, default * 2, default * 4] if form == "dose_response" else [default, default * 2]


def by_script(topic: dict[str, Any], is_sloppy: bool = False) -> tuple[Result, str]:
    """Plans a topic by the script, over a socket and the SDK."""

    def answer(body: dict[str, Any]) -> Any:
        last = [message for message in body["messages"] if message["role"] == "assistant"]
        if is_sloppy and len(last) < 2:
            wrong = {"form": "compare", "varied": [{"factor": "kl", "levels": [0, 1]}], "metrics": ["score"]}
            return openai_answer(("plan", wrong)) if last else openai_answer(text="I would vary the KL penalty.")
        return openai_answer(scripted(topic, body))

    with LlmServer(answer).serve() as server, tempfile.TemporaryDirectory() as folder:
        model = LanguageModel(LlmEndpoint(server.url, "scripted"), Path(folder) / "llm.jsonl")
        result, text = judged(topic, lambda text: question_of(text, [model]))
        is_planned = "by a language model" in text or "planned by: a language model" in text
        return (result, text) if is_planned else ("other", text)


# ---- worlds with a known truth ---------------------------------------------------------------------------------------

CLEAR = 3.0
SPREADS = (0.01, 0.02, 0.05)
"""Standard deviations of scores over seeds. The smallest effect of interest is 0.02."""
TOKENS = 200.0


def doublings(setting: Setting, name: str, of: float) -> float:
    return math.log2(float(setting[name]) / of)


SCALE = "How does the score scale with the training steps: 20, 40, 80?"
WORLDS: dict[str, tuple[str, Callable[[Setting], float]]] = {
    "gain": ("Does the KL penalty matter?", lambda s: 0.5 + 10 * float(s["job.recipe.kl_coef"])),
    "loss": ("Does an entropy bonus help?", lambda s: 0.5 - 10 * float(s["job.recipe.entropy_coef"])),
    "equal": ("GRPO against RLOO against GSPO", lambda s: 0.5),
    "threshold": (
        "How many tasks are enough: 4, 8, 16, 32?",
        lambda s: 0.3 + 0.1 * min(2, doublings(s, "tasks.number", 4)),
    ),
    "best_inside": (
        "Learning rate 1e-6, 1e-5 or 1e-4",
        lambda s: 0.6 - 0.1 * abs(math.log10(float(s["job.optimizer.lr"])) + 5),
    ),
    "interaction": (
        "Does the best temperature depend on the group size?",
        lambda s: 0.5 + (0.2 if s["job.temperature"] == 1.3 and s["job.group_size"] == 16 else 0.0),
    ),
    "no_interaction": (
        "Learning rate × group size",
        lambda s: 0.4 + 0.1 * (float(s["job.optimizer.lr"]) > 3e-5) + 0.1 * (s["job.group_size"] == 16),
    ),
    "slope": (SCALE, lambda s: 0.3 + 0.08 * doublings(s, "steps", 20)),
    "no_slope": (SCALE, lambda s: 0.5),
    "cheaper": ("A length penalty without loss of accuracy", lambda s: 0.5),
}
"""By name, a topic and the score of a setting. Answers of `alp` have half of the tokens."""


class World(Formula):
    def collect(self, key: str) -> Outcome:
        found = super().collect(key)
        share = 0.5 if self.trial(key).setting.get("job.recipe.name") == "alp" else 1.0
        noise = 1 + 0.05 * math.sin(self.trial(key).seed)
        return replace(found, signals={"completion/tokens": (TOKENS * share * noise,) * 4})


def worlds(repeats: int) -> dict[str, float]:
    """Returns the shares of right and wrong verdicts."""
    decidable = right = wrong = claims = 0
    for topic, score in WORLDS.values():
        for spread in SPREADS:
            for repeat in range(repeats):
                study = study_of(topic, seed=repeat)
                findings, _ = conduct(study, StudyLog(), World(score=lambda s, _, f=score: f(s), noise=spread))
                for claim, finding in zip(study.hypotheses, findings, strict=True):
                    verdict, is_clear = truth(study, claim, score, spread)
                    claims, decidable = claims + 1, decidable + is_clear
                    right += is_clear and finding.verdict == verdict
                    wrong += finding.verdict not in (verdict, "inconclusive")
    return {"worlds_claims": claims, "worlds_right": right / decidable, "worlds_wrong": wrong / claims}


@dataclass(frozen=True)
class Described:
    """The part of a `SubjectRepo` that a plan without other files needs."""

    first: str = "0" * 40

    def described(self, commit: str) -> Subject:
        return Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl", "judge.py:score", steps=40)

    def num_tasks(self) -> int:
        return 32


def study_of(topic: str, levels: Mapping[str, Sequence[Value]] = MappingProxyType({}), seed: int = 0) -> Study:
    question = Question(topic, Budget(runs=500.0), seed, sesoi=0.02)
    asked = read_topic(topic)
    return Study.from_json(plan_study(replace(question, equal=asked.equal), asked, levels, Described())["study"])


def truth(study: Study, claim: Hypothesis, score: Callable[[Setting], float], spread: float) -> tuple[Verdict, bool]:
    """Returns the right verdict of a claim, and whether the last look can be expected to find it."""
    matters = claim.sesoi or study.sesoi
    if claim.metric == "tokens":
        value, spread = math.log(0.5), 0.05
    else:
        value = sum(weight * score(study.arm(arm).changes) for arm, weight in claim.contrast.items())
    error = spread * math.sqrt(sum(weight**2 for weight in claim.contrast.values()) / study.looks[-1])
    verdict: Verdict = "supported" if value > matters else "refuted" if value < -matters else "practically_equivalent"
    return verdict, abs(abs(value) - matters) >= CLEAR * error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="studies of each world and spread")
    names = [topic["name"] for topic in published.topics()]
    parser.add_argument("--published", nargs="*", choices=names, help="conduct published topics instead, by real runs")
    parser.add_argument("--grids", nargs="*", choices=names, help="measure the grids of published topics anew")
    parser.add_argument("--out", type=Path, help="folder for the campaigns of --published, which are kept there")
    options = parser.parse_args()
    if options.grids is not None:
        for topic in published.topics(options.grids):
            published.measure(topic)
        return
    if options.published is not None:
        report("topics", published.conducted(options.published, options.out))
        return
    results = []
    for topic in topics():
        result, text = judged(topic)
        results.append((result, topic.get("set", "notes")))
        if result != "as_asked":
            print(f"{result}: {topic['text']}: {text}")
    planned = [by_script(topic) for topic in topics()]
    for topic, (result, text) in zip(topics(), planned, strict=True):
        if result != "as_asked":
            print(f"{result} with a scripted model: {topic['text']}: {text}")
    sloppy = [by_script(topic, is_sloppy=True)[0] for topic in topics()[::8]]
    sets = sorted({name for _, name in results})
    shares = {f"as_asked_{name}": _share([result for result, of in results if of == name]) for name in sets}
    print(
        json.dumps(
            {
                "topics": len(results),
                "as_asked": _share([result for result, _ in results]),
                **shares,
                "doubtful": sum(result == "doubtful" for result, _ in results),
                "silent_other": sum(result == "other" for result, _ in [*results, *planned]),
                "as_asked_llm": _share([result for result, _ in planned]),
                "sloppy": _share(sloppy),
                **worlds(options.repeats),
            }
        )
    )


def _share(results: list[Result]) -> float:
    return round(results.count("as_asked") / max(1, len(results)), 3)


if __name__ == "__main__":
    main()
