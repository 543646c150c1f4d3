"""Settings: the order of their sources, and one message with key, value and way out for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentjet.config import (
    JobConfig,
    ServeConfig,
    bfloat16_is_faster,
    check_models,
    load_config,
    parse_config,
    server_token,
    settings_table,
)
from agentjet.config.loader import parse_value, read_toml
from agentjet.errors import ConfigError
from tests.setting_names import setting_names


def load(*overrides: str, file: Path | None = None) -> ServeConfig:
    return load_config(file, overrides)


def complaint(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*overrides, file=file)
    return str(refused.value)


def test_without_anything_the_defaults_hold() -> None:
    assert load() == ServeConfig()


def test_a_file_with_a_byte_order_mark_or_without_end(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("\ufeff[job]\nbatch_size = 3\n", encoding="utf-8")
    assert load(file=file).job.batch_size == 3
    file.write_text("x = " + "[" * 100_000)
    assert "is not valid TOML: maximum recursion depth" in complaint(file=file)
    assert "job.batch_size = '[[[" in complaint("job.batch_size=" + "[" * 100_000)


def test_a_recipe_with_exchanged_letters() -> None:
    assert "did you mean 'grpo'?" in complaint("job.recipe=gpro")


def test_file_then_set(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[server]\nport = 1\ndata_dir = 'here'\n[job]\nbatch_size = 3\n[job.optimizer]\nlr = 1e-4\n")
    config = load("server.port=3", "job.optimizer.lr=2e-4", file=file)
    assert (config.server.port, config.server.data_dir) == (3, Path("here"))
    assert (config.job.batch_size, config.job.optimizer.lr, config.job.group_size) == (3, 2e-4, 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4), ("2e-5", 2e-5), ("true", True), ("cuda", "cuda"), ('"cuda"', "cuda"), (" /tmp/a b ", "/tmp/a b"),
        ("org/Model-1.5", "org/Model-1.5"), ("", ""), ("1 # 2", "1 # 2"), ("1\nb = 2", "1\nb = 2"), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_what_is_set_is_toml_or_else_text(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("job.bach_size", "job.batch_size"),
        ("lr", "job.optimizer.lr"),
        ("job.lr", "job.optimizer.lr"),
        ("job.recpe.loss", "job.recipe.loss"),
        ("sever.port", "server.port"),
        ("Job.Batch_Size", "job.batch_size"),
        ("recipe.clip", "job.recipe.loss.clip_low"),
        ("clip_high", "job.recipe.loss.clip_high"),
        ("recipe.epochs", "job.recipe.epochs"),
        ("recipe", "job.recipe"),
        ("job.task_weigths.math", "job.task_weights"),
        ("compute.sampler", "compute.samplers"),
        ("job.optimiser.lr", "job.optimizer.lr"),
        ("policies.planner.modle", "policies.planner.model"),
        ("policies.planner.lora.rnk", "policies.planner.lora.rank"),
        ("job.optimizers.policy.beta", "job.optimizers.policy.beta1"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    assert complaint(f"{key}=1").endswith(f"there is no such setting; did you mean {nearest}?")


def test_the_section_that_an_unknown_key_is_in_already_is_no_way_out() -> None:
    assert complaint("job.foo=1") == "job.foo = 1 (--set): there is no such setting; docs/settings.md lists them all"


def test_an_unknown_key_names_its_value_and_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("[job]\nbach_size = 3\n")
    assert complaint(file=file) == (
        f"job.bach_size = 3 ({file}): there is no such setting; did you mean job.batch_size?"
    )
    assert "docs/settings.md" in complaint("wxyz=1")


UNKNOWN = "there is no such setting; docs/settings.md lists them all"
CLIP = "'grpo' has no parameter 'clip'; did you mean 'loss.clip_low'?"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("unknown.key", "1", UNKNOWN),
        ("unknown", "1", UNKNOWN),
        ("job.foo", "'x'", UNKNOWN),
        ("job.optimizer.zzzz", "1", UNKNOWN),
        ("job.optimizer.lrr", "1", "there is no such setting; did you mean job.optimizer.lr?"),
        ("job.recipe.clip", "1", CLIP),
        ("job.recipe.loss.clip", "1", "'clip' has no parameter 'clip'; did you mean 'clip_low'?"),
        ("job.recipe.epochs", "0", "input should be greater than or equal to 1"),
    ],
)
@pytest.mark.parametrize("source", ["--set", "file", "request"])
def test_each_source_of_a_refused_setting_is_named_the_same_way(
    source: str, key: str, value: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"{key} = {value}\n")
    named = str(file) if source == "file" else source
    with pytest.raises(ConfigError) as refused:
        if source == "request":
            parse_config(read_toml(file), "request")
        else:
            load_config(*((file, ()) if source == "file" else (None, [f"{key}={value}"])))
    assert str(refused.value) == f"{key} = {value} ({named}): {says}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["job.batch_size=0"], "job.batch_size = 0 (--set): input should be greater than or equal to 1"),
        (
            ["job.seed=9223372036854775808"],
            "job.seed = 9223372036854775808 (--set): a whole number has 64 bits at most",
        ),
        (['job.seed="-9223372036854775809"'], "job.seed = '-9223372036854775809' (--set): a whole number has 64 bits"),
        (["job.batch_size=1180591620717411303424"], "(--set): a whole number has 64 bits at most"),
        (["job.seed=1" + "0" * 5000], "(--set): unable to parse input string as an integer"),
        (["job.temperature=1e-44"], "job.temperature = 1e-44 (--set): input should be greater than or equal to 0.01"),
        (["job.temperature=11"], "job.temperature = 11 (--set): input should be less than or equal to 10"),
        (["job.batch_size=many"], "job.batch_size = 'many' (--set): input should be a valid integer"),
        (["job.batch_size=true"], "job.batch_size = True (--set): true and false are not values"),
        (["job.optimizer.lr=inf"], "job.optimizer.lr = inf (--set): input should be a finite number"),
        (["job.task_weights.math=0"], "job.task_weights.math = 0 (--set): input should be greater than 0"),
        (["job.task_weights.math=inf"], "job.task_weights.math = inf (--set): input should be a finite number"),
        (["job.task_weights=2"], "job.task_weights = 2 (--set): input should be a table, such as"),
        (
            ["job.task_weights={math={code=1}}"],
            "job.task_weights.math = {'code': 1} (--set): input should be a valid number",
        ),
        (["job.side_calls=3"], "job.side_calls = 3 (--set): input should be a list, such as"),
        (["job.side_calls=[3]"], "job.side_calls.0 = 3 (--set): input should be a table, such as"),
        (["job.side_calls=[{tools='none'}]"], "job.side_calls.0.name: this setting is missing; set it"),
        (["model.threads=1025"], "model.threads = 1025 (--set): input should be less than or equal to 1024"),
        (["server.data_dir="], "server.data_dir = '' (--set): give the name of a folder, such as 'agentjet-data'"),
        (["model.device=gpu"], "model.device = 'gpu' (--set): input should be 'auto', 'cpu' or 'cuda'"),
        (["job=3"], "job = 3 (--set): this is a section; set what is in it, such as job.batch_size"),
        (["job=3", "job.seed=1"], "job.seed = 1: 'job' is set to 3 already"),
        (["job.group_size=1"], "group_size = 1: recipe grpo compares the episodes of a group"),
        (["job.min_group_size=1"], "min_group_size = 1: recipe grpo compares the episodes of a group"),
        (["job.group_size=4", "job.min_group_size=5"], "min_group_size = 5 is above group_size = 4"),
        (["model.context_length=100", "job.max_tokens=100"], "job.max_tokens = 100 leaves no room for a prompt"),
        (["job.recipe.aggregation=constant"], "needs constant > 0"),
        (["server.host=0.0.0.0"], "server.host = '0.0.0.0' (--set): non-loopback addresses require TLS"),
        (["policies.planner=3"], "this is a section; set what is in it, such as policies.planner.model"),
        (["policies.policy.model=m"], "policies.policy: 'policy' is the policy of a run without [policies]: choose"),
        (["policies.Planner.model=m"], "policies.Planner: a policy's name is a lower-case letter, then up to 63 of"),
        (
            ["policies.planner.model=m", "job.optimizers.planer.lr=1"],
            "job.optimizers.planer: the run has no policy 'planer'; did you mean 'planner'?",
        ),
        (
            ["policies.planner.model=m", "policies.coder.model=m", "job.optimizers.x.lr=1"],
            "job.optimizers.x: the run has no policy 'x'; its policies are 'planner', 'coder'",
        ),
        (
            ["policies.planner.model=m", "job.recipe=single_stream"],
            "job.recipe = 'single_stream' compares rewards with those of earlier episodes of the task, and these are "
            "not of single policies: choose another recipe, or omit [policies]",
        ),
        (
            ['policies.a={lora={rank=2},model="m"}', 'policies.b={lora={rank=2},model="n"}'],
            "policies.b.model = 'n' and policies.a.model = 'm': the adapters of one worker share one base model; set "
            "policies.b.worker to another name",
        ),
        (
            ["server.fronts=2"],
            "server.fronts = 2 needs samplers beside the learner of each policy: set compute.backend = 'cluster', or "
            "fronts to 0",
        ),
        (
            [
                "server.fronts=2",
                "compute.backend=cluster",
                "policies.a.model=m",
                'policies.b={model="m",compute={backend="embedded"}}',
            ],
            "set policies.b.compute.backend = 'cluster', or fronts to 0",
        ),
        (["server.fronts=9"], "server.fronts = 9 (--set): input should be less than or equal to 8"),
        (
            ["server.fronts=3", "server.port=65533", "compute.backend=cluster"],
            "server.port = 65533 leaves no ports for 3 fronts: lower it",
        ),
        (
            ["server.front_url=https://agents.example/f0"],
            "server.front_url = 'https://agents.example/f0' (--set): not a URL with {front}, which stands for the "
            "number of the front: use one such as 'https://agents.example/f{front}'",
        ),
        (
            ["server.front_url=https://agents.example/f{front}"],
            "server.front_url = 'https://agents.example/f{front}' needs fronts: set server.fronts, or omit it",
        ),
        (["server.front_url=agents.example/f{front}"], "not a URL with {front}"),
        (["server.front_url=https://agents.example/f{front}/v1"], "without user, query and /v1"),
        (["server.front_url=https://agents.example/?f={front}"], "without user, query and /v1"),
        (["server.front_url=https://a:b@agents.example/f{front}"], "without user, query and /v1"),
        (["server.front_url=https://agents.example/f{front}{"], "not a URL with {front}"),
        (["sampler.max_concurrent=0"], "sampler.max_concurrent = 0 (--set): input should be 'auto'"),
        (["sampler.cache_tokens=AUTO"], "sampler.cache_tokens = 'AUTO' (--set): input should be 'auto'"),
        (["batch_size"], "'batch_size' is not of the form section.setting=value"),
        (["=3"], "'=3' is not of the form section.setting=value"),
    ],
)
def test_mistakes_are_sentences(overrides: list[str], said: str) -> None:
    assert said in complaint(*overrides)


def test_a_table_can_be_set_whole_or_in_parts() -> None:
    assert load('job.task_weights={math = 2, "*" = 1}').job.task_weights == {"math": 2, "*": 1}
    assert load("job.task_weights.math=2", "job.task_weights.code=0.5").job.task_weights == {"math": 2, "code": 0.5}


def test_every_mistake_is_named_at_once() -> None:
    assert complaint("job.batch_size=0", "job.seed=x").count("\n") == 1


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert "does not exist" in complaint(file=tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[job\n")
    assert "is not valid TOML" in complaint(file=broken)
    broken.write_text(f"[job]\nseed = 1{'0' * 5000}\n")
    assert "is not valid TOML" in complaint(file=broken)
    assert "cannot be read" in complaint(file=tmp_path)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_loopback_has_several_names(host: str) -> None:
    assert load(f"server.host={host}").server.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_no_machine_reaches_is_refused(host: str) -> None:
    assert "compute.host" in complaint(f"compute.host='{host}'", "compute.backend=cluster")


def parse_job(values: dict[str, Any]) -> JobConfig:
    return parse_config({"job": values}).job


def test_a_job_over_the_wire_is_checked_alike() -> None:
    assert parse_job(JobConfig(seed=7).model_dump(mode="json")) == JobConfig(seed=7)
    with pytest.raises(
        ConfigError, match=r"job\.bach_size = 3: there is no such setting; did you mean job\.batch_size"
    ):
        parse_job({"bach_size": 3})
    with pytest.raises(ConfigError, match=r"job\.optimizer\.lr = -1: input should be greater than 0"):
        parse_job({"optimizer": {"lr": -1}})
    with pytest.raises(ConfigError, match=r"job\.seed = 1180591620717411303424: a whole number has 64 bits at most"):
        parse_job({"seed": 2**70})
    assert [parse_job({"seed": seed}).seed for seed in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]


def test_a_token_from_the_environment_must_be_hard_to_guess() -> None:
    assert server_token({}) is None is server_token({"AGENTJET_TOKEN": ""})
    assert server_token({"AGENTJET_TOKEN": "x" * 16}) == "x" * 16
    with pytest.raises(ConfigError, match="AGENTJET_TOKEN has 5 characters"):
        server_token({"AGENTJET_TOKEN": "hello"})
    assert server_token({"AGENTJET_TOKEN": "x" * 16 + "\n"}) == "x" * 16


@pytest.mark.parametrize("odd", ["ü", " ", "\n", "\r\n", "\x00", "\x7f"])
def test_a_token_that_no_header_can_carry_is_refused_by_name(odd: str) -> None:
    with pytest.raises(ConfigError, match="AGENTJET_TOKEN has a character") as refused:
        server_token({"AGENTJET_TOKEN": f"secret-secret{odd}secret-secret"})
    assert "secret-secret" not in str(refused.value)


BUNDLED = "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "qwen3-0.6",
            r"is neither .*, nor a Hugging Face id \(organisation/name\).*; did you mean 'Qwen/Qwen3-0.6B'\?",
        ),
        ("SmolLM2-135M", "did you mean 'smollm2-135m'?"),
        ("modle", "did you mean 'model'?"),
        ("gpt", "; give the folder of a model, organisation/name of the Hugging Face hub, or 'smollm2-135m'"),
        ("Qwen/Qwen3 0.6B", "did you mean 'Qwen/Qwen3-0.6B'?"),
        ("./no/such/folder", "is neither a folder here"),
        ("", "'' is empty: give the folder of a model, organisation/name"),
        (" ", "' ' is neither a folder here"),
        ("notes.txt", "is a file: give the folder of a model"),
        ("outer", "is a folder without config.json, .*, or 'smollm2-135m', such as 'outer/inner'"),
        ("adapter", "is the folder of an adapter without config.json, so not of a whole model: give"),
    ],
)
@pytest.mark.parametrize("key", ["model.name", "policies.planner.model"])
def test_a_model_that_no_server_can_load_is_refused(
    key: str, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    for file in ("model/config.json", "outer/inner/config.json", "adapter/adapter_config.json", "notes.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    if key.startswith("policies") and not name:  # It has the model of the server.
        return check_models(load("policies.planner.model="))
    config = load(f"{key}={json.dumps(name)}")
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{key} = {name!r}')}.*") as refused:
        check_models(config)
    assert says in str(refused.value) or re.search(says, str(refused.value))


@pytest.mark.parametrize("name", [BUNDLED, "Qwen/Qwen3-0.6B", "model", "./model", "other@3", "other/planner@3"])
def test_other_models_are_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    check_models(load(f"model.name={json.dumps(name)}"))


def test_a_folder_of_other_machines_is_not_checked_here() -> None:
    check_models(load("model.name=/no/such/folder", "compute.backend=cluster", "compute.address=10.0.0.1:6379"))


def test_every_setting_can_be_set_by_its_name_and_is_documented() -> None:
    table = settings_table()
    for name in setting_names():
        section, _, leaf = name.rpartition(".")
        [row] = [
            line for line in table.partition(f"## `[{section}]`")[2].splitlines() if line.startswith(f"| `{leaf}` ")
        ][:1]
        meaning = row.split(" | ")[3].removesuffix(" |")
        assert meaning.endswith("."), f"{name} has no docstring"
    assert "| `lr` | number > 0 | `2e-05` | Peak learning rate. |" in table


@pytest.mark.parametrize(
    ("facts", "faster"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16 amx_bf16 amx_tile", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : avx2", False),
    ],
)
def test_bfloat16_is_chosen_where_it_is_faster(tmp_path: Path, facts: str, faster: bool) -> None:
    assert not bfloat16_is_faster(tmp_path / "absent")
    (tmp_path / "cpuinfo").write_text(facts)
    assert bfloat16_is_faster(tmp_path / "cpuinfo") is faster
