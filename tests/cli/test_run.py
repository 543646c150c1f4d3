"""`agentjet run`: programs as agents over a real server, where their rewards and tasks come from, and edits of a
program while it is trained. The file of `--reward file:NAME` is written by the program, so it may be anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.cli.run import (
    MAX_REWARD_BYTES,
    CommandLine,
    CommandSource,
    NoReward,
    check_source,
    from_file,
    reward_source,
)
from agentjet.client import AgentVersion, Command, CommandFailed, Result
from agentjet.client.agent_source import CodeFolder
from agentjet.client.inputs import read_tasks
from agentjet.errors import AgentJetError, ConfigError, InvalidRequest
from agentjet.types import Reward, Task
from tests.client.test_command import ASKS, episode
from tests.fakes import recent_episodes, saying
from tests.server.serving import TOKEN, Served, serving

pytestmark = pytest.mark.anyio

AGENT = ASKS.replace("QUESTION", "'What is %s + %s?' % (sys.argv[1], sys.argv[2])")
REWARD = """
def score(task, result):
    return float(result.stdout.strip() == f"{task['a']} + {task['b']} = {task['a'] + task['b']}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent, a reward and tasks, which commands are run in."""
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": f"t{number}", "a": number, "b": 200} for number in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    return folder


def run(served: Served, *arguments: str, command: tuple[str, ...] = ()) -> Any:
    """The document that `agentjet run` prints."""
    options = ["--url", served.url, "--token", TOKEN, "--task-file", "tasks.jsonl", "--json", *arguments]
    words = command or (sys.executable, "agent.py", "{task.a}", "{task.b}")
    result = CliRunner().invoke(app, ["run", *options, "--", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_program_is_trained_and_evaluated(served: Served, folder: Path) -> None:
    trained = run(served, "--reward", "reward.py:score", "--steps", "2", "--concurrency", "3")
    assert (trained["steps"], trained["rewards"], trained["aborted"]) == (2, [1.0, 1.0], 0)
    [version] = trained["code_versions"]
    episodes = recent_episodes(served.run.gateway.swarm, 100)
    assert {episode.code_version for episode in episodes} == {version}
    assert all(episode.num_calls == 1 for episode in episodes if episode.trained_in is not None)
    evaluated = run(served, "--reward", "reward.py:score", "--eval", "--repeats", "2")
    assert (evaluated["finished"], evaluated["mean_reward"]) == (12, 1.0)
    assert list(evaluated["code_versions"]) == [version]
    (folder / "agent.py").write_text(AGENT + "# edited\n")
    assert list(run(served, "--reward", "reward.py:score", "--eval")["code_versions"]) != [version]
    failing = run(served, "--reward", "exit-code", "--eval", command=("false",))
    assert (failing["finished"], failing["mean_reward"]) == (6, 0.0)
    named = run(served, "--reward", "reward.py:score", "--eval", "--code-version", "v7")
    assert list(named["code_versions"]) == ["v7"]


REFUSED_AGENT = """
import contextlib
with contextlib.suppress(Exception):
    exec(open(%r).read().replace('"messages"', '"no_such_key": 1, "messages"'))
print(0)
"""


def test_an_episode_with_a_refused_request_is_not_scored(served: Served, folder: Path) -> None:
    """The program hides the refusal, ends with 0 and prints a reward, as agent products do."""
    (folder / "hiding.py").write_text(REFUSED_AGENT % str(folder / "agent.py"))
    words = (sys.executable, "hiding.py", "1", "2")
    options = ["--url", served.url, "--token", TOKEN, "--task-file", "tasks.jsonl", "--concurrency", "1"]
    said = CliRunner().invoke(app, ["run", *options, "--reward", "stdout", "--eval", "--", *words])
    assert said.exit_code != 0 and "the server refused requests of the program: unknown_parameter: no_such_key" in (
        " ".join(said.output.split())
    )
    scored = run(served, "--reward", "stdout", "--eval", "--score-refused", command=words)
    assert (scored["finished"], scored["mean_reward"]) == (6, 0.0)


ECHO = ("echo", "{task.c}")


@pytest.mark.parametrize(
    ("error", "options", "command"),
    [
        (r"\{task.c\}: the task has no 'c'; its keys are: a, b, id", ["--reward", "stdout"], ECHO),
        ("the command 'no-such-program' is missing", ["--reward", "stdout"], ("no-such-program",)),
        ("expected FILE.py:FUNCTION, stdout, exit-code or file:NAME", ["--reward", "magic"], ()),
        (r"there is no function 'sore' in reward.py; did you mean 'score'", ["--reward", "reward.py:sore"], ()),
        (r"missing.py: No such file", ["--reward", "missing.py:score"], ()),
        (r"broken.py: SyntaxError: .*line 1", ["--reward", "broken.py:score"], ()),
        ("must lie in the command's working directory", ["--reward", "file:/etc/passwd"], ()),
        ("must lie in the command's working directory", ["--reward", "file:../reward"], ()),
        ("--source nowhere: no such file", ["--reward", "stdout", "--source", "nowhere"], ()),
        ("--watch: the command line names no file or folder of yours", ["--reward", "stdout", "--watch"], ("true",)),
        (r"--memory 2 is a limit of the sandbox: give --sandbox", ["--reward", "stdout", "--memory", "2"], ()),
        ("--watch and --eval exclude", ["--reward", "stdout", "--watch", "--eval"], ()),
        ("--repeats is for --eval", ["--reward", "stdout", "--repeats", "3"], ()),
        ("--steps and --eval exclude each other", ["--reward", "stdout", "--eval", "--steps", "3"], ()),
    ],
)
def test_what_would_fail_in_every_episode_is_said_before_the_first(
    error: str, options: list[str], command: tuple[str, ...], folder: Path
) -> None:
    """Nothing is sent: no server has this address."""
    (folder / "broken.py").write_text("def score(task result): ...")
    words = ["run", "--url", "http://127.0.0.1:9", "--token", TOKEN, "--task-file", "tasks.jsonl", *options, "--"]
    with pytest.raises(ConfigError, match=error):
        CliRunner().invoke(app, [*words, *(command or (sys.executable, "agent.py"))], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"name": "Zoë"}'.encode("latin-1"), "line 1, byte 13: the line is not UTF-8"),
        ('{"id": "a"}\n{"id": "b" "c"}\n', r"tasks.jsonl line 2, column 12: Expecting ',' delimiter"),
        ('{"id": "a"}\n\n["b"]\n', r"line 3: a task is a JSON object .*, not \[\"b\"\]"),
        ('{"id": "a"}\n{"id": "a"}\n', r"line 2: the id 'a' is also that of line 1"),
        ('{"id": ""}', "line 1: the task id '' must be text"),
        ('{"id": true}', "line 1: the task id 'True' must be text"),
        ('{"task_set": 3}', "line 1: the task set '3' must be text"),
        ("\n \n", "the file has no tasks"),
        (json.dumps({"text": "x" * 200_000}), "line 1: the row has 200012 bytes"),
        ('{"id": "a"}\n{"board": ' + "[" * 40_000 + "]" * 40_000 + "}", "line 2: maximum recursion depth"),
        ('{"seed": ' + "7" * 5_000 + "}", r"line 1: .*4300 digits"),
    ],
)
def test_bad_tasks_are_named_by_line(tmp_path: Path, text: str | bytes, error: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=error):
        read_tasks(file)


def test_ids_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    with pytest.raises(ConfigError, match=r"tasks.jsonl: No such file"):
        read_tasks(file)
    file.write_text('\ufeff{"q": "ü\\u2028"}\r\n\n{"id": 7, "task_set": "s"}')
    first, second = read_tasks(file)
    assert (first.id, first.task_set, first.payload) == ("line-1", "", {"q": "ü\u2028"})
    assert (second.id, second.task_set) == ("7", "s")


def judge(source: str, folder: Path, stdout: str = "", code: int = 0) -> Any:
    return reward_source(source)[0]({}, Result(stdout, "", code, 1.0, folder))


@pytest.mark.parametrize(
    ("stdout", "reward"),
    [
        ("thinking\n0.5\n\n", Reward(0.5)),
        (
            '{"reward": -1, "by_role": {"critic": 2}, "metrics": {"turns": 3}}',
            Reward(-1.0, {"critic": 2}, {"turns": 3}),
        ),
        (
            '{"reward": 1, "by_turn": [0, 0.5], "by_call": {"chatcmpl-1": 2}}',
            Reward(1.0, by_turn=[0, 0.5], by_call={"chatcmpl-1": 2}),
        ),
        ('{"reward": 0, "text": "expected 30"}', Reward(0.0, text="expected 30")),
        (
            '{"planner": 1, "coder": {"reward": 0.5, "metrics": {"turns": 3}}}',
            {"planner": Reward(1.0), "coder": Reward(0.5, metrics={"turns": 3})},
        ),
    ],
)
def test_rewards_from_standard_output(stdout: str, reward: object, tmp_path: Path) -> None:
    assert judge("stdout", tmp_path, stdout) == reward


def test_rewards_from_files_and_exit_codes(tmp_path: Path) -> None:
    with pytest.raises(NoReward, match=r"the file reward\.json of the reward: No such file"):
        judge("file:reward.json", tmp_path)
    (tmp_path / "reward.json").write_text('{\n "reward": 1\n}\n')
    assert judge("file:reward.json", tmp_path) == Reward(1.0)
    with pytest.raises(InvalidRequest, match="reward is inf: it must be a finite number"):
        judge("stdout", tmp_path, "7" * 5_000)
    assert [judge("exit-code", tmp_path, code=code) for code in (0, 1)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("stdout", "error"),
    [
        ("", "stdout is empty"),
        ("done\n", "the last line of stdout is 'done': expected a number"),
        ("true", "expected a number"),
        ("[" * 40_000, "expected a number"),
        ('{"reward": "1"}', "expected a number"),
        ('{"planner": 1, "coder": "good"}', "expected a number"),
        ("{}", "expected a number"),
        ('{"reward": 1, "rewards": {}}', r"rewards: Extra inputs are not permitted"),
        ('{"reward": 1, "metrics": {"turns": "many"}}', r"metrics\.turns: Input should be a valid number"),
        ('{"reward": 1, "text": 30}', r"text: Input should be a valid string"),
    ],
)
def test_a_reward_that_cannot_be_read_is_not_zero(tmp_path: Path, stdout: str, error: str) -> None:
    with pytest.raises(NoReward, match=error):
        judge("stdout", tmp_path, stdout)


def test_paths_of_a_command_hold_in_another_folder(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "interpreter").symlink_to(sys.executable)
    words = (
        "./interpreter",
        "agent.py",
        "--with=data/../reward.py",
        "data",
        "./data",
        "word",
        "-m",
        "{here}/x",
        "{task}",
    )
    source = CommandLine(words, folder, check_source([Path("data")], folder))
    here = str(folder)
    assert source.moved({}) == [
        *(f"{here}/interpreter", f"{here}/agent.py", f"--with={here}/reward.py"),
        *("data", f"{here}/data", "word", "-m", f"{here}/x", "{task}"),
    ]
    (folder / "data" / "words.txt").write_text("a")
    (folder / "data" / ".hidden").write_text("a")
    assert source.files() == [folder / "agent.py", folder / "reward.py", folder / "data" / "words.txt"]
    version = source.version("")
    (folder / "data" / "words.txt").write_text("b")
    assert source.version("") != version != source.version("another reward")
    version = source.version("")
    assert replace(source, arguments=("python", *words[1:])).version("") != version, "another program"
    assert replace(source, arguments=(f"{here}/interpreter", *words[1:])).version("") == version
    assert replace(source, arguments=(*words, "--terse")).version("") != version


def command_source(arguments: tuple[str, ...], folder: Path, copies: Path, more: tuple[str, ...] = ()) -> CommandSource:
    line = CommandLine(arguments, folder, check_source([Path(name) for name in more], folder))
    return CommandSource(line, Command(line.moved({}), lambda task, result: 0.0), None, copies)


def output_of(version: AgentVersion) -> str:
    command = version.agent
    assert isinstance(command, Command)
    variables = {**os.environ, **command.variables}
    done = subprocess.run(command.arguments, capture_output=True, text=True, cwd="/", env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PROGRAM = """
import sys
from pathlib import Path
import helper, lib.words
print(helper.WORD, lib.words.WORD, Path(__file__).with_name("prompt.txt").read_text(), Path(sys.argv[1]).read_text())
"""
PARTS = ("agent.py", "helper.py", "lib/words.py", "prompt.txt", "../outside/settings")
PYTHON = sys.executable
WATCHED_COMMANDS = {
    "a script": (PYTHON, "agent.py", "../outside/settings"),
    "an absolute script": (PYTHON, "{folder}/agent.py", "{folder}/../outside/settings"),
    "a module": ("env", "PYTHONPATH={folder}", PYTHON, "-m", "agent", "../outside/settings"),
    "a module of several places": ("env", "PYTHONPATH=/nowhere:{folder}", PYTHON, "-m", "agent", "../outside/settings"),
    "a shell": ("sh", "-c", "exec " + PYTHON + " {here}/agent.py {here}/../outside/settings"),
}


@pytest.mark.parametrize("kind", WATCHED_COMMANDS)
@pytest.mark.parametrize("is_here", [True, False], ids=["inside", "elsewhere"])
def test_a_version_is_one_state_of_everything_that_the_program_uses(
    kind: str, is_here: bool, folder: Path, tmp_path: Path
) -> None:
    """Each part is edited alone, in place, and through a new file. The version from before still runs as it did."""
    if not is_here and "{folder}" not in " ".join(WATCHED_COMMANDS[kind]):
        return
    (folder / "lib").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in PARTS:
        (folder / name).write_text("WORD = 0" if name.endswith(".py") else "0")
    (folder / "agent.py").write_text(PROGRAM)
    words = tuple(word.replace("{folder}", str(folder)) for word in WATCHED_COMMANDS[kind])
    here = folder if is_here else tmp_path / "elsewhere"
    code = command_source(words, here, tmp_path / "copies")
    versions = [code.load()]
    assert output_of(versions[0]) == "0 0 0 0"
    is_shell = kind == "a shell"
    for number, name in enumerate(PARTS[1:4] if is_shell else PARTS[1:], 1):
        stamp = code.stamp()
        path, new = folder / name, folder / "new.txt"
        new.write_text(path.read_text().replace("0", str(number)))
        if number % 2:
            os.replace(new, path)
        else:
            path.write_text(new.read_text())
            new.unlink()
        assert code.stamp() != stamp, f"an edit of {name} is seen"
        versions.append(code.load())
        assert versions[-1].stamp == code.stamp()
    assert len({version.code_version for version in versions}) == len(versions)
    assert output_of(versions[0]).startswith("0 0 0") and output_of(versions[-1]).startswith("1 2 3")
    if not is_shell:
        assert (output_of(versions[0]), output_of(versions[-1])) == ("0 0 0 0", "1 2 3 4")


def test_an_error_of_a_copied_program_names_the_original(folder: Path, tmp_path: Path) -> None:
    (folder / "helper.py").write_text("def look(word):\n    return {}[word]\n")
    (folder / "agent.py").write_text("import helper\nhelper.look('gone')\n")
    agent = command_source((PYTHON, "agent.py"), folder, tmp_path / "copies").load().agent
    with pytest.raises(CommandFailed, match=re.escape(f'File "{folder}/helper.py", line 2, in look')) as failed:
        asyncio.run(agent(Task("t", payload={}), episode()))
    assert str(tmp_path / "copies") not in str(failed.value)


def test_what_is_no_code_is_found_in_the_copy_and_named(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.safetensors").write_bytes(b"w")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "left-pad.js").write_text("pad")
    (folder / "pages").mkdir()
    for number in range(1001):
        (folder / "pages" / str(number)).touch()
    (folder / "agent.py").write_text(
        "from pathlib import Path\nhere = Path(__file__).parent\n(here / 'notes.txt').write_text('mine')\n"
        "print((here / 'node_modules/left-pad.js').read_text(), (here / 'weights.safetensors').read_text())\n"
        "print((here / 'pages' / '7').exists(), (here / '../beside.txt').read_text())\n"
    )
    (tmp_path / "beside.txt").write_text("beside")
    code = command_source((PYTHON, "agent.py"), folder, tmp_path / "copies")
    assert "watched: 3 files of" in code.described() and "agent.py, reward.py, tasks.jsonl" in code.described()
    unwatched = "node_modules, pages (more than 1000 entries), weights.safetensors"
    assert f"not watched and not copied: {unwatched}" in code.described()
    stamp = code.stamp()
    assert output_of(code.load()) == "pad w\nTrue beside"
    assert not (folder / "notes.txt").exists() and code.stamp() == stamp, "a program writes beside its copy"


def test_a_folder_that_is_too_large_for_copies_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "pages").mkdir()
    for number in range(9):
        (folder / "pages" / f"{number}.txt").write_bytes(b" " * (4 * 2**20))
    with pytest.raises(ConfigError, match=r"more than 4000 files or 32 MB.*pages \(3\d\.\d MB\).*with a dot"):
        command_source((PYTHON, "agent.py"), folder, tmp_path / "copies").load()


def test_files_that_change_while_they_are_copied(folder: Path, tmp_path: Path) -> None:
    """An edit of two files, between whose writes the copy begins, is taken as a whole. One that never rests is left."""
    pairs = [("one", "two"), ("three", "four")]
    (folder / "a.txt").write_text("zero")
    (folder / "b.txt").write_text("zero")

    edits = count(1)

    def edit(seconds: float) -> None:
        if pairs:
            first, second = pairs.pop(0)
            (folder / "a.txt").write_text(first)
            (folder / "b.txt").write_text(second)
        (folder / "restless.txt").write_text("x" * next(edits))  # Its size differs also within one tick of the clock.

    def now() -> int:
        """Each watched file was edited just now, until only the restless one is edited."""
        newest = max(path.stat().st_ctime_ns for path in folder.iterdir())
        return newest + (10**9 if folder / "restless.txt" in code.unwatched else 0)

    code = CodeFolder(folder, sleep=edit, now=now)
    copy, listing = code.copy(tmp_path / "copy")
    assert ((copy / "a.txt").read_text(), (copy / "b.txt").read_text()) == ("three", "four")
    assert listing.linked == {folder / "restless.txt": "changed 20 times during one load"}
    assert listing.stamp == code.listing().stamp


async def test_an_edited_program_is_taken_up_and_a_broken_one_rolled_back(tmp_path: Path, folder: Path) -> None:
    """Real time, real files: the program edits itself in its first episode, then somebody breaks it."""
    agent = folder / "agent.py"

    def text(reward: str, edit: str = "") -> str:
        return f"{edit}\n{AGENT}\nprint({reward})\n"

    broken = text("crash")
    fixed = text("0.75")
    edit = f"open({str(agent)!r}, 'w').write({fixed!r})"
    agent.write_text(text("0.25", edit))
    reply = saying(lambda prompt: "hi")
    job = {"batch_size": 1, "group_size": 2}
    async with serving(tmp_path / "data", reply, job=job) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentjet.cli", "run", "--url", served.url, "--token", TOKEN),
            *("--task-file", "tasks.jsonl", "--reward", "stdout", "--steps", "8", "--concurrency", "2"),
            *("--watch", "--json", "--", sys.executable, "agent.py", "{task.a}", "{task.b}"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
        rewards: list[float] = []
        async with asyncio.timeout(120):
            while process.returncode is None and 0.75 not in rewards:
                rewards = [e.reward for e in recent_episodes(served.run.gateway.swarm, 100) if e.reward is not None]
                await asyncio.sleep(0.01)
            agent.write_text(broken)
            out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        counts = served.run.gateway.swarm.queries.journal.outcomes()
        assert counts["live"] == 0
        assert counts["trained"] == 16
    document: dict[str, Any] = json.loads(out)
    document = document
    assert [change["kind"] for change in document["code_changes"]] == ["loaded", "loaded", "rolled back"]
    assert "NameError: name 'crash' is not defined" in document["code_changes"][2]["why"]
    first, second, third = document["code_versions"].values()
    assert (first["mean_reward"], second["mean_reward"], third["mean_reward"]) == (0.25, 0.75, None)
    assert third["num_failed"] >= 4 and document["rewards"][-1] == 0.75
    assert set(document["rewards"]) == {0.25, 0.75}, "no batch mixes the two"


async def test_a_run_that_is_ended_ends_its_programs(tmp_path: Path, folder: Path) -> None:
    pids = folder / "pids"
    pids.mkdir()
    (folder / "agent.py").write_text(
        f"import os, time; open({str(pids)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(3600)"
    )
    async with serving(tmp_path / "data") as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentjet.cli", "run", "--url", served.url, "--token", TOKEN),
            *("--task-file", "tasks.jsonl", "--reward", "stdout", "--concurrency", "2"),
            *("--", sys.executable, "agent.py"),
            cwd=folder,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
            start_new_session=True,
        )
        async with asyncio.timeout(60):
            while len(list(pids.iterdir())) < 2:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            await process.communicate()
        counts = served.run.gateway.swarm.queries.journal.outcomes()
        assert (counts["live"], counts["aborted"]) == (0, 2)
    for pid in pids.iterdir():
        assert not Path(f"/proc/{pid.name}").exists()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("echo none", "expected a number.*: fix the agent or its reward"),
        ("echo 1", "made a call of the policy.*a program: OPENAI_BASE_URL and OPENAI_API_KEY"),
    ],
)
def test_the_error_of_a_failing_program_has_the_way_out(
    served: Served, folder: Path, program: str, sentence: str
) -> None:
    asked = ["run", "--task-file", "tasks.jsonl", "--reward", "stdout", "--concurrency", "2", "--url", served.url]
    with pytest.raises(AgentJetError, match=sentence) as failed:
        CliRunner().invoke(app, [*asked, "--token", TOKEN, "--", *program.split()], catch_exceptions=False)
    assert "program.py" not in str(failed.value) and "swarm." not in str(failed.value)


