"""The smaller examples, and the settings of all.

1. Settings load; the files of `cluster` parse, and their commands and settings exist.
2. `cocktail`: each task set has an environment, a weight and tasks; batches of two clients are mixed by weight.
3. `combination_lock`: the lock never opens with the default recipe, and nearly always with turn rewards.
4. `teams`: the rewards of the protocols against numbers worked out by hand; each protocol trains two batches.
5. `word_game_team`: the rewards; both models learn on tiny models, with each of three seeds.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from agentjet.cli.main import app
from agentjet.cli.serve import ChildServer
from agentjet.client.threads import raise_on_signals
from agentjet.config import load_config
from agentjet.types import Task
from examples.arithmetic import demo as arithmetic
from examples.claude_style_cli import train as claude
from examples.cocktail import train as cocktail
from examples.cocktail.client import TASK_SETS, ends_with, is_same
from examples.combination_lock import train as lock
from examples.combination_lock.agent import is_right
from examples.teams import train as teams
from examples.teams.agent_r import REVISION, Step, is_pair, messages, splice
from examples.teams.asking import score
from examples.teams.cory import is_pioneer
from examples.teams.curiosity import Memory, cosine
from examples.teams.malt import above_siblings, pairs, values
from examples.teams.mmoa_rag import f1, is_too_long, selected, selector_penalty
from examples.teams.optima import total
from examples.teams.spo import shares
from examples.teams.temporal_rule import RULE, after, allowed, holds_at_the_end
from examples.textarena_self_play import train as textarena
from examples.word_game_team import train as word_game
from examples.word_game_team.agent import DESCRIBER, GUESSER, closeness, fairness, letters
from tests.setting_names import setting_names
from tests.tiny import make_model, overrides, set_options

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        (arithmetic.SETTINGS, []),
        (claude.SETTINGS, []),
        (textarena.SETTINGS, []),
        (word_game.SETTINGS, []),
        *((lock.SETTINGS, [f"job.recipe={recipe}"]) for recipe in lock.RECIPES),
    ],
)
def test_the_shipped_settings_load(settings: Path, overrides: list[str]) -> None:
    config = load_config(settings, overrides)
    assert config.job.max_steps > 0 and config.job.group_size > 1
    if overrides:
        assert f"job.recipe={config.job.recipe.name}" in overrides


def test_the_settings_name_the_models_of_their_examples() -> None:
    assert load_config(arithmetic.SETTINGS).model.name == "smollm2-135m"
    words = load_config(word_game.SETTINGS)
    assert (words.policy_names, words.job.max_steps) == ((DESCRIBER, GUESSER), 15)


def launch_texts() -> list[tuple[str, str]]:
    return [
        ("slurm.sh", (FOLDER / "slurm.sh").read_text()),
        ("skypilot.yaml", yaml.safe_load((FOLDER / "skypilot.yaml").read_text())["run"]),
        ("kuberay.yaml", yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]["entrypoint"]),
    ]


@pytest.mark.parametrize("name", ["one_machine.toml", "two_machines.toml"])
def test_settings_load(name: str) -> None:
    config = load_config(FOLDER / name)
    assert config.compute.backend == "cluster" and tomllib.loads((FOLDER / name).read_text())["compute"]


@pytest.mark.parametrize(("name", "text"), launch_texts(), ids=lambda value: value[:12])
def test_commands_and_settings_exist(name: str, text: str) -> None:
    [command] = re.findall(r"agentjet serve [^']*", text.replace("\\\n", " "))
    words = shlex.split(re.sub(r"\$\([^)]*\)", "HOST", command.splitlines()[0]), comments=True)
    group: Any = typer.main.get_command(app)
    context = group.commands["serve"].make_context("serve", words[2:])
    assert {one.split("=")[0] for one in context.params["override"]} <= set(setting_names())
    config = context.params["config"]
    assert config == Path("/shared/job.toml") or (ROOT / config).is_file()


@pytest.mark.parametrize("name", ["slurm.sh", "skypilot.yaml"])
def test_shell_scripts_parse(name: str) -> None:
    text = dict(launch_texts())[name]
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_job_of_kuberay_is_complete() -> None:
    found = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    cluster = found["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
    constraint = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert constraint is not None and cluster["rayVersion"] == constraint[1]


# ---- cocktail --------------------------------------------------------------------------------------------------------


def test_every_task_set_has_a_weight_and_an_environment() -> None:
    weights = load_config(cocktail.SETTINGS).job.task_weights
    assert weights.keys() == TASK_SETS.keys() == cocktail.ENVIRONMENTS.keys()
    assert {f"{name}.txt" for name in cocktail.ENVIRONMENTS.values()} == {
        path.name for path in cocktail.HERE.glob("environments/*.txt")
    }


def test_the_environments_exclude_each_other() -> None:
    wanted = {path.stem: path.read_text().splitlines() for path in cocktail.HERE.glob("environments/*.txt")}
    assert "openai<2" in wanted["sums"] and "openai>=3" in wanted["reasoning"]


@pytest.mark.parametrize("name", ["addition", "subtraction"])
def test_tasks_are_of_their_set_and_have_right_answers(name: str) -> None:
    tasks = TASK_SETS[name].tasks()
    assert {task.task_set for task in tasks} == {name}
    assert len({task.id for task in tasks}) == len(tasks)
    for task in tasks:
        question, answer = task.payload
        asked, _, result = answer.partition(" = ")
        assert asked in question and eval(asked) == int(result) >= 0
        assert TASK_SETS[name].is_right(f" {answer}\n", answer)


def test_what_counts_as_right() -> None:
    assert not is_same("3 + 4 = 8", "3 + 4 = 7")
    assert ends_with("The answer is -3.", "-3") and not ends_with("-3 or 4", "-3") and not ends_with("", "0")


@pytest.mark.e2e
@pytest.mark.thorough
def test_batches_are_mixed_by_weight(tmp_path: Path) -> None:
    settings = overrides(
        make_model(tmp_path / "model"),
        max_steps=3,
        batch_size=4,
        group_size=2,
        task_weights="{addition = 3, subtraction = 1}",
    )
    folder = tmp_path / "server"
    with raise_on_signals(), ChildServer(cocktail.SETTINGS, settings, folder) as server, server.connect():
        clients = cocktail.run_clients(
            server.url, folder, dict.fromkeys(("addition", "subtraction"), Path(sys.executable))
        )
    assert [client["task_set"] for client in clients] == ["addition", "subtraction"]
    for client, weight in zip(clients, (0.75, 0.25), strict=True):  # 12 groups in all: never more than one astray
        assert abs(sum(client["shares"]) * 4 - weight * 12) <= 1, client["shares"]
    assert all(client["failed"] == 0 for client in clients)
    assert cocktail.summary({"addition": 3, "subtraction": 1}, clients)["task_sets"]["addition"]["weight"] == 0.75


# ---- combination_lock ------------------------------------------------------------------------------------------------


def test_a_wheel_is_right_if_it_shows_a_digit() -> None:
    assert [is_right(text) for text in ("7", "a", "", "7a", "²")] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.e2e
@pytest.mark.thorough
def test_turn_rewards_open_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "lock"
    result = lock.main(["--out", str(out)])
    assert json.loads((out / "result.json").read_text()) == result
    assert lock.ends(result["grpo"]["opened"]) == (0.0, 0.0)
    assert lock.ends(result["mars"]["opened"])[1] > 0.5, result


# ---- teams -----------------------------------------------------------------------------------------------------------


def test_cory_exchanges_roles_every_five_steps() -> None:
    assert "".join("P" if is_pioneer(0, step) else "O" for step in range(12)) == "PPPPPOOOOOPP"
    assert all(is_pioneer(0, step) != is_pioneer(1, step) for step in range(12))


def test_malts_values_are_means_of_leaves() -> None:
    leaves = np.array([[[1, 1, 0], [1, 0, 0], [0, 0, 0]]], float)
    assert values(leaves, 1)[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert values(leaves, 0).tolist() == pytest.approx([1 / 3])
    assert above_siblings(values(leaves, 1)) == pytest.approx([1 / 3, 0, -1 / 3])
    assert above_siblings(values(leaves, 0)) == [0.0], "a node without siblings"
    assert list(pairs(values(leaves, 1)[0])) == [(0, 1), (0, 2)] and list(pairs(np.array([0.5, 0.5]))) == []


def test_optimas_reward() -> None:
    assert total(0.8, 120, (1.2, 2.0)) == pytest.approx(1.06)
    assert total(0.8, 30, (1.2, 2.0)) == pytest.approx(0.30)
    assert total(0.0, 900, (0.1, 0.2)) == pytest.approx(-0.6 + 1)


def test_mmoa_rags_rewards() -> None:
    assert f1("new york city", "new york") == pytest.approx(0.8) and f1("", "new york") == 0.0
    texts = ("Document0,Document4", "Document0,Document0", "Document10", "Doc1", "")
    assert [selector_penalty(text, 10) for text in texts] == [0, -1, -1, -1, 0]
    assert selected("Document0,Document4", 10) == [0, 4] and selected("Doc1", 10) == []
    assert not is_too_long(["a"] * 4) and is_too_long(["a"] * 5) and is_too_long(["a" * 301])


def test_spos_rewards() -> None:
    better = {("0", "1"): 0.7, ("0", "2"): 0.6, ("1", "2"): 0.5}

    def soft(a: str, b: str) -> float:
        return better[a, b] if (a, b) in better else 1 - better[b, a]

    assert shares("012", soft) == pytest.approx([0.65, 0.4, 0.45])
    assert shares("321", lambda a, b: float(a > b)) == pytest.approx([1, 0.5, 0])
    assert shares("012", lambda a, b: float((int(b) - int(a)) % 3 == 1)) == pytest.approx([0.5] * 3), "a cycle"
    assert shares("0", soft) == [0.5]
    assert shares("01", lambda a, b: 1.0) == [0.5, 0.5], "a judge that prefers the first of two"


def test_curiosity_pays_for_new_inputs() -> None:
    x = Counter(a=1, b=1)
    memory = Memory()
    assert memory.similarity(Counter(a=1)) == 0.0 and memory.similarity(Counter(b=1)) == 0.0
    assert memory.similarity(x) == pytest.approx(0.707107)
    assert cosine(x, Counter()) == 0.0


@pytest.mark.parametrize(
    ("segments", "next_ones", "holds"),
    [
        ("", "think obs fin", False),
        ("think", "think act obs fin", False),
        ("think act", "obs", False),
        ("think act obs", "think act obs fin", False),
        ("think act obs fin", "think act obs fin", True),
        ("think fin", "think act obs fin", True),
        ("fin", "think obs fin", False),  # the thought is missing
    ],
)
def test_a_temporal_rule(segments: str, next_ones: str, holds: bool) -> None:
    rule = RULE
    for kind in segments.split():
        assert kind in allowed(rule)
        rule = after(rule, kind)
    assert allowed(rule) == next_ones.split() and holds_at_the_end(rule) is holds


def test_a_rule_that_nothing_satisfies_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kind of segment satisfies"):
        allowed(("and", "think", "act"))
    with pytest.raises(ValueError, match="is not a formula"):
        allowed(("H", "think"))


def test_agent_rs_splice() -> None:
    good, bad = ([Step("o", action) for action in names.split()] for names in ("g0 a1 a2 a3", "g0 a1 b2 b3"))
    spliced = splice(good, bad, lambda step: step.action == "b2")
    assert [step.action for step in spliced.steps] == ["g0", "a1", "b2", REVISION, "a2", "a3"]
    assert spliced.learned == (False, False, False, True, True, True)
    assert messages(spliced)[4:8] == [
        {"role": "user", "content": "o"},
        {"role": "assistant", "content": "b2", "weight": 0},
        {"role": "user", "content": "ok."},
        {"role": "assistant", "content": REVISION},
    ]
    whole = splice(good, bad, lambda step: False)
    assert [step.action for step in whole.steps] == ["g0", "a1", "b2", "b3", REVISION, "a2", "a3"]
    assert is_pair(0.9, 0.1) and not is_pair(0.9, 0.8) and not is_pair(0.4, 0.0)


def test_a_wrong_answer_is_scored_by_its_digits() -> None:
    task = Task("t", payload=[3, 4])
    assert [score(text, task) for text in ("It is 7.", "12", "a1", "")] == [1.0, 0.5, 0.25, 0.0]


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("protocol", teams.PROTOCOLS)
def test_each_protocol_trains(protocol: str, tmp_path: Path) -> None:
    sets = overrides(make_model(tmp_path / "model"))
    report = teams.train(protocol, tmp_path / "team", 2, sets)
    assert len(report.steps) == 2 and not report.num_aborted


# ---- word_game_team --------------------------------------------------------------------------------------------------


STEPS = 24


def test_a_guess_is_scored_by_its_letters() -> None:
    assert closeness(" Apple.\n", "apple") == 1.0
    assert closeness("ape", "apple") == pytest.approx(2 * 3 / 8)
    assert closeness("", "apple") == 0.0


def test_a_hint_that_says_the_word_is_worth_nothing() -> None:
    assert fairness("it grows on trees", "apple") == 1.0
    assert fairness("an Apple", "apple") == 0.0
    assert fairness("a 12!", "apple") == pytest.approx(1 / 4)
    assert fairness("", "apple") == 0.0


def test_a_guess_is_letters_only() -> None:
    assert (letters("apple"), letters("ap 1"), letters("")) == (1.0, 0.5, 0.0)


def tiny_run(folder: Path, seed: int) -> dict[str, list[float]]:
    """Mean rewards by policy and batch, of a run on tiny models."""
    sets = set_options(make_model(folder / "model"), max_steps=STEPS, batch_size=2, optimizer__lr=1e-2)
    out = folder / "out"
    result = word_game.main(["--out", str(out), "--seed", str(seed), *sets])
    assert json.loads((out / "result.json").read_text()) == result
    assert result["aborted"] == 0 and result["episodes"] >= STEPS * 16
    rewards: dict[str, list[float]] = result["rewards"]
    return rewards


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_models_learn(tmp_path: Path, seed: int) -> None:
    rewards = tiny_run(tmp_path, seed)
    for policy in (DESCRIBER, GUESSER):
        assert len(rewards[policy]) == STEPS
        first, last = word_game.ends(rewards[policy])
        assert last > 1.5 * first, rewards
