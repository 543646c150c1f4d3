"""Episodes, trees and groups as the API answers them, and a tab that gets them: for views without a journal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import Page, Route

Json = dict[str, Any]
WORDS = (
    " the",
    " sum",
    " of",
    " 17",
    " and",
    " carry",
    "\n",
    ",",
    " so",
    " answer",
    " is",
    " 391",
    " wait",
    " 🙂",
    ".",
)


def view(number: int, **changes: Any) -> Json:
    """An `EpisodeView`. Every fifth is aborted; rewards are 0 and 1."""
    aborted = number % 5 == 4
    return {
        "episode_id": f"ep{number:05}",
        "status": "aborted" if aborted else "finished",
        "mode": "train",
        "task_id": f"q{number % 7}",
        "task_set": "math" if number % 2 else "code",
        "group": f"q{number % 7}",
        "group_id": number // 4,
        "client_id": "train-0",
        "policy_version": number // 16,
        "num_calls": 1,
        "num_tokens": 100 + number,
        "reward": None if aborted else float(number % 2),
        "by_role": {},
        "metrics": {},
        "reward_text": "",
        "reason": "TimeoutError: the tool did not answer" if aborted else "",
        "trained_in": None if aborted else number // 16,
        "dropped": "",
        "code_version": "c3",
        "noted": {},
        "refused": {},
        "unscorable": False,
        "begun": 1_790_000_000.0 + number,
        "ended": 1_790_000_009.5 + number,
        "expires_at": 1_790_000_060.0 + number,
        **changes,
    }


def utf16(text: str) -> int:
    """Length of a text in JavaScript."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def call(call_id: str, context: list[str], sampled: list[str], *, seed: int = 0, **changes: Any) -> Json:
    """A call of `form=runs`."""
    chance = random.Random(seed)
    count = len(sampled)
    return {
        "call_id": call_id,
        "role": "",
        "parent": None,
        "kept": 0,
        "fork": "",
        "retry_of": None,
        "orphan": "",
        "after": None,
        "messages": [{"role": "user", "content": "".join(context)}],
        "tools": [],
        "response": {"role": "assistant", "content": "".join(sampled)},
        "text": "".join([*context, *sampled]),
        "lengths": [utf16(piece) for piece in [*context, *sampled]],
        "num_context": len(context),
        "logprobs": [round(-chance.expovariate(1.5), 3) for _ in range(count)],
        "mask": [[1, count]],
        "versions": [[3, count // 2], [4, count - count // 2]],
        "allowed": [[None, count]],
        "temperature": 1.0,
        "finish_reason": "stop",
        "created": 1_790_000_003.0,
        "seconds": None,
        **changes,
    }


def some_words(count: int, seed: int = 0) -> list[str]:
    """Texts of tokens, the same for the same seed."""
    chance = random.Random(seed)
    return [chance.choice(WORDS) for _ in range(count)]


def tree(number: int, calls: list[Json], **changes: Any) -> Json:
    """An `EpisodeTree` of `form=runs`."""
    return {**view(number, num_calls=len(calls)), "kept": "journal", "calls": calls, **changes}


def long_tree(number: int, tokens: int = 10_000, calls: int = 4) -> Json:
    """An episode with so many tokens, a fifth of them context, in calls that continue each other."""
    each = tokens // calls
    context = each // 5
    made = []
    for i in range(calls):
        before = made[-1]["call_id"] if made else None
        texts = some_words(context, seed=i), some_words(each - context, seed=100 + i)
        made.append(call(f"c{i + 1}", *texts, seed=i, parent=before, kept=i * each, after=before))
    return tree(number, made)


Answer = Callable[[dict[str, str]], Json | None]


def answering(page: Page, answers: dict[str, Answer]) -> list[str]:
    """Answers GET requests below /swarm/v1 by path; None is 404. Returns the list of the requests that were made."""
    asked: list[str] = []

    def answer(route: Route) -> None:
        parts = urlsplit(route.request.url)
        path = parts.path.removeprefix("/swarm/v1")
        if path not in answers:
            route.continue_()
            return
        asked.append(f"{path}?{parts.query}")
        found = answers[path]({name: values[0] for name, values in parse_qs(parts.query).items()})
        if found is None:
            body: Json = {
                "title": "Not Found",
                "status": 404,
                "code": "episode_not_found",
                "detail": "There is no such episode.",
            }
            route.fulfill(status=404, content_type="application/problem+json", body=json.dumps(body))
        else:
            route.fulfill(status=200, content_type="application/json", body=json.dumps(found))

    page.route("**/swarm/v1/**", answer)
    return asked
