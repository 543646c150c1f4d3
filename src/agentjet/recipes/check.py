"""`check`: runs every hook of a recipe on small batches, without a model and a server.

The hooks run in the order of a real batch. Log-probabilities, needs and value heads are made up, so nothing is computed
by a model. Each hook is called three times with the same input: twice by the recipe, and once by a recipe that is made
from the stored parameters, as a replay makes it. All results must have equal bits. The batches have what breaks
recipes: equal rewards, a comparison of one, the smallest group, truncated calls, a policy without a token.

Shapes: E episodes, R roles, C calls, M targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import create_model

from agentjet.errors import AgentJetError, InvalidRequest, failure
from agentjet.recipes import hooks
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import MISMATCH, OwnLoss
from agentjet.recipes.recipe import Attempt, FinishedGroup, Need, Recipe, Teaching
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, select

if TYPE_CHECKING:
    from torch import Tensor

Result = TypeVar("Result")
DECLARED = ("needs", "value_heads", "teaching", "reference_moves", "reads", "reports", "takes_batch")
ROLES = ("planner", "critic")
CALLS = ((0, 0, 3), (0, 1, 2), (1, 0, 2))
"""Role, turn and number of tokens of the calls of an episode. Only the first episode of a group has the last one."""
STEP = 1e-4
"""Change of a log-probability, of which the change of the loss is measured."""
MOST_SLOPES = 100
"""Numbers with gradient for which that is compared."""
NOT_GRADED = 1
"""The batch that the teacher does not grade. In the others it leaves out the first token."""
SLOW_SECONDS = 0.05
"""A loss that takes longer on a small batch is not called for each token."""


@dataclass(frozen=True, slots=True)
class Check:
    """The calls of one hook."""

    hook: str
    problem: str
    """A sentence about the first call that failed; '' if all are ok."""
    note: str
    milliseconds: float
    """Time of the slowest call."""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of a recipe, and an example group as a table: one row for each call, means over its tokens."""

    recipe: str
    checks: list[Check]
    example: list[list[str]]

    @property
    def ok(self) -> bool:
        return not any(check.problem for check in self.checks)

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}, a group of the batch 'different rewards', means over the tokens of a call:"]
        lines += ["  ".join(f"{cell:>9}" for cell in row) for row in self.example]
        lines = [*lines, ""] if self.example else []
        for one in self.checks:
            found = f"WRONG: {one.problem}" if one.problem else f"ok  {one.note}".rstrip()
            lines.append(f"{one.hook:<18}{one.milliseconds:>8.1f} ms  {found}")
        return "\n".join(lines)


class _Case(NamedTuple):
    name: str
    batch: TrainingBatch


class _Step(NamedTuple):
    """The numbers of a loss: the leaves [M] or [M, K] with gradient, `logp` first, and the columns."""

    leaves: dict[str, Tensor]
    columns: dict[str, Tensor]


def check(
    recipe: Recipe | PolicyLoss | type[Recipe | PolicyLoss] | str | Mapping[str, Any],
    seconds: float = hooks.HOOK_SECONDS,
) -> Report:
    """Runs the hooks of a recipe, or of a loss within `grpo`. `seconds` is the time limit of one call.

    Raises `ValueError` for a recipe that cannot be made.
    """
    made: Any = recipe() if isinstance(recipe, type) else recipe
    if isinstance(made, PolicyLoss):  # As the default of its field, it needs no import path.
        made = create_model(f"Grpo_{type(made).__name__}", __base__=Grpo, loss=(OwnLoss, made))()
    return _Checks(make_recipe(made), seconds).run()


