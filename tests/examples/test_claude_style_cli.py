"""1. The tasks are broken as they stand. 2. The tools keep to their folder, and no file can make the tests pass. 3.
Against a real server: the model's tool uses are trained, with exact context and on one timeline; the example and
the results of the tools are not. 4. The program alone, with nothing but Anthropic's variables. 5. The program as
it is, trained by `agentjet run`, in a fresh folder each time. 6. The run shortened, on a tiny model.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import anthropic
import pytest
from typer.testing import CliRunner

from agentjet import Swarm
from agentjet.cli.main import app
from agentjet.client import Result
from examples.claude_style_cli import cli, train
from examples.claude_style_cli.cli import EXAMPLE, ToolError, Workspace, asked
from examples.claude_style_cli.repairs import TASKS, row
from examples.claude_style_cli.reward import PARTLY, score
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, Served, in_thread, serving
from tests.tiny import make_model, make_model_info, set_options

EXAMPLE_FOLDER = Path(cli.__file__).parent
ADD = TASKS[0]
FIXED = "def add(a, b):\n    return a + b\n"


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the connections of the example's client with the test, not with the process."""
    with anthropic.DefaultHttpxClient(trust_env=False) as http:
        monkeypatch.setattr(train, "ANTHROPIC", train.ANTHROPIC.copy(http_client=http))
        yield


def test_every_task_is_broken_as_it_stands(tmp_path: Path) -> None:
    assert len({task.id for task in TASKS}) == len(TASKS)
    for task in TASKS:
        workspace = Workspace(tmp_path, task.payload.tests)
        (tmp_path / f"{task.id}.py").write_text(task.payload.code)
        assert not workspace.passes(), task.id
    (tmp_path / "add.py").write_text(FIXED)
    assert Workspace(tmp_path, ADD.payload.tests).passes()


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit(0)\n",
        "import sys\nprint('the tests passed')\nsys.stdout.flush()\nraise SystemExit\n",
        "while True:\n    pass\n",
        "x = bytes(2**30)\n",
        "def add(a, b):\n    return a - b\n",
    ],
)
def test_tests_cannot_be_talked_into_passing(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "SECONDS", 1)
    (tmp_path / "add.py").write_text(code)
    with pytest.raises(ToolError):
        Workspace(tmp_path, ADD.payload.tests).run_tests()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/b", "", ".", "..", "x\0y", "x" * 101])
