"""1. Proposals of a model are part of the plan before the data, and of an annex afterwards. Both show their origin.
2. An invalid answer is sent back twice with the reason, then refused. Without an answer the study continues.
3. Interrupted at any entry, the conversation continues where it was: no answered question is asked again.
4. The version of a coding agent becomes an arm, stored under its hash. The judge's files are neither shown nor changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import EntryKind, StudyLog
from agentjet.research.models import Arm, Hypothesis, Study, Subject
from agentjet.research.planner import landlock
from agentjet.research.planner.plan import Plan
from agentjet.research.planner.proposals import (
    MAX_ACTIONS,
    ChatEndpoint,
    CodingAgentSandbox,
    LLMUnavailable,
    Message,
    ModelAdviser,
    propose_code,
    read_answer,
    refine,
)
from agentjet.research.scheduler import StudyRun, conduct_with_annexes, estimate_cost
from tests.research.world import STUDY, Formula

PLAIN = replace(
    STUDY,
    arms=tuple(Arm(name, {"gain": gain, "lr": 16.0}) for name, gain in (("a", 0.0), ("b", 3.0))),
    looks=(4, 6),
    budget=60.0,
)
ARM = {"kind": "add_arm", "arm": "c", "against": "b", "changes": {"gain": 6.0, "lr": 16.0}, "why": "more of it"}
PROBE = {"kind": "request_probe", "arm": "b", "changes": {"lr": 8.0}}
NONSENSE = {"kind": "finding", "verdict": "supported"}


def saying(*actions: Mapping[str, Any]) -> str:
    return json.dumps({"actions": actions})


@dataclass
class Scripted:
    """A model that gives these answers in order, and then none."""

    answers: list[str]
    heard: list[list[Message]] = field(default_factory=list)

    def answer(self, messages: Sequence[Message]) -> str:
        self.heard.append([*messages])
        if len(self.heard) > len(self.answers):
            raise LLMUnavailable("nothing more to say")
        return self.answers[len(self.heard) - 1]


def planned(study: Study = PLAIN) -> Plan:
    return Plan(study, None, (), (), estimate_cost(study))


# ---- before the data ------------------------------------------------------------------------------------------------


def test_a_proposal_before_the_data_is_in_the_plan() -> None:
    log = StudyLog()
    refined = refine(planned(), Scripted([saying(ARM, {"kind": "promote", "arm": "c", "against": "b"})]), log)
    assert refined.study.hypotheses[1] == Hypothesis("c scores higher than b", "c", "b", True, "llm")
    assert refined.cost.least == planned().cost.least + 4, "the rehearsal is of the new study"
    assert "| c scores higher than b | proposed by a language model | confirmatory |" in refined.to_markdown()
    assert [amendment.point for amendment in log.amendments] == [-1, -1]
    study_runs = conduct_with_annexes(refined.study, log, Formula())
    assert [found.verdict for found in study_runs[0].findings] == ["supported", "supported"]


def test_an_arm_that_the_budget_does_not_carry_is_refused() -> None:
    log = StudyLog()
    plan = planned(replace(STUDY, budget=30.0))
    assert refine(plan, Scripted([saying({**ARM, "changes": {"gain": 6.0}})]), log) == plan
    assert "full runs, of a budget of 30" in log.amendments[0].refused


@pytest.mark.parametrize(
    ("name", "word"),
    [("proven best", "proven"), ("Well-Proven", "proven"), ("supported", "supported"), ("a_better_lr", "better")],
)
def test_a_model_does_not_name_an_arm_by_what_it_hopes(name: str, word: str) -> None:
    log = StudyLog()
    assert refine(planned(), Scripted([saying({**ARM, "arm": name})]), log) == planned()
    assert log.amendments[0].refused == f"arm = {name!r}: {word!r} is a judgement; name the arm after its change"
    assert len(refine(planned(), Scripted([saying({**ARM, "arm": "six times 6.0"})]), StudyLog()).study.arms) == 3


@pytest.mark.parametrize(
    "wrong", ["no", "[]", '{"actions": {}}', '{"actions": [], "score": 1}', saying(NONSENSE), saying(*[ARM] * 9)]
)
def test_a_wrong_answer_is_sent_back_with_the_reason(wrong: str) -> None:
    llm, log = Scripted([wrong, saying(ARM)]), StudyLog()
    refined = refine(planned(), llm, log)
    assert len(refined.study.arms) == 3
    assert [message["role"] for message in llm.heard[1]] == ["system", "user", "assistant", "user"]
    complaint = read_answer(wrong)[1]
    assert complaint and complaint in llm.heard[1][3]["content"]
    assert [exchange.answer for exchange in log.exchanges] == [wrong, saying(ARM)]


def test_after_two_repairs_it_is_refused() -> None:
    llm, log = Scripted(["no", saying(NONSENSE), saying(NONSENSE, ARM), saying(ARM)]), StudyLog()
    refined = refine(planned(), llm, log)
    assert len(llm.heard) == 3
    assert [bool(amendment.refused) for amendment in log.amendments] == [True, False], "one by one in the last answer"
    assert len(refined.study.arms) == 3


def test_answers_in_a_fence_are_read_and_long_ones_cut() -> None:
    assert read_answer(f"Here it is:\n```json\n{saying(ARM)}\n```") == ([ARM], "")
    actions, complaint = read_answer(saying(*[ARM] * 50))
    assert len(actions) == MAX_ACTIONS and "50 actions" in complaint


def test_silence_is_no_harm() -> None:
    log = StudyLog()
    assert refine(planned(), Scripted([]), log) == planned()
    assert [exchange.failed for exchange in log.exchanges] == ["nothing more to say"]


class Refusing(httpx.BaseTransport):
    """A connection whose error contains the request."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.LocalProtocolError(f"Illegal header value {request.headers['authorization'].encode()!r}")


