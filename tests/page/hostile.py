"""Hostile strings for every field that a model, an agent or a user fills, and a run that has them everywhere.

Each string that contains code calls `pwned()` if a browser runs it. `packed` joins as many as a name may have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentjet.protocol import AbortRequest, BeginRequest, EvaluationRequest, FinishRequest
from agentjet.swarm.state import EpisodeRecord
from agentjet.types import Mode
from tests.fakes import saying
from tests.page.chromium import Site, served_site
from tests.tiny import make_model_info

CALL = "pwned()"
ELEMENTS = (
    "img src=x", "svg", "body", "details open", "input autofocus", "video src=x", "audio src=x", "iframe src=x",
    "object data=x", "marquee", "select autofocus", "textarea autofocus", "a href=x", "math", "form action=x",
    "button autofocus", "style", "link rel=stylesheet href=x", "embed src=x", "template",
)  # fmt: skip
HANDLERS = (
    "onerror", "onload", "onfocus", "ontoggle", "onstart", "onmouseover", "onanimationstart", "onpointerenter",
    "onbeforetoggle", "oncontentvisibilityautostatechange", "onscrollsnapchange", "onwheel",
)  # fmt: skip
MARKUP = [f"<{element} {handler}={CALL}>" for element in ELEMENTS for handler in HANDLERS]
DIRECT = [
    f"<script>{CALL}</script>",
    f"<script src=data:,{CALL}></script>",
    f"</script><script>{CALL}</script>",
    f"<iframe srcdoc='<script>parent.{CALL}</script>'>",
    f"<a href=javascript:{CALL}>x</a>",
    f"javascript:{CALL}",
    f"data:text/html,<script>{CALL}</script>",
    f"<svg><script>{CALL}</script></svg>",
    f"<svg><animate onbegin={CALL} attributeName=x></svg>",
    f"<svg><set onbegin={CALL}></svg>",
    f"<svg><foreignObject><iframe onload={CALL}>",
    f"<math><mtext><table><mglyph><style><!--</style><img title='--><img src=x onerror={CALL}>'>",
    f"<noscript><p title='</noscript><img src=x onerror={CALL}>'>",
    f"<template><script>{CALL}</script></template>",
    f"<style>@import 'data:text/css,*{{x:y}}'</style><img src=x onerror={CALL}>",
    "<style>*{display:none}</style>",
    "<link rel=stylesheet href=//evil.invalid/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.invalid'>",
    "<base href=//evil.invalid/>",
    "<form action=//evil.invalid><button>x</button></form>",
    "![x](//evil.invalid/x.png)",
    "[x](javascript:pwned())",
    "<img src=//evil.invalid/x.png>",
    f'"><img src=x onerror={CALL}>',
    f"'><img src=x onerror={CALL}>",
    f"`><img src=x onerror={CALL}>",
    f"--><img src=x onerror={CALL}>",
    f"]]><img src=x onerror={CALL}>",
    f"</textarea><img src=x onerror={CALL}>",
    f"</title><script>{CALL}</script>",
    f"${{{CALL}}}",
    f"{{{{constructor.constructor('{CALL}')()}}}}",
    f"#{{{CALL}}}",
    f"<%= {CALL} %>",
    f"{{@html {CALL}}}",
    f"__proto__[x]={CALL}",
    "constructor.prototype.x",
    "__proto__",
    "toString",
    "hasOwnProperty",
    f"'-{CALL}-'",
    f"\\x3cscript\\x3e{CALL}\\x3c/script\\x3e",
    f"&lt;script&gt;{CALL}&lt;/script&gt;",
    f"&#60;img src=x onerror={CALL}&#62;",
    f"<scr<script>ipt>{CALL}</script>",
    f"<IMG SRC=x OnErRoR={CALL}>",
    f"<img/src=x/onerror={CALL}>",
    f"<img\tsrc=x\nonerror={CALL}>",
    "expression(pwned())",
    "url(javascript:pwned())",
    "\u202eevil\u202c",
    "\u2066\u2067\u2068x\u2069",
    "a\u200bb\u200cc\u200dd\ufeff",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x07\x08\x7f",
    "a\u0000b",
    "\r\nSet-Cookie: x=y",
    "\u2028\u2029",
    "مرحبا <b>بالعالم</b>",
    "שלום <i>עולם</i>",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "Z̴̡̢a̵l̶g̷o̸",
    "𝕦𝕟𝕚𝕔𝕠𝕕𝕖",
    "../../etc/passwd",
    "#/episodes?status=aborted",
    "?x=1&y=<b>",
    "%3Cscript%3E",
    "' OR 1=1 --",
    '=HYPERLINK("//evil.invalid")',
]
STRINGS = [*DIRECT, *MARKUP]
MAX_NAME = 128


def packed(size: int = MAX_NAME) -> list[str]:
    """Returns all strings, joined into texts of at most `size` characters."""
    found = [""]
    for one in STRINGS:
        if len(found[-1]) + len(one) + 1 > size:
            found.append("")
        found[-1] += one + " "
    return [text.strip() for text in found]


def everything() -> str:
    """All strings in one text."""
    return "\n".join(STRINGS)


def conversation(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns messages and tools with the text in every field."""
    called = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": json.dumps({text: text})}}
    messages = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call-1", "content": text},
        {"role": "user", "content": text},
    ]
    tool = {"name": "look", "description": text, "parameters": {"type": "object", "properties": {}, "title": text}}
    return messages, [{"type": "function", "function": tool}]


