"""The runs of a server without HTTP: the path of a call, the training loop, supervision of workers. Imports no torch.

gateway = Gateway(config, compute)
await gateway.start()
await gateway.ready()
episode = await gateway.begin(BeginRequest(task_id="t1"))
async for chunk in gateway.call(episode.id, "", CallRequest(conversation)):
    ...
await gateway.finish(episode.id, FinishRequest(reward=1.0))
await gateway.close()
"""

from agentjet.gateway.gateway import Gateway
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.gateway.runs import Runs

__all__ = ["CallChunk", "CallRequest", "Gateway", "Runs"]
