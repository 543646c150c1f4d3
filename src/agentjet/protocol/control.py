"""Bodies of the routes that run and control a run, and the rules that client and server share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, computed_field, field_validator, model_validator

from agentjet.errors import Unprocessable
from agentjet.protocol.base import (
    MAX_CALL_REWARDS,
    NO_EFFECT,
    CallRewards,
    Finite,
    Int64,
    MetricMap,
    Name,
    NumberMap,
    Request,
    Response,
    Temperature,
)
from agentjet.types import MAX_NAME, MAX_REWARD_TEXT, RUN_NAME, EngineState, Mode, SamplersStatus

MAX_CLOSED_GROUPS = 4096
"""Maximum number of groups in a `CloseGroupsRequest`."""


class BeginRequest(Request):
    """Begin an episode. 429 with `Retry-After` when the present batch needs none."""

    task_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    task_set: Name = ""
    group: Name = ""
    """Episodes with the same group are compared with each other; default: the task. Namespaced per client."""
    mode: Mode = "train"
    client_id: Annotated[str, Field(min_length=1, max_length=128)] = "anonymous"
    instance_id: Annotated[str, Field(max_length=128)] = ""
    """The process of the client. A new process aborts the live episodes of the one before it, which then gets 409
    `client_replaced`. If empty, no process is replaced."""
    join_only: bool = False
    """Join an open group, never open one. 409 `group_closed` if no open group has room."""
    unless_full: bool = False
    """409 `task_set_full` at once while the task set has its share of the batch."""
    unless_skipped: bool = False
    """409 `task_skipped` while the recipe skips the task. If false, it is begun nevertheless."""
    place: Int64 = Field(0, ge=0)
    """Number of the episode in its group, from 0. 409 `group_closed` if the recipe wants fewer episodes."""
    wait: float = Field(0.0, ge=0, le=60, allow_inf_nan=False)
    """Hold the request up to this long until there is room, instead of answering 429 at once."""
    code_version: Annotated[str, Field(max_length=128)] = ""
    """Version of the agent's code. Groups never mix versions, unless `job.mix_code_versions`."""
    at_version: Int64 | None = Field(None, ge=0)
    """Only in eval mode: the policy version of all calls. 409 `version_gone` when the server is at another one."""
    temperature: Temperature | None = None
    """Only in eval mode: the temperature of every call of the episode; overrides the calls' own. 0 is greedy."""
    seed: Int64 | None = Field(None, ge=0)
    """Seeds the answers of the episode, together with `job.seed`. Default: the number of the episode in the run. The
    answers of replicas are random without it."""
    ends_at_version: Int64 = Field(0, ge=0)
    """The policy version that the client trains to; 0 if it did not decide. Only shown, as `ends_at_version` of the
    status."""

    @property
    def group_name(self) -> str:
        """The client's name for the group. Default: the task, with its task set if it has one."""
        return self.group or (f"{self.task_set}/{self.task_id}" if self.task_set else self.task_id)

    @model_validator(mode="after")
    def _only_evaluation_is_pinned(self) -> Self:
        if self.mode != "eval" and self.at_version is not None:
            raise ValueError("at_version is for mode 'eval': a training episode may see the policy learn")
        if self.mode != "eval" and self.temperature is not None:
            raise ValueError("temperature is for mode 'eval': in training it is the job's, or the call's")
        return self


class BeginResponse(Response):
    """An episode, and how its agent reaches the model."""

    episode_id: str
    base_url: str
    """OpenAI-compatible: the address of the server or of its run, then `/v1`."""
    api_key: str
    model: str
    """Empty if the run names its policies."""
    policies: tuple[str, ...] = ()
    """The policies that the run names. An agent sends one of these names as `model`."""
    policy_version: int
    lease_seconds: float
    expires_at: float
    group_size: int = 0
    """Number of finished episodes that complete the group; 0 in eval mode."""
    max_turns: int = 0
    """Maximum number of trained calls of each role; a further one is refused with `turn_limit`. 0: no maximum."""


