"""The import table of `docs/architecture.md`, enforced.

1. A package imports only the packages of its row; every file belongs to a package.
2. A library is imported only by packages whose row has it, `lazy` ones only inside functions.
3. Importing the light packages loads neither torch nor transformers, and the client loads no library of the server. A
   fresh interpreter checks this, because libraries import other libraries.
4. Front and server use every method of the compute protocol.
5. No file is longer than 900 lines, and no file is called utils.
6. A child process imports nothing from the present working directory.
7. Only the server, its clients and the table of statuses know HTTP statuses.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from agentjet.errors import InvalidRequest, OperationConflict, RequestError, ServerFailed, Unavailable, Unprocessable
from agentjet.protocol.base import STATUSES, refusal_of, status_of

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "agentjet"
MAX_LINES = 900
PROTOCOLS = {"Sampler", "Learner", "Compute"}
PRIMITIVES = {"load_batch", "forward_backward", "optim_step"}
"""Operations that the server asks for through `protocol.learn`."""
HTTP = {"protocol", "front", "server", "fronts", "sandbox", "client", "environments", "cli", "research"}
VAGUE = {"utils", "util", "helpers", "misc", "common"}


@dataclass(frozen=True)
class Rule:
    """Allowed imports. `ours` are packages or modules of AgentJet; `lazy` libraries are for functions only."""

    ours: frozenset[str]
    libraries: frozenset[str] = frozenset()
    lazy: frozenset[str] = frozenset()


def rule(ours: str, libraries: str = "", lazy: str = "") -> Rule:
    return Rule(frozenset(ours.split()), frozenset(libraries.split()), frozenset(lazy.split()))


VOCABULARY = "errors types"
PACKAGES = {
    "errors": rule(""),
    "types": rule("errors"),
    "database": rule("errors"),
    "section": rule("", "pydantic"),
    "protocol": rule(VOCABULARY, "pydantic"),
    "timeline": rule(VOCABULARY, "numpy"),
    "recipes": rule(f"{VOCABULARY} section timeline", "numpy pydantic pydantic_core", lazy="torch"),
    "config": rule(f"{VOCABULARY} section recipes.hooks recipes.recipe recipes.registry", "pydantic pydantic_core"),
    "rendering": rule(f"{VOCABULARY} config", "jinja2 llguidance regex tokenizers"),
    "swarm": rule(
        f"{VOCABULARY} database config protocol timeline recipes.hooks recipes.recipe recipes.rollout",
        "numpy pydantic",
    ),
    "processes": rule(VOCABULARY, "psutil ray"),
    "compute": rule(
        f"{VOCABULARY} config timeline rendering recipes processes",
        "bitsandbytes gguf huggingface_hub llguidance msgpack numpy peft psutil safetensors tokenizers torch "
        "transformers vllm",
    ),
    "front": rule(
        f"{VOCABULARY} config protocol timeline rendering swarm compute.protocol",
        "fastapi itsdangerous pydantic pydantic_core starlette uvicorn",
        lazy="opentelemetry",
    ),
    "server": rule(
        f"{VOCABULARY} config protocol timeline rendering swarm recipes.hooks recipes.recipe compute.protocol front",
        "fastapi httpx numpy prometheus_client psutil starlette",
    ),
    "fronts": rule(
        f"{VOCABULARY} config protocol rendering swarm timeline compute processes front server", "starlette"
    ),
    "sandbox": rule(VOCABULARY, "h11"),
    "client": rule(f"{VOCABULARY} protocol sandbox", "httpx pydantic", lazy="rich"),
    "environments": rule(
        f"{VOCABULARY} section sandbox client",
        "httpx pydantic",
        lazy="anyio gymnasium inspect_ai mcp mcp_types numpy openai openenv reasoning_gym scienceworld textarena "
        "verifiers",
    ),
    "trackers": rule(VOCABULARY, lazy="mlflow tensorboardX trackio wandb"),
    "research": rule(
        f"{VOCABULARY} database config recipes.registry sandbox client",
        "jinja2 markdown_it numpy pydantic scipy",
        lazy="anthropic openai",
    ),
    "__init__": rule(f"{VOCABULARY} client"),
}
COMMAND_LINE = rule(
    " ".join(PACKAGES),
    "anyio httpx huggingface_hub jinja2 matplotlib numpy openai opentelemetry psutil pydantic rich typer uvicorn",
)
LIGHT = ["agentjet"]
LIGHT += [
    f"agentjet.{name}"
    for name in ("client", "cli.main", "swarm", "rendering", "front.inference", "server.app", "compute.backend")
]
"""Modules without torch, in the order in which one interpreter imports them; the first three are the client's."""