class _Checks:
    def __init__(self, recipe: Recipe, seconds: float) -> None:
        import torch  # noqa: F401  before any time is measured

        self.recipe = recipe
        self.stored = recipe
        self.threads = hooks.PlugInThreads(seconds)
        self.found: dict[str, Check] = {}
        self.failed: set[str] = set()
        self.example: list[list[str]] = []
        self.num_learned = 0

    def run(self) -> Report:
        self.call("parameters", "", self._read_parameters)
        declared = self.call("needs, reads", "", lambda recipe: tuple(hooks.declared(recipe, x) for x in DECLARED))
        if declared is not None and (problem := _declaration_problem(self.recipe, declared)):
            self.note("needs, reads", problem)
        elif declared is not None:
            self._before_a_batch()
            self._batches()
        loss: Any = getattr(self.recipe, "loss", None)
        own = isinstance(loss, PolicyLoss) and hooks.is_plug_in(type(loss))
        name = f"{self.recipe.name} with the loss {loss.name or type(loss).__name__}" if own else self.recipe.name
        return Report(name, list(self.found.values()), self.example)

    def call(self, hook: str, where: str, function: Callable[[Recipe], Result], *inputs: Any) -> Result | None:
        """Returns what a hook returns, or None if it failed. A hook that failed is not called again."""
        if hook in self.failed:
            return None
        before, results, slowest, problem, note = _bits(inputs), list[Result](), 0.0, "", ""
        try:
            for recipe in (self.recipe, self.recipe, self.stored):
                begun = perf_counter()
                try:
                    results.append(self.threads.call(f"{hook} of {recipe.name}", partial(function, recipe)))
                finally:
                    slowest = max(slowest, perf_counter() - begun)
        except InvalidRequest as error:
            note = f"refuses {where}: {error}"
        except AgentJetError as error:
            problem = str(error).removesuffix(f"; {hooks.WAY_OUT}").removeprefix(f"the recipe {self.recipe.name!r}: ")
        except Exception as error:  # Boundary: the result is of a type that nothing expected.
            problem = f"the result of `{hook}` cannot be used: {failure(error)}"
        if problem:
            self.failed.add(hook)
        elif _bits(inputs) != before:
            problem = f"`{hook}` changes its input in place: copy the array before"
        elif len({_bits(result) for result in results[:2]}) > 1:
            problem = (
                f"`{hook}` returned other values for the same input at its second call: take randomness from "
                "`batch.id` in `columns`, as np.random.default_rng(batch.id), and keep nothing outside of `next_state`"
            )
        elif len({_bits(result) for result in results}) > 1:
            problem = (
                f"`{hook}` of the same recipe, made again from its parameters, returned other values: a replay would "
                "give other weights; keep everything in parameters and `next_state`"
            )
        self.note(hook, f"{where}: {problem}" if problem and where else problem, note, slowest)
        return results[0] if results and hook not in self.failed else None

    def note(self, hook: str, problem: str = "", note: str = "", seconds: float = 0.0) -> None:
        """Adds a result to those of a hook. The first problem stays."""
        old = self.found.get(hook, Check(hook, "", "", 0.0))
        slowest = max(old.milliseconds, round(1000 * seconds, 3))
        self.found[hook] = Check(hook, old.problem or problem, note or old.note, slowest)

    def _read_parameters(self, recipe: Recipe) -> str:
        """Returns the stored parameters."""
        dumped = hooks.called(recipe, "validators", lambda: recipe.model_dump(mode="json"))
        self.stored = hooks.called(recipe, "validators", lambda: type(recipe).model_validate(dumped))
        again = self.stored.model_dump(mode="json")
        changed = [f"{key} = {dumped[key]!r} became {again[key]!r}" for key in dumped if again[key] != dumped[key]]
        if changed:
            self.note("parameters", problem=f"the validators change their own result: {'; '.join(changed)}")
        return repr(again)

    def _before_a_batch(self) -> None:
        """The hooks of the gateway."""
        episodes = max(4, self.recipe.smallest_group)
        default = Rollout(episodes, 1.0)
        new = TaskStats("", "t0")
        for name, rewards in (("a new task", ()), ("a solved task", (1.0,) * 4), ("a task", (1.0, 0.0, 1.0, 0.0))):
            task = new.with_group(rewards, [2] * len(rewards), 1) if rewards else new
            rollout = partial(hooks.rollout, task=task, default=default, version=3)
            self.call("rollout", name, rollout, task, default)
        for name, rewards in (("different rewards", (1.0, 0.0, 0.5, 0.0)), ("equal rewards", (0.0,) * 4)):
            group = FinishedGroup("t0", "", rewards, [{}] * 4, [7, 5, 5, 5], is_uniform=len(set(rewards)) == 1)
            reasons = frozenset({"too_few"})
            self.call("accept", name, partial(hooks.accept, group=group, others=reasons), group)
        for number, attempt in enumerate(ATTEMPTS if self.recipe.teaching and self.recipe.teaching.has_context else ()):
            others = [*ATTEMPTS[:number], *ATTEMPTS[number + 1 :]]
            for name, seen in ((f"attempt {number} of a group", others), (f"attempt {number} alone", [])):
                context = partial(hooks.teacher_context, attempt=attempt, others=seen)
                self.call("teacher_context", name, context, attempt, seen)

    def _batches(self) -> None:
        state: Mapping[str, float] = {}
        loss_hook = "batch_loss" if self.recipe.takes_batch else "token_loss"
        for case in _cases(self.recipe.smallest_group):
            made = partial(_with_outputs, batch=replace(case.batch, state=state))
            with_outputs = self.call("needs, reads", case.name, made)
            if with_outputs is None:
                return
            batch, outputs = with_outputs
            self.call("reward_advantages", case.name, partial(_reward_advantages, batch), batch)
            prepared = self.call("columns", case.name, partial(hooks.columns, batch=batch, outputs=outputs), batch)
            if prepared is None:
                continue
            forest, metrics = prepared
            found = self._mini_batch(case, loss_hook, forest)
            metrics = dict(metrics) | (found or {})
            if found is not None and hooks.has_state(self.recipe):
                new = partial(hooks.next_state, state=state, metrics=metrics)
                state = self.call("next_state", case.name, new, state, metrics) or state
        if not self.num_learned and not self.failed:
            self.note(loss_hook, "no token of any batch has a gradient, so nothing is learned")

    def _mini_batch(self, case: _Case, hook: str, forest: Forest) -> dict[str, float] | None:
        """Returns the metrics of a mini-batch, the whole batch."""
        contributing = self.call("contributing", case.name, partial(hooks.contributing, forest=forest), forest)
        none: dict[str, float] = dict.fromkeys(self.recipe.reports if forest.num_targets else (), 0.0)
        if contributing is None or not contributing.any():
            return none if contributing is not None else None
        weights = self.call("weights", case.name, partial(hooks.weights, forest=forest), forest)
        if weights is None:
            return None
        weighted = select(forest.with_columns(weight=weights), contributing)
        step = self.call("needs, reads", case.name, partial(_step, forest=weighted, double=False))
        if step is None:
            return None
        result = self.call(hook, case.name, partial(_differentiated, step=step, forest=weighted), step)
        if result is None:
            return None
        losses, metrics, gradients = result
        self._check_gradients(case, hook, weighted, gradients)
        if case.name == "different rewards":
            gradient = gradients["logp"] + (gradients["new_top"].sum(-1) if "new_top" in gradients else 0)
            self.example = [*_table(self.recipe, case.batch, weighted, losses, gradient)]
        logp, old = step.leaves["logp"].detach(), step.columns["logprob"]
        means = {name: float(values.float().sum()) / forest.num_targets for name, values in metrics.items()}
        return none | means | {MISMATCH: float(((old - logp).exp() - (old - logp) - 1).mean())}

    def _check_gradients(self, case: _Case, hook: str, forest: Forest, gradients: Mapping[str, Tensor]) -> None:
        """Checks the derivative of the loss, and that it does not depend on the cut into micro-batches."""
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        if not is_finite:
            self.note(hook, f"{case.name}: `{hook}` has a gradient that is not finite, such as that of sqrt at 0")
            return
        own = [gradients[name].reshape(forest.num_targets, -1) for name in ("logp", "new_top") if name in gradients]
        number = sum(bool(any(values)) for values in zip(*(one.any(-1) for one in own), strict=True))
        self.num_learned += sum(bool(gradient.any()) for gradient in gradients.values())
        if case.name != "different rewards":
            return
        note = f"{number} of {forest.num_targets} tokens have a gradient"
        if self.found[hook].milliseconds > 1000 * SLOW_SECONDS:
            self.note(hook, note=f"{note}; too slow to compare it with differences")
            return
        double = _step(self.recipe, forest, double=True)
        try:
            hooks.loss(self.recipe, double.leaves["logp"], {**double.columns, **_heads(double)})
        except AgentJetError:
            self.note(hook, note=f"{note}; not compared with differences, because the loss fails in float64")
            return
        try:
            problem = _cut_problem(self.recipe, hook, double) or _slope_problem(self.recipe, hook, double)
        except AgentJetError as error:
            problem = f"with half of the tokens, or other log-probabilities: {error}"
        self.note(hook, problem, note)