class FinishRequest(Request):
    """The end of an episode: its reward, in all or by agent role, metrics to chart, and a text. With named policies,
    `by_role` is empty, or has an entry for every policy and perhaps further ones for roles, such as `planner/critic`.
    """

    reward: Finite
    """Reward of the episode. Those of policies and roles are in `by_role`."""
    by_role: NumberMap = Field(default_factory=dict)
    by_call: Annotated[dict[Name, Finite], Field(max_length=MAX_CALL_REWARDS)] = Field(default_factory=dict)
    """Rewards of single calls, by the `id` of their answers."""
    by_turn: Annotated[dict[Name, CallRewards], Field(max_length=64)] = Field(default_factory=dict)
    """Rewards of the first, second, ... call of a role; the role is empty if the agent names none."""
    metrics: MetricMap = Field(default_factory=dict)
    text: Annotated[str, Field(max_length=MAX_REWARD_TEXT)] = ""
    """The reason for the reward, for people. It is not trained on."""

    @field_validator("reward", mode="before")
    @classmethod
    def _rewards_of_policies_are_elsewhere(cls, reward: object) -> object:
        if isinstance(reward, dict):
            raise ValueError("give one number here, and the rewards of policies and roles in by_role")
        return reward


class AbortRequest(Request):
    """The episode failed; it is never scored."""

    reason: Annotated[str, Field(max_length=2000)] = ""


class GroupName(Request):
    """A group of a client, by the name that its episodes have."""

    group: Annotated[str, Field(min_length=1, max_length=2 * MAX_NAME + 1)]
    """As `group` of the episode: the one it was begun with, else its task, after `TASK_SET/` if it has a task set."""
    task_set: Name = ""


class CloseGroupsRequest(Request):
    """The client begins no further episode of these groups: it gave an attempt up, or it stops.

    A group waits for its live episodes only. Then it is trained with the episodes it has if they are at least
    `job.min_group_size`, or if that is 0, as many as the recipe needs. Otherwise it is dropped and counted. Groups that
    are not open are left as they are.
    """

    client_id: Annotated[str, Field(min_length=1, max_length=128)] = "anonymous"
    groups: Annotated[list[GroupName], Field(min_length=1, max_length=MAX_CLOSED_GROUPS)]
    not_needed: bool = False
    """Drop the groups as `surplus` instead, because the client has the steps that it wanted."""


class CloseGroupsResponse(Response):
    """The effect of a `CloseGroupsRequest`."""

    num_waiting: int
    """Groups among them that still wait for live episodes."""


class EmptyRequest(Request):
    """The request takes no options: any key is refused."""


class ExportRequest(Request):
    """Write a present policy to the server's disk."""

    policy: Annotated[str, Field(max_length=64)] = ""
    adapter: bool = False
    """The adapter alone, as a PEFT folder, instead of the whole model."""


class DemonstrationBody(Request):
    """A conversation with given answers, in OpenAI's chat format. Every assistant message is learned, except those with
    `"weight": 0`."""

    task_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    """Name of the demonstration in errors and in the list of episodes, such as `answers.jsonl:12`."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = Field([])
    """The tools on offer. They are part of the prompt."""
    reward: Finite | None = None
    """Reward of the answers, for a recipe that compares them: of `dpo`, the preferred answer has the higher one; of
    `kto`, a good one is above 0. null: none."""
    group: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """Demonstrations of the request with the same name are one group, such as the two answers of a pair. Empty: it is a
    group by itself."""


class SftRequest(Request):
    """Train a policy on demonstrations: one batch, one policy version. 429 with `Retry-After` while another batch is
    being learned."""

    demonstrations: Annotated[list[DemonstrationBody], Field(min_length=1, max_length=4096)]
    policy: Annotated[str, Field(max_length=64)] = ""
    """The policy, if the run has several."""
    lr: Annotated[Finite, Field(gt=0)] | None = None
    """Constant learning rate of this batch. null: that of the job."""
    recipe: str | dict[str, Any] = ""
    """The recipe of this batch: `sft`, `dpo`, `kto`, or a table with `name` and parameters. A name alone takes the
    parameters of the job if its recipe has this name. Empty: the recipe of the job if it learns from given answers
    only, else `sft`."""
    check_only: bool = False
    """Check the demonstrations and count their tokens. Nothing is learned."""
    client_id: Annotated[str, Field(min_length=1, max_length=128)] = "anonymous"

    def _pieces(self) -> Iterator[str]:
        yield '{"demonstrations":['
        for number, one in enumerate(self.demonstrations):
            yield f"{',' if number else ''}{one.model_dump_json()}"
        yield f"],{self.model_dump_json(exclude=NO_EFFECT | {'demonstrations'})[1:]}"


class SftResponse(Response):
    """The batch that the demonstrations became, which is on disk."""

    batch: Int64 | None
    """Its id. The policy version after it is one higher. null with `check_only`."""
    last_event: Int64 | None
    """Number of the newest event when it was committed: later ones tell what becomes of it. null with `check_only`."""
    num_answers: int
    """Assistant messages that are learned."""
    num_tokens: int
    """Tokens of these answers, with their end tokens."""


class Event(Response):
    """One line of `GET /swarm/v1/events` (SSE, `event:` is `kind`, `id:` is `seq`).

    Kinds: `step`, `state`, `checkpoint`, `episode`, `group`, `batch` (given up because workers crash on it),
    `code_version` (first used), `task_set` (joined, left or stalled), `evaluation` (an `EvaluationRequest`),
    `rollback`.
    """

    seq: int
    kind: str
    time: float
    body: dict[str, Any]


class Tick(Response):
    """One line of `GET /swarm/v1/events?form=tick`: the events since the tick before."""

    last_event: int
    """Number of the newest one. A read with `at=NUMBER` has its effect."""
    kinds: dict[str, int]
    """Number of events of each kind."""


EventForm = Literal["event", "tick"]


class EvaluationRequest(Request):
    """The score of a policy version on tasks; higher is better."""

    policy_version: Annotated[int, Field(ge=0, lt=2**63)]
    score: Finite
    """Mean over the tasks of the mean reward of a task's repeats."""
    num_tasks: Annotated[int, Field(ge=1, lt=2**63)]
    num_episodes: Annotated[int, Field(ge=1, lt=2**63)]
    name: Name = ""
    """A name for people: the task set, for example."""
    task_list: Name = ""
    """Identity of the tasks. Only scores of one name and one task list are compared, and they are one curve. Empty:
    scores of the name have the same tasks."""
    held_out: bool = True
    """True for the score that a run is judged by. The best checkpoint, the health and the answer to "is it learning?"
    depend on these only. The others are shown and compared."""
    client_id: Annotated[str, Field(min_length=1, max_length=128)] = "anonymous"


