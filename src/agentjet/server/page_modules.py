"""Joins the modules of the first view into one file, and each later view with its own parts into another.

A request for each module takes a browser longer than its text. In a joined file a module is a function that returns its
exports, after the modules that it imports. The file under the module's name exports the same objects. The forms of
`import` and `export` that the page and its libraries use are known; others are refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

JOINED = "joined.js"
SOURCE = r'\s*from\s*"(\.{1,2}/[^"]+)";?'
IMPORT = re.compile(r"import\s*(?:(\w+)|\{([^}]*)\})" + SOURCE)
PASSED_ON = re.compile(r"export\s*\{([^}]*)\}" + SOURCE)
DECLARED = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)
LISTED = re.compile(r"export\s*\{([^}]*)\};?")
UNKNOWN = re.compile(r"^(?:import|export)\b(?!\().*", re.MULTILINE)


def joined(
    modules: Mapping[str, bytes], entry: str, later: Collection[str] = (), apart: Collection[str] = ()
) -> dict[str, bytes]:
    """Returns the files that replace the module `entry`, all that it imports, and the modules `later`, by name.

    Each of `later` becomes one file: if it was not loaded, another address of it loads all its parts again. The
    modules `apart` stay. Raises `ValueError` for an import or export of a form that is not known, and for modules that
    import each other.
    """
    first = Bundle(modules, apart, {})
    text, _ = first.rewritten(entry)
    objects = ", ".join(map(object_of, first.exports))
    files = {
        name: f"{shared_import(name, [object_of(name)])}{exported(name, of)}" for name, of in first.exports.items()
    }
    entry_imports = first.kept.pop(entry, [])
    files[entry] = f'{apart_imports(entry, entry_imports)}import {{ {objects} }} from "./{JOINED}";{text}'
    kept = [one for imports in first.kept.values() for one in imports]
    files[JOINED] = f"{apart_imports(JOINED, kept)}\n{''.join(first.functions)}export {{ {objects} }};\n"
    for name in later:
        if name not in first.exports:
            view = Bundle(modules, apart, first.exports)
            view.add("", name)
            kept = [one for imports in view.kept.values() for one in imports]
            head = f"{apart_imports(name, kept)}{shared_import(name, view.shared)}"
            files[name] = f"{head}{''.join(view.functions)}{exported(name, view.exports[name])}"
    return {name: content.encode() for name, content in files.items()}


class Bundle:
    """Modules that become functions of one file."""

    def __init__(
        self, modules: Mapping[str, bytes], apart: Collection[str], shared: Mapping[str, Mapping[str, str]]
    ) -> None:
        """`shared` has the exports of the modules in `JOINED`, which this file imports from there."""
        self.exports: dict[str, dict[str, str]] = {}
        """By module, what it exports: the expressions by their names."""
        self.functions: list[str] = []
        self.shared: dict[str, None] = {}
        """The objects that are imported from `JOINED`."""
        self.kept: dict[str, list[tuple[str, str]]] = {}
        """By module, its imports of modules that stay apart: the list of names, and the file."""
        self._modules, self._apart, self._elsewhere = modules, apart, shared

    def add(self, name: str, path: str) -> str:
        """Adds what module `name` imports as `path`. Returns the object with its exports.

        Raises `ValueError` for modules that import each other.
        """
        found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if found in self._elsewhere:
            self.shared[object_of(found)] = None
        elif found not in self.exports:
            self.exports[found] = {}
            text, self.exports[found] = self.rewritten(found)
            returned = ", ".join(f"{outer}: {inner}" for outer, inner in self.exports[found].items())
            self.functions.append(f"const {object_of(found)} = (() => {{{text}\nreturn {{ {returned} }};\n}})();\n")
        elif not self.exports[found]:
            raise ValueError(f"{found} and {name} import each other")
        return object_of(found)

    def rewritten(self, name: str) -> tuple[str, dict[str, str]]:
        """Returns a module without imports and exports, and what it exports.

        Raises `ValueError` for an import or export of a form that is not known.
        """
        names: dict[str, str] = {}

        def imported(found: re.Match[str]) -> str:
            default, listed, path = found.groups()
            if posixpath.basename(path) in self._apart:
                self.kept.setdefault(name, []).append((listed, posixpath.basename(path)))
                return ""
            wanted = f"default: {default}" if default else listed.replace(" as ", ": ")
            return f"const {{ {wanted} }} = {self.add(name, path)};"

        def passed_on(found: re.Match[str]) -> str:
            module = self.add(name, found[2])
            names.update({outer: f"{module}.{inner}" for inner, outer in pairs(found[1])})
            return ""

        def declared(found: re.Match[str]) -> str:
            names[found[1]] = found[1]
            return ""

        def listed(found: re.Match[str]) -> str:
            names.update({outer: inner for inner, outer in pairs(found[1])})
            return ""

        text = self._modules[name].decode()
        for form, use in ((IMPORT, imported), (PASSED_ON, passed_on), (DECLARED, declared), (LISTED, listed)):
            text = form.sub(use, text)
        if "export default " in text:
            text, names["default"] = text.replace("export default ", "const $default = ", 1), "$default"
        if found := UNKNOWN.search(text):
            raise ValueError(f"{name}: {found[0]}: this form of import or export is not known")
        return text, names


def object_of(name: str) -> str:
    """The name of the object with a module's exports."""
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def pairs(listed: str) -> Iterator[tuple[str, str]]:
    """Yields the names of a list such as `a, b as c`: inside the module and outside of it."""
    for one in filter(None, map(str.strip, listed.split(","))):
        inner, _, outer = one.partition(" as ")
        yield inner, outer or inner


def root_of(name: str) -> str:
    """The path from a file to the folder of all files."""
    return "../" * name.count("/") or "./"


def apart_imports(name: str, imports: Iterable[tuple[str, str]]) -> str:
    """The imports of file `name` from modules that stay apart."""
    return "".join(f'import {{ {listed} }} from "{root_of(name)}{file}";' for listed, file in imports)


def shared_import(name: str, objects: Collection[str]) -> str:
    """The import of file `name` from the joined file."""
    return f'import {{ {", ".join(objects)} }} from "{root_of(name)}{JOINED}";\n' if objects else ""


def exported(name: str, names: Mapping[str, str]) -> str:
    """The exports of a module whose object the file has."""
    module = object_of(name)
    named = ", ".join(one for one in names if one != "default")
    default = f"export default {module}.default;\n" if "default" in names else ""
    return f"export const {{ {named} }} = {module};\n{default}"
