"""Bodies of the read routes, which the page uses: episodes with their calls, steps, groups and batches; the health of a
run, the groups that training waits for, sessions, the machine, `agentjet look`.

Times are Unix seconds, durations are seconds. A number that is not finite is null.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from agentjet.protocol.base import Int64, Request, Response
from agentjet.protocol.control import EvaluationView
from agentjet.types import EpisodeFilter, EpisodeOrder, EpisodeStatus, FinishReason, Fork, GroupState, Mode

MOST_EPISODES = 1000
"""Maximum number of episodes in an answer."""
Text = Annotated[str, Field(max_length=2000)]
Bound = Annotated[float, Field(allow_inf_nan=False)]
Kept = Literal["journal", "gone"]
EpisodeForm = Literal["tokens", "runs"]
IN_BATCH = (
    "id IN (SELECT member.value FROM batches, json_each(batches.groups) AS members, "
    "json_each(members.value) AS member WHERE batches.id = :batch)"
)
HAS_REASON = "(instr(reason, :reason) OR instr(dropped, :reason))"
HAS_NAME = '(instr(task_id, :search) OR instr("group", :search) OR instr(id, :search))'
HAS_TEXT = (
    "(instr(reward_text, :text) OR "
    "EXISTS (SELECT 1 FROM calls WHERE calls.episode_id = episodes.id AND instr(calls.body, :json) AND "
    "(instr(calls.body -> '$[0].ask.messages', :json) OR instr(calls.body -> '$[0].response', :json))))"
)
"""SQL of `text`; `json` is the text as it stands in JSON. The first condition on a call is the cheap one."""


@dataclass(frozen=True)
class Filter:
    """A field of `EpisodeQuery` that selects episodes. SQL, command line and page have their filters from here."""

    sql: str
    """Condition on a row of the table `episodes`; `:NAME` is the value."""
    title: str
    """Label on the page."""


class EpisodeQuery(Request):
    """The wanted episodes: those that match every given filter, a page at a time. The parameters of `GET /episodes`."""

    limit: int = Field(20, ge=1, le=MOST_EPISODES)
    before: Text = ""
    """The page that follows this episode, in the order of `sort`: `next` of the page before it."""
    sort: EpisodeOrder = "newest"
    """`reward` is lowest first; with a minus sign, highest first. Both leave out episodes without a reward."""
    count: bool = False
    """Also return `total`."""
    status: Annotated[EpisodeFilter | None, Filter("status = :status", "Status")] = None
    """`aborted` leaves out the aborted episodes that were `not_needed`."""
    mode: Annotated[Mode | None, Filter("mode = :mode", "Mode")] = None
    """Only training or only evaluation episodes."""
    task: Annotated[Text | None, Filter("task_id = :task", "Task")] = None
    """The id of the task."""
    task_set: Annotated[Text | None, Filter("task_set = :task_set", "Task set")] = None
    """The name of the task set."""
    group: Annotated[Text | None, Filter('"group" = :group', "Group")] = None
    """The client's name for the group."""
    group_id: Annotated[Int64 | None, Filter("group_id = :group_id", "Group number")] = None
    """The number of the group."""
    client: Annotated[Text | None, Filter("client_id = :client", "Client")] = None
    """The id of the client."""
    code_version: Annotated[Text | None, Filter("code_version = :code_version", "Code version")] = None
    """The version of the agent's code."""
    batch: Annotated[Int64 | None, Filter(IN_BATCH, "Step")] = None
    """The batch that contains the episode, learned or not."""
    min_version: Annotated[Int64 | None, Filter("policy_version >= :min_version", "Version from")] = None
    """Lowest policy version at the beginning of the episode."""
    max_version: Annotated[Int64 | None, Filter("policy_version <= :max_version", "Version to")] = None
    """Highest policy version at the beginning of the episode."""
    min_reward: Annotated[Bound | None, Filter("reward >= :min_reward", "Reward from")] = None
    """Lowest reward. Episodes without a reward do not match."""
    max_reward: Annotated[Bound | None, Filter("reward <= :max_reward", "Reward to")] = None
    """Highest reward. Episodes without a reward do not match."""
    reason: Annotated[Text, Filter(HAS_REASON, "Reason")] = ""
    """Text inside the reason of its abort, or of its drop."""
    search: Annotated[Text, Filter(HAS_NAME, "Search")] = ""
    """Text inside the id of the task, the group or the id of the episode."""
    text: Annotated[Text, Filter(HAS_TEXT, "Text of messages and rewards")] = ""
    """Text inside the text of the reward, a message or an answer. Messages are found as long as they are kept."""

    @classmethod
    def filters(cls) -> dict[str, Filter]:
        """Returns the filters by name."""
        fields = cls.model_fields.items()
        return {name: one for name, field in fields for one in field.metadata if isinstance(one, Filter)}


