"""What "Confidence: equal to ..." in a recipe's description means. Pinned here:

1. every built-in recipe has one of three labels, and "equal to" names a reference that is in the tables below;
2. `agentjet recipes` lists families and labels;
3. the loss of a random batch and its gradient, or the advantages of its calls, equal those of the reference.

Rewards and advantages are written here from the sources of the references: over padded rows, in loops over groups.
Losses are those of `tests/compute/formulas.py`, with the parameters of the references. Neither has code of `recipes/`.
B rows, one for each episode, T tokens; M tokens of all rows.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from agentjet.cli.main import app, confidence
from agentjet.recipes import hooks, registry
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.rollout import Rollout, TaskStats
from tests.compute.formulas import FORMULAS
from tests.recipes.batches import advantages, make_batch, recipe_of

VERL, TRL = "verl 0.9.1", "TRL 1.16"
"""Releases on PyPI: `verl/trainer/ppo/core_algos.py`, `trl/trainer/grpo_trainer.py`."""
DUAL = {"loss": {"dual_clip": 3}}
"""verl's default."""


@dataclass(frozen=True)
class Rows:
    """A batch as the references have it. `mask`, `logp` and those below are [B, T]."""

    groups: list[int]
    scores: Tensor
    """[B]"""
    grades: Tensor
    """A second reward [B]."""
    mask: Tensor
    logp: Tensor
    """With gradient, as the next two have it."""
    new_entropy: Tensor
    new_value: Tensor
    old: Tensor
    entropy: Tensor
    value: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.logp, self.new_entropy, self.new_value

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)


