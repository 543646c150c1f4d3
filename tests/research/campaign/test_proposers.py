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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    papers_in,
    texts_of,
)
from agentjet.research.campaign.strategist import Intervention, ProposerAway, View
from agentjet.research.journal import JournalEntry
from agentjet.research.models import Outcome, Transcript
from tests.research.campaign.llm_server import LlmServer, anthropic_answer, as_json, openai_answer

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


def proposal_tools(papers: Mapping[str, str] | None = None) -> ProposalTools:
    return ProposalTools(texts_of(VIEW.files, VIEW.judge_source, papers or {}), 3, view=VIEW)


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
    assert proposal_tools().use(call).startswith("invalid: ")


def test_papers_are_read_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "grpo.md").write_text("# GRPO")
    (tmp_path / "secret.md").write_text("no")
    tools = proposal_tools(papers_in(tmp_path / "papers"))
    assert tools.use(LlmToolCall("c", "read", '{"name": "grpo.md"}')) == "# GRPO"
    assert tools.use(LlmToolCall("c", "read", '{"name": "grpo.md", "start": 2}')) == "GRPO"
    assert tools.use(LlmToolCall("c", "read", '{"name": "../secret.md"}')).startswith("invalid: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"%PDF", r"a\.pdf: papers are \.md and \.txt files: convert it"),
        ("a.md", b"\xff\xfe\x00", r"a\.md: it is not UTF-8 text: convert it"),
        (".hidden", b"", "no .md or .txt file is in this folder"),
        ("sub/a.md", b"x", r"sub: papers are \.md and \.txt files"),
        ("../elsewhere", b"", "papers: No such file or directory: give a folder"),
    ],
)
def test_papers_that_are_not_text(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "papers" / name).parent.resolve().mkdir(parents=True, exist_ok=True)
    (tmp_path / "papers" / name).resolve().write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Proposers(llm="http://127.0.0.1:9/v1", llm_model="m", papers=tmp_path / "papers").of(tmp_path)


@pytest.mark.parametrize("prices", ["3", "3,", "a,b", "-1,2", "1,2,3"])
def test_prices_that_are_not_two_numbers(prices: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--llm-price '{prices}': give the prices of a million tokens"):
        Proposers(llm="http://127.0.0.1:9/v1", llm_model="m", llm_price=prices).of(tmp_path)


def test_a_model_that_is_away_or_endless() -> None:
    with pytest.raises(ProposerAway, match="nothing more"):
        propose()
    with pytest.raises(ProposerAway, match=f"no call of propose within {MAX_TURNS} answers"):
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


@pytest.mark.parametrize(("kind", "answer"), [("openai", openai_answer), ("anthropic", anthropic_answer)])
def test_both_kinds_of_url(kind: Any, answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(variable, "of-another-server")
    answers = iter([answer(("files", {}), ("curves", {})), answer(PROPOSE, FINISH)] * 2)
    with LlmServer(lambda body: next(answers)).serve() as server:
        for key in ("own-key", ""):
            model = LanguageModel(LlmEndpoint(server.url, "m", key, kind), tmp_path / "llm.jsonl", prices=(3.0, 15.0))
            assert model.propose(VIEW, 3) == [SLOWER]
            assert model.used == {"read": 200, "written": 20, "price": pytest.approx(0.0009)}
    (path, headers, first), (_, _, second), (_, unkeyed, _), _ = server.requests
    assert path == ("/v1/chat/completions" if kind == "openai" else "/v1/messages") and len(first["tools"]) == 7
    assert any("own-key" in value for value in headers.values())
    assert not any("of-another-server" in value for value in [*headers.values(), *unkeyed.values()])
    assert "own-key" not in (tmp_path / "llm.jsonl").read_text()
    if kind == "anthropic":
        assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
        assert [block["type"] for block in second["messages"][2]["content"]] == ["tool_result"] * 2
    played = LanguageModel(ReplayedModel(tmp_path / "llm.jsonl"), Path(os.devnull))
    assert played.propose(VIEW, 3) == [SLOWER] and played.used == {"read": 0, "written": 0}, "no model was asked"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (as_json({"error": {"message": "wrong key own-key"}}, 401), "answered with status 401$"),
        (as_json({}, 500), "answered with status 500$"),
        (as_json({}, 307), "answered with status 307$"),
        ((200, [b"hello"]), "the answer is not one of the openai API"),
        (as_json({"choices": []}), "the answer is not one of the openai API"),
        (as_json({"choices": [{"message": {"content": [1]}}]}), "the answer is not one"),
        (
            as_json({"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": -1}}),
            "the answer is not one",
        ),
        ((200, [b" " * (1 << 20)] * 1000), "the answer is longer than"),
    ],
)
def test_a_wrong_answer_of_an_endpoint(answer: Any, message: str) -> None:
    with LlmServer(lambda body: answer).serve() as server, pytest.raises(ProposerAway, match=message):
        LlmEndpoint(server.url, "m", "own-key").reply([{"role": "user", "content": "x"}], [])
    assert len(server.requests) == 1, "nothing is asked again"


def test_an_answer_that_takes_hours_is_none() -> None:
    """Of a server that accepts and is silent, of one whose answer drips."""
    for dripping in (False, True):
        server = LlmServer(lambda body: (200, []))

        def slow(body: Any, server: LlmServer = server, dripping: bool = dripping) -> Any:
            if not dripping:
                server.closing.wait()
            return 200, iter(lambda: b"" if server.closing.wait(0.02) else b" ", b"")

        server.answer = slow
        with server.serve(), pytest.raises(ProposerAway, match=r"the answer took longer than 0\.3 s"):
            LlmEndpoint(server.url, "m", seconds=0.3).reply([{"role": "user", "content": "x"}], [])


def test_an_endpoint_that_is_away() -> None:
    with pytest.raises(ProposerAway, match=r"http://127\.0\.0\.1:9/v1: All connection attempts failed"):
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