class EpisodeFilters(TypedDict, total=False):
    """The filters and the order of an `EpisodeQuery`, as keyword arguments of a client."""

    sort: EpisodeOrder
    count: bool
    status: EpisodeFilter | None
    mode: Mode | None
    task_set: str | None
    task: str | None
    group: str | None
    group_id: int | None
    client: str | None
    code_version: str | None
    batch: int | None
    min_version: int | None
    max_version: int | None
    min_reward: float | None
    max_reward: float | None
    reason: str
    search: str
    text: str


class EpisodeView(Response):
    """An episode as the server sees it."""

    episode_id: str
    status: EpisodeStatus
    mode: Mode
    task_id: str
    task_set: str
    group: str
    """The client's name for the group."""
    group_id: int | None = None
    """The group; null for eval episodes."""
    client_id: str
    policy_version: int
    """Version at the beginning of the episode."""
    num_calls: int = 0
    num_tokens: int = 0
    """Sampled tokens, over all calls that may train."""
    begun: float = 0.0
    ended: float | None = None
    expires_at: float | None = None
    """When a live episode expires without activity; null where no server runs."""
    reward: float | None = None
    by_role: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    reward_text: str = ""
    """The reason for the reward, as the client gave it."""
    reason: str = ""
    """Why it was aborted or expired, or `dropped`."""
    dropped: str = ""
    """Why a finished episode is never trained: the reason of its group."""
    trained_in: int | None = None
    code_version: str = ""
    noted: dict[str, int] = Field(default_factory=dict)
    """Counts of request keys that were accepted without an effect, and of other deviations from the requests."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Counts of refused requests by `code` or `code: parameter`."""
    unscorable: bool = False
    """A refusal ended a call of the agent, so the reward may judge the refusal instead of the policy."""


class CallSummary(Response):
    """A call of an episode, without its tokens."""

    call_id: str
    role: str
    parent: str | None
    """The call whose tokens it continues."""
    kept: int
    """Number of the first tokens of `parent`, context and answer, that it keeps."""
    fork: Fork
    retry_of: str | None
    orphan: str
    """Why it is not trained: `retry`, `undelivered`, `side` (a rule of `job.side_calls`); empty if it is trained."""
    after: str | None
    """The call whose response `messages` follow. null: they are the whole conversation."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]
    temperature: float
    finish_reason: FinishReason
    created: float
    seconds: float | None = None
    """Seconds from the arrival of the request to `created`; null in journals of earlier versions."""


class CallView(CallSummary):
    """A call of an episode. `tokens`, `texts`, `mask`, `logprobs` and `versions` run in parallel: first the context
    that was new, then what was sampled. Before them come the first `kept` tokens of call `parent`.
    """

    tokens: list[int]
    texts: list[str]
    """Token by token, for people. A character of several tokens is at the first of them."""
    mask: list[int]
    """1 where a token is trained."""
    logprobs: list[float | None]
    versions: list[int | None]
    """The policy version that sampled each token; null for context."""


class CallRuns(CallSummary):
    """A call of an episode in short form. Its first `num_context` tokens are context, the others are sampled.

    A run `[value, count]` has `count` successive tokens with the same value. Runs are about sampled tokens only.
    """

    text: str
    """Text of all tokens."""
    lengths: list[int]
    """Length of each token's text in UTF-16 code units; 0 for a token that continues a character."""
    num_context: int
    logprobs: list[float | None]
    """One for each sampled token, to three decimals; null in an answer that was given."""
    mask: list[tuple[int, int]]
    """Runs: 1 where a token is trained."""
    versions: list[tuple[int, int]]
    """Runs: the policy version that sampled the token."""
    allowed: list[tuple[int | None, int]]
    """Runs: number of tokens that a grammar, `top_k` or `top_p` allowed; null if more than half of the vocabulary."""