# ---- batches ---------------------------------------------------------------------------------------------------------


ATTEMPTS = tuple(
    Attempt("t0", "", reward, text, {"score": reward}, answer)
    for reward, text, answer in ((1.0, "a {text}", "right {answer}"), (0.0, "wrong: 1 != 2", "wrong"), (0.0, "", ""))
)
"""A group: a success, a failure with a reason, and one without text and answer."""


def _declaration_problem(recipe: Recipe, declared: Sequence[Any]) -> str:
    """Returns a sentence about values of `DECLARED` that are wrong; else ''."""
    values = dict(zip(DECLARED, declared, strict=True))
    needs, teaching = values["needs"], values["teaching"]
    if not (isinstance(needs, frozenset) and needs <= {*get_args(Need)}):
        known = ", ".join(sorted(get_args(Need)))
        return f"`needs` returned {needs!r} instead of a frozenset of some of {known}"
    if "teacher" in needs and not (teaching and teaching.sources):
        return (
            f"`needs` names a teacher, and `teaching` returned {teaching!r} instead of Teaching((...,)) with a source"
        )
    if teaching and teaching.has_context and type(recipe).teacher_context is Recipe.teacher_context:
        return "`teaching` has a context, and the recipe has no `teacher_context`, which returns it"
    return ""