class EvaluationView(EvaluationRequest):
    """A recorded evaluation."""

    model_config = Response.model_config

    time: float
    best: bool
    """True if no held-out score of the newest one's tasks is higher, and no earlier one the same. Undone ones do not
    count."""
    undone: bool
    """True if a rollback undid its policy version."""

    @property
    def tasks(self) -> tuple[bool, str, str]:
        """Equal for scores that can be compared with each other."""
        return self.held_out, self.name, self.task_list


def newest_held_out(evaluations: Sequence[EvaluationView]) -> list[EvaluationView]:
    """Returns the held-out scores that are compared: those of the newest one's tasks, without undone ones."""
    known = [one for one in evaluations if one.held_out and not one.undone]
    return [one for one in known if one.tasks == known[-1].tasks]


class CheckpointInfo(Response):
    """A checkpoint on disk."""

    policy_version: int
    path: str
    created: float
    tags: list[str] = Field(default_factory=list)
    """Its names; a checkpoint that has one is never rotated away."""
    score: float | None = None
    """The newest held-out score of this version."""


class TagRequest(Request):
    """The checkpoint that a tag names."""

    policy_version: Annotated[int, Field(ge=0, lt=2**63)]


class JobBody(Request):
    """The job settings with the revision they were read at: a compare-and-set."""

    revision: Int64
    job: dict[str, Any]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields settings by dotted name. A table of weights is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "task_weights":
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class RunSettings(Request):
    """The settings of a run besides those of the server."""

    policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """As `[policies]` of the settings file. Cannot change once the run was up or has an episode."""
    job: dict[str, Any] | None = None
    """As `[job]` of the settings file. null keeps those of the run; a new run has those of the server's start.
    Settings that `job` does not name get their defaults.
    """


class RunView(Response):
    """A run of the server."""

    name: str
    path: str
    """Start of the paths of its API; empty for the default run."""
    policies: tuple[str, ...]
    is_open: bool
    """False if the run was ended. Its files remain, and it can be opened again."""
    state: EngineState = "offline"
    reason: str = ""
    """Cause of the state `failed`."""
    policy_version: int | None = None
    """null if the run is not open."""


class RunList(Response):
    """The runs of the server, the default run first."""

    runs: list[RunView]


class CodeVersionStatus(Response):
    """Outcomes of the training episodes of one `code_version`, since the data dir was made."""

    episodes: int
    finished: int
    aborted: int
    """Includes expired episodes."""
    not_needed: int = 0
    """Aborted because the run had enough without them."""
    reward_mean: float | None
    """Mean over finished episodes; null before the first."""