class EpisodeTree(EpisodeView):
    """An episode with its calls. `kept` is `gone` once the journal has deleted them."""

    kept: Kept = "journal"
    calls: list[CallView]


class EpisodeRuns(EpisodeView):
    """An episode with its calls in short form."""

    kept: Kept = "journal"
    calls: list[CallRuns]


class EpisodeList(Response):
    """A page of episodes."""

    episodes: list[EpisodeView]
    next: str | None = None
    """`before` of the next page; null on the last one."""
    total: int | None = None
    """Number of episodes on all pages, if `count` was asked for."""


class MemberView(EpisodeView):
    """An episode of a group."""

    advantage: float | None = None
    """By the recipe of its batch; null if rewards are by policy or role, or if there is an `advantages_note`."""
    advantages: dict[str, float] = Field(default_factory=dict)
    """By policy or role, where rewards are."""


class GroupView(Response):
    """A group with its episodes, in the order they began. Lost ones are among them."""

    id: int
    name: str
    task_set: str
    task_id: str
    client_id: str
    code_version: str
    state: GroupState
    reason: str
    """Why it was dropped; or `short`: it trains below full size."""
    size: int
    """Number of finished episodes that complete it; 0 once it is in a batch, or dropped."""
    batch: int | None
    episodes: list[MemberView]
    advantages_note: str = ""
    """Why advantages are null."""


class BatchSummary(Response):
    """A batch in the list of batches."""

    id: int
    """The policy version that it starts from."""
    state: Literal["pending", "learned"]
    composed: float
    groups: int
    episodes: int
    reward_mean: float | None
    """null until it is learned."""


class BatchList(Response):
    """Batches, newest first."""

    batches: list[BatchSummary]
    next: int | None
    """`before` of the next page; null on the last one."""


class BatchMember(Response):
    """An episode of a batch."""

    episode_id: str
    reward: float | None
    advantage: float | None = None
    advantages: dict[str, float] = Field(default_factory=dict)
    """See `MemberView`."""


class BatchGroup(Response):
    """A group of a batch."""

    id: int | None
    """null for demonstrations."""
    task_set: str
    task_id: str
    zero_variance: bool
    """True if all rewards are equal, also by policy and role: it teaches nothing by comparison."""
    members: list[BatchMember]


class LostEpisode(Response):
    """A training episode that was not trained."""

    episode_id: str
    task_set: str
    task_id: str
    status: EpisodeStatus
    reason: str


class SettingChangeView(Response):
    """A job setting that changed."""

    key: str
    """Its dotted name below `job`."""
    before: Any
    after: Any


class BatchView(Response):
    """A batch with its groups."""

    id: int
    state: Literal["pending", "learned"]
    composed: float
    metrics: dict[str, float | None]
    """Empty until it is learned."""
    groups: list[BatchGroup]
    dropped: list[LostEpisode]
    """Episodes that ended while the batch was filled and never train. The newest 1000, newest first."""
    job_changes: list[SettingChangeView]
    """Job settings that differ from those of the batch before."""
    advantages_note: str = ""
    """Why advantages are null."""


class StepList(Response):
    """Metrics of learned batches by policy version, oldest first."""

    versions: list[int]
    """The policy version after each step."""
    times: list[float]
    """When the batch of each step was composed."""
    metrics: dict[str, list[float | None]]
    """One value for each version; null where the step does not have the metric."""


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