def _cases(smallest_group: int) -> Iterator[_Case]:
    different = ((1.0, 0.0, 0.5), (0.2, 0.9, 0.4))
    smallest = ([1.0, 0.0] * smallest_group)[:smallest_group]
    yield _Case("different rewards", _batch(0, different))
    yield _Case("equal rewards", _batch(1, ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))))
    yield _Case("a role with one reward", _batch(2, different, names_rewards=True))
    yield _Case("the smallest group", _batch(3, (smallest,)))
    yield _Case("a policy without a token", _batch(4, different, calls=()))
    yield _Case("different rewards again", _batch(5, different))


def _batch(
    number: int,
    groups: Sequence[Sequence[float]],
    *,
    calls: Sequence[tuple[int, int, int]] = CALLS,
    names_rewards: bool = False,
) -> TrainingBatch:
    """Returns a batch. Episodes of a group share their prompt, and calls of a role in an episode their tokens before.

    The second call of the second episode is truncated. With `names_rewards`, the first episode of a group, the only one
    with a critic, names a reward for it: so the critic is compared with no one.
    """
    rng = np.random.default_rng(number)
    members = [(g, i, reward) for g, rewards in enumerate(groups) for i, reward in enumerate(rewards)]
    rows, places, tokens = list[Row](), list[tuple[int, int, int]](), dict[tuple[int, int], list[int]]()
    for e, (g, i, _) in enumerate(members):
        for role, turn, size in calls:
            if role and i:
                continue
            before = [*tokens.get((e, role), [1, 10 + g, 20 + role]), 30 + turn]
            tokens[e, role] = [*before, *rng.integers(100, 200, size).tolist()]
            columns: dict[str, Any] = {"logprob": rng.uniform(-3, -0.1, size).astype(np.float32), "version": number}
            columns |= {"sequence": len(tokens) - 1, "call": len(places), "temperature": 1.0}
            rows.append(Row(np.array(tokens[e, role], np.int32), slice(len(before), None), columns))
            places.append((e, role, turn))
    call_episode, call_role, call_turn = np.array(places, np.int32).reshape(-1, 3).T
    spoke = np.zeros((len(members), len(ROLES)), bool)
    spoke[call_episode, call_role] = True
    named = np.where(
        [[False, names_rewards and not i] for _, i, _ in members], [[reward] for *_, reward in members], np.nan
    )
    facts = Facts(
        groups=np.array([g for g, *_ in members], np.int32),
        rewards=np.array([reward for *_, reward in members]),
        roles=ROLES,
        role_rewards=named,
        spoke=spoke,
        call_episode=call_episode,
        call_role=call_role,
        call_turn=call_turn,
        call_rewards=np.array([members[e][2] * (turn + 1) / 2 for e, _, turn in places]),
        call_truncated=np.array([(e, turn) == (1, 1) for e, _, turn in places], bool),
        tasks=tuple(("", f"t{g}") for g, *_ in members),
        seconds=np.arange(1.0, len(members) + 1),
        metrics={},
        code_versions=("",) * len(members),
        task_means=np.array([np.nan if g else 0.5 for g, *_ in members]),
    )
    return TrainingBatch(number, build_forest(rows), facts)


