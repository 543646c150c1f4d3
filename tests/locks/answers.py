"""The questions to a run, and its recorded answers: how they are read, compared and written."""

from __future__ import annotations

import difflib
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tests.locks.data_dirs import RECORDED, Source

PRESENT = Path(__file__).parents[2] / "build" / "locks"
"""Folder of the present answers of a test that failed."""
MOST_SHOWN = 6
"""Answers whose differences are shown."""
MOST_LINES = 40
"""Lines of a difference that are shown."""
Answer = Any
"""JSON: the text of an answer, or its JSON."""
Answers = dict[str, Answer]
"""Answers by question."""

# ---- the moment and the machine --------------------------------------------------------------------------------------

VOLATILE = (
    (re.compile(r'("version": ?)"[^"]+"'), r'\1"VERSION"'),
    (re.compile(r"(?m)^(agentjet_(?:journal_bytes|state_seconds)(?:\{[^}]*\})?) .*"), r"\1 NOW"),
)
"""Of the release, of the file system, and of a clock that is not injected."""


def normalised(text: str, names: Mapping[str, str]) -> str:
    """`text` with names for its addresses and folders, and for the values of `VOLATILE`."""
    for known, name in names.items():
        text = text.replace(known, name)
    for pattern, name in VOLATILE:
        text = pattern.sub(name, text)
    return text


def answer_of(response: httpx.Response, source: Source) -> Answer:
    """The body of a response, in a dict with its status and type if these are not the usual ones."""
    kind, text = response.headers.get("content-type", ""), normalised(response.text, source.names)
    body = json.loads(text) if kind == "application/json" else text
    if response.status_code == 200 and kind == "application/json":
        return body
    return {"status": response.status_code, "type": kind, "body": body}


# ---- questions -------------------------------------------------------------------------------------------------------

QUERIES = (
    "",
    "limit=3",
    "limit=3&sort=oldest",
    "limit=3&sort=reward",
    "limit=3&sort=-reward",
    "limit=3&sort=-num_tokens",
    "limit=3&sort=-num_calls&count=true",
    "limit=1&count=true",
    "status=live&count=true",
    "status=finished&limit=4",
    "status=aborted&count=true&limit=8",
    "status=expired&count=true",
    "status=not_needed&count=true",
    "mode=train&limit=2&count=true",
    "mode=eval&count=true&limit=4",
    "task_set=math&limit=2&count=true",
    "task_set=&limit=2&count=true",
    "task=12%2B30&count=true&limit=4",
    "group=math/12%2B30&count=true&limit=4",
    "group=&count=true&limit=2",
    "group_id=3",
    "client=trainer-b&count=true&limit=2",
    "code_version=v2&count=true&limit=2",
    "code_version=&count=true&limit=2",
    "batch=0&count=true",
    "batch=2&sort=reward",
    "batch=99999&count=true",
    "min_version=2&count=true&limit=2&sort=oldest",
    "max_version=1&count=true&limit=2",
    "min_version=1&max_version=2&count=true&limit=2",
    "min_reward=0.5&count=true&limit=2&sort=reward",
    "max_reward=0.5&count=true&limit=2&sort=-reward",
    "min_reward=0.25&max_reward=0.25&count=true&limit=2",
    "reason=Timeout&count=true&limit=3",
    "reason=zero_variance&count=true",
    "reason=rolled%20back&count=true&limit=3",
    "search=30&count=true&limit=2",
    "search=ep_&count=true&limit=1",
    "text=expected&count=true",
    "text=%E2%82%AC&count=true&limit=3",
    "text=%22got%22&count=true",
    "text=hello%20half&count=true",
    "status=finished&mode=train&task_set=math&min_reward=1&sort=-num_tokens&count=true&limit=2",
    "status=aborted&reason=Timeout&client=trainer-a&code_version=v2&count=true&limit=2",
    "task_set=code&max_version=3&text=hello&sort=oldest&count=true&limit=2",
    "before=none",
    "limit=0",
    "limit=1001",
    "sort=nonsense",
    "status=lost",
    "min_reward=nan",
    "group_id=99999999999999999999",
    "unknown=1",
)
"""Filters and orders of the list of episodes. Pages follow each one that has more episodes."""
NUM_PAGES = 2
"""Pages that are followed."""
READS = (
    *(f"/swarm/v1/{name}" for name in ("status", "health", "waiting", "job", "cluster", "checkpoints", "evaluations")),
    "/swarm/v1/steps",
    "/swarm/v1/steps?after=1&limit=2",
    "/swarm/v1/steps?limit=1",
    "/swarm/v1/steps?limit=3&metric=reward/mean&metric=batch/episodes&metric=none",
    "/swarm/v1/steps?limit=0",
    "/swarm/v1/batches?limit=5",
    "/swarm/v1/batches?before=2",
    "/swarm/v1/batches?before=0",
    "/swarm/v1/batches/99999",
    "/swarm/v1/groups/99999",
    "/swarm/v1/episodes/none",
    "/swarm/v1/nothing",
)
SERVER_READS = ("/metrics", "/readyz", "/healthz", "/swarm/v1/runs", "/v1/nothing", "/v1/chat/completions")
"""Routes that `look` does not have."""
LOOK_READS = ("/swarm/v1/look", "/swarm/v1/studies/none", "/swarm/v1/compare?runs=none", "/swarm/v1/compare?runs=")
MOST_WHOLE = 200
"""Episodes of a run that are all read. Of a longer one: the newest, and those of lists."""
NUM_NEWEST = 12