def rows_of(seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    groups = [group for group, size in enumerate((4, 2, 5, 3)) for _ in range(size)]
    num, most = len(groups), 6
    lengths = rng.integers(1, most + 1, num)
    mask = torch.from_numpy(np.arange(most) < lengths[:, None]).double()

    def normal(scale: float, shift: float = 0.0) -> Tensor:  # as float32 has it, because columns are stored so
        return torch.from_numpy((rng.normal(shift, scale, (num, most))).astype(np.float32)).double()

    old = -normal(1.0).abs() - 0.05
    logp = (old + normal(0.5)).clamp(max=-0.01)
    return Rows(
        groups,
        torch.from_numpy(rng.choice([0.0, 0.25, 1.0], num)),
        torch.from_numpy(rng.choice([0.0, 0.5, 1.0], num)),
        mask,
        logp.requires_grad_(),
        normal(0.5, 1.0).requires_grad_(),
        normal(1.0).requires_grad_(),
        old,
        normal(1.0).abs(),
        normal(1.0),
    )


def ours(name: str, rows: Rows, parameters: Mapping[str, Any]) -> Tensor:
    """The loss of the batch by the hooks of the recipe."""
    recipe = make_recipe({"name": name, **parameters})
    assert isinstance(recipe, PolicyGradient)
    sizes = [rows.groups.count(group) for group in dict.fromkeys(rows.groups)]
    batch = make_batch(
        [part.tolist() for part in rows.scores.split(sizes)],
        calls=[[int(length)] for length in rows.lengths],
        metrics={"grade": rows.grades.tolist()},
    )
    forest = batch.forest
    at = forest["call"], forest.depth[forest.node] - 2  # below two tokens of the prompt
    own = {"logprob": rows.old[at].numpy(), "entropy": rows.entropy[at].numpy(), "value": rows.value[at].numpy()}
    batch = replace(batch, forest=forest.with_columns(**own, row=at[0], place=at[1]))
    outputs = {key: value.astype(np.float32) for key, value in own.items()}
    forest, _ = hooks.columns(recipe, batch, outputs)
    at = forest["row"], forest["place"]
    columns = {key: torch.from_numpy(forest[key].copy()).double() for key in forest.targets}
    columns |= {key: columns[key].long() for key in ("sequence", "call")}
    columns |= {"new_entropy": rows.new_entropy[at]} if "new_entropy" in recipe.reads else {}
    columns |= {f"new_{head}": rows.new_value[at] for head in (recipe.value_heads.names if recipe.value_heads else ())}
    loss, _ = hooks.loss(recipe, rows.logp[at], columns)
    return (loss * torch.from_numpy(hooks.weights(recipe, forest))).sum()


# ---- rewards and advantages of rows ----------------------------------------------------------------------------------


def by_group(rows: Rows, values: Tensor, of: Callable[[Tensor, list[int]], Tensor]) -> Tensor:
    """Returns [B]: `of` the values of each group and its rows."""
    found = torch.zeros_like(values)
    for group in set(rows.groups):
        members = [row for row, own in enumerate(rows.groups) if own == group]
        found[members] = of(values[members], members)
    return found


def grpo(rows: Rows, scores: Tensor) -> Tensor:
    return by_group(rows, scores, lambda own, _: (own - own.mean()) / (own.std() + 1e-6))


def centred(rows: Rows, scores: Tensor) -> Tensor:
    return by_group(rows, scores, lambda own, _: own - own.mean())


def rloo(rows: Rows, scores: Tensor) -> Tensor:
    return by_group(
        rows, scores, lambda own, _: own * len(own) / (len(own) - 1) - own.mean() * len(own) / (len(own) - 1)
    )


def opo(rows: Rows, scores: Tensor) -> Tensor:
    return by_group(rows, scores, lambda own, at: own - (rows.lengths[at] * own).sum() / rows.lengths[at].sum())


def passk(rows: Rows, scores: Tensor) -> Tensor:
    def of(own: Tensor, _: list[int]) -> Tensor:
        (best, second), places = own.topk(2)
        return torch.zeros_like(own).index_fill(0, places[:1], float((best - second) / (own.std() + 1e-6)))

    return by_group(rows, scores, of)


def max_rl(rows: Rows, scores: Tensor) -> Tensor:
    return by_group(
        rows, scores, lambda own, _: (own - own.mean()) / own.mean() if own.mean() > 0 else torch.zeros_like(own)
    )


def pkpo(rows: Rows, scores: Tensor) -> Tensor:
    """Its equation 33, over all subsets of k = 2 members, times the size of the group."""

    def of(own: Tensor, _: list[int]) -> Tensor:
        subsets = list(combinations(range(len(own)), 2))
        sums = torch.zeros_like(own)
        for subset in subsets:
            for one in subset:
                sums[one] += own[[*subset]].max() - own[[other for other in subset if other != one]].max()
        return sums * len(own) / len(subsets)

    return by_group(rows, scores, of)


def of_tokens(rows: Rows, scores: Tensor) -> Tensor:
    """HAPO: mean and population deviation over the tokens of the group; GRPO where one is 5 or more."""

    def of(own: Tensor, at: list[int]) -> Tensor:
        tokens = torch.repeat_interleave(own, rows.lengths[at].long())
        found = (own - tokens.mean()) / (tokens.std(correction=0) + 1e-6)
        return found if found.abs().max() < 5 else (own - own.mean()) / (own.std() + 1e-6)

    return by_group(rows, scores, of)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum() * mask.sum() / (mask.sum() - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def spread(rows: Rows, of_rows: Tensor) -> Tensor:
    return of_rows[:, None] * rows.mask


def estimated(rows: Rows) -> tuple[Tensor, Tensor]:
    """verl's GAE with gamma 1 and lambda 0.95, and the returns."""
    rewards = torch.zeros_like(rows.mask)
    rewards[range(len(rewards)), rows.lengths.long() - 1] = rows.scores
    following, last, found = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        now = rewards[:, t] + following - rows.value[:, t] + 0.95 * last
        is_own = rows.mask[:, t]
        following = rows.value[:, t] * is_own + (1 - is_own) * following
        last = now * is_own + (1 - is_own) * last
        found.append(last)
    advantage = torch.stack(found[::-1], 1)
    return whitened(advantage, rows.mask), advantage + rows.value


# ---- losses of tokens, and means -------------------------------------------------------------------------------------


def tokens_loss(rows: Rows, advantage: Tensor, loss: str, **chosen: float | str) -> Tensor:
    """Returns the losses [M] of the tokens by the formula of that name, row after row."""
    at = rows.mask.bool()
    gap = (((rows.logp - rows.old) * rows.mask).sum(1) / rows.lengths).detach()
    row = torch.arange(len(rows.mask))[:, None].expand_as(rows.mask)
    columns = {"logprob": rows.old, "advantage": advantage, "mean_log_ratio": spread(rows, gap), "sequence": row}
    flat = {name: column[at] for name, column in columns.items()}
    return FORMULAS[loss](rows.logp[at], flat, SimpleNamespace(**chosen))


clip = partial(tokens_loss, loss="clip", clip_low=0.2, clip_high=0.2, dual_clip=3)


def uncertain(rows: Rows, advantage: Tensor) -> Tensor:
    """TRL: without the tokens below the 0.8-quantile of the entropies."""
    own = rows.entropy[rows.mask.bool()]
    return clip(rows, advantage) * (own >= own.quantile(0.8))


def entropy_balanced(rows: Rows, advantage: Tensor) -> Tensor:
    own = rows.entropy[rows.mask.bool()]
    weighed = advantage * (1 + 0.2 * (rows.entropy - own.mean()) / own.std())
    return tokens_loss(rows, weighed, "aepo", clip_low=0.2, clip_high=0.2, dual_clip=3)


def token_mean(rows: Rows, loss: Tensor) -> Tensor:
    return loss.mean()


def row_sums(rows: Rows, loss: Tensor) -> Tensor:
    return torch.stack([own.sum() for own in loss.split(rows.lengths.int().tolist())])


def row_mean(rows: Rows, loss: Tensor) -> Tensor:
    return (row_sums(rows, loss) / rows.lengths).mean()


# ---- recipes ---------------------------------------------------------------------------------------------------------


def clipped(estimate: Callable[[Rows, Tensor], Tensor], rows: Rows) -> Tensor:
    return clip(rows, spread(rows, estimate(rows, rows.scores))).mean()


def on_grpo(mean: Callable[[Rows, Tensor], Tensor], loss: Callable[[Rows, Tensor], Tensor]) -> Callable[[Rows], Tensor]:
    return lambda rows: mean(rows, loss(rows, spread(rows, grpo(rows, rows.scores))))


def formula(loss: str, **chosen: float | str) -> Callable[[Rows, Tensor], Tensor]:
    return partial(tokens_loss, loss=loss, **chosen)


def dapo(rows: Rows) -> Tensor:
    """`max_length` 6 and a buffer of 4."""
    penalised = rows.scores + (-(rows.lengths - (6 - 4)) / 4 * 1.0).clamp(max=0)
    return clip(rows, spread(rows, grpo(rows, penalised)), clip_high=0.28, dual_clip=10).mean()


def gdpo(rows: Rows) -> Tensor:
    added = 1.0 * grpo(rows, rows.scores) + 2.0 * grpo(rows, rows.grades)
    return clip(rows, whitened(spread(rows, added), rows.mask)).mean()


def rlsp(rows: Rows) -> Tensor:
    mixed = (rows.scores - 3 / rows.lengths) * 0.8 + rows.grades * 0.2
    return clip(rows, spread(rows, grpo(rows, mixed))).mean()


def ppo(rows: Rows) -> Tensor:
    advantage, goal = estimated(rows)
    near = rows.new_value.clamp(rows.value - 0.5, rows.value + 0.5)
    value = 0.5 * torch.maximum((rows.new_value - goal) ** 2, (near - goal) ** 2)
    return clip(rows, advantage).mean() + value[rows.mask.bool()].mean()


def without_small(rows: Rows) -> Tensor:
    """LOOP: the mean over the rows with an advantage of 0.01 or more."""
    advantage = rloo(rows, rows.scores)
    loss = tokens_loss(rows, spread(rows, advantage), "loop", clip=0.1)
    return (row_sums(rows, loss) / rows.lengths)[advantage.abs() >= 0.01].mean()


OF_BATCHES: list[tuple[str, str, Mapping[str, Any], Callable[[Rows], Tensor]]] = [
    ("grpo", VERL, DUAL, partial(clipped, grpo)),
    ("dr_grpo", VERL, {**DUAL, "constant": 6}, lambda rows: (
        row_sums(rows, clip(rows, spread(rows, centred(rows, rows.scores)))).mean() / 6)),
    ("rloo", VERL, DUAL, partial(clipped, rloo)),
    ("opo", VERL, DUAL, partial(clipped, opo)),
    ("grpo_passk", VERL, DUAL, partial(clipped, passk)),
    ("max_rl", "github.com/PrimeIntellect-ai/prime-rl at 0d6738f", DUAL, partial(clipped, max_rl)),
    ("pkpo", "github.com/kpahwa16/pass-k-policy-optimization at 1b0928e", {**DUAL, "k": 2}, partial(clipped, pkpo)),
    ("hapo_tlga", "github.com/starriver030515/HAPO at 7671dde", DUAL, partial(clipped, of_tokens)),
    ("reinforce_pp", VERL, DUAL, lambda rows: (
        clip(rows, whitened(spread(rows, rows.scores), rows.mask)).mean())),
    ("reinforce_pp_baseline", VERL, DUAL, lambda rows: (
        clip(rows, whitened(spread(rows, centred(rows, rows.scores)), rows.mask)).mean())),
    ("dapo", VERL, {"max_length": 6, "buffer": 4}, dapo),
    ("gspo", VERL, {}, on_grpo(row_mean, formula("gspo", clip_low=3e-4, clip_high=4e-4))),
    ("gspo_token", VERL, {}, on_grpo(row_mean, formula("gspo", clip_low=3e-4, clip_high=4e-4))),
    ("gmpo", VERL, {}, on_grpo(row_mean, formula("gmpo", clip=0.4))),
    ("cispo", VERL, {}, on_grpo(token_mean, formula("cispo", clip_low=10, clip_high=0.2))),
    ("dppo", VERL, {}, on_grpo(
        token_mean, formula("dppo", divergence="tv", clip_low=0.15, clip_high=0.15, max_ratio=20))),
    ("dppo", VERL, {"loss": {"divergence": "kl", "clip_low": 0.05, "clip_high": 0.05}}, on_grpo(
        token_mean, formula("dppo", divergence="kl", clip_low=0.05, clip_high=0.05, max_ratio=20))),
    ("sapo", VERL, {}, on_grpo(row_mean, formula("sapo", positive=1.0, negative=1.05))),
    # with a share so large that no token is chosen by chance
    ("clip_cov", VERL, {"loss": {"share": 1, "lowest": 0.2, "highest": 1}}, on_grpo(token_mean, formula(
        "clip_cov", clip_low=0.2, clip_high=0.2, dual_clip=0, share=1, lowest=0.2, highest=1))),
    ("kl_cov", VERL, {"loss": {"share": 0.2}}, on_grpo(token_mean, formula("kl_cov", share=0.2, coef=1))),
    ("top_entropy", TRL, DUAL, on_grpo(token_mean, uncertain)),
    ("loop", "github.com/apple/ml-loop at 6ade7b9", {}, without_small),
    ("aepo", "github.com/multi-agent-deep-research/ARPO at b7a33bd", {}, on_grpo(token_mean, entropy_balanced)),
    ("entropy_bonus", VERL, {**DUAL, "entropy_coef": 0.1}, lambda rows: (
        clipped(grpo, rows) - 0.1 * rows.new_entropy[rows.mask.bool()].mean())),
    ("ppo", VERL, DUAL, ppo),
    ("gdpo", VERL, {**DUAL, "mix": {"reward": 1, "grade": 2}}, gdpo),
    ("rlsp", "github.com/GuanghaoYe/Emergence-of-Thinking at a36ba6c", {**DUAL, "cost": 3, "metric": "grade"}, rlsp),
    ("dro", VERL, {}, lambda rows: (
        tokens_loss(rows, spread(rows, centred(rows, rows.scores)), "dro", beta=0.05).mean())),
]  # fmt: skip
"""Recipe, reference, parameters, and the loss of a batch."""


@pytest.mark.parametrize(("name", "source", "parameters", "theirs"), OF_BATCHES, ids=[case[0] for case in OF_BATCHES])
def test_the_loss_and_its_gradient_are_those_of_the_reference(
    name: str, source: str, parameters: Mapping[str, Any], theirs: Callable[[Rows], Tensor]
) -> None:
    for seed in range(3):
        rows = rows_of(seed)
        losses = theirs(rows), ours(name, rows, parameters)
        assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), abs=1e-5)
        expected, found = (torch.autograd.grad(loss, rows.leaves, allow_unused=True) for loss in losses)
        assert expected[0] is not None and float(expected[0].norm()) > 1e-3
        for own, other in zip(found, expected, strict=True):
            assert (own is None or not own.any()) if other is None else torch.allclose(own, other, atol=1e-5)