def _with_outputs(recipe: Recipe, batch: TrainingBatch) -> tuple[TrainingBatch, dict[str, NDArray[Any]]]:
    """Returns the batch with made-up numbers [M] of each of `needs` and value heads, and likely tokens [M, K]."""
    rng, logprob = np.random.default_rng(batch.id), batch.forest["logprob"]
    outputs: dict[str, NDArray[Any]] = {}
    for name in sorted(recipe.needs):
        made = rng.uniform(0.1, 2, len(logprob)) if name == "entropy" else _near(rng, logprob)
        outputs[name] = made.astype(np.float32)
    if (teaching := recipe.teaching) is not None:
        outputs |= _likely(rng, len(logprob), teaching, is_taught="teacher" in recipe.needs)
    for grades in (outputs[name] for name in hooks.GRADES if name in outputs):
        grades[: None if batch.id == NOT_GRADED else 1] = np.nan
    for head in recipe.value_heads.names if recipe.value_heads else ():
        outputs[head] = rng.normal(0, 0.3, len(logprob)).astype(np.float32)
    taught = None
    if teaching is not None and teaching.has_context:
        taught = batch.forest.with_columns(target=np.arange(len(logprob)))
    return replace(batch, forest=batch.forest.with_columns(**outputs), taught=taught), outputs


def _likely(rng: np.random.Generator, count: int, teaching: Teaching, *, is_taught: bool) -> dict[str, NDArray[Any]]:
    """Returns made-up likely tokens [M, K] and log-probabilities of them, which have the probability 0.8 together."""
    if not teaching.top_k:
        return {}
    names = [*(["teacher_top"] if is_taught else []), *(["old_top"] if teaching.top_of == "policy" else [])]
    shape = count, teaching.top_k
    shares = {name: 0.8 * rng.dirichlet(np.ones(shape[1]), count).reshape(shape) for name in names}
    logs = {name: np.log(np.maximum(values, 1e-6)).astype(np.float32) for name, values in shares.items()}
    return {"top_ids": np.tile(np.arange(shape[1], dtype=np.int32), (count, 1)), **logs}


def _near(rng: np.random.Generator, logprob: NDArray[np.float32]) -> NDArray[Any]:
    return np.minimum(logprob + rng.normal(0, 0.2, len(logprob)), -1e-3)