def few() -> list[str]:
    """Three names: markup, text in both directions, and characters of several scripts."""
    return [next(name for name in packed() if part in name) for part in ("<script>", "\u202e", "👩")]


@contextmanager
def hostile_site(data_dir: Path, names: Sequence[str]) -> Iterator[Site]:
    """A run with each name in a group of its first batch, then a long, a failed and a live episode."""
    card = replace(make_model_info(data_dir.parent / "qwen", "qwen3", tool_format="hermes"), context_length=500_000)
    job = {"batch_size": len(names), "group_size": 2, "max_tokens": 50_000}
    script = saying(lambda prompt: everything() if STRINGS[50] in prompt else STRINGS[0])
    with served_site(data_dir, script, batches=0, card=card, job=job) as site:
        site.do(fill(site, names))
        yield site


async def fill(site: Site, names: Sequence[str]) -> None:
    """Learns one batch, then leaves an episode with all strings, a failed one for each name, and a live one."""
    for name in names:
        for member in range(2):
            begun = await begin(site, name)
            await site.run.say(begun.id, role=name)
            await site.run.gateway.finish(begun.id, FinishRequest(reward=float(member), metrics={name: 1.0}))
        score = EvaluationRequest(
            policy_version=0, score=0.5, num_tasks=1, num_episodes=1, client_id=name, name=name, held_out=False
        )
        await site.run.gateway.versions.record_evaluation(score)
    await site.run.until(lambda: site.run.gateway.swarm.policy_version == 1)
    long = await begin(site, names[0], "eval")
    await converse(site, long, names[0])
    await site.run.gateway.finish(
        long.id, FinishRequest(reward=0.5, by_role=dict.fromkeys(names[:50], 0.5), text=everything()[:10_000])
    )
    for name in names:
        failed = await begin(site, name, "eval")
        await site.run.gateway.abort(failed.id, AbortRequest(reason=f"{name}\n{everything()[:1000]}"))
    await site.run.gateway.abort((await begin(site, names[0])).id, AbortRequest(reason=everything()[:1000]))
    await begin(site, names[1])


async def begin(site: Site, name: str, mode: Mode = "train") -> EpisodeRecord:
    """Begins an episode with the name in every field."""
    fields = dict.fromkeys(("task_id", "task_set", "group", "client_id", "instance_id", "code_version"), name)
    return await site.run.gateway.begin(BeginRequest.model_validate({**fields, "mode": mode, "wait": 5}))


async def converse(site: Site, episode: EpisodeRecord, role: str) -> None:
    """Makes a call with all strings in every field of its messages and tools, as an agent does."""
    messages, tools = conversation(everything())
    headers = {"Authorization": f"Bearer {site.served.keys.sign(episode.id, episode.begun)}"}
    body = {"model": f"policy@{role}", "messages": messages, "tools": tools}
    said = await site.served.http.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert said.status_code == 200, said.text
