"""What the offline planner makes of topics: `python -m bench.topics`.

`bench/cases/topics.toml` has topics with the plan that a researcher would write. A topic is planned *as asked* if form,
factors, named levels, metrics and amounts are those of that plan, or if it is refused because no study can answer it.
`silent_other` counts topics for which another plan was made whose reading names no word that it left out. A plan that
does name some is *doubtful*, and a refusal that asks for other words is neither.

Prints a line for each topic that is not as asked, then one JSON object as the last line.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from agentjet.errors import ConfigError
from agentjet.research.topic import Question, read_topic

CASES = Path(__file__).parent / "cases" / "topics.toml"
Result = Literal["as_asked", "refused", "doubtful", "other"]


def topics() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(CASES.read_text(encoding="utf-8"))["topic"]
    return found


def judged(topic: dict[str, Any]) -> tuple[Result, str]:
    """Returns what became of a topic, and how it was read or why it was refused."""
    try:
        question = read_topic(topic["text"])
    except ConfigError as error:
        wanted = topic.get("refused")
        return "as_asked" if wanted and f"asks about {wanted}" in str(error) else "refused", str(error)
    wrong: Result = "doubtful" if question.unread else "other"
    return "as_asked" if is_plan(question, topic) else wrong, question.reading()


def is_plan(question: Question, topic: dict[str, Any]) -> bool:
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


def main() -> None:
    results = []
    for topic in topics():
        result, text = judged(topic)
        results.append((result, topic.get("set", "notes")))
        if result != "as_asked":
            print(f"{result}: {topic['text']}: {text}")
    sets = sorted({name for _, name in results})
    shares = {f"as_asked_{name}": _share([result for result, of in results if of == name]) for name in sets}
    print(
        json.dumps(
            {
                "topics": len(results),
                "as_asked": _share([result for result, _ in results]),
                **shares,
                "doubtful": sum(result == "doubtful" for result, _ in results),
                "silent_other": sum(result == "other" for result, _ in results),
            }
        )
    )


def _share(results: list[Result]) -> float:
    return round(results.count("as_asked") / max(1, len(results)), 3)


if __name__ == "__main__":
    main()
