"""Episodes of an environment against the real server with a scripted model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentjet import AsyncSwarm
from agentjet.environments import Environment
from agentjet.types import Reward, Task
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving
from tests.tiny import make_model_info

TEMPLATE = "qwen3"  # A model with tools.
Play = Callable[[Environment, Task], Reward]


@contextmanager
def episodes(reply: Callable[[str], str]) -> Iterator[tuple[Play, Served]]:
    """Yields a function that plays one episode, and the server. `reply` gets the prompt as text."""
    with tempfile.TemporaryDirectory() as folder:
        card = make_model_info(Path(folder, "tokenizer"), TEMPLATE, tool_format="hermes")
        script = saying(reply, TEMPLATE)
        server = serving(Path(folder, "data"), script, card=card, job={"max_tokens": 128}, call_timeout=30.0)
        with in_thread(server) as (served, loop):

            async def play(environment: Environment, task: Task) -> Reward:
                async with (
                    AsyncSwarm(served.url, TOKEN) as swarm,
                    swarm.episode(task.id, task_set=task.task_set, mode="eval") as episode,
                ):
                    reward = await environment.agent(task, episode)
                    await episode.finish(reward)
                    return reward

            yield lambda environment, task: loop.run(play(environment, task)), served