class TaskSetStatus(Response):
    """A task set's part in the training."""

    weight: float | None
    """As in `job.task_weights`."""
    share: float
    """Share of the groups of the newest 50 batches."""
    groups_open: int
    groups_complete: int
    reward_mean: float | None
    """Mean of `reward/{task_set}/mean` over those batches; null when it was in none."""


class PlacesStatus(Response):
    """The groups of the present batch that a client holds."""

    num_open: int
    num_silent: int
    """Those of the open groups without a sign of progress. Other clients may open groups in their place."""
    num_complete: int
    waits: bool
    """True if it waits to open another one."""


class ScoredAnswer(Response):
    """The shortened last response and the reward of `count` episodes of a group."""

    answer: str
    reward: float
    count: int


class ZeroVariance(Response):
    """The newest batches could teach nothing: in each of their groups all rewards were equal. Shows one group, whose
    texts are empty once a durable checkpoint covers its batch."""

    batches: int
    """Number of newest batches in a row, at most 50."""
    truncated: float
    """Part of the newest batch's calls that ended at `max_tokens`."""
    limit: str = "job.max_tokens"
    """The limit that cut most of them."""
    task_id: str
    prompt: str
    """The last message of the group's first request, shortened."""
    answers: list[ScoredAnswer]
    rewards_fell: bool = False
    """True if the health rule `reward` is bad: rewards were higher before, so the tasks are not the cause."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def advice(self) -> list[str]:
        """Things to look at, the likeliest first."""
        if self.rewards_fell:
            return ["the health rule `reward`: rewards were higher before, so tasks and sampling are not the cause"]
        found = []
        if self.truncated:
            found.append(f"the limit of answers: {self.truncated:.0%} of them were cut at {self.limit}")
        if len({one.answer for one in self.answers}) > 1:
            found.append(
                "the reward: the answers differ; does it accept what is right in them, or could it be partial?"
            )
        elif self.prompt:
            found.append("job.temperature: all answers are the same, so there is nothing to compare")
        found.append("the tasks: take easier ones if every attempt fails, harder ones if every attempt succeeds")
        found.append("job.group_size: more attempts at a task find rare successes")
        return found


class LoopView(Response):
    """The longest time for which the event loop of the server answered no request, in the last ten minutes."""

    cpu: float
    """CPU seconds of the server's process in it."""
    wall: float
    """Seconds. Far more than `cpu` on a machine that other programs use."""
    held_by: str = ""
    """The function of AgentJet that ran then; empty for a short time."""


class FrontView(Response):
    """A process that answers model calls."""

    front: int
    """Its number, from 0."""
    ready: bool
    """False while it starts."""
    calls: int
    """Calls that wait, are sampled, or are being sent."""
    load: float
    """CPU seconds a second in the last half second. At 1 it is saturated."""
    lag: float
    """Longest time in seconds that its event loop was late in the last half second, or that its report is overdue."""
    starts: int
    """Processes started so far: 1, and 1 for each that died or hung."""
    problem: str = ""
    """The reason why it answers no calls now, in words; empty if it answers. Its other figures are old then."""


