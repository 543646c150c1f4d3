"""Harbor's task folders, with real sandboxes.

1. Tasks, splits and layouts come from the folders, the same each time. Wrong folders are an error that names the key.
2. The agent's commands and the verifier run in separate sandboxes; an agent cannot change its reward.
3. Limits hold: a slow agent is verified, a slow verifier fails. A verifier without a valid reward fails.
4. An episode through the pool against the real application, and one with a program as the agent.
5. Tasks that need an image run with docker, here a program that notes its calls.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from agentjet import environments
from agentjet.client import AgentFailing, AsyncSwarm, Retry
from agentjet.environments import EnvironmentFailed, EnvironmentTask
from agentjet.environments.kinds import harbor_machines
from agentjet.environments.kinds.harbor import Harbor, rewards_in
from agentjet.environments.kinds.harbor_folder import read
from agentjet.environments.kinds.harbor_machines import leads_into
from agentjet.environments.model import ContextFull, ModelAnswer
from agentjet.errors import ConfigError
from agentjet.sandbox import Sandbox
from agentjet.types import Reward
from tests.fakes import saying
from tests.needs import need
from tests.server.serving import ADMIN, serving

TOML = """
schema_version = "1.4"
[agent]
timeout_sec = 20
[verifier]
timeout_sec = 20
[environment]
memory_mb = 256
storage_mb = 16
"""
DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\nCOPY answer .\n"
VERIFIER = """#!/bin/bash
if [ "$(cat answer)" = good ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
cat answer
"""


def make(folder: Path, toml: str = TOML, test: str = VERIFIER, dockerfile: str = DOCKERFILE, **files: str) -> Path:
    """Writes a task: the word in `answer` must become "good". `files` have "__" for a slash."""
    contents = {
        "task.toml": toml,
        "instruction.md": "Write good into answer.",
        "environment/Dockerfile": dockerfile,
        "environment/answer": "bad\n",
        "tests/test.sh": test,
        "tests/expected": "good\n",
    }
    contents |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Commands:
    """A model that answers with these commands, and keeps the conversation."""

    base_url, url_with_key, max_turns = "http://127.0.0.1:9/v1", "", 0

    def __init__(self, *commands: str) -> None:
        self._commands = list(commands)
        self.conversation: Sequence[dict[str, Any]] = ()
        self.menu: Sequence[str] = ()
        self.schema: Any = None

    def act(self, messages: Sequence[dict[str, Any]], actions: Sequence[str] = (), schema: Any = None) -> ModelAnswer:
        self.conversation, self.menu, self.schema = messages, actions, schema
        if schema is not None:
            return ModelAnswer({"role": "assistant", "content": "[]"}, [self._commands.pop(0) for _ in range(2)])
        command = self._commands.pop(0) if self._commands else "exit"
        if command == "FULL":
            raise ContextFull("the context is full")
        return ModelAnswer({"role": "assistant", "content": command}, command)

    def outputs(self) -> list[str]:
        return [message["content"] for message in self.conversation if message["role"] == "user"][1:]


@pytest.fixture
def bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("bubblewrap")
    (tmp_path / "process").mkdir()
    monkeypatch.chdir(tmp_path / "process")


def play(folder: Path, model: Any, **settings: Any) -> Reward:
    return Harbor(target=str(folder), **settings).play(EnvironmentTask(folder.name, {"folder": str(folder)}), model)


# ---- 1. folders ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bubblewrap")
def test_tasks_and_their_splits_are_the_same_in_every_process(tmp_path: Path) -> None:
    for split, names in {"train": "ab", "held_out": "c"}.items():
        for name in names:
            make(tmp_path / "tasks" / split / name)
    for _ in range(2):
        with environments.load(f"harbor:{tmp_path / 'tasks'}") as environment:
            assert [[task.id for task in tasks] for tasks in (environment.tasks, environment.held_out)] == [
                ["a", "b"],
                ["c"],
            ]
    [one] = Harbor(target=str(tmp_path / "tasks" / "train" / "a")).tasks()
    assert (one.id, one.split) == ("a", "")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("task.toml", None, "one has no task.toml: a task of Harbor needs one"),
        ("task.toml", "[agent", r"task.toml is not TOML: Expected ']'"),
        ("task.toml", 'version = "9.0"', r"schema_version = '9.0': expected one of the versions 1.0, 1.1"),
        ("task.toml", "[agent]\ntimeout_sec = 0", "agent.timeout_sec = 0: Input should be greater than 0"),
        ("task.toml", "[verifier]\ntimeout_sec = inf", "verifier.timeout_sec = inf: Input should be a finite number"),
        ("task.toml", '[environment]\nmemory = "lots"', "environment.memory = 'lots': give a size such as 512M or 2G"),
        ("task.toml", "[verifier]\ntimeout_sec = 9000", "allows 9000 s, more than seconds = 7200: set seconds"),
        ("task.toml", "[environment]\nmemory_mb = 9000", "needs 9000 MiB, more than memory = 4096: set memory"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus is not supported here: Harbor's own backends"),
        ("task.toml", '[[steps]]\nname = "a"', "steps is not supported here"),
        ("task.toml", '[verifier.env]\nKEY = "${KEY}"', "verifier.env, which reads variables of this machine"),
        ("task.toml", '[environment.env]\n"A=B" = "1"', "environment.env = .*'A=B' is not a name of a variable"),
        ("task.toml", "[metadata.agentjet]\ncommands = [1]", "metadata.agentjet.commands.0 = 1: Input should be a"),
        ("instruction.md", None, "one has no instruction.md"),
        ("instruction.md", "<!-- canary 1 -->\n\n", "instruction.md is empty"),
        ("tests/test.sh", None, "has no tests/test.sh: add the script that writes the reward"),
        ("environment/Dockerfile", None, "has neither environment/Dockerfile nor environment.docker_image"),
    ],
)
def test_a_wrong_folder(tmp_path: Path, name: str, content: str | None, reason: str) -> None:
    folder = make(tmp_path / "one")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        list(Harbor(target=str(folder)).tasks())


@pytest.mark.parametrize(
    ("target", "reason"),
    [("", "give harbor:FOLDER"), ("nothing", "nothing is not a folder"), (".", "has no task folders")],
)
def test_a_wrong_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, reason: str) -> None:
    monkeypatch.setenv("AGENTJET_CALLER", str(tmp_path))
    with pytest.raises(ConfigError, match=reason):
        list(Harbor(target=target).tasks())


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"dockerfile": "FROM ubuntu:24.04\nRUN apt-get install -y \\\n  git\n"}, "line 2: RUN apt-get install -y"),
        ({"dockerfile": "FROM nvidia/cuda:12\nWORKDIR /app\n"}, "line 1: FROM nvidia/cuda:12"),
        ({"dockerfile": "FROM python:3.1-slim\nWORKDIR /app\n"}, "FROM python:3.1-slim, and this machine's Python is"),
        ({"dockerfile": "FROM debian\nFROM debian\n"}, "line 2: a second FROM"),
        ({"dockerfile": "FROM debian\nCOPY --from=a /x /app/\n"}, "line 2: COPY --from=a /x /app/"),
        ({"dockerfile": "FROM debian\nADD https://example.org/x /app/\n"}, "ADD https://example.org/x /app/"),
        ({"dockerfile": "FROM debian\nCOPY nothing /app/\n"}, "environment/ has no nothing"),
        ({"dockerfile": "FROM debian\nCOPY ../task.toml /app/\n"}, "environment/ has no ../task.toml"),
        ({"dockerfile": "FROM debian\nCOPY [1, 2]\n"}, "line 2: COPY [1, 2]"),
        ({"dockerfile": "FROM debian\nCOPY **x /app/\n"}, "line 2: COPY **x /app/"),
        ({"dockerfile": 'FROM debian\nENV A="x\n'}, 'line 2: ENV A="x'),
        ({"dockerfile": "FROM debian\nENV =1\n"}, "line 2: ENV =1"),
        ({"dockerfile": "FROM debian\nUSER agent\n"}, "USER agent"),
        ({"dockerfile": "FROM debian\n"}, "the task works in /: no WORKDIR is set"),
        ({"dockerfile": "FROM debian\nWORKDIR /app\nCOPY answer /usr/bin/\n"}, "the task has files in /usr"),
        ({"environment__docker-compose.yaml": "services: {}"}, "environment/ has a compose file"),
        ({"toml": '[environment]\nnetwork_mode = "public"'}, "task.toml asks for a network"),
        ({"test": "#!/bin/bash\ncurl -LsSf https://example.org/install.sh | sh\n"}, "line 2 needs a network: curl"),
    ],
)
def test_a_task_that_needs_an_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr(harbor_machines, "container_program", lambda: "")
    folder = make(tmp_path / "one", **files)
    with pytest.raises(ConfigError) as caught:
        list(Harbor(target=str(folder)).tasks())
    assert "the task needs an image, which docker or podman have: one (" in str(caught.value)
    assert reason in str(caught.value)


def test_the_layout_of_a_dockerfile(tmp_path: Path) -> None:
    dockerfile = """# a comment
FROM --platform=x debian
"""
    assert read(make(tmp_path / "platform", dockerfile=dockerfile)).needs_container
    dockerfile = """FROM docker.io/library/ubuntu:24.04 AS base
LABEL a=b
ENV HOME_OF=/data NAME="two words"
WORKDIR /app
WORKDIR sub
COPY answer ${HOME_OF}/renamed
COPY ["answer", "more/", "./"]
COPY . /all
CMD ["bash"]
"""
    files = {"environment__more__inner": "1"}
    task = read(make(tmp_path / "one", dockerfile=dockerfile, **files))
    assert (task.needs_container, task.layout.workdir, task.layout.tops()) == ("", "/app/sub", ["app", "data", "all"])
    assert task.variables == {"HOME_OF": "/data", "NAME": "two words"}
    task.layout.write(tmp_path / "root")
    written = {str(path.relative_to(tmp_path / "root")) for path in (tmp_path / "root").rglob("*") if path.is_file()}
    copied = {"all/Dockerfile", "all/answer", "all/more/inner"}
    assert written == {"data/renamed", "app/sub/answer", "app/sub/inner"} | copied


def test_a_copy_through_a_link_stays_in_the_task(tmp_path: Path) -> None:
    folder = make(tmp_path / "one", dockerfile="FROM debian\nWORKDIR /app\nCOPY links /app/\nCOPY answer /app/out/\n")
    (folder / "environment" / "links").mkdir()
    (folder / "environment" / "links" / "out").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="through a link that leads out of the task"):
        read(folder).layout.write(tmp_path / "root")
    assert not (tmp_path / "answer").exists()


@pytest.mark.parametrize(
    ("target", "is_kept"),
    [
        ("other", True),
        ("/app/x", True),
        ("../app/x", True),
        ("/usr/bin/python3", True),
        ("/tests/expected", False),
        ("../../tests/expected", False),
        ("sub/../../tests/expected", False),
        ("/app/../tests/expected", False),
        ("/proc/self/root/tests/expected", False),
        ("/logs/verifier/reward.txt", False),
        ("/", False),
        ("..", False),
    ],
)
def test_links_that_a_verifier_may_follow(target: str, is_kept: bool) -> None:
    assert leads_into(PurePosixPath("/app"), target, ("app", "usr")) is is_kept


# ---- 2. agents -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bubblewrap")
def test_the_commands_of_an_agent(tmp_path: Path) -> None:
    model = Commands("```bash\necho good > answer\n```", "cat answer; pwd; exit 3", "printf ' '", "done")
    reward = play(make(tmp_path / "one"), model, artefacts=str(tmp_path / "kept"), system_prompt="Act.")
    assert model.outputs() == ["[no output]", "good\n/app\n[exit code 3]", "[no output]"]
    assert [message["content"] for message in model.conversation[:2]] == ["Act.", "Write good into answer."]
    assert (reward.value, reward.text, dict(reward.metrics)) == (1.0, "good", {"turns": 4.0, "reward": 1.0})
    [place] = (tmp_path / "kept" / "one").iterdir()
    assert (place / "work" / "answer").read_text() == "good\n"
    assert (place / "verifier" / "reward.txt").read_text() == "1\n"
    assert (place / "test-stdout.txt").read_text() == "good\n"
    kept = json.loads((place / "trajectory.json").read_text())
    assert [step["command"] for step in kept] == ["echo good > answer", "cat answer; pwd; exit 3", "printf ' '", "done"]


@pytest.mark.usefixtures("bubblewrap")
def test_a_menu_of_commands(tmp_path: Path) -> None:
    listed = '[metadata.agentjet]\ncommands = ["echo good > answer", "exit"]'
    model = Commands("echo good > answer")
    assert play(make(tmp_path / "one", toml=listed), model).value == 1.0
    assert list(model.menu) == ["echo good > answer", "exit"]
    assert model.conversation[1]["content"] == "Write good into answer.\n\nCommands:\necho good > answer\nexit"
    model = Commands("true")
    assert play(tmp_path / "one", model, commands=("true",), max_turns=1).value == 0.0
    assert list(model.menu) == ["true"]
    model = Commands("true", "echo good > answer")
    settings: dict[str, Any] = {"commands_each_turn": 2, "shows_commands": False, "max_turns": 1}
    assert play(tmp_path / "one", model, **settings).value == 1.0
    assert model.schema["items"]["enum"] == ["echo good > answer", "exit"] and model.schema["maxItems"] == 2
    assert model.conversation[1]["content"] == "Write good into answer."


PATH_OF_AGENT = """
mkdir -p /app/bin ~/.local/bin ~/bin
printf '#!/bin/sh\\necho good\\n' | tee /app/bin/cat /app/cat ~/.local/bin/cat ~/bin/cat > /tmp/cat
chmod +x /app/bin/cat /app/cat ~/.local/bin/cat ~/bin/cat /tmp/cat
echo 'export PATH=/app/bin:$HOME/bin:$PATH; cat() { echo good; }' | tee ~/.bashrc ~/.profile > ~/.bash_profile
cp ~/.bashrc ~/.profile /app; export BASH_ENV=/app/.bashrc
"""


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("cat /tests/expected /tests/test.sh; ls /solution", "No such file"),
        ("find / -name test.sh -o -name solve.sh 2>/dev/null", "[exit code 1]"),
        ("mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt", "Read-only file system"),
        ("for i in agent artifacts; do mkdir -p /logs/$i/../verifier; echo 1 > /logs/$i/reward.txt; done", "Read-only"),
        ("(sleep 0.3; echo good > answer) & disown; setsid sh -c 'sleep 0.3; echo good > answer' &", "[no output]"),
        (PATH_OF_AGENT, "[no output]"),
        ("ln -sf /tests/expected answer", "[no output]"),
        ("ln -sf /proc/self/root/tests/expected answer", "[no output]"),
        ("ln -s /usr sub; ln -sf sub/../tests/expected answer", "[no output]"),
        ("rm answer; mkfifo answer", "[no output]"),
        ("chmod 0 answer .", "[no output]"),
        ("for i in $(seq 150); do mkdir d; cd d; done; mkfifo p", "[no output]"),
        ("mkdir -p runs/default; cp /bin/true answer", "[no output]"),
        ("rm answer; ln -s answer answer; ln -s /app app; ln -s . here", "[no output]"),
    ],
)
def test_an_agent_cannot_change_its_reward(tmp_path: Path, command: str, printed: str) -> None:
    test = VERIFIER.replace("\n", "\nsleep 0.6\n", 1) if "sleep" in command else VERIFIER
    folder = make(tmp_path / "one", test=test, **{"solution__solve.sh": "echo good > answer"})
    model = Commands(command)
    assert play(folder, model).value == 0.0
    assert printed in model.outputs()[0]


# ---- 3. limits -------------------------------------------------------------------------------------------------------


def limits(agent: float = 20, verifier: float = 20) -> str:
    numbers = f"[agent]\ntimeout_sec = {agent}\n[verifier]\ntimeout_sec = {verifier}\n"
    return numbers + "[environment]\nstorage_mb = 16\nmemory_mb = 256\n"


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("toml", "command", "printed"),
    [
        (limits(agent=0.5), "echo good > answer; sleep 100", "[ran longer than 0."),
        (limits(), "echo good > answer; yes", "[printed more than 16 MiB and was ended]"),
        (limits(), "echo good > answer; head -c 900000 /dev/zero | tr '\\0' x", "characters]"),
        (limits(), "echo good > answer; head -c 100M /dev/zero > big; rm -f big", "too large"),
    ],
)
def test_an_agent_at_a_limit_is_verified(tmp_path: Path, toml: str, command: str, printed: str) -> None:
    model = Commands(command, "cat answer")
    reward = play(make(tmp_path / "one", toml=toml), model, output_characters=400)
    assert (reward.value, reward.text) == (1.0, "good")
    if "timeout_sec = 0.5" in toml:  # No time is left for a second turn.
        assert reward.metrics["turns"] == 1.0
    else:
        assert printed in model.outputs()[0] and len(model.outputs()[0]) < 500
        assert reward.metrics["turns"] == 3.0


@pytest.mark.usefixtures("bubblewrap")
def test_a_full_context_ends_the_agent(tmp_path: Path) -> None:
    folder = make(tmp_path / "one")
    assert play(folder, Commands("echo good > answer", "FULL")).value == 1.0
    with pytest.raises(ContextFull):
        play(folder, Commands("FULL"))


WRITES = "#!/bin/bash\ncd /logs/verifier\necho seen\n"


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("", "the verifier of one wrote no reward: it must write reward.txt or reward.json.*it printed last: seen"),
        ("echo nan > reward.txt", "wrote reward = nan into reward.txt, which is not a finite number"),
        ("echo well > reward.txt", "wrote 'well' into reward.txt, which is not a number"),
        ("touch reward.txt", "wrote an empty reward.txt"),
        ("echo '{' > reward.json", "wrote '{' into reward.json, which is not a number"),
        ("""echo '{"reward": "1"}' > reward.json""", "wrote reward = '1' into reward.json, which is not a finite"),
        ("""echo '{"a": 1, "b": 0}' > reward.json""", "reward.json of one has a, b: one of them must be called reward"),
        (
            "head -c 60000 /dev/zero | tr '\\0' '[' > reward.json",
            r"wrote '\[\[.* into reward.json, which is not a number",
        ),
        (
            "printf '{\"reward\": 1%0500d}' 0 > reward.json",
            "wrote reward = 10000.* into reward.json, which is not a fin",
        ),
        ("echo '{}' > reward.json", "reward.json of one has no numbers"),
        ("echo 2.0 > reward.txt", "gave the reward 2: it must be from 0 to 1, or set lowest and highest"),
        ("ln -s /etc/os-release reward.txt", "made reward.txt, which is not a file"),
        ("mkdir reward.json", "made reward.json, which is not a file"),
        ("exec sleep 100", "the verifier of one ran longer than 1 s and was ended; it printed last: seen"),
        ("exec yes", "the verifier of one printed more than 16 MiB and was ended"),
    ],
)
def test_a_verifier_without_a_valid_reward_fails(tmp_path: Path, test: str, reason: str) -> None:
    folder = make(tmp_path / "one", test=WRITES + test, toml=limits(verifier=1 if "sleep" in test else 20))
    with pytest.raises(EnvironmentFailed, match=reason):
        play(folder, Commands())


@pytest.mark.usefixtures("bubblewrap")
def test_links_and_pipes_of_a_task_are_not_followed(tmp_path: Path) -> None:
    """They would lead to files of this machine, or wait for ever."""
    folder = make(tmp_path / "one", dockerfile=DOCKERFILE.replace("answer", "."), test=WRITES + "cat /tests/* /app/*")
    (tmp_path / "secret").write_text("of this machine")
    for place in (folder / "tests", folder / "environment"):
        (place / "out").symlink_to(tmp_path / "secret")
        (place / "loop").symlink_to(".")
        os.mkfifo(place / "pipe")
    with (folder / "tests" / "test.sh").open("a") as file:
        file.write("\necho 1 > /logs/verifier/reward.txt")
    reward = play(folder, Commands())
    assert reward.value == 1.0 and "of this machine" not in reward.text and "/tests/out: No such file" in reward.text


@pytest.mark.usefixtures("bubblewrap")
def test_several_numbers_are_metrics(tmp_path: Path) -> None:
    test = WRITES + """echo '{"reward": 2, "tests": 3, "style": true}' > reward.json; echo 0 > reward.txt"""
    reward = play(make(tmp_path / "one", test=test), Commands(), highest=2.0)
    assert (reward.value, reward.metrics["tests"], reward.metrics["style"]) == (2.0, 3.0, 1.0)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    subprocess.run(["mkfifo", tmp_path / "reward.txt"], check=True)
    with pytest.raises(ValueError, match="not a file"):
        rewards_in(tmp_path)


# ---- 4. through the pool ---------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.usefixtures("bubblewrap")
async def test_tasks_are_trained(tmp_path: Path) -> None:
    listed = '[metadata.agentjet]\ncommands = ["echo good > answer", "echo worse > answer"]'
    for name in ("train/a", "train/b", "held_out/c"):
        make(tmp_path / "tasks" / name, toml=listed)

    def reply(prompt: str) -> str:
        return '"echo good > answer"'

    settings: dict[str, Any] = {"max_turns": 2, "processes": 2, "artefacts": str(tmp_path / "kept")}
    with environments.load(f"harbor:{tmp_path / 'tasks'}", **settings) as harbor:
        async with (
            serving(tmp_path / "data", saying(reply)) as served,
            AsyncSwarm(served.url, ADMIN, retry=Retry(patience=5.0)) as swarm,
        ):
            report = await swarm.train(harbor.agent, harbor.tasks, steps=1, concurrency=2, progress=False)
            assert (report.num_aborted, report.rewards) == (0, (1.0,))
            evaluated = await swarm.evaluate(harbor.agent, harbor.held_out, progress=False)
    assert (evaluated.mean_reward, evaluated.mean_metric("turns")) == (1.0, 2.0)
    assert len(list((tmp_path / "kept" / "c").iterdir())) == 1


PROGRAM = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
open("answer", "w").write(answer["choices"][0]["message"]["content"])
"""


@pytest.mark.anyio
@pytest.mark.usefixtures("bubblewrap")
async def test_a_program_is_the_agent(tmp_path: Path) -> None:
    make(tmp_path / "tasks" / "one")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "agent.py").write_text(PROGRAM)
    command = f"python3 {tmp_path / 'program' / 'agent.py'} {{instruction}}"
    settings: dict[str, Any] = {"agent_folders": [str(tmp_path / "program")], "held_out": 0, "processes": 1}
    async with (
        serving(tmp_path / "data", saying(lambda prompt: "good" if "into answer" in prompt else "bad")) as served,
        AsyncSwarm(served.url, ADMIN, retry=Retry(patience=5.0)) as swarm,
    ):
        with environments.load(f"harbor:{tmp_path / 'tasks'}", agent_command=command, **settings) as harbor:
            report = await swarm.evaluate(harbor.agent, harbor.tasks, progress=False)
            assert (dict(report.errors), report.mean_reward) == ({}, 1.0)
        settings["agent_command"] = "echo no; exit 4"
        with (
            environments.load(f"harbor:{tmp_path / 'tasks'}", **settings) as harbor,
            pytest.raises(AgentFailing, match="the agent ended with exit code 4; it printed last: no"),
        ):
            await swarm.evaluate(harbor.agent, harbor.tasks, progress=False)


