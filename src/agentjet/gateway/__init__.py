"""The runs of a server without HTTP: the path of a call, the training loop, supervision of workers. Imports no torch.

gateway = Gateway(config, compute)
await gateway.start()
await gateway.engine.wait_until_up()
episode = await gateway.begin(BeginRequest(task_id="t1"))
async for chunk in gateway.calls.answer(episode.id, "", CallRequest(conversation)):
    ...
await gateway.finish(episode.id, FinishRequest(reward=1.0))
await gateway.close()
"""

from agentjet.gateway.calls import CallChunk, CallRequest
from agentjet.gateway.gateway import Gateway
from agentjet.gateway.runs import Runs

__all__ = ["CallChunk", "CallRequest", "Gateway", "Runs"]