@dataclass(frozen=True)
class Import:
    """One imported module, with the line and whether it stands inside a function (or is for the type checker only)."""

    module: str
    line: int
    lazy: bool


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    """The first part of the path inside the package: a folder's name or a module's."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@cache
def imports(path: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                inside = True
            found.extend(Import(module, child.lineno, inside) for module in imported_modules(child, path))
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), lazy=False)
    return found


def imported_modules(node: ast.AST, path: Path) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}:{node.lineno}: write agentjet.<package>, so that the direction can be read"
        yield from (defining_module(node.module or "", alias.name) for alias in node.names)


@cache
def defining_module(module: str, name: str) -> str:
    """Returns the module that defines `name` of `from module import name`."""
    if module.split(".")[0] != "agentjet":
        return module
    folder = SOURCE.joinpath(*module.split(".")[1:])
    if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
        return f"{module}.{name}"
    package = folder / "__init__.py"
    if package.exists():
        for node in ast.parse(package.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
                own = (node.module or "").startswith(f"{module}.")  # other re-exported names count as its own
                return node.module if own and node.module else module
    return module


def violations(name: str, path: Path) -> Iterator[str]:
    """Yields the forbidden imports of the file at `path` in package `name`."""
    rules = COMMAND_LINE if name == "cli" else PACKAGES[name]
    for found in imports(path):
        where = f"{name}/{path.name}:{found.line} imports {found.module}"
        top, *rest = found.module.split(".")
        if top == "agentjet":
            target = ".".join(rest)
            own = not rest or rest[0] == name
            if not own and not any(target == allowed or target.startswith(f"{allowed}.") for allowed in rules.ours):
                yield f"{where}: {name} may import {sorted(rules.ours)}"
        elif top not in sys.stdlib_module_names | rules.libraries:
            if top not in rules.lazy:
                yield f"{where}: {name} may use {sorted(rules.libraries | rules.lazy)}"
            elif not found.lazy:
                yield f"{where}: in {name} only inside functions"


def test_only_the_conductor_imports_ray() -> None:
    importers = {path.name for path in source_files() for found in imports(path) if found.module.split(".")[0] == "ray"}
    assert importers == {"conductor.py"}


def test_refusals_below_the_server_have_a_class_and_no_status() -> None:
    statuses = set(STATUSES.values()) - {500}  # 500 is a round number of other things, too
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in source_files()
        if package_of(path) not in HTTP
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in statuses
    ]
    assert not found, f"raise the class that `protocol.STATUSES` maps to the status: {found}"


@pytest.mark.parametrize("kind", STATUSES)
def test_a_client_raises_the_class_that_the_server_answered(kind: type[RequestError]) -> None:
    assert refusal_of(STATUSES[kind]) is kind


def test_every_refusal_has_the_status_of_its_nearest_class() -> None:
    refused = Unavailable("no", retry_after=1.0), OperationConflict("no"), Unprocessable("no")
    assert [status_of(error) for error in refused] == [503, 409, 422]
    assert (refusal_of(418), refusal_of(501)) == (InvalidRequest, ServerFailed)


def test_every_file_belongs_to_a_package() -> None:
    assert {package_of(path) for path in source_files()} <= {*PACKAGES, "cli"}


def test_packages_import_only_what_their_row_names() -> None:
    problems = [problem for path in source_files() for problem in violations(package_of(path), path)]
    assert not problems, "\n".join(problems)


def test_arrows_point_up_the_table() -> None:
    order = list(PACKAGES)
    for name, rules in PACKAGES.items():
        above = {allowed.split(".")[0] for allowed in rules.ours}
        assert all(order.index(other) < order.index(name) for other in above), name


@pytest.mark.parametrize(
    ("package", "line", "problem"),
    [
        ("timeline", "import torch", "may use"),
        ("client", "import rich.progress", "only inside functions"),
        ("swarm", "from agentjet.recipes import losses", "may import"),
        ("server", "from agentjet.compute.backend import ProcessCompute", "may import"),
        ("server", "from agentjet.compute import Compute", None),
        ("front", "from agentjet.server.runs import Runs", "may import"),
        ("server", "from agentjet.front.calls import Calls", None),
        ("client", "def f():\n    import rich", None),
        ("server", "from agentjet.server import access", None),
    ],
)
def test_the_rule_itself(package: str, line: str, problem: str | None, tmp_path: Path) -> None:
    """Planted imports are found, and allowed ones are not."""
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    found = list(violations(package, planted))
    assert (len(found) == 1 and problem in found[0]) if problem else not found


@cache
def loaded(*modules: str) -> dict[str, set[str]]:
    """Top-level packages in a fresh interpreter after importing each of the modules and those before it."""
    program = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    print(module, *{{name.split('.')[0] for name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {module: {*packages} for module, *packages in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("module", LIGHT)
def test_light_packages_load_no_torch(module: str) -> None:
    assert not loaded(*LIGHT)[module] & {"torch", "transformers", "peft"}


@pytest.mark.parametrize("module", LIGHT[:3])
def test_client_loads_nothing_of_the_servers(module: str) -> None:
    """`pip install agentjet` without an extra must be able to import these."""
    servers = {
        "fastapi",
        "jinja2",
        "matplotlib",
        "msgpack",
        "numpy",
        "openai",
        "scipy",
        "starlette",
        "tokenizers",
        "uvicorn",
    }
    assert not loaded(*LIGHT)[module] & servers


def test_the_line_to_the_worker_has_no_verb_that_nobody_uses() -> None:
    tree = ast.parse((SOURCE / "compute" / "protocol.py").read_text(encoding="utf-8"))
    protocols = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in PROTOCOLS]
    methods = [node for protocol in protocols for node in protocol.body]
    verbs = {node.name for node in methods if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    asking = [path for package in ("front", "server") for path in (SOURCE / package).glob("*.py")]
    asked = "\n".join(path.read_text(encoding="utf-8") for path in asking)
    assert verbs - PRIMITIVES == set(re.findall(r"(?<!agentjet\.)compute\.(\w+)", asked))


def test_the_tests_that_a_bench_runs_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"\"(tests/[\w/]+\.py)", text)}
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_files_named_in_the_architecture_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    places = (ROOT, SOURCE, SOURCE / "front", SOURCE / "server")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_children_do_not_import_from_the_current_folder() -> None:
    started = [
        (path, line)
        for path in source_files()
        for line in path.read_text(encoding="utf-8").splitlines()
        if "sys.executable" in line
    ]
    assert len(started) >= 3
    assert [where for where in started if not re.search(r'sys\.executable, "-(P|I)"', where[1])] == []


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "examples", "conformance"])
def test_files_fit_in_the_head(folder: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}
    assert [
        str(path) for path in lengths if VAGUE & {part.lower() for part in path.relative_to(ROOT).with_suffix("").parts}
    ] == []
