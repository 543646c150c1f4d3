"""A language model and a coding agent as proposers.

1. A model reads by tools and proposes interventions. Both kinds of URL carry the same conversation.
2. Prose, nonsense and invalid proposals are sent back, and returned as text in the end. A model that is away or endless
   is away.
3. Answers are recorded before they are used, and a record is played again.
4. A command edits files behind the fence; the difference is a patch. It sees no other file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentjet.cli.research import Proposers
from agentjet.errors import ConfigError
from agentjet.research.campaign.proposers import (
    MAX_TURNS,
    REPAIRS,
    CodingAgent,
    LanguageModel,
    LlmEndpoint,
    LlmToolCall,
    Message,
    ProposalTools,
    ReplayedModel,
    Reply,
    Tool,
)
from agentjet.research.campaign.strategist import Intervention, ProposerAway, View
from agentjet.research.journal import JournalEntry
from agentjet.research.models import Outcome, Transcript

PROPOSED = {"name": "slower", "kind": "settings", "changes": {"job.optimizer.lr": 1e-5}, "why": "entry 2: it diverges"}
PROPOSED |= {"predicts": "no divergence", "refutes": "it diverges again", "evidence": [2]}
SLOWER = Intervention.from_json(PROPOSED)


VIEW = View(
    "why does it not learn?",
    Outcome(
        "t",
        "completed",
        score=0.5,
        signals={"reward/mean": (0.1, 0.2)},
        transcripts=(Transcript("best", {"q": 1}, ({"role": "assistant", "content": "hi"},), 1.0, 0.0),),
    ),
    observed=2,
    tried=frozenset(),
    notebook=(JournalEntry(1, "started", "s", 0.0, (), {"topic": "x"}),),
    files={"agent.py": "LIMIT = 3\n"},
    judge_source="def score(task, messages): ...",
)


@dataclass
class Scripted:
    """A model that gives these answers in order, then none."""

    replies: list[Reply]
    heard: list[list[Message]] = field(default_factory=list)

    def reply(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Reply:
        self.heard.append([*messages])
        if len(self.heard) > len(self.replies):
            raise ProposerAway("nothing more")
        return self.replies[len(self.heard) - 1]


def calls(*named: tuple[str, Mapping[str, Any]]) -> Reply:
    return Reply("", tuple(LlmToolCall(f"c{n}", name, json.dumps(a)) for n, (name, a) in enumerate(named)))


PROPOSE, FINISH = ("propose", PROPOSED), ("finish", {"reason": "enough"})


def propose(*replies: Reply, most: int = 3) -> tuple[Sequence[Any], Scripted]:
    model = Scripted([*replies])
    return LanguageModel(model, Path(os.devnull)).propose(VIEW, most), model


def test_a_model_reads_and_proposes() -> None:
    reads = calls(("notebook", {}), ("files", {}), ("read", {"name": "judge"}), ("curves", {}), ("transcripts", {}))
    found, model = propose(reads, calls(("curves", {"name": "reward/mean"}), PROPOSE, FINISH))
    assert [*found] == [SLOWER]
    results = [message["content"] for message in model.heard[1] if message["role"] == "tool"]
    assert "started" in results[0] and "agent.py" in results[1] and "def score" in results[2]
    assert '"score": 0.5' in results[3] and '"place": "best"' in results[4]


def test_nothing_worth_a_try_is_an_answer() -> None:
    assert [*propose(calls(FINISH))[0]] == []


def test_no_more_proposals_than_asked_for() -> None:
    found, model = propose(calls(PROPOSE, PROPOSE, PROPOSE), most=2)
    assert [*found] == [SLOWER, SLOWER] and len(model.heard) == 1


def test_prose_is_sent_back_and_then_returned() -> None:
    found, model = propose(*[Reply("The reward is 0.97 now, believe me.")] * 5)
    assert [*found] == ["The reward is 0.97 now, believe me."] and len(model.heard) == 1 + REPAIRS
    found, _ = propose(Reply("hm"), calls(PROPOSE, FINISH))
    assert [*found] == [SLOWER]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({**PROPOSED, "kind": "evaluator"}, "kind = 'evaluator'"),
        ({**PROPOSED, "seeds": 10_000}, "unknown key"),
        ({**PROPOSED, "changes": {}}, "it changes nothing"),
        ({**PROPOSED, "changes": {"a": [1]}}, "it must be text, a number, true or false, or a list of texts"),
        ({**PROPOSED, "why": "x" * 3000}, "string should have at most 2000 characters"),
        ({"score": 1.0}, "Intervention: "),
    ],
)
def test_an_invalid_proposal_is_answered_with_the_reason(arguments: Mapping[str, Any], reason: str) -> None:
    found, model = propose(calls(("propose", arguments)), calls(PROPOSE, FINISH))
    assert [*found] == [SLOWER] and reason in model.heard[1][-1]["content"]
    found, _ = propose(*[calls(("propose", arguments))] * 3, calls(FINISH))
    assert len(found) == 1 and reason in found[0]


@pytest.mark.parametrize(
    "call",
    [
        LlmToolCall("c", "launch", "{}"),
        LlmToolCall("c", "read", "[1"),
        LlmToolCall("c", "read", "[]"),
        LlmToolCall("c", "read", "[" * 100_000),
        LlmToolCall("c", "notebook", '{"first": 1e999}'),
        LlmToolCall("c", "propose", json.dumps(PROPOSED)[:-1] + ', "changes": {"job.optimizer.lr": 1e999}}'),
        LlmToolCall("c", "propose", json.dumps(PROPOSED)[:-1] + ', "name": "\\ud800"}'),
        LlmToolCall("c", "propose", json.dumps(PROPOSED)[:-1] + ', "evidence": [1e999]}'),
    ],
)
def test_an_invalid_call_is_answered(call: LlmToolCall) -> None:
    assert ProposalTools(VIEW, 3).use(call).startswith("invalid: ")


def test_papers_are_read_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "grpo.md").write_text("# GRPO")
    (tmp_path / "secret.md").write_text("no")
    desk = ProposalTools(VIEW, 3, tmp_path / "papers")
    assert desk.use(LlmToolCall("c", "read", '{"name": "grpo.md"}')) == "# GRPO"
    assert desk.use(LlmToolCall("c", "read", '{"name": "../secret.md"}')).startswith("invalid: ")


def test_a_model_that_is_away_or_endless() -> None:
    with pytest.raises(ProposerAway, match="nothing more"):
        propose()
    with pytest.raises(ProposerAway, match=f"no proposal within {MAX_TURNS} answers"):
        propose(*[calls(("files", {}))] * 100)
    assert [*propose(calls(PROPOSE))[0]] == [SLOWER], "what it proposed before counts"


def test_answers_are_recorded_and_played_again(tmp_path: Path) -> None:
    script = Scripted([calls(("files", {})), calls(PROPOSE, FINISH)])
    first = LanguageModel(script, tmp_path / "llm.jsonl").propose(VIEW, 3)
    again = LanguageModel(ReplayedModel(tmp_path / "llm.jsonl"), tmp_path / "new.jsonl")
    assert again.propose(VIEW, 3) == first == [SLOWER]
    with pytest.raises(ProposerAway, match="the record ends here"):
        again.propose(VIEW, 3)
    later = LanguageModel(ReplayedModel(tmp_path / "llm.jsonl", before=1), tmp_path / "new.jsonl")
    assert later.propose(VIEW, 3) == [SLOWER]
    assert (tmp_path / "new.jsonl").read_text() != ""


@pytest.mark.parametrize("line", ["prose", "{}", '{"reply": {"calls": 1}}'])
def test_a_record_with_a_wrong_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "llm.jsonl").write_text(f'{{"reply": {{"text": "", "calls": []}}}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2 has no answer of a model"):
        ReplayedModel(tmp_path / "llm.jsonl")


# ---- endpoints -------------------------------------------------------------------------------------------------------


@dataclass
class Wire(httpx.BaseTransport):
    """A connection with scripted answers."""

    answer: Callable[[Any], httpx.Response]
    bodies: list[Any] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append((request.url.path, json.loads(request.read())))
        return self.answer(request)


def openai_answer(*named: tuple[str, Mapping[str, Any]]) -> httpx.Response:
    listed = [{"id": "c1", "function": {"name": name, "arguments": json.dumps(a)}} for name, a in named]
    return httpx.Response(200, json={"choices": [{"message": {"content": None, "tool_calls": listed}}]})


def anthropic_answer(*named: tuple[str, Mapping[str, Any]]) -> httpx.Response:
    blocks = [{"type": "tool_use", "id": f"c{n}", "name": name, "input": a} for n, (name, a) in enumerate(named)]
    return httpx.Response(200, json={"content": [{"type": "text", "text": "Let me see."}, *blocks]})


@pytest.mark.parametrize(("kind", "answer"), [("openai", openai_answer), ("anthropic", anthropic_answer)])
def test_both_kinds_of_url(kind: Any, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([answer(("files", {}), ("curves", {})), answer(PROPOSE, FINISH)])
    wire = Wire(lambda request: next(answers))
    monkeypatch.setattr(httpx, "stream", httpx.Client(transport=wire).stream)
    assert LanguageModel(LlmEndpoint("http://127.0.0.1:9/v1", "m", "k", kind), Path(os.devnull)).propose(VIEW, 3) == [
        SLOWER
    ]
    (path, first), (_, second) = wire.bodies
    assert path == ("/v1/chat/completions" if kind == "openai" else "/v1/messages") and len(first["tools"]) == 7
    if kind == "anthropic":
        assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
        assert [block["type"] for block in second["messages"][2]["content"]] == ["tool_result"] * 2


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(500), "answered with status 500"),
        (httpx.Response(200, text="hello"), "the answer is not one of the openai API"),
        (httpx.Response(200, json={"choices": []}), "the answer is not one of the openai API"),
        (httpx.Response(200, json={"choices": [{"message": {"content": [1]}}]}), "the answer is not one"),
        (httpx.Response(200, content=b" " * (1 << 21)), "the answer is longer than"),
    ],
)
def test_a_wrong_answer_of_an_endpoint(response: httpx.Response, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpx, "stream", httpx.Client(transport=Wire(lambda request: response)).stream)
    with pytest.raises(ProposerAway, match=message):
        LlmEndpoint("http://127.0.0.1:9/v1", "m").reply([{"role": "user", "content": "x"}], [])


def test_a_slow_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Wire(lambda request: httpx.Response(200, content=b"{}"))
    monkeypatch.setattr(httpx, "stream", httpx.Client(transport=slow).stream)
    with pytest.raises(ProposerAway, match=r"took longer than -1 s"):
        LlmEndpoint("http://127.0.0.1:9/v1", "m", seconds=-1.0).reply([{"role": "user", "content": "x"}], [])


def test_an_endpoint_that_is_away() -> None:
    with pytest.raises(ProposerAway, match=r"http://127\.0\.0\.1:9/v1: .*refused"):
        LlmEndpoint("http://127.0.0.1:9/v1", "m", "k").reply([{"role": "user", "content": "x"}], [])


# ---- coding agents ---------------------------------------------------------------------------------------------------

sandboxed = pytest.mark.needs("bubblewrap")
EDIT = """
import json, sys
task = sys.stdin.read()
assert "why does it not learn?" in task and "reward/mean" in open("campaign/run.json").read()
open("subject/agent.py", "w").write("LIMIT = 30\\n")
open("subject/pay.py", "w").write("x = 1\\n")
reasons = {"name": "longer", "why": "it is cut off", "predicts": "more", "refutes": "less"}
json.dump(reasons, open("hypothesis.json", "w"))
"""


def agent(code: str, tmp_path: Path, seconds: float = 60.0) -> CodingAgent:
    (tmp_path / "edit.py").write_text(code)
    return CodingAgent((sys.executable, str(tmp_path / "edit.py")), seconds=seconds, readable=(Path(sys.prefix),))


@sandboxed
def test_a_command_writes_the_patch(tmp_path: Path) -> None:
    [found] = agent(EDIT, tmp_path).propose(VIEW, 3)
    assert isinstance(found, Intervention)
    assert (found.name, found.kind, found.why) == ("longer", "agent", "it is cut off")
    assert "-LIMIT = 3\n+LIMIT = 30\n" in found.patch and "+++ b/pay.py" in found.patch


@sandboxed
def test_a_command_finds_no_secret_for_its_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "leaked-123")
    code = """