def _reward_advantages(batch: TrainingBatch, recipe: Recipe) -> NDArray[np.float64] | None:
    found = hooks.called(recipe, "reward_advantages", lambda: recipe.reward_advantages(batch))
    if found is not None and batch.facts is not None:
        hooks.check_shape(recipe, "reward_advantages", found, batch.facts.spoke.shape, "each episode and role")
    return found


# ---- losses ----------------------------------------------------------------------------------------------------------


def _step(recipe: Recipe, forest: Forest, *, double: bool) -> _Step:
    """Returns made-up present numbers, and the columns as the learner gives them to the loss."""
    import torch

    dtype = torch.float64 if double else torch.float32
    rng = np.random.default_rng(7)
    leaves = {"logp": torch.from_numpy(_near(rng, forest["logprob"])).to(dtype)}
    made = {"reference": _near(rng, forest["logprob"]), "new_entropy": rng.uniform(0.1, 2, forest.num_targets)}
    for name in recipe.value_heads.names if recipe.value_heads else ():
        leaves[f"new_{name}"] = torch.from_numpy(rng.normal(0, 0.3, forest.num_targets)).to(dtype)
    if (teaching := recipe.teaching) is not None and teaching.top_k:
        made["new_top"] = _likely(rng, forest.num_targets, teaching._replace(top_of="policy"), is_taught=False)[
            "old_top"
        ]
    columns: dict[str, Tensor] = {}
    for name in {"weight", "logprob", *recipe.reads}:
        if name in made and name not in forest.targets:
            (leaves if name.startswith("new_") else columns)[name] = torch.from_numpy(made[name]).to(dtype)
        elif name in forest.targets:
            values = torch.from_numpy(forest[name].copy())
            is_index = recipe.takes_batch and not values.is_floating_point()
            columns[name] = values.to(torch.int64 if is_index else dtype)
    return _Step({name: values.requires_grad_() for name, values in leaves.items()}, columns)


def _heads(step: _Step) -> dict[str, Tensor]:
    return {name: values for name, values in step.leaves.items() if name != "logp"}


def _total(recipe: Recipe, step: _Step) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the loss of a mini-batch as one number, the losses [M], and the metrics [M]."""
    loss, metrics = hooks.loss(recipe, step.leaves["logp"], {**step.columns, **_heads(step)})
    return (loss * step.columns["weight"] if loss.shape else loss).sum(), loss, metrics


def _differentiated(recipe: Recipe, step: _Step, forest: Forest) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Returns the losses [M], metrics [M], and the gradient [M] of each leaf."""
    import torch

    step = _Step({name: leaf.detach().clone().requires_grad_() for name, leaf in step.leaves.items()}, step.columns)
    total, loss, metrics = _total(recipe, step)
    columns = {**step.columns, **_heads(step)}
    hooks.check_loss(recipe, hooks.num_not_finite(loss, step.leaves["logp"], columns), forest)
    hooks.called(recipe, hooks.loss_hook(recipe), total.backward)
    zero = torch.zeros_like(step.leaves["logp"])
    gradients = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in step.leaves.items()}
    return loss.detach().expand_as(zero), {name: values.detach() for name, values in metrics.items()}, gradients