class StatusResponse(Response):
    """`GET /swarm/v1/status`."""

    version: str
    """AgentJet's own version."""
    state: EngineState
    waiting_for: str
    """A phrase for the thing that training waits for."""
    run: str = "default"
    policies: tuple[str, ...] = ()
    model: str
    model_weights: str = ""
    """Fingerprint of the weights of version 0; empty until they are loaded."""
    machine: str = ""
    """Kind of the hardware, such as `1 x NVIDIA H200`, or the CPU with its used cores; empty until the model is
    loaded."""
    policy_version: int
    branched_from: str = ""
    """`DATA_DIR@VERSION` that this run began at, if it is a branch."""
    batch_size: int
    group_size: int
    spare_episodes: int = 0
    max_steps: int
    ends_at_version: int = 0
    """The policy version at which training ends: `job.max_steps`, or else the last one that a client of the last five
    minutes trains to; 0 if unknown."""
    groups_complete: int
    groups_open: int
    episodes: dict[str, int]
    """Counts since the data dir was made: live, finished, aborted, expired, and not_needed, which were aborted because
    the run had enough without them; of finished: trained, waiting, dropped."""
    dropped: dict[str, int] = Field(default_factory=dict)
    """The dropped ones by reason, such as `stale`: a token is too old for `job.max_staleness`."""
    calls_active: int
    last_step: dict[str, float]
    """Metrics of the newest batch."""
    clients: dict[str, float]
    """Client id to seconds since last seen."""
    holding: dict[str, int] = Field(default_factory=dict)
    """Client id to the number of live episodes it holds."""
    places: dict[str, PlacesStatus] = Field(default_factory=dict)
    """The clients that hold groups of the present batch, or wait for a place."""
    code_versions: dict[str, CodeVersionStatus] = Field(default_factory=dict)
    """The newest 20 by last use, the newest last."""
    task_sets: dict[str, TaskSetStatus] = Field(default_factory=dict)
    """Those that have a weight, or groups in the present or a recent batch."""
    workers_started: int = 0
    """Since the server began."""
    fronts: list[FrontView] = Field(default_factory=list)
    """The processes that answer model calls, if the server does not (`server.fronts`)."""
    workers_hung: int = 0
    """Killed after `server.worker_timeout` seconds without work."""
    replay_difference: str = ""
    """A sentence about a batch that was learned again and led to other weights; empty if there was none."""
    abandoned_hooks: list[str] = Field(default_factory=list)
    """A sentence about each thread of the gateway in which code of a plug-in has not returned in time. The default run
    has those of validators and imports."""
    unusable_checkpoints: list[str] = Field(default_factory=list)
    """Renamed folders of checkpoints that are damaged or belong to another run."""
    zero_variance: ZeroVariance | None = None
    """The report if the newest 3 or more batches could teach nothing, else null."""
    last_event: int = 0
    """Number of the newest event. Read `events` after it to miss none."""
    loop: LoopView | None = None
    uptime: float


class ScaleRequest(Request):
    """Change the number of sampler replicas of a policy."""

    samplers: int | Annotated[str, Field(max_length=64)]
    """A number such as 6, or a range such as `2..8`."""
    policy: Annotated[str, Field(max_length=64)] = ""
    """The policy, if the run has several."""


class ProcessView(Response):
    """A process that hosts weights of a policy."""

    policy: str
    name: str
    kind: str
    """`worker` (learns and samples), `rank` (learns) or `replica` (samples)."""
    state: str
    place: str = ""
    """Machine and process id, as far as they are known."""
    version: int | None = None
    """Policy version that it samples with."""
    completions: int = 0
    """Completions that it samples now."""


class ClusterView(Response):
    """The processes of a run, by policy, ranks before replicas."""

    processes: list[ProcessView]
    samplers: dict[str, SamplersStatus] = Field(default_factory=dict)
    """By policy, of those that have replicas."""


class Problem(Response):
    """RFC 9457 problem details; `code` is stable."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str = ""
    param: str | None = None
    retry_after: float | None = None


TAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


def check_tag(name: str) -> None:
    """Raises `InvalidRequest` for an invalid tag."""
    _check_name(name, TAG_NAME, "tag", "a letter, then up to 63 letters, digits")


def check_run_name(name: str) -> None:
    """Raises `InvalidRequest` for a name that a run cannot have."""
    _check_name(name, RUN_NAME, "run", "a lower-case letter or a digit, then up to 63 of a-z, 0-9")


def _check_name(name: str, pattern: re.Pattern[str], noun: str, rule: str) -> None:
    if not pattern.fullmatch(name):
        message = f"{name[:100]!r} is not the name of a {noun}: give {rule}, dots, dashes or underscores."
        code = "run_name_invalid" if noun == "run" else "tag_invalid"
        raise Unprocessable(message, code=code, param="name")


REPORTED_BATCHES = 3
"""Number of batches in a row without variance that is reported. One or two happen by chance."""


def batches_without_variance(steps: Sequence[Mapping[str, float]]) -> int:
    """Number of newest batches in a row in which no group had any variance. `steps` are their metrics in order."""
    return sum(1 for _ in takewhile(lambda metrics: metrics.get("groups/zero_variance") == 1.0, reversed(steps)))


def report_lines(found: ZeroVariance) -> list[str]:
    """Lines about one group, with advice. Texts are escaped, so that they cannot control a terminal."""
    shown = [f"task {found.task_id!r}{f', prompt {found.prompt!r}' if found.prompt else ''}"]
    shown += [f"reward {a.reward:g} x {a.count}{f': {a.answer!r}' if a.answer else ''}" for a in found.answers]
    return [
        f"{found.batches} batches in a row could teach nothing: in every group all rewards were equal",
        *(f"  {line}" for line in shown),
        *(f"  look at {line}" for line in found.advice),
    ]