# ---- files of rewards ------------------------------------------------------------------------------------------------


SECRET = "a-secret-of-the-user"


def _link_above(file: Path, secret: Path) -> None:
    file.parent.rmdir()
    file.parent.symlink_to(secret.parent)


LEFT: dict[str, Callable[[Path, Path], object]] = {
    "fifo": lambda file, secret: os.mkfifo(file),
    "endless": lambda file, secret: file.symlink_to("/dev/zero"),
    "link": lambda file, secret: file.symlink_to(secret),
    "hard link": lambda file, secret: file.hardlink_to(secret),
    "link above": _link_above,
    "folder": lambda file, secret: file.mkdir(),
    "long": lambda file, secret: file.write_bytes(b"1" * (MAX_REWARD_BYTES + 1)),
    "nothing": lambda file, secret: None,
}


@pytest.mark.parametrize("left", LEFT)
def test_only_a_small_file_of_the_program_is_read(tmp_path: Path, left: str) -> None:
    secret, file = tmp_path / "home" / "reward", tmp_path / "work" / "out" / "reward"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    file.parent.mkdir(parents=True)
    LEFT[left](file, secret)
    with pytest.raises(NoReward, match="the file out/reward of the reward") as raised:
        from_file(tmp_path / "work", "out/reward")
    assert SECRET not in str(raised.value)


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "reward").write_text("0.5")
    assert from_file(tmp_path, "out/reward") == Reward(0.5)
