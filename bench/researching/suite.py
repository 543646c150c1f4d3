"""The studies: common questions, traps included. Their answers are not written here; `oracle` computes them."""

from __future__ import annotations

from dataclasses import dataclass

from agentjet.research.models import Arm, Hypothesis, Knob, Study
from agentjet.research.records import Setting
from bench.researching.world import World

LEARNING_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
LOOKS = (4, 8, 16)
BUDGET_PER_ARM = 32.0
"""Full runs."""


@dataclass(frozen=True)
class Case:
    name: str
    world: World
    arms: dict[str, Setting]
    claims: tuple[tuple[str, str], ...]
    """Pairs of arms: the first scores higher than the second."""
    sesoi: float = 2.0
    tuned: bool = True
    is_aa: bool = False

    def study(self, seed: int) -> Study:
        nuisance = (Knob("lr", LEARNING_RATES),) if self.tuned else ()
        return Study(
            topic=self.name,
            metric="expected true reward, points",
            sesoi=self.sesoi,
            arms=tuple(Arm(name, changes, nuisance) for name, changes in self.arms.items()),
            hypotheses=tuple(Hypothesis(f"{a} scores higher than {b}", a, b) for a, b in self.claims),
            budget=BUDGET_PER_ARM * len(self.arms),
            looks=LOOKS,
            seed=seed,
        )


TWO = (("b", "a"),)


def suite(environment: int = 0) -> tuple[Case, ...]:
    """The studies in two worlds, each also with a grader that can be hacked. Their names describe environment 0."""
    easy, hard = World(2 * environment), World(2 * environment + 1)
    hacked_easy, hacked_hard = World(easy.seed, hackable=True), World(hard.seed, hackable=True)
    return (
        Case("A/A", easy, {"a": {"label": 1.0}, "b": {"label": 2.0}}, TWO, is_aa=True),
        Case(
            "A/A, noisy", hacked_easy, {"a": {"kl": 0.3, "label": 1.0}, "b": {"kl": 0.3, "label": 2.0}}, TWO, is_aa=True
        ),
        Case("divide by deviation", easy, {"a": {"normalise": 0.0}, "b": {"normalise": 1.0}}, TWO),
        Case(
            "divide by deviation, at lr 2",
            easy,
            {"a": {"normalise": 0.0, "lr": 2.0}, "b": {"normalise": 1.0, "lr": 2.0}},
            TWO,
            tuned=False,
        ),
        Case(
            "num_repeat 2, 8, 32",
            hard,
            {"2": {"num_repeat": 2.0}, "8": {"num_repeat": 8.0}, "32": {"num_repeat": 32.0}},
            (("8", "2"), ("32", "8")),
        ),
        Case(
            "num_repeat 64 or 8",
            hard,
            {"8": {"num_repeat": 8.0}, "64": {"num_repeat": 64.0}},
            (("64", "8"),),
            sesoi=1.0,
        ),
        Case(
            "KL, clean reward",
            hard,
            {"0": {"kl": 0.0}, "0.3": {"kl": 0.3}, "1": {"kl": 1.0}},
            (("0.3", "0"), ("1", "0")),
        ),
        Case("KL, hackable reward", hacked_hard, {"0": {"kl": 0.0}, "0.3": {"kl": 0.3}}, (("0.3", "0"),)),
        Case("KL, crossing curves", hacked_easy, {"0": {"kl": 0.0}, "0.3": {"kl": 0.3}}, (("0.3", "0"),)),
        Case(
            "underpowered",
            World(easy.seed, evaluations=100),
            {"a": {}, "b": {"skill": 0.012}},
            TWO,
            sesoi=1.0,
        ),
        Case("seed lottery", easy, {"a": {"collapse": 0.1}, "b": {"collapse": 0.1, "skill": 0.06}}, TWO),
        Case("seed lottery, one arm", easy, {"a": {"collapse": 0.1}, "b": {}}, TWO),
        Case("just below interest", hard, {"a": {}, "b": {"skill": 0.013}}, TWO),
        Case("real gain", hard, {"a": {}, "b": {"skill": 0.04}}, TWO),
        Case("real loss", easy, {"a": {}, "b": {"skill": -0.04}}, TWO),
        Case("learning rate decay", hard, {"a": {}, "b": {"decay": 1.0}}, TWO),
    )


SUITE = suite()
QUICK = tuple(case for case in SUITE if case.name in ("A/A", "divide by deviation, at lr 2", "real loss"))
