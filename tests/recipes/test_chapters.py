"""Every built-in recipe against numbers worked out by hand, and what holds for all of them."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentjet.recipes import hooks, registry
from agentjet.recipes.losses import Clip, PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import FinishedGroup, Recipe
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import build_forest
from tests.recipes.batches import advantages, make_batch, recipe_of

NAMES = registry.built_in()
ESTIMATORS = [name for name in NAMES if issubclass(registry.find(name), PolicyGradient)]
"""Recipes with an advantage. The others have tests in files of their names."""
CRITICS = {"archer", "digirl", "ppo", "vapo", *registry.CHAPTERS["distillation"].split()}
"""Recipes whose advantages need columns that the learner computes: `test_values` and `test_distillation` have their
numbers."""
SCALED = {
    *("rft", "mars", "reinforce", "max_rl", "direct_advantage", "dense_turn_credit", "digirl_curriculum"),
    *CRITICS,
}
"""Recipes whose advantages are not differences of the rewards of episodes within a group."""

AS_GRPO = (
    "grpo",
    *("cispo", "gspo", "gspo_token", "gmpo", "sapo", "etr", "adaptive_kl", "awr", "dr_mas"),
    *("adaptive_entropy", "entropy_bonus", "dppo", "clip_cov", "kl_cov", "top_entropy"),
    *("scaling_inter", "task_temperature", "pass_rate", "staged"),
)
"""Recipes with the advantages of GRPO: they differ in the loss, the roles or the sampling."""

STATES = [[1, 50], [1, 50, 100, 51], [1, 50, 100, 51, 100, 52], [1, 50], [1, 50, 100, 51], [1, 50], [1, 50, 100, 53]]
"""Prompts of calls after the states 50, 51, 52 and 53, where every answer is 100."""


@pytest.mark.parametrize(
    ("name", "batch", "parameters", "expected"),
    [
        *((name, {"groups": [[1, 0, 0, 1]]}, {}, [0.866024, -0.866024, -0.866024, 0.866024]) for name in AS_GRPO),
        *((name, {"groups": [[1, 0, 0, 0]]}, {}, [1.499997, -0.499999, -0.499999, -0.499999]) for name in AS_GRPO),
        # three turns of 1, seven of 0
        ("dart", {"groups": [[1, 0]], "calls": [[1] * 3, [1] * 7]}, {}, [1.449135] * 3 + [-0.621058] * 7),
        ("single_stream", {"groups": [[1, 0], [0, 1]]}, {}, [0.866024, -0.866024, -0.866024, 0.866024]),
        # r - v: 0.5, -2/3, 0; mean -1/18, sample deviation 0.585314
        ("single_stream", {"groups": [[1], [0], [1]], "means": [0.5, math.nan, 1]}, {},
         [0.949156, -1.044072, 0.094916]),
        ("single_stream", {"groups": [[1]]}, {}, [0]),
        *(
            (name, {"groups": [[0], [0], [0]], "named": [5, 3, 4], "means": [0, 5, math.nan]}, {}, expected)
            for name, expected in (("single_stream", [0.999999, -0.999999, 0]), ("digirl_curriculum", [1, 0, 0]))
        ),  # Rewards of roles are not compared with those of tasks: their mean in the batch is 4.
        ("digirl_curriculum", {"groups": [[1, 0, 0, 0]]}, {}, [1, 0, 0, 0]),
        ("digirl_curriculum", {"groups": [[0, 0]]}, {}, [0, 0]),  # failures are not imitated
        (
            "digirl_curriculum",  # the quantile is 0.53
            {
                "groups": [[1], [1], [0], [0], [1], [0], [0], [0], [0], [1]],
                "means": [0.9, 0.2, 0.1, 0.8, 0.5, 0.3, 0.3, 0.3, 0.3, 0.95],
            },
            {},
            [0, 1, *[0] * 8],
        ),
        ("dr_grpo", {"groups": [[1, 0, 0, 0]]}, {}, [0.75, -0.25, -0.25, -0.25]),
        ("dro", {"groups": [[1, 0, 0, 0]]}, {}, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", {"groups": [[0.2, 0.8, 0.5]]}, {}, [-0.45, 0.45, 0]),
        ("rloo", {"groups": [[1, 0, 0, 0]]}, {}, [1, -1 / 3, -1 / 3, -1 / 3]),
        # mean 3/5, variance 1.2/4 = 0.3 over the tokens 1 1 1 0 0
        ("reinforce_pp", {"groups": [[1, 0]], "calls": [[3], [2]]}, {}, [0.730297, -1.095445]),
        ("reinforce_pp_baseline", {"groups": [[1, 0], [1, 1]], "calls": [[2], [1], [2], [2]]}, {},
         [1.242118, -1.656157, -0.20702, -0.20702]),
        *(
            (
                name,  # only the first two name a reward for the role: mean 1/2, variance 1/3 over the tokens 1 1 0 0
                {"groups": [[1, 0, 0.5]], "calls": [[2], [2], [3]], "named": [1, 0, math.nan]},
                {},
                [0.866025, -0.866025, 0],
            )
            for name in ("reinforce_pp", "reinforce_pp_baseline")
        ),
        ("opo", {"groups": [[1, 0, 0]], "calls": [[2], [4], [2]]}, {}, [0.75, -0.25, -0.25]),  # 2 / 8 is the baseline
        ("hapo_tlga", {"groups": [[1, 0]], "calls": [[2], [6]]}, {}, [1.732047, -0.577349]),
        ("hapo_tlga", {"groups": [[1, 0]], "calls": [[1], [40]]}, {}, [0.707106, -0.707106]),  # 6.3 is too far
        *(
            (
                name,  # two of four groups teach: factor 2
                {"groups": [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]]},
                {},
                [2.999994, *[-0.999998] * 3, *[0] * 8, 1.732048, 1.732048, -1.732048, -1.732048],
            )
            for name in ("rapo", "rapo_pruning")
        ),
        # one of four groups teaches: factor 4, at most 3
        ("rapo", {"groups": [[1, 0], [1, 1], [0, 0], [1, 1]]}, {"max_factor": 3}, [2.121318, -2.121318, *[0] * 6]),
        # strata of 1, 2 and 3 turns
        ("stratified_grpo",
         {"groups": [[1, 0, 1, 0, 0, 0, 1, 1]], "calls": [[1]] * 2 + [[1, 1]] * 4 + [[1, 1, 1]] * 2}, {},
         [0.752767, -0.752767, *[1.38708] * 2, *[-0.587082] * 6, *[0.187083] * 6]),
        # weights 1/3 1/3 1/3 3 of the advantages of GRPO
        ("duration_aware", {"groups": [[1, 0, 0, 1]], "metrics": {"env_seconds": [1, 1, 1, 9]}}, {},
         [0.288675, -0.288675, -0.288675, 2.598073]),
        # weights 1/2 1/2 1/2 2 instead of 1/3 and 3
        ("duration_aware", {"groups": [[1, 0, 0, 1]], "metrics": {"env_seconds": [1, 1, 1, 9]}}, {"max_weight": 2},
         [0.433012, -0.433012, -0.433012, 1.732048]),
        ("duration_aware", {"groups": [[1, 0, 0, 1]]}, {}, [0.866024, -0.866024, -0.866024, 0.866024]),
        # penalties 0 0 -0.4 -1 make the rewards 1 1 0.6 0: mean 0.65, deviation 0.472582
        ("dapo", {"groups": [[1, 1, 1, 1]], "calls": [[10], [15], [17], [20]]}, {"max_length": 20, "buffer": 5},
         [0.740612, 0.740612, -0.105802, -1.375422]),
        # penalties 0 -0.375 -0.5 make the rewards 1 0.625 0.5
        ("dapo", {"groups": [[1, 1, 1]], "calls": [[4], [9], [99]]}, {"max_length": 10, "buffer": 4, "factor": 0.5},
         [1.120893, -0.320255, -0.800638]),
        ("loop", {"groups": [[1, 0.5, 0, 0.5, 1, 0]]}, {}, [0.6, 0, -0.6, 0, 0.6, -0.6]),
        ("rft", {"groups": [[1, 0.5, 0, 1]]}, {}, [1, 0, 0, 1]),
        # the mean 0.125 is subtracted, then summed to the end
        ("mars", {"groups": [[0, 0]], "calls": [[1, 1], [1, 1]], "turn_rewards": [[0, -1], [0.5, 1]]}, {},
         [-1.25, -1.125, 1.25, 0.875]),
        ("reinforce", {"groups": [[1, -0.5, 0]]}, {}, [1, -0.5, 0]),
        ("grpo_passk", {"groups": [[0.2, 1, 0.4], [1, 1, 0]]}, {}, [0, 1.441150, 0, 0, 0, 0]),  # 0.6 / 0.416334
        ("max_rl", {"groups": [[1, 0, 0, 0], [0.5, 1, 0.9, 0.6], [0, 0, 0, 0]]}, {},
         [3, -1, -1, -1, -1 / 3, 1 / 3, 0.2, -0.2, *[0] * 4]),
        ("max_rl", {"groups": [[1, -2], [1, -0.5]]}, {}, [0, 0, 3, -3]),  # a mean below 0, and of 1/4
        # C(4, 2) = 6: the best leads three others by 1, so 4 / 6 x 3
        ("pkpo", {"groups": [[1, 0, 0, 0], [1, 1, 0, 0]]}, {"k": 2}, [2, 0, 0, 0, 4 / 3, 4 / 3, 0, 0]),
        # C(4, 3) = 4: 0.9 leads in three subsets, by 0.5, 0.1 and 0.1, and 0.8 in one, by 0.4
        ("pkpo", {"groups": [[0.9, 0.3, 0.4, 0.8]]}, {"k": 3}, [0.7, 0, 0, 0.4]),
        ("pkpo", {"groups": [[0.2, 1]]}, {"k": 9}, [0, 1.6]),  # k = 2, the size of the group
        ("rae", {"groups": [[1, 0], [0.5, 0.5]]}, {}, [0.5, -0.5, 0, 0]),
        # the format does not differ in the first group; 0.707106 of each, and twice that, whitened by 1.195227
        ("gdpo", {"groups": [[1, 0], [0, 1]], "metrics": {"format": [1, 1, 0, 1]}}, {},
         [0.591608, -0.591608, -1.183216, 1.183216]),
        # sums 2.12132, -2.12132 and -0.707106, 0.707106 over 2, 1, 1, 1 tokens: mean 0.424264, deviation 1.843909
        ("gdpo", {"groups": [[1, 0], [0, 1]], "calls": [[2], [1], [1], [1]], "metrics": {"short": [9, 3, 0, 0]}},
         {"mix": {"reward": 1, "short": 2}}, [0.920358, -1.380537, -0.613572, 0.153393]),
        ("gdpo", {"groups": [[1, 0, 1]], "metrics": {"format": [math.nan, 0, 1]}}, {"mix": {"format": 1}},
         [0, -1.118034, 1.118034]),  # 0.707106, whitened by 0.632455
        # penalties 0.1 x tokens x 1/2: rewards 0.9 0.8 -0.1 -0.4; mean 0.3, deviation 0.648074
        ("alp", {"groups": [[1, 1, 0, 0]], "calls": [[2], [4], [2], [8]]}, {"beta": 0.1},
         [0.925819, 0.771516, -0.617213, -1.080122]),
        # all pass, and none: 0.1 x tokens x 1/2, at least one of two
        ("alp", {"groups": [[1, 1], [0, 0]], "calls": [[2], [4], [2], [4]]}, {"beta": 0.1},
         [0.707102, -0.707102, 0.707097, -0.707097]),
        ("oapl", {"groups": [[1, 0, 0, 1]]}, {}, [0.379885, -0.620115, -0.620115, 0.379885]),
        ("oapl", {"groups": [[1, 0, 0, 1]]}, {"temperature": 0.5}, [0.283110, -0.716890, -0.716890, 0.283110]),
        ("direct_advantage", {"groups": [[1]], "calls": [[1, 1, 1]], "turn_rewards": [[0.3, 0.04, -0.2]]}, {},
         [0.3, 0, -0.2]),
        # shares 0 1/3 0 1/3 1/3 and 0 0.2 0 0.2 0, summed to the end; half the differences
        ("dense_turn_credit",
         {"groups": [[1, 0]], "calls": [[1] * 5] * 2, "turn_rewards": [[0, 1, 0, 1, 1], [0, 1, 0, 1, 0]]}, {},
         [0.3, 0.3, 0.233333, 0.233333, 0.166667, -0.3, -0.3, -0.233333, -0.233333, -0.166667]),
        (
            "hc_grpo",  # rewards 0.83 0.60 -0.12 0.68
            {
                "groups": [[1, 1, 0, 1]],
                "metrics": {"ask": [1, 0, 0, 3], "get_memory": [1, 0, 1, 0], "navigate": [5, 40, 10, 2]},
            },
            {"costs": {"ask": 0.1, "get_memory": 0.02, "navigate": 0.01}},
            [0.786866, 0.242568, -1.461322, 0.431889],
        ),
        *(
            ("hc_grpo", {"groups": [[1, 0]], "metrics": {"ask": [30, 30]}}, parameters, [0.707106, -0.707106])
            for parameters in ({}, {"costs": {"ask": 0.001}, "only_success": True})  # both costs are the largest one
        ),
        (
            "craft_gui",  # rewards 1, 0.5 / 0.7, 0.3 and the episode's 0: mean 0.503571, deviation 0.441917
            {
                "groups": [[0, 0, 0, 0]],
                "metrics": {
                    "format": [1, 0, 0, math.nan],
                    "action": [1, 1, 0, math.nan],
                    "judge": [1, math.nan, 1, math.nan],
                },
            },
            {},
            [1.123354, 0.476820, -0.460656, -1.139518],
        ),
        ("aepo", {"groups": [[1, 0]], "calls": [[1], [1]], "entropies": [0.5, 0.1]}, {}, [0.807106, -0.607107]),
        ("hapo", {"groups": [[1, 0]], "calls": [[2], [6]]}, {}, [1.732047, -0.577349]),
        # the 0.6-quantile of the entropies is 0.3 + 0.4 x 0.5
        ("top_entropy", {"groups": [[1, 0]], "calls": [[1] * 3, [1] * 2], "entropies": [0.1, 0.9, 0.3, 0.2, 0.8]},
         {"keep": 0.4}, [0, 0.707106, 0, 0, -0.707106]),
        # three turns of 1, seven of 0
        ("stepwise_grpo", {"groups": [[1, 0]], "calls": [[1] * 3, [1] * 7]}, {"keep": 1},
         [*[1.449135] * 3, *[-0.621058] * 7]),
        (
            "stepwise_grpo",  # without the turns 0 and 4, the least uncertain
            {
                "groups": [[1, 0]],
                "calls": [[1] * 3, [1] * 7],
                "entropies": [0.2, 1, 0.4, 0.9, 0.1, 0.6, 0.3, 0.8, 0.7, 0.5],
            },
            {},
            [0, *[1.449135] * 2, -0.621058, 0, *[-0.621058] * 5],
        ),
        # s0 s1 s2 with 1 at the end; s0 s1; s0 s3
        ("gigpo", {"groups": [[1, 0, 0]], "calls": [[1, 1, 1], [1, 1], [1, 1]], "prompts": STATES}, {},
         [1.268333, 1.141667, 0.666667, -0.634167, -0.808333, -0.634167, -0.333333]),
        # s0 s1 s2 success: 2, 1 and 0 calls are left after them, and 4 on other ways: 0.1 1 10, 0.1 0.001, 0.001 0.001
        ("graph_gpo", {"groups": [[1, 0, 0]], "calls": [[1, 1, 1], [1, 1], [1, 1]], "prompts": STATES}, {},
         [1.732039, 1.861805, 1.154699, -0.000009, -1.284455, -1.732029, -0.577349]),
        # s0 s1 success, so s2 is a detour: 1, 1 and 0 calls are left; 1 and 0; 3 and 3: 5 5 10, 5 10 and 1.25 1.25
        ("graph_gpo", {"groups": [[1, 1, 0]], "calls": [[1, 1, 1], [1, 1], [1, 1]], "prompts": STATES},
         {"omega": 0.5}, [1.154699, -0.129757, 0.577349, 1.154699, 1.284456, -2.309399, -1.154699]),
        ("graph_gpo", {"groups": [[0, 0.4, 0]], "calls": [[1, 1, 1], [1, 1], [1, 1]], "prompts": STATES}, {},
         [*[-0.577348] * 3, *[1.154696] * 2, *[-0.577348] * 2]),  # without a success
        # with deviations
        ("gigpo", {"groups": [[1, 0, 0]], "calls": [[1, 1, 1], [1, 1], [1, 1]], "prompts": STATES},
         {"normalise": True}, [2.309397, 1.861805, 1.154699, -1.154698, -1.284455, -1.154698, -0.577349]),
    ],
)  # fmt: skip
def test_advantages_by_hand(
    name: str, batch: dict[str, Any], parameters: dict[str, Any], expected: list[float]
) -> None:
    assert advantages(make_batch(**batch), name, **parameters) == pytest.approx(expected, abs=2e-6)


def test_dr_mas_compares_a_role_over_the_episodes_in_which_it_has_calls() -> None:
    batch = make_batch([[1, 0, 0, 1]])
    assert batch.facts is not None
    spoke = np.array([[True, True], [True, True], [True, True], [True, False]])
    facts = replace(batch.facts, roles=("planner", "critic"), role_rewards=np.full((4, 2), np.nan), spoke=spoke)
    found_ER = recipe_of("dr_mas").sequence_advantages(replace(batch, facts=facts))
    assert found_ER[:, 0].tolist() == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)
    assert found_ER[:3, 1].tolist() == pytest.approx([1.154698, -0.577349, -0.577349], abs=1e-6)


def test_rae_keeps_a_baseline_for_each_task_set_and_role() -> None:
    batch = make_batch([[1, 0], [0.6, 0.6]])
    assert batch.facts is not None
    spoke = np.array([[True, True], [True, True], [True, False], [True, False]])
    roles = np.array([[1.0, -1.0], [0, 0], [0.6, np.nan], [0.6, np.nan]])
    tasks = (("chess", "1"), ("chess", "1"), ("", "2"), ("", "2"))
    facts = replace(batch.facts, roles=("white", "black"), role_rewards=roles, spoke=spoke, tasks=tasks)
    batch = replace(batch, facts=facts)
    rae = recipe_of("rae", decay=0.5)
    assert rae.sequence_advantages(batch).tolist() == [[0.5, -0.5], [-0.5, 0.5], [0, 0], [0, 0]]
    metrics = rae.columns(batch, {})[1] | {"policy/clip_fraction": 0.0}
    white, black, other = (f"policy/baseline/{name}" for name in ("chess/white", "chess/black", "white"))
    assert rae.next_state({"kept": 1.0}, metrics) == {"kept": 1.0, white: 0.5, black: -0.5, other: 0.6}
    later = replace(batch, state={white: 0.1, black: -0.3})
    expected = [[0.9, -0.7], [-0.1, 0.3], [0, 0], [0, 0]]
    assert rae.sequence_advantages(later).tolist() == [pytest.approx(row) for row in expected]
    state = rae.next_state(later.state, rae.columns(later, {})[1])  # two episodes: a quarter is left
    assert [state[name] for name in (white, black, other)] == pytest.approx([0.4, -0.45, 0.6])


@pytest.mark.parametrize(("name", "kept"), [("grpo", [0, 1, 2, 5, 5]), ("awr", [0, 1, 2, 5, 5]), ("loop", [5, 5])])
def test_truncated_episodes_are_compared_and_left_out(name: str, kept: list[int]) -> None:
    batch = make_batch([[0.5, 1, 0]], calls=[[1, 1, 1], [1, 1], [2]])
    assert batch.facts is not None
    cut = np.array([False, False, False, True, False, False])
    batch = replace(batch, facts=replace(batch.facts, call_truncated=cut))
    whole, without = (recipe_of(name, drop_truncated=drop).columns(batch, {})[0] for drop in (False, True))
    assert without["call"].tolist() == kept, "the second episode has an answer that was cut"
    assert without["advantage"].tolist() == whole["advantage"][np.isin(whole["call"], kept)].tolist()
    assert recipe_of(name, drop_truncated=True).weights(without).sum() == pytest.approx(1)


def test_every_recipe_has_a_number_here() -> None:
    [mark] = test_advantages_by_hand.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(ESTIMATORS) - CRITICS


@pytest.mark.parametrize("chapter", registry.CHAPTERS)
def test_a_chapter_has_the_recipes_of_the_table_and_names_them(chapter: str) -> None:
    module = import_module(f"agentjet.recipes.{chapter}")
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    recipes = [kind for kind in own if issubclass(kind, Recipe) and "name" in kind.__annotations__]
    assert sorted(kind.model_fields["name"].default for kind in recipes) == registry.CHAPTERS[chapter].split()
    assert [name for name in registry.CHAPTERS[chapter].split() if f"`{name}`" not in (module.__doc__ or "")] == []
    assert max(len(inspect.getsource(kind).splitlines()) for kind in recipes) <= 100


def test_the_import_paths_of_plug_ins_stay() -> None:
    for name in NAMES:
        before = import_module(f"agentjet.recipes.shelf.{name}")
        assert registry.find(name) in vars(before).values()
        assert registry.find(f"agentjet.recipes.shelf.{name}:{registry.find(name).__name__}") is registry.find(name)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - SCALED - {"stepwise_grpo"}))
def test_only_differences_of_rewards_count(name: str) -> None:
    groups = [[0.1, 0.7, 0.4], [0.9, 0.9, 0.2]]
    found = advantages(make_batch(groups), name)
    shifted = advantages(make_batch([[reward + 3 for reward in group] for group in groups]), name)
    assert shifted == pytest.approx(found, abs=1e-5)
    reordered = advantages(make_batch([group[::-1] for group in groups]), name)
    assert reordered == pytest.approx([*found[2::-1], *found[:2:-1]], abs=1e-6)
    for rewards in ([0.7], [0.5] * 3, [0.1] * 7):
        assert advantages(make_batch([rewards]), name) == [0.0] * len(rewards), "equal rewards, in spite of rounding"


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(
    tenths=st.lists(st.integers(-50, 50), min_size=1, max_size=12), shift=st.integers(-20, 20), seed=st.integers(0, 99)
)
def test_better_rewards_have_larger_advantages(name: str, tenths: list[int], shift: int, seed: int) -> None:
    group_advantages, rewards_G = recipe_of(name).group_advantages, np.array(tenths) / 10
    advantages_G = group_advantages(rewards_G)
    order = np.random.default_rng(seed).permutation(len(tenths))
    assert np.all(np.isfinite(advantages_G))
    assert group_advantages(rewards_G + shift) == pytest.approx(advantages_G, abs=1e-6)
    assert group_advantages(rewards_G[order]) == pytest.approx(advantages_G[order], abs=1e-9)
    assert advantages_G.sum() == pytest.approx(0, abs=1e-6)
    better = np.subtract.outer(rewards_G, rewards_G) > 0
    assert np.all(np.subtract.outer(advantages_G, advantages_G)[better] > 0)


def token_loss(name: str, ratio: float, advantage: float, **parameters: Any) -> tuple[float, float]:
    """Loss and gradient at logp = -0.4."""
    logp = torch.tensor([-0.4], dtype=torch.float64, requires_grad=True)
    columns = {"logprob": logp.detach() - math.log(ratio), "advantage": torch.tensor([advantage])}
    loss, _ = recipe_of("grpo", loss={"name": name, **parameters}).token_loss(logp, columns)
    loss.sum().backward()
    return float(loss.detach()), float(logp.grad)


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "parameters", "loss", "gradient"),
    [
        ("loop", 1.3, 0.5, {}, -0.55, 0.0),
        ("loop", 0.8, 0.5, {}, -0.4, -0.4),
        ("loop", 1.3, -0.5, {}, 0.65, 0.65),
        ("loop", 0.8, -0.5, {}, 0.454545, 0.0),  # 0.5 / 1.1
        ("dro", 1.0, 2.0, {"beta": 0.5}, 0.8, -2.0),
        ("dro", math.exp(0.2), 1.0, {"beta": 0.5}, 0.41, -0.9),  # 0.4 + 0.25 x 0.04; -1 + 0.5 x 0.2
        ("awr", 1.0, -1.0, {"max_weight": 5.0}, 0.4 * 0.367879, -0.367879),
        ("awr", 1.0, 2.0, {"max_weight": 5.0}, 2.0, -5.0),  # e^2 is above the cap
        ("awr", 7.0, 1.0, {"beta": 0.5}, 0.4 * 7.389056, -7.389056),
        ("rft", 7.0, 1.0, {}, 0.4, -1.0),
        ("cispo", 1.5, 1.0, {}, 0.48, -1.2),
        ("cispo", 0.5, -1.0, {}, -0.2, 0.5),  # no lower bound
        ("cispo", 0.01, 1.0, {}, 0.004, -0.01),
        ("reinforce", 7.0, -0.5, {}, -0.2, 0.5),
        ("sapo", 1.0, 1.0, {}, -2.0, -1.0),  # 4 x 1/2; its slope is that of the ratio
        ("sapo", 2.0, 1.0, {}, -2.924234, -1.572895),  # 4 x 0.731059; 4 x 0.731059 x 0.268941 x 2
        ("sapo", 1.0, -1.0, {}, 1.904762, 1.0),  # 4 / 1.05 / 2
        ("aepo", 1.5, 1.0, {}, -1.2, -1.2),  # PPO's gradient is 0
        ("aepo", 1.1, 1.0, {}, -1.1, -1.1),
        ("aepo", 0.5, -1.0, {}, 0.8, 0.0),
        ("aepo", 5.0, -1.0, {}, 3.0, 0.0),
        # p = 0.670320. q = 0.558600 differs by 0.11, and q = 0.335160 by 0.34
        ("dppo", 1.2, 0.5, {}, 0.24, -0.6),
        ("dppo", 2.0, 0.5, {}, 0.0, 0.0),
        ("dppo", 2.0, -0.5, {}, -0.4, 1.0),  # it moves back
        ("dppo", 2.0, -0.5, {"max_ratio": 1.5}, -0.3, 0.75),
        ("dppo", 0.75, -0.5, {}, 0.0, 0.0),  # q = 0.893760, p fell by 0.22
        ("dppo", 0.75, -0.5, {"clip_low": 0.3}, -0.15, 0.375),
        # q log(q / p) + (1 - q) log((1 - q) / (1 - p)) = -0.101845 + 0.128813 = 0.026968
        ("dppo", 1.2, 1.0, {"divergence": "kl", "clip_high": 0.027}, 0.48, -1.2),
        ("dppo", 1.2, 1.0, {"divergence": "kl", "clip_high": 0.0269}, 0.0, 0.0),
        ("dppo", 1.2, -1.0, {"divergence": "kl", "clip_low": 0.0}, -0.48, 1.2),
    ],
)
def test_losses_by_hand(
    name: str, ratio: float, advantage: float, parameters: dict[str, Any], loss: float, gradient: float
) -> None:
    assert token_loss(name, ratio, advantage, **parameters) == pytest.approx((loss, gradient), abs=1e-6)


def test_a_loss_that_is_not_linear_computes_every_token_and_takes_no_correction() -> None:
    batch = make_batch([[1, 1], [1, 0]])
    dro = recipe_of("dro")
    assert dro.contributing(dro.columns(batch, {})[0]).all()
    grpo = recipe_of("grpo")
    assert grpo.contributing(grpo.columns(batch, {})[0]).sum() == 4
    with pytest.raises(ValueError, match="the loss 'dro' is not linear in the advantage"):
        recipe_of("dro", correction="tis")


def test_dapo_drops_groups_that_teach_nothing_and_keeps_its_defaults() -> None:
    dapo = recipe_of("dapo", loss={"clip_low": 0.1})
    assert dapo.loss.model_dump() == {"name": "clip", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": 10.0}
    group = FinishedGroup("t", "", [1.0, 1.0], [{}, {}], [3, 4], is_uniform=True)
    assert dapo.accept(group) == "zero_variance" and recipe_of("grpo").accept(group) == ""


def test_the_loss_of_another_recipe_has_that_recipes_defaults() -> None:
    taken = {"name": "dapo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    grpo = recipe_of("grpo", loss="dapo")
    assert grpo.loss.model_dump() == taken
    assert recipe_of(**grpo.model_dump()) == grpo, "as the journal stores it"
    assert recipe_of("rloo", loss={"name": "dapo", "clip_high": 0.3}).loss.model_dump() == taken | {"clip_high": 0.3}


@pytest.mark.parametrize("name", NAMES)
def test_the_journal_stores_a_recipe_as_it_is(name: str) -> None:
    recipe = make_recipe(name)
    assert make_recipe(json.loads(recipe.model_dump_json())) == recipe


def test_dapos_buffer_is_shorter_than_its_episodes() -> None:
    with pytest.raises(ValueError, match="buffer = 4096 is above max_length = 100"):
        recipe_of("dapo", max_length=100)


def test_what_is_not_compared_is_not_imitated() -> None:
    awr = recipe_of("awr")
    forest = awr.columns(make_batch([[1, 0, 0.5]], calls=[[2], [2], [3]], named=[1, 0, np.nan]), {})[0]
    assert forest.num_targets == 4 and awr.weights(forest).tolist() == [0.25] * 4
    one = make_batch([[1, 0, 0.5]], named=[1, np.nan, np.nan])
    assert awr.columns(one, {})[0].num_targets == 0, "compared with no other episode"


def test_costs_have_the_order_of_their_source() -> None:
    costs = recipe_of("hc_grpo").costs  # type: ignore[attr-defined]
    assert costs["navigate"] > costs["ask"] > 10 * costs["get_memory"], "arXiv 2512.18571"
    with pytest.raises(ValueError, match="greater than 0"):
        recipe_of("hc_grpo", costs={"ask": -1})


@pytest.mark.parametrize(
    ("name", "rewards", "kept"),
    [("rft", [1, 0.5, 0, 1], 4), ("loop", [1, 0.5, 0, 0.5], 4), ("rft", [0, 0], 0), ("digirl_curriculum", [1, 0], 2)],
)
def test_rejected_episodes_are_in_no_denominator(name: str, rewards: list[float], kept: int) -> None:
    recipe = recipe_of(name)
    forest = recipe.columns(make_batch([rewards]), {})[0]
    assert forest.num_targets == kept and forest.num_sequences == kept // 2
    assert recipe.contributing(forest).all()
    if kept:
        assert recipe.weights(forest).sum() == pytest.approx(1)
    corrected = recipe_of(name, correction="tis").columns(
        make_batch([rewards]), {"proximal": np.full(2 * len(rewards), -1.0, np.float32)}
    )[0]
    assert corrected["advantage"].tolist() == forest["advantage"].tolist()


@pytest.mark.parametrize("name", ["stepwise_grpo", "dart"])
def test_turns_of_any_length_count_the_same(name: str) -> None:
    recipe = recipe_of(name, keep=1)
    forest = recipe.columns(make_batch([[1, 0]], calls=[[1, 9], [4]]), {})[0]
    weights = recipe.weights(forest)
    assert [float(weights[forest["call"] == call].sum()) for call in range(3)] == pytest.approx([1 / 3] * 3)


def test_defaults_of_publications() -> None:
    assert (make_recipe("gspo").mini_batches, make_recipe("loop").epochs, make_recipe("grpo").mini_batches) == (4, 2, 1)
    assert [make_recipe(name).smallest_group for name in ("single_stream", "reinforce_pp_baseline")] == [1, 2]


def test_a_loss_says_itself_that_it_is_linear() -> None:
    class Squared(Clip):
        def token_loss(self, logp: Any, columns: Any) -> Any:
            return columns["advantage"] ** 2 * logp, {}

    class Narrow(Clip):
        clip_low: float = 0.1

    assert Narrow.is_linear and not Squared.is_linear and not PolicyLoss.is_linear
    linear = {name for name in ESTIMATORS if recipe_of(name).loss.is_linear}
    curved = {"awr", "dro", "oapl", "direct_advantage", "clip_cov", "kl_cov", "distill_top_k", "opsd", "sdft", "sdpo"}
    assert {*ESTIMATORS} - linear == curved


def test_unknown_names_and_parameters_are_refused_with_the_nearest() -> None:
    for value, sentence in (
        ("gsop", "there is no recipe 'gsop'; did you mean 'gspo'"),
        ({"name": "rapo", "max_facter": 3}, "'rapo' has no parameter 'max_facter'; did you mean 'max_factor'"),
        ({"loss": {"clip_hihg": 1}}, "'clip' has no parameter 'clip_hihg'; did you mean 'clip_high'"),
        ({"name": "nowhere.module:Recipe"}, "cannot be imported"),
        ({"name": "agentjet.recipes.losses:Clip"}, "is not a subclass of agentjet.recipes.recipe.Recipe"),
        (7, 'give a name, such as recipe = "gspo"'),
    ):
        with pytest.raises(ValueError, match=sentence):
            registry.make_recipe(value)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_without_a_token_in_the_batch_learns_nothing(name: str) -> None:
    recipe = make_recipe(name)
    heads = recipe.value_heads.names if recipe.value_heads else ()
    outputs = {column: np.zeros(0, np.float32) for column in (*recipe.needs, *heads)}
    batch = replace(make_batch([[1, 0]]), forest=build_forest([]).with_columns(**outputs))
    forest, _ = hooks.columns(recipe, batch, outputs)
    assert forest.num_targets == 0 and not hooks.contributing(recipe, forest).any()


def test_fewer_than_two_tokens_cannot_be_whitened() -> None:
    assert advantages(make_batch([[1.0]], calls=[[1]]), "reinforce_pp") == [0.0]
    assert np.all(np.isfinite(advantages(make_batch([[1.0, 1.0]]), "reinforce_pp")))
