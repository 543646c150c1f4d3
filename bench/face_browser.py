"""The page in Chromium: how long a person waits. See `measure`.

A time ends one animation frame after the frame in which the wanted elements were there, so it has the drawing of them.
Cold: a new browser context, which has no file of the page, and a new session by a one-time code. `empty_ms` is the same
for a page with one word: what the browser itself takes.
"""

from __future__ import annotations

import json
import subprocess
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import quote

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from bench.face_load import LOAD, RATE
from bench.machine import CASES, percentile
from bench.wire import ask
from tests.locks import long_run
from tests.page.chromium import ARGUMENTS, chromium_path

REPEATS = 20
LAG_SECONDS = 30.0
DEEP_PAGES = 25
WINDOW_MS = 500
SCRIPT = (CASES / "face.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Live:
    """The server of a long run."""

    url: str
    token: str
    viewer: str
    long_episode: str

    def send(self, method: str, path: str, token: str, body: object = None) -> Any:
        return ask(method, f"{self.url}/swarm/v1{path}", token, body)

    def address(self, path: str = "/") -> str:
        """Returns the URL that opens a session and then a view."""
        code = self.send("POST", "/sessions", self.viewer, {"role": "viewer"})["code"]
        return f"{self.url}/#code={code}&to={quote(path, safe='')}"

    def begin(self, number: int) -> str:
        """Begins an episode of one of two tasks, with a call."""
        task = {"task_id": f"open-{number % 2}", "task_set": "math", "client_id": "train-0", "wait": 60.0}
        begun = self.send("POST", "/episodes", self.token, task)
        body = {"model": begun["model"], "messages": [{"role": "user", "content": f"17 + {number}"}]}
        ask("POST", f"{self.url}/v1/chat/completions", begun["api_key"], body)
        return str(begun["episode_id"])

    def finish(self, episode_id: str) -> None:
        self.send("POST", f"/episodes/{episode_id}/finish", self.token, {"reward": 1.0})

    def begin_batch(self) -> list[str]:
        """Leaves a finished and two live episodes in two groups. Returns the live ones."""
        first, *live = (self.begin(number) for number in range(3))
        self.finish(first)
        return live

    def end_batch(self, live: Iterable[str]) -> None:
        """Completes the two groups."""
        for episode_id in [*live, *(self.begin(number) for number in range(3, 2 * long_run.GROUP_SIZE))]:
            self.finish(episode_id)


@contextmanager
def opened(browser: Browser) -> Iterator[Page]:
    """An empty page in a new context. Chromium opens a window for it, which is ready when this returns."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script(SCRIPT)
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.wait_for_timeout(WINDOW_MS)
    yield page
    context.close()


def cold(browser: Browser, addresses: Iterable[str], shown: str) -> list[float]:
    """Times from the request of each address until its view is shown, each in a new context."""
    found = []
    for address in addresses:
        with opened(browser) as page:
            page.goto(address, wait_until="commit")
            found.append(float(page.evaluate(f"face.{shown}()")))
    return found


def opened_view(browser: Browser, live: Live, path: str, shown: str) -> list[float]:
    """Times from the change of the URL until a view is shown that the tab has not loaded yet, from the Overview."""
    found = []
    for _ in range(REPEATS):
        with opened(browser) as page:
            page.goto(live.address(), wait_until="commit")
            page.evaluate("face.overview()")
            found.append(float(page.evaluate("face.change", [f"#{path}", shown])))
    return found


def filters() -> Iterator[str]:
    """Addresses of filtered lists, each another one."""
    kinds = ["status=aborted", "sort=reward", "sort=-reward", "min_reward=1", "search=task-37"]
    kinds += ["reason=KeyError: 'sum'", *(f"task_set={name}" for name in long_run.SETS)]
    kinds += [f"client={name}" for name in long_run.CLIENTS]
    kinds += [*(f"batch={number}" for number in (3, 250)), *(f"task=task-{number}" for number in range(REPEATS))]
    return (f"#/episodes?{quote(kind, safe='=')}" for kind in kinds[:REPEATS])


def rows(browser: Browser, live: Live) -> dict[str, list[float]]:
    with opened(browser) as page:
        page.goto(live.address("/episodes"), wait_until="commit")
        page.evaluate("face.rows()")
        filtered = [float(page.evaluate("face.filter", hash)) for hash in filters()]
        page.evaluate("face.filter", "#/episodes")
        deep, num_loaded, total = [], 0, live.send("GET", "/episodes?limit=1&count=true", live.viewer)["total"]
        while num_loaded < total:
            took, num_loaded = page.evaluate("face.deeper()")
            deep.append(float(took))
    return {"first": opened_view(browser, live, "/episodes", "rows"), "filter": filtered, "deep": deep[-DEEP_PAGES:]}


def overlays(browser: Browser, live: Live) -> list[float]:
    """Times from the key to the drawn overlay."""
    found = []
    with opened(browser) as page:
        page.goto(live.address(f"/episodes/{live.long_episode}?overlay=probability"), wait_until="commit")
        page.evaluate("face.tokens()")
        for number in range(REPEATS + 4):
            key = str(2 + number % 7)
            page.evaluate("face.onKey", key)
            page.keyboard.press(key)
            found.append(float(page.evaluate("switched")))
    return found


def lags(browser: Browser, live: Live) -> list[float]:
    """Times from the end of each episode until the Overview counts it, while agents make `RATE` calls a second."""
    with opened(browser) as page:
        page.goto(live.address(), wait_until="commit")
        page.evaluate("face.overview()")
        page.wait_for_selector(".connection.live")
        first = live.send("GET", "/status", live.viewer)
        page.evaluate("face.record()")
        agents = [*LOAD, live.url, live.token, str(RATE), str(LAG_SECONDS)]
        subprocess.run(agents, check=True, stdout=subprocess.DEVNULL)
        last = live.send("GET", "/status", live.viewer)
        page.evaluate("wanted => after(() => recorded.at(-1)[1] >= wanted)", last["episodes"]["finished"])
        record = page.evaluate("recorded")
    counts = [count for _, count in record]
    ended = finish_times(live, first["last_event"], last["last_event"])
    known = first["episodes"]["finished"]
    return [record[bisect_left(counts, known + number)][0] - 1000 * time for number, time in enumerate(ended, start=1)]


def finish_times(live: Live, after: int, last: int) -> list[float]:
    """Times at which episodes finished, between two events."""
    found = []
    headers = {"Authorization": f"Bearer {live.viewer}"}
    address = f"{live.url}/swarm/v1/events?after={after}"
    with httpx.stream("GET", address, headers=headers, timeout=60, trust_env=False) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["kind"] == "episode" and event["body"]["status"] == "finished":
                found.append(event["time"])
            if event["seq"] >= last:
                break
    return found


def measure(url: str, written: long_run.History, keys: Collection[str]) -> dict[str, Any]:
    """Returns the 95th percentiles in milliseconds of these keys, and the parts of `rows_ms`: it is the largest."""
    token, viewer = ((written.data_dir / name).read_text().strip() for name in ("token", "viewer-token"))
    live = Live(url, token, viewer, written.long_episode)
    begun = live.begin_batch()
    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=ARGUMENTS)
        if "overview_ms" in keys:
            times = cold(browser, (live.address("/") for _ in range(REPEATS)), "overview")
            empty = cold(browser, [f"{live.url}/empty"] * REPEATS, "empty")
            found |= {"overview_ms": p95(times), "overview_ms_median": median(times)}
            found |= {"empty_ms": p95(empty), "empty_ms_median": median(empty)}
        if "rows_ms" in keys:
            parts = {name: p95(times) for name, times in rows(browser, live).items()}
            found |= {"rows_ms": max(parts.values()), "rows_ms_of": parts}
        if "episode_ms" in keys:
            path = f"/episodes/{live.long_episode}?overlay=probability"
            found["episode_ms"] = p95(opened_view(browser, live, path, "tokens"))
        if "overlay_ms" in keys:
            found["overlay_ms"] = p95(overlays(browser, live))
        if "lag_ms" in keys:
            live.end_batch(begun)
            found["lag_ms"] = p95(lags(browser, live))
        browser.close()
    return found


def p95(times: list[float]) -> float:
    return round(percentile(times, 95), 1)
