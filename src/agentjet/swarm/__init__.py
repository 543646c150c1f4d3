"""Episodes, groups and batches of a run: rules, leases and the journal. No HTTP, no torch, no asyncio.

journal = Journal.open(data_dir / "journal.sqlite", models={"policy": config.model})
swarm = SwarmState(journal, config.job, clock=time.time)
episode = swarm.begin(BeginRequest(task_id="t1"))
with swarm.calling(episode.id):                      # suspends the lease during the call
    ...                                              # sample
    swarm.record_call(call, encoded_suffix, encoded_completion)
swarm.finish(episode.id, FinishRequest(reward=1.0))
if swarm.batches.ready():
    batch = swarm.batches.compose()                  # on disk before it is learned
    training = swarm.batches.training_batches(batch)["policy"]
    metrics, op = await learn(compute, op, training, batch.job)
    swarm.batches.learned(batch, metrics)
print(swarm.queries.waiting_for())
"""

from agentjet.swarm.episodes import SwarmState
from agentjet.swarm.journal import Journal
from agentjet.swarm.state import Batch, Episode, Group

__all__ = ["Batch", "Episode", "Group", "Journal", "SwarmState"]