# ---- 5. containers ---------------------------------------------------------------------------------------------------

DOCKER = """#!/bin/bash
echo "$@" >> $DOCKER_LOG
case "$1" in
  info) ;;
  build) echo built ;;
  run) echo container ;;
  commit) echo committed ;;
  exec) [[ "$*" == *"cat answer"* ]] && echo good ;;
  cp) [[ "$2" == container:/logs/verifier ]] && mkdir -p "$3" && echo 1 > "$3/reward.txt" ;;
esac
exit 0
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The calls of a program `docker`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_LOG", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path)
    harbor_machines.container_program.cache_clear()
    yield tmp_path / "calls"
    harbor_machines.container_program.cache_clear()


def test_a_task_with_an_image_runs_in_containers(tmp_path: Path, docker: Path) -> None:
    folder = make(tmp_path / "one", dockerfile="FROM ubuntu\nRUN apt-get install -y git\n", toml=limits())
    [task] = Harbor(target=str(folder)).tasks()
    model = Commands("cat answer")
    assert Harbor(target=str(folder)).play(task, model).value == 1.0  # type: ignore[arg-type]
    assert model.outputs() == ["good"]
    calls = docker.read_text().splitlines()
    starts = [call for call in calls if call.startswith("run ")]
    assert "--memory 256m" in starts[0] and starts[0].endswith(" built sleep 640") and " committed sleep" in starts[1]
    names = [call.split()[0] for call in calls]
    assert names[:3] == ["info", "build", "run"] and names[-2:] == ["rm", "rmi"]
    tests = next(index for index, call in enumerate(calls) if call.endswith("container:/tests"))
    assert names.index("rm") < tests, "the agent's container ends before the tests are copied"
    with pytest.raises(ConfigError, match="agent_command works in sandboxes, and one needs a container"):
        list(Harbor(target=str(folder), agent_command="true").tasks())


def test_a_task_in_a_real_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("docker")
    monkeypatch.chdir(tmp_path)
    folder = make(tmp_path / "one", dockerfile="FROM debian:12-slim\nRUN mkdir /app\nWORKDIR /app\nCOPY answer .\n")
    reward = play(folder, Commands("echo good > answer; cat /tests/expected", "cat answer"))
    assert (reward.value, reward.text) == (1.0, "good")


@pytest.mark.parametrize("place", ["/usr/x", "/", "app", "/app/../etc", "/proc"])
def test_a_place_in_the_system_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="name the folder, and a place outside of the system"):
        Sandbox(folder=tmp_path, places={tmp_path: place}).check()


def test_sandboxes_are_not_a_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sandbox = True: tasks of Harbor are always played in sandboxes"):
        environments.load(f"harbor:{tmp_path}", sandbox=True)
