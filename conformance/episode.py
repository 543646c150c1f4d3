"""One exercise on a real server: a client works through an episode, another episode is the one it is compared with.

The two are a group and the group is a batch, so the worker learns exactly what the client did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjet.timeline import Forest
from conformance.child import Ended, is_product, run
from conformance.conversation import Turn
from conformance.policy import Policy, Said
from tests.server.serving import Served, serving
from tests.timeline.models import make_model

REWARD, OTHER_REWARD = 0.75, 0.25
OTHER_ADVANTAGE = (OTHER_REWARD - REWARD) / 2
"""Under `dr_grpo`: a reward minus the mean of both."""
ROLE_REWARD = 1.25
"""Reward of the agent role of the client, if it has one."""
OTHER_TURN = Turn("Nothing to add.")
JOB = {"batch_size": 1, "group_size": 2, "max_tokens": 10_000, "recipe": "dr_grpo"}


@dataclass(frozen=True)
class Exercise:
    """One thing that a client is asked to do, as a process, and how it must go."""

    client: str
    name: str
    """The name of the exercise in the table."""
    dialect: str
    command: tuple[str, ...]
    """A script of `clients/` or `node/`, and its arguments."""
    turns: tuple[Turn, ...]
    answer: str
    """The last line that the client must print. A product may print others after it."""
    remark: str = ""
    template: str = "smollm2"
    """The model's, by its name in `tests.timeline.models`."""
    history: str = "template"
    """`job.history`."""
    is_constrained: bool = False
    """True if the client asks for answers that follow a grammar: strict tools, a tool that must be called, JSON."""
    role: str = ""
    """The agent role that the client speaks as, by the model's name."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the job beside `JOB`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in a product's working directory at the start, by name."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Files that it must have at the end."""
    reaches: tuple[str, ...] = ()
    """Hosts that a product tries to reach with any settings, and does not need."""

    @property
    def is_product(self) -> bool:
        """True if the client is a program that people use as it is, not a library."""
        return is_product(self.command[0])

    @property
    def model(self) -> str:
        """The name that the client is given."""
        return f"policy@{self.role}" if self.role else "policy"

    @property
    def advantage(self) -> float:
        """Advantage of the sampled tokens of the client's episode."""
        return ((ROLE_REWARD if self.role else REWARD) - OTHER_REWARD) / 2


@dataclass(frozen=True)
class Evidence:
    """Evidence about an exercise from its three sides: client, sampler and learner."""

    ended: Ended
    turns: tuple[Turn, ...]
    """The turns of the exercise, with the names of its folder."""
    said: tuple[Said, ...]
    other: tuple[Said, ...]
    tree: dict[str, Any]
    """`GET /swarm/v1/episodes/{id}` of the client's episode."""
    forest: Forest | None
    files: dict[str, str]
    """The files of `Exercise.leaves` that exist."""
    unanswered: tuple[str, ...]
    """Prompts that the exercise has no turn for."""
    text: Callable[[tuple[int, ...]], str]

    @property
    def num_timelines(self) -> int:
        """Samples that no other one continues."""
        prompts = [one.prompt for one in self.said]
        return sum(all(prompt[: len(one.tokens)] != one.tokens for prompt in prompts) for one in self.said)


async def play(exercise: Exercise, argv: list[str], folder: Path) -> Evidence:
    """Run the client with `argv` on a fresh server that keeps everything in `folder`."""
    model = make_model(folder, exercise.template)
    turns = [turn.within(str(folder / "work")) for turn in exercise.turns]
    policy = Policy(model, turns.copy())
    job = {**JOB, "history": exercise.history, **exercise.job}
    async with serving(folder / "data", policy, card=model.card, job=job, prepare=policy.attach) as served:
        episode, other = await served.begin(group="g"), await served.begin(group="g")
        _write(folder / "work", exercise.files)
        ended = await run(argv, {**episode, "model": exercise.model}, folder, product=exercise.is_product)
        said = tuple(policy.said)
        tree = (await served.http.get(f"/swarm/v1/episodes/{episode['episode_id']}")).json()
        forest = None
        if said:
            policy.turns[:] = [OTHER_TURN]
            client = served.openai(other)
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "And you?"}])
            roles = [exercise.role] if exercise.role else []
            await _finish(served, episode, REWARD, dict.fromkeys(roles, ROLE_REWARD))
            await _finish(served, other, OTHER_REWARD, dict.fromkeys(roles, OTHER_REWARD))
            await served.run.until(lambda: bool(policy.learned))
            [forest] = policy.learned
    left = {
        name: (folder / "work" / name).read_text() for name in exercise.leaves if (folder / "work" / name).is_file()
    }
    others = tuple(policy.said[len(said) :])
    return Evidence(ended, tuple(turns), said, others, tree, forest, left, tuple(policy.unanswered), policy.text)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


async def _finish(served: Served, episode: dict[str, Any], reward: float, by_role: dict[str, float]) -> None:
    body = {"reward": reward, "by_role": by_role}
    answer = await served.http.post(f"/swarm/v1/episodes/{episode['episode_id']}/finish", json=body)
    assert answer.status_code == 200, answer.text
