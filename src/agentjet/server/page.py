"""The page: `/` and its files below `/ui/`, with the headers that confine it.

The files are read once, at the start. The style sheets become one file. The index names the modules of the first view,
so a browser requests them at once and not level by level. The URLs contain a digest of all files, so browsers keep them
until an upgrade; `/` itself is always validated. The page needs no token: it contains no data of a run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fastapi import APIRouter, Request
from starlette.responses import Response

import agentjet
from agentjet.errors import NotFound
from agentjet.front.http import PROBLEM
from agentjet.protocol import EpisodeFilters, EpisodeQuery

FOLDER = Path(agentjet.__file__).parent / "page"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
FILTERS = "filters.js"
"""A module that is made from the API."""
ENTRY = "app.js"
"""The module that imports those of the first view. The other views are loaded when they open."""
COMMENT = re.compile(rb"^[ \t]*//.*", re.MULTILINE)
IMPORT = re.compile(r'\b(?:from|import) ?"(\.[^"]+)"')


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, plain and compressed."""

    media_type: str
    content: bytes
    compressed: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> PageFile:
        return cls(MEDIA_TYPES[Path(name).suffix], content, gzip.compress(content, 9, mtime=0))

    def response(self, request: Request, headers: Mapping[str, str]) -> Response:
        """Returns the file, compressed if the client accepts it."""
        given = {**SECURITY_HEADERS, **headers, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return Response(self.compressed, headers={**given, "Content-Encoding": "gzip"}, media_type=self.media_type)
        return Response(self.content, headers=given, media_type=self.media_type)


def episode_filters() -> list[dict[str, Any]]:
    """Returns name and label of each filter of the episodes, with `number`, and `options` if it has some."""
    hints = get_type_hints(EpisodeFilters)
    found = []
    for name, one in EpisodeQuery.filters().items():
        kinds = {*get_args(hints[name])} - {type(None)} or {hints[name]}
        options = [option for kind in get_args(hints[name]) for option in get_args(kind)]
        found.append(
            {"name": name, "title": one.title, "number": not kinds.isdisjoint({int, float}), "options": options or None}
        )
    return found


def imported(modules: Mapping[str, bytes], entry: str) -> list[str]:
    """Returns the modules that `entry` imports, directly or through others."""
    names = [entry]
    for name in names:  # It grows meanwhile.
        paths = (posixpath.join(posixpath.dirname(name), path) for path in IMPORT.findall(modules[name].decode()))
        names += [path for path in dict.fromkeys(map(posixpath.normpath, paths)) if path not in names]
    return names[1:]


def style_order(name: str) -> tuple[bool, bool, str]:
    """Sort key of the style sheets: libraries, then colours and type, then the rest."""
    return not name.startswith("vendor/"), name != "style/base.css", name


class Page:
    """The files of the page, by their path below `/ui/DIGEST/`."""

    def __init__(self, folder: Path = FOLDER) -> None:
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in MEDIA_TYPES
        }
        found[FILTERS] = f"export const EPISODE_FILTERS = {json.dumps(episode_filters())};\n".encode()
        # Lines keep their numbers without their comments, which are a tenth of what a browser loads.
        found = {name: COMMENT.sub(b"", content) for name, content in found.items()}
        sheets = [found.pop(name) for name in sorted(found, key=style_order) if name.endswith(".css")]
        found["style.css"] = b"".join(sheets)
        index = found.pop("index.html").decode()
        parts = [part for name, content in found.items() for part in (name.encode(), content)]
        self.digest = hashlib.sha256(b"\0".join([index.encode(), *parts])).hexdigest()[:16]
        self.files = {name: PageFile.of(name, content) for name, content in found.items()}
        links = "".join(f'<link rel="modulepreload" href="ui/{name}">\n' for name in imported(found, ENTRY))
        index = index.replace("</head>", f"{links}</head>").replace('"ui/', f'"ui/{self.digest}/')
        self.index = PageFile.of("index.html", index.encode())


page = Page()
router = APIRouter(tags=["page"], include_in_schema=False)


@router.get("/")
async def get_page(request: Request) -> Response:
    """The page."""
    tag = f'"{page.digest}"'
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers={**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"})
    return page.index.response(request, {"ETag": tag, "Cache-Control": "no-cache"})


@router.get("/ui/{digest}/{name:path}", responses={404: PROBLEM})
async def get_page_file(digest: str, name: str, request: Request) -> Response:
    """A file of the page."""
    file = page.files.get(name)
    if file is None or digest != page.digest:
        raise NotFound("The page was changed by an upgrade of the server: reload it.", code="page_file_not_found")
    return file.response(request, {"Cache-Control": "public, max-age=31536000, immutable"})