def test_a_failed_request_never_tells_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=Refusing()))
    for key in ("sk-secret", "sk\\'secret"):
        log = StudyLog()
        refine(planned(), ChatEndpoint("http://127.0.0.1:9/v1", "m", key), log)
        [exchange] = log.exchanges
        assert exchange.failed == f"http://127.0.0.1:9/v1: Illegal header value b{'Bearer (the key)'!r}".replace(
            "'", '"' if "'" in key else "'"
        )


# ---- after the data -------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


class Stopping(StudyLog):
    """Interrupted after some entries, including those of its annexes, and then resumed."""

    def __init__(self, entries: list[int]) -> None:
        super().__init__()
        self.entries = entries
        self.annexes: dict[int, StudyLog] = {}

    def append(self, kind: EntryKind, body: Mapping[str, Any]) -> None:
        super().append(kind, body)
        self.entries[0] -= 1
        if self.entries[0] == 0:
            raise Interrupted

    def annex(self, number: int) -> StudyLog:
        return self.annexes.setdefault(number, Stopping(self.entries))


def seen_through(log: StudyLog, runner: Formula, llm: Scripted) -> list[StudyRun]:
    return conduct_with_annexes(PLAIN, log, runner, adviser=ModelAdviser(llm))


def ending(study_runs: list[StudyRun]) -> list[Any]:
    return [
        (
            study_run.study,
            [f.to_json() for f in study_run.findings],
            study_run.log.amendments,
            study_run.launcher.spending.total,
        )
        for study_run in study_runs
    ]


def test_a_proposal_after_the_data_is_an_annex() -> None:
    llm = Scripted(["no", saying(PROBE, ARM), saying({"kind": "stop"})])
    first, annex = seen_through(StudyLog(), Formula(), llm)
    assert len(llm.heard) == 3, "it said stop"
    view = json.loads(llm.heard[0][1]["content"])
    assert view["findings"][0]["verdict"] == "supported" and view["runs_left"] == 52.0
    assert [h.origin for h in annex.study.hypotheses] == ["llm"] and not annex.study.hypotheses[0].confirmatory
    assert annex.findings[0].verdict == "supported" and "exploratory" in annex.findings[0].reason
    [probe] = [trial for trial in first.log.trials.values() if trial.setting["lr"] == 8.0]
    assert (probe.phase, probe.arm) == ("probe", "b")
    assert first.launcher.spending.total == 9.0 and annex.study.budget == 51.0


def test_whoever_says_stop_is_not_asked_again() -> None:
    llm = Scripted([saying(ARM, {"kind": "stop"}), saying({**ARM, "arm": "d", "changes": {"gain": 9.0, "lr": 16.0}})])
    assert len(seen_through(StudyLog(), Formula(), llm)) == 2
    assert len(llm.heard) == 1


def test_it_is_asked_three_times_at_most() -> None:
    claims = [{"kind": "add_hypothesis", "arm": "b", "against": "a"}] * 9
    llm = Scripted([saying(claim) for claim in claims])
    study = replace(PLAIN, budget=400.0)
    assert len(conduct_with_annexes(study, StudyLog(), Formula(), adviser=ModelAdviser(llm))) == 4
    assert len(llm.heard) == 3


