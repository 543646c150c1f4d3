"""Seeds of calls. They follow from the seeds of the job and of the episode and from the number of the call; without a
seed of the episode, from its number in the run.
"""

from __future__ import annotations

from typing import Any

from agentjet.gateway.calls import choice_seed
from agentjet.swarm.state import EpisodeRecord


def episode(**fields: Any) -> EpisodeRecord:
    whole = {"id": "ep", "seq": 1, "client_id": "c", "task_id": "t", "task_set": "", "group": "g", "group_id": 1}
    return EpisodeRecord(**{**whole, "mode": "train", "policy_version": 0, "begun": 0.0, **fields})


def test_a_call_of_a_seeded_episode_does_not_depend_on_when_it_began() -> None:
    first, later = episode(seed=5), episode(seed=5, id="other", seq=9, policy_version=3)
    assert choice_seed(None, 0, 7, first, 0) == choice_seed(None, 0, 7, later, 0)
    others = [(8, first, 0, 0), (7, episode(seed=6), 0, 0), (7, first, 1, 0), (7, first, 0, 1), (7, episode(), 0, 0)]
    drawn = {choice_seed(None, choice, job, of, number) for job, of, number, choice in [*others, (7, first, 0, 0)]}
    assert len(drawn) == 6


def test_without_a_seed_the_number_of_the_episode_counts() -> None:
    assert choice_seed(None, 0, 7, episode(), 0) == choice_seed(None, 0, 7, episode(id="other"), 0)
    assert choice_seed(None, 0, 7, episode(), 0) != choice_seed(None, 0, 7, episode(seq=2), 0)
    assert choice_seed(3, 0, 7, episode(seed=5), 0) == 3, "the request's own seed comes first"
