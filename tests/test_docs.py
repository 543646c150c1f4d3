"""Checks the documents against the program, and their language against `STYLE.md`, "How we write".

1. Every `agentjet ...` command in them parses, with its options. Every `make ...` target exists. The output folders of
   commands are ignored by git.
2. Python snippets compile; their imports exist, and their calls on a swarm or episode have valid arguments.
3. `docs/settings.md` and `docs/recipes.md` are the output of `make docs`; every setting has a description; settings
   named in prose exist.
4. Every metric of a step or of Prometheus in the code has its line in `docs/operations.md`.
5. Links lead somewhere; the table of packages is the enforced one; the tree in the README is the tree.
6. Reports of the shipped studies are what their journals print.
7. No sentence of a docstring or page has a banned opening or word.
8. (e2e) The README's first example runs, commands and agent, as printed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer

from agentjet import Episode, Swarm
from agentjet.cli.main import app, confidence, parameters, recipes_reference
from agentjet.config import load_config, settings_table
from agentjet.config.loader import sections, settings
from agentjet.recipes import registry
from agentjet.research.campaign.report import chapters
from agentjet.research.journal import NOTEBOOK, Notebook, StudyFolder
from agentjet.research.report import check
from bench.readme import Example, free_port, run
from tests.setting_names import recipe_parameters, setting_names
from tests.test_architecture import PACKAGES
from tests.tiny import make_model

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")])
PAGES += sorted((ROOT / "examples").glob("*/*.md"))  # no deeper: npm's packages may lie there
PAGES.append(ROOT / "docs" / "studies" / "README.md")
README = ROOT / "README.md"
SOURCE = ROOT / "src" / "agentjet"
OPENINGS = re.compile(r"(What|Of|Who|Whose|Whom|How|Whether|So many|So much)\b(?!.*\?$)")
WORDS = re.compile(
    r"\b(nobody|whoever|whatever|anew|meanwhile|of (?:its|their|his) own|but for|goodbye|lest|errands?"
    r"|(?<!there )(?:is|are|was|were) no\b(?! longer| more| less)"
    r"|hears|heard|tells|told|knows|knew|wishes|says|said)\b",
    re.IGNORECASE,
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page in a language; "" is none."""
    return [text for written, text in FENCE.findall(page.read_text(encoding="utf-8")) if written == language]