def test_an_interrupted_conversation_goes_on() -> None:
    answers = ["no", saying(PROBE, NONSENSE), saying(PROBE, ARM), saying(NONSENSE), "no", saying({"kind": "stop"})]
    undisturbed = ending(seen_through(StudyLog(), Formula(), Scripted(answers)))
    assert len(undisturbed) == 2
    num_entries = 0
    while True:
        num_entries += 1
        log, runner, llm = Stopping([num_entries]), Formula(), Scripted(answers)
        try:
            seen_through(log, runner, llm)
        except Interrupted:
            assert ending(seen_through(log, runner, llm)) == undisturbed, num_entries
            assert len(llm.heard) == len(answers), "what was answered is not asked again"
        else:
            break
    assert num_entries > 60


# ---- a coding agent -------------------------------------------------------------------------------------------------

fenced = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")


@pytest.fixture
def plan_with_files(tmp_path: Path) -> Plan:
    files = {
        "agent.py": "import tools\ndef agent(task, episode): ...\n",
        "tools.py": "",
        "judge.py": "SECRET = 1\ndef judge(task, episode): ...\n",
        "tasks.jsonl": '{"id": "t"}\n',
        "held_out.jsonl": '{"id": "h"}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    subject = Subject(
        "tiny",
        f"{tmp_path / 'agent.py'}:agent",
        str(tmp_path / "tasks.jsonl"),
        str(tmp_path / "held_out.jsonl"),
        evaluator=f"{tmp_path / 'judge.py'}:judge",
    )
    arms = (Arm("a"), Arm("b", {"job.recipe.loss.name": "gspo"}))
    return planned(replace(PLAIN, arms=arms, subject=subject.with_hashes()))


def shell(script: str) -> CodingAgentSandbox:
    return CodingAgentSandbox(("/bin/sh", "-c", script), seconds=60.0)


@fenced
def test_a_coding_agents_version_is_an_arm(plan_with_files: Plan, tmp_path: Path) -> None:
    log, keeping = StudyLog(), tmp_path / "code"
    script = "cat > ../task; ls; echo 'def agent(task, episode): return 1' > agent.py; echo 'x = 1' > more.py"
    made = propose_code(plan_with_files, "a", shell(script), keeping, log)
    [*_, arm] = made.study.arms
    assert arm.code and arm.name == f"agent {arm.code[:6]}"
    assert {path.name for path in (keeping / arm.code).iterdir()} == {"agent.py", "tools.py", "more.py", "judge.py"}
    assert made.study.subject and made.study.subject.agent_of(arm.name) == f"{keeping / arm.code / 'agent.py'}:agent"
    made.study.subject.check_code()
    assert made.study.subject.code != plan_with_files.study.subject.code  # type: ignore[union-attr]
    assert log.exchanges[0].answer.split() == ["agent.py", "tools.py"], "it is not shown what judges it"
    assert (made.study.hypotheses[-1].origin, made.study.hypotheses[-1].confirmatory) == ("llm", False)
    assert "return 1" not in (tmp_path / "agent.py").read_text(encoding="utf-8")
    assert f"| {arm.name} scores higher than a | proposed by a coding agent | exploratory |" in made.to_markdown()


@fenced
def test_a_model_and_a_coding_agent_propose_one_after_the_other(plan_with_files: Plan, tmp_path: Path) -> None:
    log = StudyLog()
    arm = {"kind": "add_arm", "arm": "c", "against": "a", "changes": {"job.recipe.loss.name": "cispo"}}
    made = refine(plan_with_files, Scripted([saying(arm)]), log)
    made = propose_code(made, "a", shell("echo '# more' >> agent.py"), tmp_path / "code", log)
    assert [one.name for one in made.study.arms[:3]] == ["a", "b", "c"]
    assert made.study.arms[3].code
    assert [amendment.asked["arm"] for amendment in log.amendments] == ["c", made.study.arms[3].name]


@fenced
def test_a_denial_is_final(plan_with_files: Plan, tmp_path: Path) -> None:
    log = StudyLog()
    for script in ("echo > judge.py", "echo '# more' >> agent.py"):
        assert propose_code(plan_with_files, "a", shell(script), tmp_path / "code", log) == plan_with_files
    assert [amendment.refused for amendment in log.amendments] == ["'judge.py' is a file of the tasks or the evaluator"]
    assert len(log.exchanges) == 1


@fenced
def test_an_agent_that_is_its_own_judge_is_not_given_away(plan_with_files: Plan, tmp_path: Path) -> None:
    assert plan_with_files.study.subject
    alone = replace(plan_with_files.study.subject, evaluator="", code="")
    with pytest.raises(ConfigError, match="separate files"):
        propose_code(planned(replace(plan_with_files.study, subject=alone)), "a", shell("true"), tmp_path, StudyLog())