def walk(source: Source, run: str, query: str) -> Iterator[dict[str, Any]]:
    """Yields the episodes of all pages."""
    before = ""
    while True:
        page = source.get(run, f"/swarm/v1/episodes?{query}&limit=1000&before={before}").json()
        yield from page["episodes"]
        if (before := page["next"]) is None:
            return


def records(source: Source, run: str, episodes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The paths of batches, groups and episodes. Each episode in the short form, one of each kind also with tokens."""
    is_long = len(episodes) > MOST_WHOLE
    shown = episodes[-NUM_NEWEST:] if is_long else episodes
    seen = set()
    for episode in shown:
        path = f"/swarm/v1/episodes/{episode['episode_id']}"
        yield f"{path}?form=runs"
        kind = tuple(episode[name] for name in ("status", "mode", "task_set", "dropped", "num_calls"))
        if kind not in seen:
            yield path
        seen.add(kind)
    groups = dict.fromkeys(episode["group_id"] for episode in shown if episode["group_id"] is not None)
    yield from (f"/swarm/v1/groups/{group}" for group in groups)
    batches = source.get(run, "/swarm/v1/batches?limit=1000").json()["batches"]
    yield from (f"/swarm/v1/batches/{batch['id']}" for batch in (batches[:2] + batches[-2:] if is_long else batches))


def lists(source: Source, run: str) -> Iterator[str]:
    """The paths of lists of episodes, with the pages that follow them."""
    for query in QUERIES:
        path = f"/swarm/v1/episodes?{query}"
        yield path
        for _ in range(NUM_PAGES):
            page = source.get(run, path)
            if page.status_code != 200 or page.json()["next"] is None:
                break
            path = f"/swarm/v1/episodes?{query}&before={page.json()['next']}"
            yield path


def ask(source: Source, run: str, paths: Iterable[str]) -> Answers:
    return {f"{run} {path}".strip(): answer_of(source.get(run, path), source) for path in paths}


def digest(lines: Sequence[str], name: str) -> Answer:
    """The number and the digest of lines, which are in the file `name`, and some of them."""
    (PRESENT / "lines").mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines)
    (PRESENT / "lines" / name).write_text(text)
    some = [*lines[:3], *lines[-3:]]
    return {"lines": len(lines), "digest": hashlib.sha256(text.encode()).hexdigest(), "first and last": some}


def all_events(source: Source, run: str) -> Answers:
    """All events, their end from a number on, and the tick that counts them."""
    last = source.get(run, "/swarm/v1/status").json()["last_event"]
    start = f'data: {{"seq":{last},'
    seen = [line for line in source.events(run, "", lambda line: line.startswith(start)) if line.startswith("data")]
    late = source.events(run, f"?after={last - 3}", lambda line: line.startswith(start))
    tick = source.events(run, "?form=tick", lambda line: line.startswith("data"))
    found = {"": digest(seen, f"{source.name}{run}.events"), f"?after={last - 3}": late, "?form=tick": tick}
    return {f"{run} /swarm/v1/events{query}".strip(): answer for query, answer in found.items()}


def read_everything(source: Source, run: str) -> Answers:
    """The answers to all questions that a server and `look` take."""
    episodes = list(walk(source, run, "sort=oldest"))
    found = ask(source, run, (*READS, *records(source, run, episodes), *lists(source, run)))
    lines = [json.dumps(one, sort_keys=True) for one in episodes]
    return found | {f"{run} all episodes".strip(): digest(lines, f"{source.name}{run}.episodes")}


def model_reads(source: Source, run: str, key: str) -> Answers:
    """The routes that need the key of an episode."""
    paths = ("/v1/models", "/v1/models/policy", "/v1/models/planner", "/v1/models/none", "/v1/nothing")
    found = {path: source.get(run, path, Authorization=f"Bearer {key}") for path in paths}
    found |= {f"/k/KEY{path}": source.get(run, f"/k/{quote(key)}{path}") for path in paths}
    return {f"{run} {path}".strip(): answer_of(answer, source) for path, answer in found.items()}


# ---- recorded answers ------------------------------------------------------------------------------------------------


def line(question: str, answer: Answer) -> str:
    return json.dumps({"ask": question, "answer": answer}, ensure_ascii=False, sort_keys=True)


def path_of(name: str) -> Path:
    """The file of recorded answers. Those of `long` are compressed."""
    return RECORDED / f"{name}{'.txt' if name.endswith('commands') else '.jsonl'}{'.xz' * name.startswith('long')}"


def recorded(name: str) -> Answers:
    content, path = path_of(name).read_bytes(), path_of(name)
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    if ".txt" in path.name:
        _, *parts = re.split(r"(?m)^### (.*)\n", text)
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return {one["ask"]: one["answer"] for one in map(json.loads, text.splitlines())}


def text_of(name: str, answers: Mapping[str, Answer]) -> str:
    if name.endswith("commands"):
        assert not any(re.search("(?m)^### ", text) for text in answers.values()), "an output has the mark of questions"
        return "".join(f"### {question}\n{text}" for question, text in answers.items())
    return "".join(f"{line(question, answer)}\n" for question, answer in answers.items())


def write(name: str, answers: Mapping[str, Answer]) -> None:
    """Records answers."""
    content = text_of(name, answers).encode()
    path_of(name).write_bytes(lzma.compress(content, preset=9) if path_of(name).suffix == ".xz" else content)


def check(name: str, present: Mapping[str, Answer]) -> None:
    """Fails with the differences from the recorded answers."""
    expected = recorded(name)
    different = [
        question
        for question in dict.fromkeys((*expected, *present))
        if question not in present
        or question not in expected
        or line("", present[question]) != line("", expected[question])
    ]
    if not different:
        return
    PRESENT.mkdir(parents=True, exist_ok=True)
    written = PRESENT / path_of(name).name.removesuffix(".xz")
    written.write_text(text_of(name, present))
    shown = [f"{question}\n{_difference(expected, present, question)}" for question in different[:MOST_SHOWN]]
    raise AssertionError(
        f"{len(different)} of {len(expected)} answers differ from {path_of(name)}; the present ones are in {written}. "
        "See tests/locks/__init__.py.\n\n" + "\n".join(shown)
    )


def _difference(expected: Mapping[str, Answer], present: Mapping[str, Answer], question: str) -> str:
    texts = [_pretty(answers[question]) if question in answers else [] for answers in (expected, present)]
    lines = list(difflib.unified_diff(*texts, "recorded", "present", n=2, lineterm=""))
    return "\n".join(lines[:MOST_LINES] + ["..."] * (len(lines) > MOST_LINES))


def _pretty(answer: Answer) -> list[str]:
    if isinstance(answer, str):
        return answer.splitlines()
    return json.dumps(answer, ensure_ascii=False, sort_keys=True, indent=1).splitlines()


SAME = "as the server"


def without_same(answers: Answers, others: Answers) -> Answers:
    """`answers` in which those that `others` have as well are only named."""
    return {
        question: SAME if question in others and line("", answer) == line("", others[question]) else answer
        for question, answer in answers.items()
    }


def unanswered(routes: Sequence[str], questions: Iterable[str]) -> list[str]:
    """The routes that none of the questions is for."""
    patterns = [
        re.compile(re.sub(r"\{[^}]*:path\}", ".+", route).replace("{", "(?P<").replace("}", ">[^/]+)"))
        for route in routes
    ]
    paths = {question.partition(" ")[2] or question for question in questions}
    asked = {
        next(
            (
                route
                for route, pattern in zip(routes, patterns, strict=True)
                if pattern.fullmatch(path.partition("?")[0])
            ),
            "",
        )
        for path in paths
    }
    return [route for route in routes if route not in asked]


# ---- the form of all bodies ------------------------------------------------------------------------------------------

WORDING = {"title", "description", "summary", "operationId", "tags"}


def form(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """A JSON schema without its wording and without names of classes: each reference is replaced by its target."""
    if isinstance(schema, list):
        return [form(one, definitions, inside) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        return "RECURSIVE" if reference in inside else form(definitions[reference], definitions, (*inside, reference))
    properties = schema.get("type") == "object" and "properties" in schema
    found = {name: form(value, definitions, inside) for name, value in schema.items() if name not in WORDING}
    if properties:
        found["properties"] = {name: form(one, definitions, inside) for name, one in schema["properties"].items()}
    return found


def forms(openapi: Mapping[str, Any]) -> Answers:
    """The form of each route: parameters, body and good answers, and the statuses of others."""
    parts = openapi["components"]["schemas"]
    definitions = {f"#/components/schemas/{name}": schema for name, schema in parts.items()}
    found: Answers = {}
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            good = {status: one for status, one in route["responses"].items() if status.startswith("2")}
            known = {**route, "responses": good, "errors": sorted(route["responses"].keys() - good.keys())}
            found[f"{method.upper()} {path}"] = form(known, definitions)
    return found
