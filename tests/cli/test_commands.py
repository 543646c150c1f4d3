"""Commands and their errors, and `eval`. An option with one value is given once.

The outputs of commands that list or show are in `tests.locks`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from agentjet.cli import printable
from agentjet.cli.main import app, main
from agentjet.client import Swarm
from agentjet.errors import ConfigError, InvalidRequest, Unreachable, nearest_name
from tests.server.serving import TOKEN, Served, in_thread, serving
from tests.swarm.world import World


def run(*arguments: str) -> str:
    """The output of a command. Raises the command's exceptions."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def at(served: Served) -> list[str]:
    return ["--url", served.url, "--token", TOKEN]


def test_a_token_may_be_in_a_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    run("status", "--url", served.url, "--token-file", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match=r"--token-file .*missing: No such file"):
        run("status", "--url", served.url, "--token-file", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="exclude each other"):
        run("status", *at(served), "--token-file", str(tmp_path / "token"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["episodes", "list", "--min-reward", "nan"], InvalidRequest, r"min_reward = nan: .*finite"),
        (["episodes", "export", "e.jsonl", "--min-reward", "nan"], ConfigError, "--min-reward nan: give a finite"),
        (["cluster", "scale", "ranks=3"], ConfigError, "only samplers can be scaled, such as samplers=6"),
    ],
)
def test_wrong_values_are_refused_with_the_way_out(
    served: Served, arguments: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(*arguments, *at(served))


@pytest.mark.parametrize("every", ["inf", "nan", "1e30", "0"])
def test_watch_refuses_what_nobody_can_wait_for(every: str) -> None:
    refused = CliRunner().invoke(app, ["watch", "--every", every])
    assert refused.exit_code == 2 and "Invalid value for '--every'" in refused.output


def test_no_server_is_a_sentence_and_exit_code_2() -> None:
    with pytest.raises(Unreachable, match="agentjet serve"):
        run("status", "--url", "http://127.0.0.1:9")
    ended = subprocess.run(
        [sys.executable, "-m", "agentjet.cli", "status", "--url", "localhost:9"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("agentjet: 'localhost:9' is not a server's address")


def test_checkpoints_and_export(served: Served, tmp_path: Path) -> None:
    assert "none yet" in run("checkpoints", "list", *at(served))
    assert "step_000000" in run("checkpoints", "create", *at(served))
    [saved] = json.loads(run("checkpoints", "list", "--json", *at(served)))
    assert saved["policy_version"] == 0
    out = tmp_path / "it is exported"
    assert f"agentjet eval '{out}'" in run("export", str(out), *at(served)), "to be copied into a shell"
    assert (out / "model.txt").is_file()
    with pytest.raises(ConfigError, match="exists"):
        run("export", str(out), *at(served))
    with pytest.raises(InvalidRequest, match=r"model\.lora\.rank = 0: .*no adapter"):
        run("export", str(tmp_path / "adapter"), "--adapter", *at(served))


def test_what_the_disk_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/root/out")

    monkeypatch.setattr("agentjet.cli.main.app", refused)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "agentjet: /root/out: Permission denied\n"


def test_export_into_what_is_no_folder(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="out cannot be written"):
        run("export", str(tmp_path / "file" / "out"), *at(served))
    mine = tmp_path / "out.unfinished"
    mine.mkdir()
    run("export", str(tmp_path / "out"), *at(served))
    assert mine.is_dir(), "the user's own folders stay"
    assert not list(tmp_path.glob(".out*"))


def test_eval_of_a_running_server(served: Served) -> None:
    printed = run("eval", served.url, "--token", TOKEN, "--tasks", "10", "--temperature", "0", "--json")
    score = json.loads(printed)
    assert (score["success"], score["well_formed"], score["tasks"]) == (0.9, 0.9, 10)
    low, high = score["success_interval"]
    assert 0.55 < low < 0.9 < high < 1.0
    assert {asked.params.temperature for asked in served.run.compute.asked} == {0.0}
    printed = run("eval", served.url, "--token", TOKEN, "--tasks", "10")
    assert "mean@1 0.900 (95 % interval" in printed and "well_formed: 0.900" in printed
    assert {asked.params.temperature for asked in served.run.compute.asked[10:]} == {1.0}


def test_eval_draws_the_same_again(served: Served) -> None:
    for _ in range(2):
        run("eval", served.url, "--token", TOKEN, "--tasks", "5", "--concurrency", "1")
    seeds = [asked.params.seed for asked in served.run.compute.asked]
    assert seeds[:5] == seeds[5:] and len(set(seeds)) == 5


AGENT = """
from agentjet import Reward, Task
import httpx

def tasks():
    return [Task("3+4", payload=(3, 4)), Task("5+6", payload=(5, 6))]

def agent(task, episode):
    a, b = task.payload
    question = {"role": "user", "content": f"What is {a} + {b}?"}
    body = {"model": episode.model, "messages": [question]}
    key = {"Authorization": f"Bearer {episode.api_key}"}
    answer = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=key).json()
    text = answer["choices"][0]["message"]["content"]
    return Reward(float(text.endswith("= 7")), metrics={"letters": float(len(text))})
"""


def test_eval_of_any_agent(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "scored.py"
    file.write_text(AGENT)
    arguments = ("--agent", f"{file}:agent", "--task-file", f"{file}:tasks")
    score = json.loads(run("eval", served.url, "--token", TOKEN, *arguments, "--json"))
    assert (score["tasks"], score["success"], score["letters"]) == (2, 0.5, 9.5)
    only = json.loads(run("eval", served.url, "--token", TOKEN, *arguments, "--tasks", "1", "--json"))
    assert (only["tasks"], only["success"], only["letters_interval"]) == (1, 1.0, [None, None])


def test_eval_of_a_run_with_several_policies(tmp_path: Path) -> None:
    file = tmp_path / "team.py"
    kept = AGENT.partition("    return Reward")[0].replace("episode.model", "'coder'")
    file.write_text(kept + "    return {'planner': 0.5, 'coder': 1.0}\n")
    with in_thread(serving(tmp_path / "data", policies={"planner": {}, "coder": {}})) as (served, _):
        with pytest.raises(ConfigError, match="has the policies planner, coder, and the default agent asks one"):
            run("eval", served.url, "--token", TOKEN, "--tasks", "3")
        printed = run("eval", served.url, "--token", TOKEN, "--agent", f"{file}:agent", "--task-file", f"{file}:tasks")
        assert "mean@1 0.750" in printed, printed


def test_eval_with_repeats(served: Served) -> None:
    asked = [
        "--tasks",
        "10",
        "--repeats",
        "4",
        "--pass-at",
        "1",
        "--pass-at",
        "4",
        "--at-version",
        "newest",
        "--concurrency",
        "4",
    ]
    score = json.loads(run("eval", served.url, "--token", TOKEN, *asked, "--json"))
    assert (score["success"], score["repeats"]) == (0.9, 4)
    assert (score["pass@1"], score["pass@4"]) == (0.9, 0.9)
    assert score["pass@4_interval"] == score["success_interval"], "all repeats agree: tasks are what counts"
    assert len({asked.params.seed for asked in served.run.compute.asked}) == 40
    printed = run("eval", served.url, "--token", TOKEN, *asked)
    assert "mean@4 0.900" in printed and "pass@4: 0.900" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("./a/b",), r"begins with http://, and as a model './a/b' is neither a folder here"),
        (("http://a", "--at-version", "old"), "or newest"),
        (("http://a", "--pass-at", "1", "--pass-at", "4"), "--pass-at 4 needs --repeats 4"),
        (("http://a", "--tasks", "501"), "--tasks 501: there are 500 tasks"),
        (("http://a", "--task-file", "t.jsonl"), "--task-file is for --agent"),
        (("http://a", "--agent", "a.py:agent"), "--agent needs --task-file"),
        (("http://a", "--agent", "a.py:agent", "--task-file", "t.jsonl"), "--agent a.py: No such file"),
    ],
)
def test_eval_refuses(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("eval", *arguments)


def test_a_demo_never_removes_what_no_demo_made(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not made by a demo"):
        run("demo", "--out", str(tmp_path))
    assert (tmp_path / "server" / "thesis.txt").exists()


def test_a_demo_with_a_misspelt_setting_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean job.batch_size\?"):
        run("demo", "--out", str(tmp_path / "out"), "--set", "job.batchsize=3")
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "default"
    folder.mkdir(parents=True)
    world = World(folder)
    held = json.loads(world.journal.file.meta("job_settings", ""))
    held["job"]["recipe"] = {"name": "gone.package:Recipe"}
    world.journal.file.set_meta("job_settings", json.dumps(held))
    world.close()
    monkeypatch.setattr(sys, "argv", ["agentjet", "serve", "--data-dir", str(tmp_path), "--set", "server.port=0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "stored job settings (recipe 'gone.package:Recipe') cannot be read" in line


def test_nothing_that_others_wrote_steers_the_terminal(served: Served) -> None:
    evil = "a\x1b[31mRED\x07\u202e\x9b2J\nep9"
    with Swarm(served.url, TOKEN, client_id="c\x1b]0;t\x07") as swarm:
        live = swarm.begin(evil)
        bad = swarm.begin("b")
        bad.abort("why\x1b[2J")
        printed = [
            run("episodes", "list", *at(served)),
            run("episodes", "show", live.id, *at(served)),
            run("episodes", "show", bad.id, *at(served)),
            run("status", *at(served)),
        ]
        live.abort("over")
    assert all(set(text) & set("\x1b\x07\u202e\x9b") == set() for text in printed), printed
    assert r"a\x1b[31mRED" in printed[0] and r"\nep9" in printed[1], "it is there to be read, in its line"
    assert r"why\x1b[2J" in printed[2] and r"c\x1b]0" in printed[3]
    assert json.loads(run("episodes", "show", live.id, "--json", *at(served)))["task_id"] == evil
    plain = "Grüße, 世界\tسلام می‌خواهم 👩‍🚀 1\u202f000 €\n"
    assert printable(plain) == plain, "what people write is printed as it is"
    assert printable("\ud800\r\x00") == r"\ud800\r\x00"


# ---- rules of all commands -------------------------------------------------------------------------------------------


def options(group: object, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The path of each command with one of its options that has one value."""
    for name, command in getattr(group, "commands", {}).items():
        yield from options(command, (*names, name))
    for parameter in getattr(group, "params", []) if not hasattr(group, "commands") else []:
        if parameter.param_type_name == "option" and not parameter.multiple and not parameter.is_flag:
            yield names, parameter.opts[0]
            return


EVERY = list(options(typer.main.get_command(app)))


@pytest.mark.parametrize(("names", "option"), EVERY, ids=[" ".join(names) for names, _ in EVERY])
def test_an_option_that_is_given_twice_is_refused(names: tuple[str, ...], option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is given 2 times and has one value: give it once"):
        CliRunner().invoke(app, [*names, option, "1", f"{option}=2"], catch_exceptions=False)


def test_options_of_all_commands_are_tried() -> None:
    assert (("track",), "--to") in EVERY and len(EVERY) > 20


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gpro", "grpo"),
        ("gsop", "gspo"),
        ("ppoo", "ppo"),
        ("drgrpo", "dr_grpo"),
        ("GRPO", "grpo"),
        ("wholly different", None),
    ],
)
def test_the_nearest_name_is_the_one_with_the_fewest_edits(typed: str, meant: str | None) -> None:
    assert nearest_name(typed, ["gspo", "ppo", "grpo", "dr_grpo", "dapo"]) == meant
