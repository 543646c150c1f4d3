"""1. A language model or a coding agent plans a study; the plan says who planned it, from what, and at which cost.
2. A plan is checked against the registry, the subject and the papers. An invalid one is answered with the reason.
3. Without a valid plan the grammar reads the topic, and the plan says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import ConfigError
from agentjet.research.campaign.planner import PlanView, question_of
from agentjet.research.campaign.proposers import CodingAgent, LanguageModel, LlmEndpoint
from agentjet.research.campaign.strategist import unified_diff
from agentjet.research.campaign.subject_repo import SubjectRepo
from agentjet.research.question import StudyQuestion
from bench.topics import by_script, topics
from tests.research.campaign.llm_server import LlmServer, openai_answer
from tests.research.campaign.subjects import write_subject

TOPIC = "Does the KL penalty matter?"
KL = {"factor": "job.recipe.kl_coef", "levels": [0.0, 0.02]}
PLAN = {"form": "compare", "varied": [KL], "metrics": ["score"], "expects": "a lower score", "refutes": "no difference"}
PAPERS = {"kl.md": "# A paper on KL\n\nIt matters."}


def asked(tmp_path: Path, *answers: Any, topic: str = TOPIC, view: PlanView | None = None) -> tuple[StudyQuestion, Any]:
    """Returns the plan of a model with these answers, and the requests that it got."""
    script = iter(answers)
    with LlmServer(lambda body: next(script)).serve() as server:
        endpoint = LlmEndpoint(server.url, "m")
        model = LanguageModel(endpoint, tmp_path / "llm.jsonl", PAPERS, prices=(3.0, 15.0))
        return question_of(topic, [model], view), server.requests


def plan(**changes: Any) -> Any:
    return openai_answer(("plan", {**PLAN, **changes}))


def test_a_model_plans_a_study(tmp_path: Path) -> None:
    cited = [{"file": "kl.md", "says": "It matters."}]
    reads = openai_answer(("files", {}), ("read", {"name": "kl.md"}))
    question, requests = asked(tmp_path, reads, plan(cites=cited))
    assert [one.levels for one in question.varied] == [(0.0, 0.02)]
    assert question.reading() == (
        "Which is better: job.recipe.kl_coef (0, 0.02); measured: score, at equal episodes; planned by: a language "
        "model; expected: a lower score; refuted by: no difference; related work: A paper on KL (kl.md): It matters."
    )
    assert question.cites[0].title == "A paper on KL"
    assert question.used == {
        "read": 200,
        "written": 20,
        "price": pytest.approx(0.0009),
        "hours": question.used["hours"],
    }
    rules = requests[0][2]["messages"][0]["content"]
    assert '"factor": "job.max_staleness"' in rules and "people's judgement is needed" in rules
    assert "# A paper on KL" in str(requests[1][2]["messages"])
    assert len((tmp_path / "llm.jsonl").read_text().splitlines()) == 2
    assert StudyQuestion.model_validate_json(question.model_dump_json()) == question


def test_a_model_reads_another_language(tmp_path: Path) -> None:
    topic = "KLペナルティは重要ですか?"
    assert asked(tmp_path, plan(), topic=topic)[0].topic == topic
    with pytest.raises(ConfigError, match=r"is not in English.*because llm gave no valid plan \(No\.\)"):
        asked(tmp_path, *[openai_answer(text="No.")] * 3, topic=topic)


def test_a_model_refuses_a_topic(tmp_path: Path) -> None:
    refused = openai_answer(("refuse", {"reason": "people must judge"}))
    with pytest.raises(ConfigError, match="is refused by a language model: people must judge"):
        asked(tmp_path, openai_answer(("refuse", {"reason": " "})), refused)


def levels(factor: str, *given: Any) -> dict[str, Any]:
    return {"varied": [{"factor": factor, "levels": given}]}


SUBJECT = """\
model = "m"
agent = "agent.py:agent"
tasks = "tasks.jsonl"
held_out = "held_out.jsonl"
evaluator = "judge.py:score"
settings.job.optimizer.schedule = "cosine"
"""
LR = {"factor": "job.optimizer.lr", "levels": [1e-5, 1e-4]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (levels("job.recipe.kl", 0, 1), "job.recipe.kl: there is no such factor"),
        (levels("machine", "h100", "a100"), "asks about machine: the machine changes the speed"),
        (levels("job.recipe.kl_coef", 0, "high"), "job.recipe.kl_coef = 'high': give a number"),
        (levels("job.recipe.kl_coef", 0, True), "job.recipe.kl_coef = True: give a number"),
        (levels("job.recipe.kl_coef", 0, -1), "job.recipe.kl_coef = -1"),
        (levels("job.recipe.kl_coef", 0, None), "varied.0.levels.1 = None: it must be text, a number, true or false"),
        (levels("job.recipe.kl_coef", 0.01), "has the levels (0.01,): give two or more to compare"),
        (levels("job.recipe.kl_coef", *range(99)), "99 levels: give at most 12"),
        (levels("job.recipe.kl_coef", 0, 0.1, 0), "a level is named twice"),
        (levels("job.group_size", 2.5, 8), "job.group_size = 2.5"),
        (levels("job.recipe.drop_truncated", 0, 1), "job.recipe.drop_truncated = 0: give true or false"),
        (levels("job.recipe.correction", "tis", "all"), "job.recipe.correction = 'all'"),
        (levels("job.recipe", "grpo", "os:system"), "there is no recipe 'os:system'"),
        (levels("job.recipe", "grpo", "grp"), "did you mean"),
        (levels("job.seed", 1, 2), "job.seed: did you mean 'seed'?"),
        (levels("job.max_steps", 1, 2), "seeds and lengths of trials are the study's"),
        (levels("steps", 0, 40), "steps = 0: give a whole number from 1 to 1000000"),
        (levels("tasks.number", "half", "all"), "tasks.number = 'half': give a number of tasks, a share"),
        (levels("tasks.order", "given", 7), "give a text of at most 160 characters"),
        (levels("agent", "agent.py:agent", "judge.py:score"), "the subject has no file 'judge.py': patch it in"),
        (levels("agent", "as given", "critic", "pair") | {"patches": {"pair": "x"}}, "all but one need a patch"),
        ({"patches": {"0.02": "--- a/x"}}, "patches: '0.02' is not a level of agent, prompt, reward"),
        ({"form": "interaction"}, "form = 'interaction': it has 2 to 2 factors, and not 1"),
        ({"varied": [KL, LR]}, "form = 'compare': it has 1 to 1 factors, and not 2"),
        ({"form": "interaction", "varied": [KL, KL]}, "a factor is named twice"),
        ({"form": "robustness"}, "its factor is world or tasks.filter"),
        ({"form": "trade_off"}, "give two metrics, the aim first"),
        ({"form": "scaling", **levels("job.recipe", "grpo", "rloo")}, "more or less of job.recipe cannot be had"),
        ({"form": "guess"}, "form = 'guess': input should be 'compare'"),
        ({"metrics": ["score", "score"]}, "metrics: one is named twice"),
        ({"metrics": ["joy"]}, "metrics.0 = 'joy'"),
        ({"equal": "love"}, "equal = 'love'"),
        ({"needs": {"steps": "x"}}, "needs: steps is set by a study"),
        ({"planner": "the king"}, "planner: unknown key"),
        ({"seeds": 9}, "seeds: unknown key"),
        ({"cites": [{"file": "../secret.md", "says": "x"}]}, "cites: there is no paper '../secret.md'"),
        ({"expects": "\ud800"}, "unable to parse raw data as a unicode string"),
        ({"expects": "x" * 3000}, "string should have at most 2000 characters"),
        (levels("job.optimizer.warmup_steps", 0, 50), "leaves no room after warmup_steps = 50"),
    ],
)
def test_an_invalid_plan_is_answered_with_the_reason(changes: Mapping[str, Any], reason: str, tmp_path: Path) -> None:
    question, requests = asked(
        tmp_path, plan(**changes), plan(), view=PlanView({"subject.toml": SUBJECT, "agent.py": ""})
    )
    assert question.planner == "a language model" and reason in requests[1][2]["messages"][-1]["content"]


def test_levels_that_only_a_person_has_are_needs(tmp_path: Path) -> None:
    for changes, needed in (
        (levels("agent"), ["agent"]),
        (levels("reward", "binary", "graded"), ["reward"]),
        (levels("job.recipe", "grpo", "distill"), ["teacher"]),
        (levels("job.recipe", "grpo") | {"needs": {"own_recipe": "theirs"}}, ["own_recipe"]),
        (levels("agent", "as given", "critic") | {"patches": {"critic": "--- a/x"}}, []),
        (levels("agent", "one.py:agent", "two.py:agent"), []),
        (levels("model", "0.5B", "3B") | {"form": "scaling"}, ["model"]),
        (levels("model", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B") | {"form": "scaling"}, []),
        ({"form": "diagnose", "varied": []}, []),
    ):
        view = PlanView({"one.py": "", "two.py": ""})
        assert [*asked(tmp_path, plan(**changes), view=view)[0].needs] == needed


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (openai_answer(text="I think that KL matters."), "I think that KL matters."),
        (openai_answer(text="x" * 10**6), "x ... x"),
        (openai_answer(), "(an empty answer)"),
        (plan(**levels("job.kl", 0, 1)), "job.kl: there is no such factor"),
        ((200, [b"{not JSON"]), "the answer is not one of the openai API"),
        ((503, [b"{}"]), "answered with status 503"),
    ],
)
def test_without_a_valid_plan_the_grammar_reads_the_topic(answer: Any, why: str, tmp_path: Path) -> None:
    question, requests = asked(tmp_path, *[answer] * 3)
    assert question.varied[0].levels == (0.0, 0.01) and question.form == "compare"
    assert "planned by: the offline grammar, because llm gave no valid plan (" in question.reading()
    assert why in question.planner and len(requests) in (1, 3)


def test_a_silent_model_is_waited_for_once(tmp_path: Path) -> None:
    server = LlmServer(lambda body: (server.closing.wait(), (200, []))[1])
    with server.serve():
        model = LanguageModel(LlmEndpoint(server.url, "m", seconds=0.3), tmp_path / "llm.jsonl")
        question = question_of(TOPIC, [model])
    assert "the answer took longer than 0.3 s" in question.planner and len(server.requests) <= 1


@pytest.mark.parametrize(
    ("topic", "why"), [("", "the topic is empty"), (" \n", "the topic is empty"), ("x" * 1001, "1001")]
)
def test_a_topic_that_is_none_asks_nobody(topic: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        asked(tmp_path, topic=topic)


def test_text_of_a_model_cannot_steer_a_terminal(tmp_path: Path) -> None:
    question, _ = asked(tmp_path, plan(expects="more\n\x1b[2Jscore"))
    assert "expected: more  [2Jscore" in question.reading()


@pytest.mark.parametrize("topic", topics()[::23], ids=lambda topic: topic["text"][:60])
def test_scripted_plans_are_accepted_as_asked(topic: dict[str, Any]) -> None:
    """Also after prose and an invalid plan."""
    for is_sloppy in (False, True):
        result, text = by_script(topic, is_sloppy)
        assert result == "as_asked", text


@pytest.mark.needs("bubblewrap")
def test_a_patch_of_a_level_must_apply(tmp_path: Path) -> None:
    repo = SubjectRepo.create(tmp_path / "c", write_subject(tmp_path / "user"))
    files = repo.files(repo.first)
    good = unified_diff(files, {**files, "agent.py": files["agent.py"] + "\n# with a critic\n"})
    agents = levels("agent", "as given", "critic")
    answers = (plan(**agents, patches={"critic": text}) for text in ("--- a/agent.py\n+++ b/agent.py\n", good))
    question, requests = asked(tmp_path, *answers, view=PlanView.of(repo, ["longer answers raise the score"]))
    assert "the patch does not apply" in requests[1][2]["messages"][-1]["content"]
    assert question.patches == {"critic": good}
    assert "longer answers raise the score" in requests[0][2]["messages"][0]["content"]


@pytest.mark.needs("bubblewrap")
def test_a_coding_agent_plans_a_study(tmp_path: Path) -> None:
    """First with a factor that does not exist."""
    code = f"""
import json, sys
task, plan = sys.stdin.read(), {PLAN!r}
assert {TOPIC!r} in task and open("subject/agent.py").read() == "x"
if "was invalid" not in task:
    plan["varied"] = [{{"factor": "job.kl", "levels": [0, 1]}}]
json.dump(plan, open("question.json", "w"))
"""
    (tmp_path / "plan.py").write_text(code)
    (tmp_path / "refuse.py").write_text("import json; json.dump({'refuse': 'no'}, open('question.json', 'w'))")
    plans, refuses, idle = (
        CodingAgent((sys.executable, *given), readable=(Path(sys.prefix),), seconds=60.0)
        for given in ([str(tmp_path / "plan.py")], [str(tmp_path / "refuse.py")], ["-c", ""])
    )
    view = PlanView({"agent.py": "x"})
    question = question_of(TOPIC, [plans], view)
    assert question.planner == "a coding agent" and question.varied[0].levels == (0.0, 0.02)
    with pytest.raises(ConfigError, match="is refused by a coding agent: no"):
        question_of(TOPIC, [refuses], view)
    assert "form: is required" in question_of(TOPIC, [idle], view).planner
    assert json.dumps(dict(question.used)).startswith('{"hours"')
