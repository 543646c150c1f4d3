"""Joins the modules that the first view imports into one file: a request for each takes a browser longer than its text.

In the joined file a module is a function that returns its exports, after the modules that it imports. The file under
the module's name exports the same objects, for views that are imported later. The forms of `import` and `export` that
the page and its libraries use are known; others are refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping

JOINED = "joined.js"
SOURCE = r'\s*from\s*"(\.{1,2}/[^"]+)";?'
IMPORT = re.compile(r"import\s*(?:(\w+)|\{([^}]*)\})" + SOURCE)
PASSED_ON = re.compile(r"export\s*\{([^}]*)\}" + SOURCE)
DECLARED = re.compile(r"^export (?=(?:async )?(?:function\*?|const|class) (\w+))", re.MULTILINE)
LISTED = re.compile(r"export\s*\{([^}]*)\};?")
UNKNOWN = re.compile(r"^(?:import|export)\b(?!\().*", re.MULTILINE)


def joined(modules: Mapping[str, bytes], entry: str, apart: Collection[str] = ()) -> dict[str, bytes]:
    """Returns the files that replace the module `entry` and all that it imports, except those `apart`, by name.

    Raises `ValueError` for an import or export of a form that is not known, and for modules that import each other.
    """
    exports: dict[str, dict[str, str]] = {}
    kept: dict[str, list[str]] = {entry: [], JOINED: []}
    """By new file, its imports of modules that stay apart."""
    functions: list[str] = []

    def add(name: str, path: str) -> str:
        """Adds what module `name` imports as `path`. Returns the object with its exports."""
        found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        if found not in exports:
            exports[found] = {}
            text, exports[found] = rewritten(found)
            returned = ", ".join(f"{outer}: {inner}" for outer, inner in exports[found].items())
            functions.append(f"const {object_of(found)} = (() => {{{text}\nreturn {{ {returned} }};\n}})();\n")
        elif not exports[found]:
            raise ValueError(f"{found} and {name} import each other")
        return object_of(found)

    def rewritten(name: str) -> tuple[str, dict[str, str]]:
        """Returns a module without imports and exports, and what it exports: the expressions by their names."""
        names: dict[str, str] = {}

        def imported(found: re.Match[str]) -> str:
            default, listed, path = found.groups()
            if posixpath.basename(path) in apart:
                kept[entry if name == entry else JOINED].append(
                    f'import {{ {listed} }} from "./{posixpath.basename(path)}";'
                )
                return ""
            wanted = f"default: {default}" if default else listed.replace(" as ", ": ")
            return f"const {{ {wanted} }} = {add(name, path)};"

        def passed_on(found: re.Match[str]) -> str:
            module = add(name, found[2])
            names.update({outer: f"{module}.{inner}" for inner, outer in pairs(found[1])})
            return ""

        def declared(found: re.Match[str]) -> str:
            names[found[1]] = found[1]
            return ""

        def listed(found: re.Match[str]) -> str:
            names.update({outer: inner for inner, outer in pairs(found[1])})
            return ""

        text = modules[name].decode()
        for form, use in ((IMPORT, imported), (PASSED_ON, passed_on), (DECLARED, declared), (LISTED, listed)):
            text = form.sub(use, text)
        if "export default " in text:
            text, names["default"] = text.replace("export default ", "const $default = ", 1), "$default"
        if found := UNKNOWN.search(text):
            raise ValueError(f"{name}: {found[0]}: this form of import or export is not known")
        return text, names

    text, _ = rewritten(entry)
    objects = ", ".join(map(object_of, exports))
    files = {name: forwarding(name, names) for name, names in exports.items()}
    files[entry] = f'{"".join(kept[entry])}import {{ {objects} }} from "./{JOINED}";{text}'
    files[JOINED] = f"{''.join(kept[JOINED])}\n{''.join(functions)}export {{ {objects} }};\n"
    return {name: content.encode() for name, content in files.items()}


def object_of(name: str) -> str:
    """The name of the object with a module's exports."""
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def pairs(listed: str) -> Iterator[tuple[str, str]]:
    """Yields the names of a list such as `a, b as c`: inside the module and outside of it."""
    for one in filter(None, map(str.strip, listed.split(","))):
        inner, _, outer = one.partition(" as ")
        yield inner, outer or inner


def forwarding(name: str, names: Mapping[str, str]) -> str:
    """The text of a module that exports what the joined file has of it."""
    module, up = object_of(name), "../" * name.count("/") or "./"
    named = ", ".join(one for one in names if one != "default")
    default = f"export default {module}.default;\n" if "default" in names else ""
    return f'import {{ {module} }} from "{up}{JOINED}";\nexport const {{ {named} }} = {module};\n{default}'
