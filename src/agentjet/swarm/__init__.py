"""Episodes, groups and batches of a run: rules, leases and the journal. No HTTP, no torch, no asyncio.

journal = Journal.open(data_dir / "journal.sqlite", models={"policy": config.model})
swarm = SwarmState(journal, config.job)
episode = swarm.begin(BeginRequest(task_id="t1"))
swarm.finish(episode.id, FinishRequest(reward=1.0))
if swarm.batches.ready():
    batch = swarm.batches.compose()                  # on disk before it is learned
"""

from agentjet.swarm.episodes import SwarmState
from agentjet.swarm.journal import Journal
from agentjet.swarm.state import Batch, EpisodeRecord, Group

__all__ = ["Batch", "EpisodeRecord", "Group", "Journal", "SwarmState"]
