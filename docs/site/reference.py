"""Pages of the site that are made from the program: its routes and its commands."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import click
import typer
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from typer.cli import get_docs_for_click

from agentjet.cli.main import app as commands
from agentjet.config import load_config
from agentjet.front import http
from agentjet.front.keys import Keys
from agentjet.server import access
from agentjet.server.app import create_app
from agentjet.server.runs import Runs

TOKENS = {
    id(guard): opens
    for [guard], opens in (
        (access.VIEWER, "any token of the run"),
        (access.CLIENT, "the client token or the admin token"),
        (access.ADMIN, "the admin token"),
        (access.SERVER_ADMIN, "the admin token of the default run"),
        (access.EPISODE, "the client token, the admin token, or the key of the episode"),
        (access.EPISODE_READER, "any token of the run, or the key of the episode"),
        (
            access.EPISODE_SCORER,
            "the client token, the admin token, or the key of the episode if `server.episode_may_finish`",
        ),
        (http.EPISODE_KEY, "the key of an episode"),
        (access.SMALL_BODY, "none"),
    )
}
"""Tokens by the guard that asks for them."""


def commands_page() -> str:
    """Returns the page of all commands, made by Typer."""
    group = typer.main.get_command(commands)
    text = get_docs_for_click(obj=group, ctx=click.Context(group), name="agentjet")
    _, _, rest = text.partition("\n")
    return f"# Commands\n\nFor users of the command line: every command, as `--help` prints it.\n{rest}"


def http_page() -> str:
    """Returns the page of all routes, made from the OpenAPI document of a server."""
    app = asyncio.run(_app())
    document = app.openapi()
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    tokens = _tokens(app)
    lines = [
        "# HTTP",
        "",
        "For programs in any language: the routes of a server and their bodies, as in `GET /openapi.json`.",
        "Send a token as `Authorization: Bearer TOKEN`. Below `/runs/NAME`, each route is that of another run.",
        "",
        "A refusal is a `Problem` as `application/problem+json`, with a `code` for programs. The answers 429 and 503",
        "have `Retry-After`. See [any program as an agent](../docs/black-box.md) for examples.",
    ]
    for tag, operations in by_tag.items():
        lines += ["", f"## {tag.capitalize()}"]
        if tag == "inference":
            lines += [
                "",
                "[The dialects](../docs/dialects.md) lists the keys of these bodies. An episode key may also stand in",
            ]
            lines += ["the path, as `/k/KEY/v1/...` and `/k/KEY/inference/v1/generate`."]
        for method, path, operation in operations:
            if not path.startswith("/k/"):
                lines += ["", *_route(method, path, operation, tokens.get((method, path), "none"), tag != "inference")]
    shown = [one for tag, operations in by_tag.items() if tag != "inference" for *_, one in operations]
    schemas = document["components"]["schemas"]
    lines += ["", "## Bodies"]
    for name in sorted(_reachable(shown, schemas)):
        lines += ["", *_body(name, schemas[name])]
    return "\n".join(lines) + "\n"


async def _app() -> FastAPI:
    """Returns the application of a server that is never started."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(None, [f"server.data_dir={folder}"])
        runs = Runs(config, None)  # type: ignore[arg-type]
        app = create_app(runs, Keys({"client": "client", "admin": "admin"}))
        app.openapi()
        await runs.default.close()
    return app


def _tokens(app: FastAPI) -> dict[tuple[str, str], str]:
    found = {}
    for context in iter_route_contexts(app.routes):
        for guard in getattr(context.original_route, "dependencies", ()):
            if isinstance(guard.dependency, http.Guard):
                found |= {(method, context.path_format): TOKENS[id(guard)] for method in context.methods or ()}
    return found


def _route(method: str, path: str, operation: dict[str, Any], token: str, with_bodies: bool) -> Iterator[str]:
    yield f"### {method} {path}"
    yield ""
    yield _text(operation["description"], "\n")
    yield ""
    yield f"* Token: {token}."
    if with_bodies:
        content = operation.get("requestBody", {}).get("content", {})
        yield from (f"* Body: {_type(one['schema'])}." for one in content.values() if "schema" in one)
        answers = (value.get("content", {}) for code, value in operation["responses"].items() if code < "300")
        for kind, one in (pair for answer in answers for pair in answer.items()):
            yield f"* Answer: {_type(one['schema']) if one.get('schema') else f'`{kind}`'}."
    if parameters := operation.get("parameters"):
        yield from ("", "| parameter | in | type | default |", "|---|---|---|---|")
        for one in parameters:
            kind = f"{_type(one['schema'])}. {one.get('description', '')}".removesuffix(". ")
            yield _row(f"`{one['name']}`", one["in"], kind, _default(one))


def _body(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield _text(schema.get("description", ""), "\n")
    if properties := schema.get("properties"):
        yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
        needed = schema.get("required", ())
        for field, one in properties.items():
            yield _row(
                f"`{field}`", _type(one), _default({**one, "required": field in needed}), one.get("description", "")
            )


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default", schema.get("schema", {}).get("default"))
    return "needed" if schema.get("required") else "" if default in (None, "", [], {}) else f"`{default}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(_text(cell).replace('|', '&#124;') for cell in cells)} |"


def _text(text: str, joint: str = " ") -> str:
    return joint.join(line.strip() for line in text.strip().splitlines())


def _type(schema: dict[str, Any]) -> str:
    """Returns a phrase for a JSON schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        more = schema.get("additionalProperties")
        return f"object of {_type(more)}" if isinstance(more, dict) and more else "object"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema and abs(schema[key]) < 1e12
    ]
    kind = {"string": "text", "boolean": "true or false", None: "any"}.get(schema.get("type"), schema.get("type"))
    return " ".join([f"{kind}", ", ".join(bounds)]).strip()


def _reachable(value: Any, schemas: dict[str, Any]) -> set[str]:
    """Returns the names of the bodies that a part of the document refers to, and of those that these refer to."""
    found: set[str] = set()
    todo = set(re.findall(r"#/components/schemas/(\w+)", str(value)))
    while todo:
        found |= todo
        todo = {name for one in todo for name in re.findall(r"#/components/schemas/(\w+)", str(schemas[one]))} - found
    return found
