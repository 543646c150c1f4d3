"""Bodies of the control API under `/swarm/v1/`, shared by server and client. Versioned; unknown keys are refused in
requests.
"""

from agentjet.protocol.bodies import (
    HOTTEST,
    LARGEST,
    AbortRequest,
    BeginRequest,
    BeginResponse,
    CallView,
    CheckpointInfo,
    CodeVersionStatus,
    EmptyRequest,
    EpisodeList,
    EpisodeTree,
    EpisodeView,
    Event,
    FinishRequest,
    JobBody,
    LeaseRequest,
    LeaseView,
    Problem,
    RunRequest,
    StatusResponse,
    TaskSetStatus,
)

PROTOCOL_VERSION = "1"

__all__ = [
    "HOTTEST",
    "LARGEST",
    "PROTOCOL_VERSION",
    "AbortRequest",
    "BeginRequest",
    "BeginResponse",
    "CallView",
    "CheckpointInfo",
    "CodeVersionStatus",
    "EmptyRequest",
    "EpisodeList",
    "EpisodeTree",
    "EpisodeView",
    "Event",
    "FinishRequest",
    "JobBody",
    "LeaseRequest",
    "LeaseView",
    "Problem",
    "RunRequest",
    "StatusResponse",
    "TaskSetStatus",
]