def _cut_problem(recipe: Recipe, hook: str, step: _Step) -> str:
    """Returns a sentence if the losses of a part of the tokens are other ones than in the whole; else ''."""
    if hook == "batch_loss":  # It always gets the whole mini-batch.
        return ""
    _, whole, _ = _total(recipe, step)
    half = slice(len(whole) // 2)
    part = _Step({k: v.detach()[half].requires_grad_() for k, v in step.leaves.items()}, {})
    _, losses, _ = _total(recipe, part._replace(columns={name: one[half] for name, one in step.columns.items()}))
    if losses.allclose(whole[half], rtol=1e-4, atol=1e-6):
        return ""
    return (
        "`token_loss` returned other losses for half of the tokens than for all: the learner gives it micro-batches of "
        "any size; write a `batch_loss`, or compute what compares tokens in `columns`"
    )


def _slope_problem(recipe: Recipe, hook: str, step: _Step) -> str:
    """Returns a sentence if the gradient is not the slope of the loss; else ''.

    Values of `detach` and of code under `no_grad` are held constant. At a kink, any slope between those of its
    sides is right.
    """
    import torch
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    cuts = Tensor.detach, Tensor.data.__get__  # type: ignore[attr-defined]

    class Constants(TorchFunctionMode):
        """Returns for `detach`, and under `no_grad` if `all_cut`, the values of the recorded call."""

        def __init__(self, all_cut: bool, recorded: Sequence[Any] | None = None) -> None:
            super().__init__()
            self.all_cut, self.replayed, self.seen = all_cut, recorded, list[Any]()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in cuts or (self.all_cut and not torch.is_grad_enabled()):
                number = len(self.seen)
                self.seen.append(result)
                if self.replayed is not None and number < len(self.replayed):
                    return self.replayed[number]
            return result

    total, *_ = _total(recipe, step)
    gradients = torch.autograd.grad(total, list(step.leaves.values()), allow_unused=True)
    wrong = ""
    for all_cut in (False, True):  # The forward of a `torch.autograd.Function` runs under `no_grad`, too.
        wrong = ""
        with Constants(all_cut) as constants:
            middle, *_ = _total(recipe, step)
        for (name, leaf), gradient in zip(step.leaves.items(), gradients, strict=True):
            slopes = torch.zeros_like(leaf) if gradient is None else gradient
            tolerance = 1e-6 + 2e-3 * float(slopes.abs().max())
            places = np.unique(np.linspace(0, leaf.numel() - 1, MOST_SLOPES).astype(int)).tolist()
            for token, slope in zip(places, slopes.flatten()[places].tolist(), strict=True):
                sides = []
                for change in (-STEP, STEP):
                    moved = leaf.detach().clone()
                    moved.view(-1)[token] += change
                    leaves = {**step.leaves, name: moved.requires_grad_()}
                    with Constants(all_cut, constants.seen):
                        value, *_ = _total(recipe, step._replace(leaves=leaves))
                    sides.append((value - middle).item() / change)
                if not min(sides) - tolerance <= slope <= max(sides) + tolerance:
                    wrong = wrong or f"{slope:.4g} by {name}[{token}], and its values change by {sides[1]:.4g}"
        if not wrong:
            return ""
    return (
        f"`{hook}` has the derivative {wrong}: a backward pass of its own is wrong, or .item(), float() or NumPy cuts "
        "the gradient; if it is meant, cut it with detach()"
    )


# ---- output ----------------------------------------------------------------------------------------------------------


def _table(recipe: Recipe, batch: TrainingBatch, forest: Forest, losses: Tensor, gradient: Tensor) -> Iterator[Any]:
    """Yields the cells of the calls of the first group, after those of the header."""
    facts = batch.facts
    assert facts is not None
    read = [name for name in recipe.reads if name in forest.targets and forest[name].dtype.kind == "f"]
    columns = {name: forest[name] for name in dict.fromkeys(("logprob", *read))}
    columns |= {"loss": losses.numpy(), "gradient": gradient.numpy()}
    yield ["episode", "role", "turn", "reward", "tokens", *columns]
    for call in np.flatnonzero(facts.groups[facts.call_episode] == facts.groups[0]):
        of_call = forest["call"] == call
        episode = facts.call_episode[call]
        cells = [str(episode), facts.roles[facts.call_role[call]], str(facts.call_turn[call])]
        cells += [f"{facts.rewards[episode]:g}", str(int(of_call.sum()))]
        yield [*cells, *(f"{one[of_call].mean():.4g}" if of_call.any() else "-" for one in columns.values())]


def _bits(value: Any) -> Any:
    """Returns something hashable that is equal for values with equal bits."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return tuple(_bits(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _bits(one)) for key, one in value.items()))
    if isinstance(value, tuple | list):
        return tuple(map(_bits, value))
    return repr(sorted(value)) if isinstance(value, frozenset | set) else repr(value)