def inline(page: Path) -> list[str]:
    """The inline code of a page, outside its code blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """The arguments of every command of `program` in a page's shell blocks and inline code."""
    lines = [line for language in ("bash", "") for block in blocks(page, language) for line in block.splitlines()]
    for line in [*lines, *inline(page)]:
        if re.match(rf"(\S*/)?{program} ", line):
            yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for name, *arguments in commands(page, "agentjet"):
        if name in ("--help", "--version"):
            continue
        assert name in group.commands, f"agentjet {name}"
        if arguments and "--help" not in arguments:  # a name alone may be just that
            group.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target, *_ in commands(page, "make"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_nothing_installs_the_other_project_of_this_name() -> None:
    """`agentjet` on PyPI is not this project: its extras do not exist."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"] == "agentjet-swarm"
    files = [*PAGES, *SOURCE.rglob("*.py"), *(path for path in (ROOT / "examples").rglob("*.y*ml"))]
    past = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md"}
    wrong = re.compile(r"install (?:-\S+ )*['\"]?agentjet\b")
    found = [path for path in files if path not in past and wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_ci_runs_what_the_readme_says() -> None:
    assert ["test"] in list(commands(README, "make"))
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    made = [line for line in lines if line.startswith("make ")]
    assert made[0] == "make test", "nothing else is installed before it"


def is_checked(module: str, page: Path) -> bool:
    """True unless the module is a framework of a page whose blocks `make conformance` runs."""
    return page.name != "frameworks.md" or importlib.util.find_spec(module.partition(".")[0]) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_snippets_are_true(page: Path) -> None:
    for snippet in blocks(page, "python"):
        tree = ast.parse(snippet, str(page))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom) and is_checked(node.module or "", page):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Call):
                check_call(node)


def check_call(node: ast.Call) -> None:
    """Checks a method call on `swarm` or `episode`: the method exists and takes these arguments."""
    kinds: dict[str, type] = {"swarm": Swarm, "episode": Episode}
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        kind = kinds.get(node.func.value.id)
        if kind is not None:
            method = getattr(kind, node.func.attr)
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(method).bind(None, *node.args, **keywords)


def test_settings_page_is_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page.startswith("# Settings\n")
    assert page.endswith(settings_table()), "run `make docs`"


def test_recipes_page_is_current() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page.endswith(recipes_reference()), "run `make docs`"
    assert [row for row in registry.FIRST.items() if f"| `{row[0]}` | {row[1][0]} | {row[1][1]} |" not in page] == []
    for name in registry.built_in():
        recipe = registry.find(name)
        assert recipe.model_fields["name"].default == name
        assert [
            word for word in ("Source:", "Confidence:", "Use:", "Cost:") if word not in (recipe.__doc__ or "")
        ] == []
        assert [one for one, _, _, meaning in parameters(recipe) if not meaning] == [], name


def test_every_setting_has_a_meaning() -> None:
    for prefix, section in sections():
        assert section.__doc__, prefix
        assert [name for name, field in settings(section) if not field.description] == [], prefix


def test_folders_that_commands_write_to_are_ignored() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    named = {name for page in PAGES for name in re.findall(r"--out[ =]([\w$./-]+)", page.read_text(encoding="utf-8"))}
    tops = {f"/{name.split('/')[0]}/" for name in named if not name.startswith(("/", "$"))}
    assert len(tops) > 5
    assert [top for top in sorted(tops) if not any(fnmatch(top, pattern) for pattern in ignored)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_named_in_prose_exist(page: Path) -> None:
    known = {*setting_names(), *recipe_parameters(), *(name for name, _ in sections())}
    tops = {name.split(".")[0] for name in known}
    named = [code for code in inline(page) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", code) and code.split(".")[0] in tops]
    assert [name for name in named if name not in {*known, "job.toml"}] == []


def test_every_metric_of_a_step_is_explained() -> None:
    kinds = "reward|code|agent|episodes?|rollout|completion|batch|groups|forest|policy|optim|weights|time|perf"
    kinds += "|learner|sampler|server"
    literal = re.compile(rf'"((?:{kinds})/[\w/{{}}.-]*[\w}}])"')
    packages = [SOURCE / name for name in ("recipes", "swarm", "front", "server", "compute")]
    sources = [path.read_text(encoding="utf-8") for package in packages for path in package.rglob("*.py")]
    named = {re.sub(r"{[^}]*}", "*", name) for text in sources for name in literal.findall(text)}
    table = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split("## What a step reports")[1]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    explained = {re.sub("[A-Z][A-Z_]+", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(named) > 25 and named - explained - {"forest/*"} == set()


def test_every_metric_of_prometheus_is_explained() -> None:
    named = re.findall(r'family\("(\w+)"', (SOURCE / "server" / "monitoring.py").read_text(encoding="utf-8"))
    table = (
        (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").split("## Prometheus")[1].partition("\n## ")[0]
    )
    explained = re.findall(r"^\| `agentjet_(\w+)` \|", table, re.MULTILINE)
    assert len(named) > 10 and sorted(named) == sorted(explained)


def test_the_settings_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    [text] = blocks(README, "toml")
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "job.toml").job.recipe.drop_zero_variance


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_table_of_packages_is_the_enforced_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = page.split("## Packages")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ?([^|]*?) ?\|$", text, re.MULTILINE))
    assert rows.pop("cli") == "everything"
    enforced = {name: set(rules.ours) for name, rules in PACKAGES.items() if name != "__init__"}
    written = {name: set(filter(None, imports.split(", "))) for name, imports in rows.items()}
    assert written == enforced


def test_tree_in_the_readme_is_the_tree() -> None:
    [tree] = [block for block in blocks(README, "") if block.startswith("src/agentjet/")]
    packages = {
        name.rstrip("/") for line in re.findall(r"^  (\S+(?: \S+)*)", tree, re.MULTILINE) for name in line.split()
    }
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages == {*folders, "page", *(path.name for path in SOURCE.glob("[!_]*.py"))}
    assert [name for name in re.findall(r"^(\w+)/", tree, re.MULTILINE) if not (ROOT / name).is_dir()] == []


def test_numbers_in_the_readme_are_those_of_their_pages() -> None:
    text, models = README.read_text(encoding="utf-8"), (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    classes = re.findall(r"^\| \w+ \| `\w+For\w+` \|", models, re.MULTILINE)
    assert f"{len(classes)} architectures as tiny random models" in text
    assert f"| {len(registry.built_in())} recipes, in nine families" in text and len(registry.CHAPTERS) == 9
    equal = [name for name in registry.built_in() if confidence(registry.find(name)) == "equal to"]
    assert f"{len(equal)} equal a release or commit" in text


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring or page. Code becomes `x`; table cells and list items are separate sentences."""
    text = re.sub(r"`[^`]*`", "`x`", FENCE.sub("", text))
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*|]\s|\|", text):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split())):
            yield sentence.strip(" *>-")