def test_tools_keep_to_their_folder(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    workspace = Workspace(folder, "")
    for name, arguments in (("read_file", {"path": path}), ("write_file", {"path": path, "content": "x"})):
        with pytest.raises((ToolError, OSError)):
            workspace.call(name, dict(arguments))
    assert list(tmp_path.rglob("*")) == [folder]


def test_tools_say_what_they_take(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, "")
    for name, arguments in (("write_file", {"path": "x"}), ("read_file", {"path": 3}), ("run_tests", {"x": "y"})):
        with pytest.raises(ToolError, match="takes these texts"):
            workspace.call(name, dict(arguments))
    with pytest.raises(ToolError, match="no tool 'rm'"):
        workspace.call("rm", {})


def call(name: str, **arguments: str) -> str:
    """A tool use as the tiny model's template has it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = [
    call("run_tests"),
    call("write_file", path="add.py", content=FIXED),
    call("run_tests"),
]


def has_learned(prompt: str) -> str:
    """A model that has learned it: its next call is the one after as many as it has made here."""
    return CALLS[prompt.count("</tool_response>", prompt.rindex("The function in add.py"))]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(cli, "MAX_TOKENS", 512)  # the tiny vocabulary spells everything out
    card = replace(make_model_info(tmp_path / "tokenizer", "qwen3", tool_format="hermes"), context_length=4096)
    job = {"batch_size": 1, "group_size": 2}
    with in_thread(serving(tmp_path / "data", saying(has_learned), card=card, job=job)) as (served, _):
        yield served


def test_what_the_model_said_is_trained_on_one_timeline(served: Served) -> None:
    with Swarm(served.url, TOKEN) as swarm:
        with swarm.episode(ADD.id) as episode:
            reward = train.agent(ADD, episode)
            episode.finish(reward)
        assert (reward.value, reward.metrics) == (1.0, {"solved": 1.0, "wrote": 1.0})
        calls = swarm.episode_tree(episode.id).calls
    assert len(calls) == len(CALLS)
    for expected, one, sampled in zip(CALLS, calls, served.run.compute.asked, strict=True):
        said = "".join(text for text, mask in zip(one.texts, one.mask, strict=True) if mask)
        assert said == expected + "<|im_end|>"
        assert sampled.params.grammar, "tool_choice binds the answer"
        assert one.orphan == one.fork == ""
    for before, one in pairwise(calls):
        assert one.parent == before.call_id and one.kept == before.kept + len(before.tokens)
    heard = "".join(text for text, mask in zip(calls[1].texts, calls[1].mask, strict=True) if not mask)
    assert "Error: the tests failed: AssertionError: add(2, 3) == 5" in heard and "half.py" not in heard


def test_no_tool_is_the_end_of_it(served: Served) -> None:
    served.run.compute.script = saying(lambda prompt: "I cannot do that.")
    with Swarm(served.url, TOKEN) as swarm, swarm.episode(ADD.id) as episode:
        assert train.agent(ADD, episode).value == 0.0
        assert len(swarm.episode_tree(episode.id).calls) == 1


def test_the_program_alone(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "add.py").write_text(ADD.payload.code)
    (folder / "tests.py").write_text(ADD.payload.tests)
    with Swarm(served.url, TOKEN) as swarm, swarm.episode(ADD.id) as episode:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", episode.anthropic_base_url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", episode.api_key)
        monkeypatch.setenv("ANTHROPIC_MODEL", episode.model)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        cli.main(str(folder), "The function in add.py is wrong. Repair it.")
    assert (folder / "add.py").read_text() == FIXED
    assert capsys.readouterr().out.splitlines() == [
        "run_tests: the tests failed: AssertionError: add(2, 3) == 5",
        "write_file: ok",
        "run_tests: ok",
        "the tests pass",
    ]


@pytest.mark.e2e
def test_the_program_as_it_is_is_trained(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of its README, for one task."""
    place = tmp_path / "example"
    shutil.copytree(EXAMPLE_FOLDER, place, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(place)
    program = re.sub("^MAX_TOKENS = .*", "MAX_TOKENS = 512", Path("cli.py").read_text(), flags=re.MULTILINE)
    Path("cli.py").write_text(program)
    Path("one.jsonl").write_text(json.dumps(row(ADD)))
    options = ["--url", served.url, "--token", TOKEN, "--task-file", "one.jsonl", "--reward", "reward.py:score"]
    command = [sys.executable, "with_files.py", sys.executable, "cli.py", "."]
    command += ["The function in {task.id}.py is wrong. Repair it."]
    arguments = ["run", *options, "--steps", "1", "--concurrency", "2", "--json", "--", *command]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert (report["steps"], report["aborted"], report["mean_reward"]) == (1, 0, 1.0), report
    trained = [e for e in recent_episodes(served.run.gateway.swarm, 100) if e.trained_in == 0]
    assert [(e.num_calls, e.metrics) for e in trained] == [(len(CALLS), {"solved": 1.0, "wrote": 1.0})] * 2
    assert not Path("add.py").exists()


def test_what_it_prints_is_worth_what_its_agent_gets() -> None:
    def printed(*lines: str) -> float:
        return score(row(ADD), Result("\n".join(lines), "", 0, 1.0, Path())).value

    assert printed("run_tests: ok", "the tests pass") == 1.0
    assert printed("read_file: ok", "write_file: ok", "write_file: ok", "the tests fail") == PARTLY
    assert printed("read_file: ok", "write_file: there is no file 'x'", "the tests fail") == 0.0
    assert printed("run_tests: the tests failed: write_file: ok", "the tests fail") == 0.0
    assert printed("the tests fail") == 0.0


def test_its_task_file_holds_its_tasks() -> None:
    lines = (EXAMPLE_FOLDER / "tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row(task) for task in TASKS]


def test_the_example_uses_the_tools_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def half(x):\n    return x * 2\n")
    (tmp_path / "least.py").write_text("def least(items):\n    return max(items)\n")
    tests = ["from half import half", "assert half(4) == 2", "from least import least", "assert least([2, 1]) == 1"]
    files = Workspace(tmp_path, "").files()
    for start, name in ((0, "half.py"), (6, "least.py")):
        opening, *uses = EXAMPLE[start : start + 5]
        assert opening == asked(f"The function in {name} is wrong. Repair it.", {name: files[name]})
        workspace = Workspace(tmp_path, "\n".join(tests[: 2 + start]))
        for used, result in zip(uses[::2], uses[1::2], strict=True):
            [block], [answer] = list(used["content"]), list(result["content"])  # type: ignore[var-annotated]
            assert workspace.call(block["name"], block["input"]) == answer["content"]


@pytest.mark.parametrize(
    "path, content, said",
    [
        ("sub.py", FIXED, "no file 'sub.py'"),
        ("add.py", "def add(a, b:\n", "no Python"),
        ("add.py", ADD.payload.code, "holds that already"),
    ],
)
def test_a_file_is_only_rewritten(tmp_path: Path, path: str, content: str, said: str) -> None:
    (tmp_path / "add.py").write_text(ADD.payload.code)
    with pytest.raises(ToolError, match=said):
        Workspace(tmp_path, "").call("write_file", {"path": path, "content": content})
    assert (tmp_path / "add.py").read_text() == ADD.payload.code


def test_the_tests_are_not_shown(tmp_path: Path) -> None:
    for name, text in row(ADD)["files"].items():
        (tmp_path / name).write_text(text)
    assert Workspace(tmp_path, "").files() == {"add.py": ADD.payload.code}


@pytest.mark.thorough
@pytest.mark.e2e
def test_the_run_shortened(tmp_path: Path) -> None:
    sets = set_options(make_model(tmp_path / "model", template="qwen3"), max_steps=1, batch_size=1, group_size=2)
    result = train.main(["--out", str(tmp_path / "out"), "--repeats", "1", *sets])
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert (result["batches"], result["aborted"]) == (1, 0)
    assert 0 <= result["before"] <= 1 and 0 <= result["rewards"][0] <= 1
