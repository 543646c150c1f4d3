"""Checks the tokens of fake replicas: each must be one of its version in its context."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bench.breaking.records import Books
from bench.breaking.victims import Server
from tests.cluster.fake_replica import logprob


def wrong_tokens(tokens: Any, contexts: Any, logprobs: Any, versions: Any) -> int:
    """Returns the number of tokens whose log-probability is not that of their version in their context (bytes)."""
    found = (
        abs(reported - logprob(context, int(token), int(version))) > 1e-5
        for token, context, reported, version in zip(tokens, contexts, logprobs, versions, strict=True)
    )
    return sum(found)


def check_forests(folder: Path, policy: str) -> tuple[int, int]:
    """Returns the tokens that were learned, and those of a wrong version."""
    checked = wrong = 0
    for path in sorted(folder.glob("*.pickle")):
        forest = pickle.loads(path.read_bytes())["batches"][policy].forest
        contexts: list[bytes] = []
        for parent in forest.parent:  # Parents stand before their children.
            before = contexts[parent] + np.int32(forest.tokens[parent]).tobytes() if parent >= 0 else b""
            contexts.append(before)
        nodes = forest.node
        checked += len(nodes)
        wrong += wrong_tokens(
            forest.tokens[nodes], [contexts[node] for node in nodes], forest["logprob"], forest["version"]
        )
    return checked, wrong


async def check_calls(server: Server, books: Books) -> tuple[int, int]:
    """The same of the tokens that the journal still has."""
    checked = wrong = 0
    for episode in sorted(books.begun):
        answer = await server.request("GET", f"/swarm/v1/episodes/{episode}")
        whole: dict[str | None, list[int]] = {None: []}
        for call in answer.json().get("calls", []) if answer.is_success else []:
            before = whole[call["parent"]][: call["kept"]]
            tokens = whole[call["call_id"]] = before + call["tokens"]
            at = [i for i, version in enumerate(call["versions"]) if version is not None]
            checked += len(at)
            wrong += wrong_tokens(
                [call["tokens"][i] for i in at],
                [np.asarray(tokens[: len(before) + i], np.int32).tobytes() for i in at],
                [call["logprobs"][i] for i in at],
                [call["versions"][i] for i in at],
            )
    return checked, wrong