def banned(text: str) -> list[str]:
    """The sentences with a banned opening or word."""
    return [sentence for sentence in sentences(text) if OPENINGS.match(sentence) or WORDS.search(sentence)]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, also of fields and constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def test_docstrings_are_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in docstrings(path)
        for sentence in banned(text)
    ]
    assert not found, "\n".join(found)


def test_pages_are_in_plain_words() -> None:
    past = {ROOT / "CHANGELOG.md", ROOT / "docs" / "log.md"}
    found = [
        f"{page.relative_to(ROOT)}: {sentence}"
        for page in PAGES
        if page not in past
        for sentence in banned(page.read_text(encoding="utf-8"))
        if not sentence.startswith("#")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_banned"),
    [
        ("What the server knows.", True),
        ("Of both policies.", True),
        ("What is a lease?", False),
        ("The server tells the client.", True),
        ("A run is no episode.", True),
        ("There is no limit, and it is no longer checked.", False),
        ("Each has a key of its own.", True),
        ("Returns `What` and the number of calls.", False),
        ("Returns the reward.\n\n* Whether it is scored.", True),
    ],
)
def test_the_rule_of_plain_words(text: str, is_banned: bool) -> None:
    assert bool(banned(text)) == is_banned


@pytest.mark.parametrize("study", sorted(path.parent for path in (ROOT / "docs" / "studies").glob("*/study.sqlite")))
def test_reports_of_shipped_studies_are_those_of_their_journals(study: Path) -> None:
    log, more = StudyFolder(study).log(), {}
    if (study / NOTEBOOK).exists():  # A topic's study is one of a campaign.
        with Notebook(study, writer=False) as notebook:
            more = chapters(notebook)
    assert [problem for name in ("report.md", "facts.json") for problem in check(study / name, log, more)] == []


@pytest.mark.e2e
@pytest.mark.slow
def test_the_first_example_runs_as_printed(tmp_path: Path) -> None:
    """On a tiny model and with one step; `bench.readme` runs it in full."""
    model = make_model(tmp_path / "model")
    example = Example.read()
    for written, here in (
        ("--model smollm2-135m", f"--model {model} --set model.threads=1 --set model.dtype=float32"),
        ("steps=20", "steps=1"),
        ("[:50]", "[:4]"),
    ):
        example = example.changed(written, here)
    folder = tmp_path / "run"
    folder.mkdir()
    done = run(example, folder, port=free_port())
    assert "1 step in" in done.output and "64 episodes finished, 0 aborted" in done.output, done.output
    assert 0 <= done.success("before") <= 1 and 0 <= done.success("after") <= 1
    assert (folder / "my-model" / "config.json").exists()
