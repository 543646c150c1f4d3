"""The size and the shape of the tree: `python -m tools.shape`.

Prints a table of packages, then one JSON object as the last line. With `--check` it fails if a figure is worse than in
`tools/shape.json`, where the figures of the present commit stand; `--write` writes them. A commit that adds a feature
may raise a figure there, and says why in its message.

* `src_lines`, `test_lines`, `bench_lines`: lines of Python files. `modules`: files of `src/agentjet`; `small_modules`:
  those below 120 lines.
* `single_importer`: modules that exactly one other module imports. Modules that a registry or a table of commands
  imports (`REGISTRIES`) do not count.
* `forwards`: methods whose body only passes their own arguments to an attribute's method, or returns its attribute.
* `same_names`: pairs of public classes with one name.
* `comments`: comments per 100 lines of code. A docstring is neither.
* `call_files`, `call_types`: files and value types of a completion in the server's process, which
  `tests/e2e/test_call_path.py` traces and bounds.
* `pages`: pages of `docs/` that a person wrote.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "agentjet"
CALL_PATH = ROOT / "tests" / "e2e" / "test_call_path.py"
RECORD = Path(__file__).with_suffix(".json")
SMALL = 120
REGISTRIES = {"agentjet.cli.main", "agentjet.recipes.registry", "agentjet.front.dialects"}
"""Modules whose imports are a table: commands, recipes, dialects."""
GENERATED_PAGES = {"settings.md", "compatibility.md"}
MORE_IS_BETTER = {"comments", "coverage"}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @property
    def name(self) -> str:
        parts = self.path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return self.path.relative_to(SOURCE).parts[0].removesuffix(".py")

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def imports(self, names: set[str]) -> set[str]:
        """Names of the modules that this one imports, of those in `names`."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in names else node.module)
        return found & names - {self.name}

    def forwards(self) -> list[str]:
        """Names of the methods that only forward."""
        methods = (
            (kind.name, node)
            for kind in self.classes
            for node in kind.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__"
        )
        return [f"{kind}.{method.name}" for kind, method in methods if only_forwards(method)]

    def num_comments(self) -> int:
        return sum(token.type == tokenize.COMMENT for token in self._tokens())

    def num_code_lines(self) -> int:
        """Lines with code on them: no blank lines, comments or docstrings."""
        lines: set[int] = set()
        for token in self._tokens():
            if token.type not in LAYOUT | {tokenize.COMMENT}:
                lines |= set(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(lines)

    def _tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(iter(self.text.splitlines(keepends=True)).__next__)


def only_forwards(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the body is one expression `self.x.y` or `self.x.y(...)` with the method's own parameters in order."""
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or body[0].value is None:
        return False
    value = body[0].value.value if isinstance(body[0].value, ast.Await) else body[0].value
    if isinstance(value, ast.Call):
        named = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
        own = [argument.arg for argument in named if argument.arg not in ("self", "cls")]
        given = [ast.unparse(argument) for argument in [*value.args, *(word.value for word in value.keywords)]]
        if given != own:
            return False
        value = value.func
    return isinstance(value, ast.Attribute) and isinstance(value.value, ast.Attribute) and rooted_in_self(value.value)


def rooted_in_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def single_importer(modules: Iterable[Module]) -> list[str]:
    """Names of the modules with one importer."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for imported in module.imports(names):
            importers[imported].add(module.name)
    packages = {module.name for module in modules if module.path.name == "__init__.py"}
    return sorted(name for name in names - packages if len(importers[name]) == 1 and not importers[name] <= REGISTRIES)


def same_names(modules: Iterable[Module]) -> list[str]:
    """Pairs of public classes with one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for kind in module.tree.body:
            if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_"):
                places[kind.name].append(module.name)
    return [f"{name}: {a} {b}" for name, where in places.items() for a, b in itertools.combinations(where, 2)]


def num_lines(folder: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / folder).rglob("*.py"))


def source_modules() -> list[Module]:
    return [Module(path) for path in sorted(SOURCE.rglob("*.py"))]


def traced() -> dict[str, float]:
    """The bounds of the traced path of a completion."""
    text = CALL_PATH.read_text(encoding="utf-8")
    return {name.lower(): float(value) for name, value in re.findall(r"^(CALL_\w+) = (\d+)$", text, re.MULTILINE)}


def figures(modules: list[Module]) -> dict[str, float]:
    """The figures by key."""
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED_PAGES]
    code = sum(module.num_code_lines() for module in modules)
    return {
        "src_lines": sum(module.num_lines for module in modules),
        "modules": len(modules),
        "small_modules": sum(module.num_lines < SMALL for module in modules),
        "single_importer": len(single_importer(modules)),
        "forwards": sum(len(module.forwards()) for module in modules),
        "same_names": len(same_names(modules)),
        "test_lines": num_lines("tests"),
        "bench_lines": num_lines("bench"),
        **traced(),
        "pages": len(pages),
        "comments": round(100 * sum(module.num_comments() for module in modules) / code, 1),
    }


def worse(now: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """A sentence about each figure that is worse than the recorded one."""
    sign = {key: -1 if key in MORE_IS_BETTER else 1 for key in now}
    return [
        f"{key} is {value:g}, and {RECORD.name} allows {recorded[key]:g}: undo it, or run "
        "`python -m tools.shape --write` and say in the commit why it had to be"
        for key, value in now.items()
        if key in recorded and sign[key] * value > sign[key] * recorded[key]
    ]


def print_table(modules: list[Module]) -> None:
    lines, files = Counter[str](), Counter[str]()
    for module in modules:
        lines[module.package] += module.num_lines
        files[module.package] += 1
    print(f"{'package':12} {'lines':>7} {'files':>6}")
    for package, count in lines.most_common():
        print(f"{package:12} {count:7} {files[package]:6}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures about the size and the shape of the tree.")
    parser.add_argument("--check", action="store_true", help="fail if a figure is worse than the recorded one")
    parser.add_argument("--write", action="store_true", help="record the present figures")
    parser.add_argument("--list", action="store_true", help="name what single_importer, forwards and same_names count")
    options = parser.parse_args()
    modules = source_modules()
    now = figures(modules)
    recorded: dict[str, float] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.write:
        RECORD.write_text(json.dumps(recorded | now, indent=2) + "\n")
    if options.check:
        sys.exit("\n".join(worse(now, recorded)) or 0)
    print_table(modules)
    if options.list:
        forwards = [f"{module.name}: {name}" for module in modules for name in module.forwards()]
        for title, items in zip(
            ("single importer", "forwards", "same names"),
            (single_importer(modules), forwards, same_names(modules)),
            strict=True,
        ):
            print(f"\n{title}", *items, sep="\n  ")
    print(json.dumps(now))


if __name__ == "__main__":
    main()
