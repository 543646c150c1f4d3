"""Bodies of the page's routes: its sessions, the health of a run, the groups that training waits for, `agentjet look`.

The read routes, which the page uses as well, are in `records`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentjet.protocol.base import Request, Response
from agentjet.protocol.control import EvaluationView
from agentjet.types import GroupState

# --- sessions

Role = Literal["viewer", "client", "admin"]
"""Rights of a token or of a session. Each role has those of the roles before it."""


class SessionRequest(Request):
    """`POST /swarm/v1/sessions`."""

    role: Role = "viewer"
    """Role of the session: at most that of the token of the request."""


class SessionCode(Response):
    """A one-time code that opens a session."""

    code: str
    expires_in: float
    """Seconds until the code ends."""


class ExchangeRequest(Request):
    """`POST /swarm/v1/sessions/exchange`."""

    code: Annotated[str, Field(max_length=256)]


class SessionView(Response):
    """A session of the page."""

    key: str
    """Sent as the bearer token."""
    role: Role
    run: str
    expires: float
    """Unix seconds."""
    live: bool = True
    """False for the stored runs of `agentjet look`."""


# --- health and waiting

Answer = Literal["yes", "learned", "no", "falls", "too_early"]
"""`learned`: the reward is above that of the first steps, and the newest steps show no further rise. `no`: neither a
rise nor a fall. `too_early`: there are fewer steps than a trend needs."""
Level = Literal["ok", "warn", "bad"]


class LearningView(Response):
    """Trend of the mean training reward over the newest steps."""

    answer: Answer
    num_steps: int
    """Steps that the trend was computed from."""
    slope: float | None = None
    """Change of `reward/mean` per step. null if it is too early."""
    low: float | None = None
    high: float | None = None
    """Interval of the slope. It contains the slope of a flat reward at every look at a run, in 98 of 100 runs."""
    text: str
    """The answer with its numbers, for people."""


class HealthRuleView(Response):
    """Result of a health rule."""

    name: str
    level: Level
    text: str
    docs: str
    """Page and section of the documentation, such as `docs/health.md#groups`."""
    remedy: str = ""
    """The first paragraph of that section: text with `code`. Empty if the rule is ok."""


class HealthView(Response):
    """Does the run learn, and is it healthy? Rules without facts are left out."""

    learning: LearningView
    rules: list[HealthRuleView]


class CellView(Response):
    """A place of a group that an episode has, or that an episode left without a reward."""

    episode_id: str
    state: Literal["finished", "live", "failed"]
    """`failed`: aborted or expired, and no other episode has the place yet."""
    reward: float | None = None
    silent_seconds: float | None = None
    """Seconds since the last call of a live episode, 0 during a call. A heartbeat does not count."""
    expires_in: float | None = None
    """Seconds until a live episode ends without a reward, unless it or its client shows activity. During a call the
    lease does not run, and this is `ends_in`."""
    ends_in: float | None = None
    """Seconds until `job.max_episode_seconds` ends a live episode, also one that makes calls."""


class WaitingGroupView(Response):
    """A group that fills the present batch. Missing cells up to `size` are places without an episode."""

    id: int
    name: str
    task_id: str
    task_set: str
    state: GroupState
    """`open`, `complete`, or `closing`: all members have ended, and the hook `accept` of the recipe has yet to decide.
    """
    size: int
    """Number of finished episodes that complete the group. Spare episodes may be more."""
    cells: list[CellView]


class WaitingView(Response):
    """The groups that training waits for."""

    text: str
    """As `waiting_for` of the status, without the silent episode: `silent_seconds` of the cells show it."""
    needed: int
    """Complete groups that make a batch."""
    places: int
    """Groups that may be open or complete at the same time."""
    num_groups: int
    """Number of groups, also of those that are left out."""
    groups: list[WaitingGroupView]
    """The groups in the order they were opened, at most 200."""


# --- the machine


class GpuView(Response):
    """A GPU of the server's machine."""

    name: str
    load: float
    """Share of the time in which it computed, 0 to 1."""
    memory_used: int
    memory_total: int
    """Bytes."""


class MachineView(Response):
    """Load and memory of the server's machine."""

    cores: int
    cpu: float
    """Share of all cores that was used since the measurement before, 0 to 1."""
    memory_used: int
    memory_total: int
    """Bytes."""
    gpus: list[GpuView]
    """NVIDIA's, as `nvidia-smi` lists them."""


# --- `agentjet look`


class LookedRunView(Response):
    """A run, as a line of a list."""

    name: str
    title: str
    """The path or the URL that it was opened with."""
    is_served: bool
    """True if another server answers for it; false if its files are read."""
    error: str = ""
    """Why it cannot be read. Then the following fields are missing."""
    model: str = ""
    waiting_for: str = ""
    policy_version: int | None = None
    episodes: dict[str, int] = Field(default_factory=dict)
    steps: int | None = None
    newest_step: float | None = None
    """Unix seconds."""
    reward: float | None = None
    """`reward/mean` of the newest step."""


class LookedStudyView(Response):
    """A study, as a line of a list."""

    name: str
    title: str
    error: str = ""
    """Why it cannot be read. Then `summary` is null."""
    summary: dict[str, Any] | None = None


class LookView(Response):
    """The runs and the studies of `agentjet look`."""

    runs: list[LookedRunView]
    studies: list[LookedStudyView]


class ComparedRunView(Response):
    """A run in a comparison."""

    name: str
    title: str
    figures: dict[str, int | float | None]
    """As `agentjet compare` prints them."""
    evaluations: list[EvaluationView]


class ComparisonView(Response):
    """Runs side by side."""

    runs: list[ComparedRunView]
    settings: dict[str, list[Any]]
    """The settings that differ, with the value in each run; null where a run has none."""
    notes: list[str]
    """Sentences about scores that are not compared, because the runs were evaluated on different tasks."""
