"""Bodies of the control API, shared by server and client. Unknown keys are refused in requests."""

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

PREFIX = "/swarm/v1"
"""Of its paths, with the version."""

__all__ = [
    "HOTTEST",
    "LARGEST",
    "PREFIX",
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
