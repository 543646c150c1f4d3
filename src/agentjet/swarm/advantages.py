"""Advantages of the episodes of a batch for people, from the journal, without the learner.

They are given where the recipe computes them from rewards and other facts about episodes. For a recipe that also reads
tokens, calls or numbers of the learner, a note is given instead: a wrong number would be worse than none.

The episodes are read from the journal first. The recipe is called afterwards, beside the event loop: a plug-in may take
long, or never return, and other reads of the journal must not wait for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from agentjet.errors import AgentJetError, ConfigError, RecipeError
from agentjet.recipes import hooks
from agentjet.recipes.recipe import Recipe
from agentjet.swarm.batch_forest import episode_facts
from agentjet.swarm.state import Batch, EpisodeRecord, reward_of
from agentjet.timeline.batch import Facts, TrainingBatch

HOOK = "reward_advantages"
NOT_AGAIN = "it is not called again until the recipe or one of its parameters changes"


class Advantages(NamedTuple):
    """The advantage of each episode by role, or a note."""

    of: Mapping[str, Mapping[str, float]]
    """By episode, then by named policy, or by role that has rewards; the role is "" for all others."""
    note: str = ""
    """Why there are none."""


class Members(NamedTuple):
    """The episodes of a batch, for their advantages."""

    groups: Sequence[Sequence[EpisodeRecord]]
    policies: Sequence[str]
    """Those that the settings name."""
    recipe: Any
    """The recipe of the batch as the journal has it."""
    batch: Callable[[], Batch]
    """Returns the batch with its recipe, which may import a plug-in. Raises `ConfigError`."""


class AdvantageHook:
    """Calls `reward_advantages` for views, a plug-in's beside the event loop and with a time limit.

    A hook that did not return in time is not called again for the same recipe.
    """

    def __init__(self, threads: hooks.PlugInThreads) -> None:
        """`threads` call the hook of a plug-in."""
        self._threads = threads
        self._overdue: dict[str, str] = {}
        """A sentence about each recipe whose hook did not return in time."""
        self._turn = asyncio.Lock()
        """Held around the hook of a plug-in, so that many viewers of a page do not begin many threads."""

    async def __call__(self, members: Members) -> Advantages:
        """Returns the advantages of the members."""
        try:
            batch = await asyncio.to_thread(members.batch)
        except ConfigError as error:
            return Advantages({}, str(error))
        recipe = batch.job.recipe
        work = partial(advantages, recipe, batch.id, members.groups, members.policies)
        if not hooks.is_plug_in(type(recipe)):
            return await asyncio.to_thread(work)
        key = json.dumps(members.recipe, sort_keys=True)
        async with self._turn:
            if key not in self._overdue:
                try:
                    return await self._threads.wait_for(f"{HOOK} of {recipe.name}", work, most=hooks.HOOK_SECONDS)
                except RecipeError as error:
                    self._overdue[key] = f"{error}; {NOT_AGAIN}"
        return Advantages({}, self._overdue[key])


class _NeedsCalls(AgentJetError):
    """The recipe reads tokens or calls."""


class _Absent:
    """In place of tokens and calls: any use of it raises `_NeedsCalls`."""

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        raise _NeedsCalls

    __getattr__ = __getitem__ = __len__ = __iter__ = __array__ = _use


def advantages(
    recipe: Recipe,
    batch_id: int,
    groups: Sequence[Sequence[EpisodeRecord]],
    policies: Sequence[str],
) -> Advantages:
    """The advantages of the members of groups. `policies` are those that the settings name."""
    if recipe.only_given:
        return Advantages({}, f"{recipe.name} learns from given answers, without rewards")
    members = [member for group in groups for member in group]
    if not members or any(member.reward is None for member in members):
        return Advantages({}, "not all episodes of the batch have a reward")
    found: dict[str, dict[str, float]] = {member.id: {} for member in members}
    try:
        for policy in policies or ("",):
            facts = _facts(groups, members, policy, policies)
            absent: Any = _Absent()
            batch = TrainingBatch(batch_id, absent, facts)
            values_ER = hooks.called(recipe, HOOK, partial(recipe.reward_advantages, batch))
            if values_ER is None:
                raise _NeedsCalls
            hooks.check_shape(recipe, HOOK, values_ER, facts.spoke.shape, "each episode and role")
            for member, values_R in zip(members, values_ER, strict=True):
                found[member.id] |= {
                    role: float(value) for role, value in zip(facts.roles, values_R, strict=True) if np.isfinite(value)
                }
    except _NeedsCalls:
        return Advantages({}, f"{recipe.name} computes advantages from tokens or calls, next to the weights")
    except RecipeError as error:
        return Advantages({}, str(error))
    return Advantages(found)


def _facts(
    groups: Sequence[Sequence[EpisodeRecord]], members_E: Sequence[EpisodeRecord], policy: str, policies: Sequence[str]
) -> Facts:
    """Facts about the episodes for a policy. Its roles are those with rewards, and the policy itself for all others."""
    named = sorted({role for member in members_E for role in member.by_role} - {*policies})
    roles = (policy, *(role for role in named if not policies or role.startswith(f"{policy}/")))
    absent: Any = _Absent()
    return Facts(
        groups=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
        rewards=np.asarray([reward_of(member, policy, policies) for member in members_E], np.float64),
        roles=roles,
        role_rewards=np.asarray(
            [[np.nan, *(member.by_role.get(role, np.nan) for role in roles[1:])] for member in members_E], np.float64
        ),
        spoke=np.ones((len(members_E), len(roles)), bool),
        call_episode=absent,
        call_role=absent,
        call_turn=absent,
        call_rewards=absent,
        call_truncated=absent,
        **episode_facts(members_E),
    )