import glob, json
texts = []
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        texts.append(open(path, errors="replace").read())
    except OSError:
        pass
open("subject/agent.py", "w").write("LIMIT = 30\\n")
json.dump({"name": "spy", "why": " ".join(text for text in texts if "leaked" in text)}, open("hypothesis.json", "w"))
"""
    [found] = agent(code, tmp_path).propose(VIEW, 3)
    assert isinstance(found, Intervention) and (found.name, found.why) == ("spy", "")


@sandboxed
def test_a_command_without_a_usable_change(tmp_path: Path) -> None:
    assert not agent("", tmp_path).propose(VIEW, 3)
    gone = "os.rename('subject', 'x')"
    for code in ("os.symlink('/etc/passwd', 'subject/x')", gone, f"{gone}; os.symlink('x', 'subject')"):
        [found] = agent(f"import os; {code}", tmp_path).propose(VIEW, 3)
        assert "not a regular file" in str(found)
    [found] = agent("[open(f'subject/{n}.py', 'wb').truncate(2**24) for n in range(3)]", tmp_path).propose(VIEW, 3)
    assert "more than 32 MB" in str(found)
    fifo = "import os; open('subject/a.py', 'w').write('x = 1'); os.mkfifo('hypothesis.json')"
    [found] = agent(fifo, tmp_path).propose(VIEW, 3)
    assert isinstance(found, Intervention) and found.name == "a patch of the coding agent"


@sandboxed
@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit('no key')", 60.0, "ended with status 1: no key"),
        ("import time; time.sleep(60)", 1.0, "did not end within 1 s"),
        ("while True: print('x' * 99_999)", 60.0, r"printed more than 256 MiB to stdout and was ended"),
        ("open({secret!r})", 60.0, "FileNotFoundError"),
        ("open({secret!r}, 'w')", 60.0, "PermissionError"),
    ],
)
def test_a_command_that_fails_is_away(code: str, seconds: float, message: str, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text("{}")
    with pytest.raises(ProposerAway, match=message):
        agent(code.format(secret=str(tmp_path / "held_out.jsonl")), tmp_path, seconds).propose(VIEW, 3)


def test_a_played_record_is_a_limit_of_the_campaign(tmp_path: Path) -> None:
    """The report names it, because no model was asked."""
    record = tmp_path / "llm.jsonl"
    record.write_text(json.dumps({"reply": Reply("x").to_json()}) + "\n", encoding="utf-8")
    played, asked = (
        Proposers(llm=name, llm_model=model).of(tmp_path / "new")[0]
        for name, model in ((str(record), ""), ("http://127.0.0.1:1/v1", "m"))
    )
    assert isinstance(played, LanguageModel) and "played from a record, llm.jsonl" in played.limit
    assert isinstance(asked, LanguageModel) and not asked.limit
