"""Replicas with a fixed token rate, in one process: `python -m bench.queueing.replica`, settings in the environment.

Each has its own connection to the gateway and speaks the protocol of the cluster's replicas, except `load` and
`score`. Tokens and log-probabilities are meaningless, but as long as real ones in the journal.
"""

from __future__ import annotations

import json
import os
import queue
import random
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentjet.processes.rpc import Answer, Link, ProcessRequest
from agentjet.types import Sampled, SamplingParams

VARIABLE = "BENCH_REPLICAS"
_rng = random.Random(0)
LOGPROBS = [struct.unpack("f", struct.pack("f", -_rng.expovariate(1.0)))[0] for _ in range(4096)]


@dataclass(slots=True)
class Completion:
    """`sent` and `done` count tokens; `offset` is where it begins in the list of tokens."""

    params: SamplingParams
    offset: int
    done: int = 0
    sent: int = 0


@dataclass(slots=True)
class Replica:
    link: Link
    words: list[int]
    slots: int
    running: dict[int, Completion] = field(default_factory=dict)
    waiting: deque[tuple[int, Completion]] = field(default_factory=deque)

    def accept(self, request: ProcessRequest) -> None:
        id = request.args[0]
        if request.op == "adopt":
            self.link.send(Answer(request.id, list(id.probe_logprobs)))
        elif request.op == "sample":
            self.waiting.append((id, Completion(request.args[2], id * 7919)))
        elif self.running.pop(id, None) is None:  # `cancel`
            self.waiting = deque(one for one in self.waiting if one[0] != id)

    def advance(self, steps: int) -> None:
        """Sample so many tokens of each running completion, and send the pieces that are complete."""
        pieces = []
        for _ in range(steps):
            while self.waiting and len(self.running) < self.slots:
                id, completion = self.waiting.popleft()
                self.running[id] = completion
            for id, one in list(self.running.items()):
                one.done += 1
                is_last = one.done == one.params.max_tokens
                if is_last or one.done - one.sent >= one.params.piece_tokens:
                    pieces.append((id, self._piece(one, is_last=is_last)))
                    one.sent = one.done
                if is_last:
                    del self.running[id]
        if pieces:
            self.link.send(pieces)

    def _piece(self, one: Completion, *, is_last: bool) -> Sampled:
        places = range(one.offset + one.sent, one.offset + one.done)
        tokens = tuple(self.words[place % len(self.words)] for place in places)
        logprobs = tuple(LOGPROBS[place % len(LOGPROBS)] for place in places)
        return Sampled(tokens, logprobs, 0, "length" if is_last else None)


def serve(links: list[Mapping[str, str]], words: list[int], slots: int, step: float) -> None:
    """Step for ever. Steps that the machine delayed are made up for, so that the rate holds."""
    arrived: queue.SimpleQueue[tuple[int, ProcessRequest]] = queue.SimpleQueue()
    replicas = [Replica(Link.from_environment(environment), words, slots) for environment in links]
    for number, replica in enumerate(replicas):
        replica.link.read_forever(lambda request, number=number: arrived.put((number, request)))  # type: ignore[misc]
    began, done = time.monotonic(), 0
    while True:
        time.sleep(max(0.0, began + (done + 1) * step - time.monotonic()))
        while not arrived.empty():
            number, request = arrived.get()
            replicas[number].accept(request)
        due = int((time.monotonic() - began) / step) - done
        done += due
        for replica in replicas:
            replica.advance(due)


if __name__ == "__main__":
    serve(**json.loads(os.environ[VARIABLE]))