# ---- advantages of calls: an episode is its group, its reward, and what was seen before each call --------------------

Episode = tuple[int, float, tuple[int, ...]]


def episodes_of(seed: int, roles: int = 0) -> list[Episode]:
    """Each begins with the state 0. With `roles`, these speak at most once, in any order."""
    rng = np.random.default_rng(seed)
    later = [rng.permutation(roles) if roles else rng.integers(1, 4, 6) for _ in range(8)]
    return [
        (e // 4, float(rng.choice([0.0, 0.5, 1.0])), (*([] if roles else [0]), *map(int, own[: rng.integers(1, 6)])))
        for e, own in enumerate(later)
    ]


def normalised(values: Sequence[float], ddof: int, by_std: bool) -> list[float]:
    centred = np.array(values) - np.mean(values)
    if len(values) > ddof and by_std:
        centred /= np.std(values, ddof=ddof) + 1e-6
    return (centred if len(values) > 1 else 0 * centred).tolist()


def compared(values: Sequence[float], keys: Sequence[Hashable], ddof: int, by_std: bool) -> list[float]:
    """Values of equal keys are compared with each other."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    found = [0.0] * len(values)
    for same in places.values():
        for place, own in zip(same, normalised([values[one] for one in same], ddof, by_std), strict=True):
            found[place] = own
    return found


def returns(episodes: Sequence[Episode]) -> list[float]:
    return [reward * 0.95**back for _, reward, states in episodes for back in reversed(range(len(states)))]


def gigpo(episodes: Sequence[Episode], by_std: bool) -> list[float]:
    of_episodes = compared([reward for _, reward, _ in episodes], [group for group, *_ in episodes], 1, by_std)
    keys = [(group, state) for group, _, states in episodes for state in states]
    of_steps = compared(returns(episodes), keys, 1, by_std)
    whole = [own for own, (*_, states) in zip(of_episodes, episodes, strict=True) for _ in states]
    return [own + step for own, step in zip(whole, of_steps, strict=True)]


def hgpo(episodes: Sequence[Episode], history: int, alpha: float, by_std: bool) -> list[float]:
    items: list[list[tuple[int, float]]] = [[] for _ in returns(episodes)]
    for k in range(1, history + 2):
        keys = [
            (group, states[turn - k + 1 : turn + 1]) if turn + 1 >= k else ("alone", e, turn)
            for e, (group, _, states) in enumerate(episodes)
            for turn in range(len(states))
        ]
        for own, found in zip(items, compared(returns(episodes), keys, 0, by_std), strict=True):
            own += [(k, found)] if abs(found) > 1e-9 else []
    weights = [[(k + 1) ** alpha for k, _ in own] for own in items]
    return [
        sum(w * a for w, (_, a) in zip(weight, own, strict=True)) / (sum(weight) or 1)
        for weight, own in zip(weights, items, strict=True)
    ]


OF_CALLS: list[tuple[str, str, Mapping[str, Any], Callable[[Sequence[Episode]], list[float]]]] = [
    ("gigpo", "github.com/langfengQ/DrMAS at 3b556f2", {}, partial(gigpo, by_std=False)),
    ("gigpo", "github.com/langfengQ/DrMAS at 3b556f2", {"normalise": True}, partial(gigpo, by_std=True)),
    ("hgpo", "github.com/OliverLeeXZ/SERL at 3c63ef3", {}, partial(hgpo, history=2, alpha=1, by_std=True)),
    ("hgpo", "github.com/OliverLeeXZ/SERL at 3c63ef3", {"history": 4, "alpha": 2, "normalise": False},
     partial(hgpo, history=4, alpha=2, by_std=False)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "source", "parameters", "theirs"), OF_CALLS)
def test_the_advantages_of_calls_are_those_of_the_reference(
    name: str, source: str, parameters: Mapping[str, Any], theirs: Callable[[Sequence[Episode]], list[float]]
) -> None:
    for seed in range(3):
        episodes = episodes_of(seed)
        groups = [[reward for group, reward, _ in episodes if group == own] for own in range(2)]
        prompts = [
            [token for state in states[: turn + 1] for token in (1 + state, 100)][:-1]
            for *_, states in episodes
            for turn in range(len(states))
        ]
        batch = make_batch(groups, calls=[[1] * len(states) for *_, states in episodes], prompts=prompts)
        expected = theirs(episodes)
        assert np.abs(expected).max() > 0.3
        assert advantages(batch, name, **parameters) == pytest.approx(expected, abs=1e-5)


DR_MAS, AGENT_GYM = "github.com/langfengQ/DrMAS at 19c632b", "github.com/WooooDyy/AgentGym-RL at 82402a9"


@pytest.mark.parametrize("seed", range(3))
def test_dr_mas_is_that_of_the_reference(seed: int) -> None:
    episodes, roles = episodes_of(seed, roles=3), 3
    batch = make_batch([[reward for group, reward, _ in episodes if group == own] for own in range(2)])
    assert batch.facts is not None
    spoke = np.array([[role in own for role in range(roles)] for *_, own in episodes])
    facts = replace(batch.facts, roles=("a", "b", "c"), role_rewards=np.full(spoke.shape, np.nan), spoke=spoke)
    found = recipe_of("dr_mas").sequence_advantages(replace(batch, facts=facts))
    calls = [(e, group, role, reward) for e, (group, reward, own) in enumerate(episodes) for role in own]
    expected = compared([call[3] for call in calls], [call[1:3] for call in calls], 1, by_std=True)
    assert [found[e, role] for e, _, role, _ in calls] == pytest.approx(expected, abs=1e-9)
    assert not found[~spoke].any()


def test_scaling_inter_has_the_limit_of_the_reference() -> None:
    recipe, limits = make_recipe("scaling_inter"), [10, 20, 30]
    for step in (1, 2, 100, 101, 200, 201, 999):
        found = recipe.rollout(TaskStats("", "t"), Rollout(4, 1.0), step - 1).max_turns
        assert found == limits[min((step - 1) // 100, len(limits) - 1)]


# ---- labels ----------------------------------------------------------------------------------------------------------

SOURCES = {
    **{name: source for name, source, *_ in (*OF_BATCHES, *OF_CALLS)},
    "dr_mas": DR_MAS,
    "scaling_inter": AGENT_GYM,
}


def test_labels_are_true() -> None:
    labels = {name: confidence(registry.find(name)) for name in registry.built_in()}
    assert {*labels.values()} == {"equal to", "after", "inspired by"}
    for name in registry.built_in():
        text = " ".join((registry.find(name).__doc__ or "").split())
        assert text.count("Confidence: ") == 1, name
        if name in SOURCES:
            assert f"Confidence: equal to {SOURCES[name]}" in text, name
        else:
            assert labels[name] != "equal to", f"{name} has no case in the tables"
            assert not re.search(r"equal to (verl|TRL|github)", text), name


def test_the_list_has_families_and_labels() -> None:
    rows = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)
    found = {row["name"]: row for row in rows if row["family"]}
    assert found.keys() == registry.BUILT_IN.keys() and all(row["meaning"] and row["confidence"] for row in rows)
    assert (found["gigpo"]["family"], found["gigpo"]["confidence"]) == ("turns", "equal to")
    listed = CliRunner().invoke(app, ["recipes"]).stdout
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("* ")] == ["grpo", "grpo"]
