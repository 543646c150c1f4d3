"""1. A number is compared: alone with the present value, or as a multiple of it. Numbers without a setting are listed.
2. A malformed number is refused or listed as a whole, never read in part.
3. Conditions are the same for all arms; only compared settings differ.
4. One question per study: a second one is refused, text without a question is listed. Topics are bounded.
"""

from __future__ import annotations

import pytest

from agentjet.errors import ConfigError
from agentjet.research.models import Setting, Subject
from agentjet.research.planner.plan import Plan, plan

SUBJECT = Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl", steps=30)
LR, KL, GROUP, BATCH = "job.optimizer.lr", "job.recipe.kl_coef", "job.group_size", "job.batch_size"
DROP, LORA, WARMUP = "job.recipe.drop_zero_variance", "model.lora.rank", "job.optimizer.warmup_steps"
ADVANTAGE, LOSS, DUAL = "job.recipe.name", "job.recipe.loss.name", "job.recipe.loss.dual_clip"


def made(topic: str) -> Plan:
    return plan(topic, budget="300", subject=SUBJECT)


def arms(topic: str) -> list[Setting]:
    return [dict(arm.changes) for arm in made(topic).study.arms]


@pytest.mark.parametrize(
    ("topic", "name", "values"),
    [
        ("does raising the learning rate to 1e-4 help?", LR, [2e-5, 1e-4]),
        ("does a learning rate of 1e-4 help?", LR, [2e-5, 1e-4]),
        ("does a 1e-4 learning rate help?", LR, [2e-5, 1e-4]),
        ("lr=1e-4.", LR, [2e-5, 1e-4]),
        ("does increasing the kl penalty to 0.1 help?", KL, [0.0, 0.1]),
        ("is the kl penalty better at 0.1", KL, [0.0, 0.1]),
        ("does a smaller batch size of 4 hurt?", BATCH, [4, 8]),
        ("lr 10^-5 vs 3*10^-4", LR, [1e-5, 3e-4]),
        ("is lr 1e-5 worse than 1e-4", LR, [1e-5, 1e-4]),
        ("kl penalty 0, 0.01 or 0.1", KL, [0.0, 0.01, 0.1]),
        ("group size 4,8,16", GROUP, [4, 8, 16]),
        ("is 1e-5 a better learning rate than 3e-5?", LR, [1e-5, 3e-5]),
        ("is 16 better than 8 as group size?", GROUP, [8, 16]),
        ("kl penalty 0/0.1", KL, [0.0, 0.1]),
        ("2x learning rate", LR, [2e-5, 4e-5]),
        ("learning rate 3 times the present", LR, [2e-5, 6e-5]),
        ("twice the group size", GROUP, [8, 16]),
        ("does halving the batch size hurt?", BATCH, [4, 8]),
    ],
)
def test_numbers_are_compared(topic: str, name: str, values: list[float]) -> None:
    assert [arm[name] for arm in arms(topic)] == values


@pytest.mark.parametrize(
    ("topic", "ignored"),
    [
        ("does a kl penalty help on qwen 2", ("qwen", "2")),
        ("does warmup help over 40 steps?", ("40", "steps")),
        ("grpo vs rloo on 7b models", ("7b", "models")),
        ("grpo vs rloo with 1,5 million tokens", ("1,5", "million", "tokens")),
        ("2x faster grpo", ("2x", "faster")),
    ],
)
def test_numbers_without_a_place_are_listed(topic: str, ignored: tuple[str, ...]) -> None:
    found = made(topic)
    assert found.ignored == ignored
    assert f"Not understood, so not part of the question: “{ignored[0]}”" in found.to_markdown()


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("lr 1 million vs 2", "'1 million' is not a number that the planner can read: write it in full"),
        ("lr 1,5 vs 2", "'1,5' is not a number"),
        ("does grpo with 8 rollouts per prompt beat 16", "gives job.group_size two values, 8 and 16, beside"),
        ("is gspo with lr 1e-5 better than grpo with lr 3e-5?", "ask for 'lr 1e-05 vs 3e-05', or give it one value"),
        ("batch size 1,000,000 vs 8", "'1,000,000' is not a number"),
        ("learning rate 3e-4% vs 1e-4", "'3e-4%' is not a number"),
        ("learning rate 1e-5 vs 1e-5", "1e-05 and 1e-05 are equal; name two values, such as 'learning rate: 2.2e-06"),
        ("does a smaller batch size of 8 hurt?", "job.batch_size: 8 is its present value; name another one"),
        ("twice the kl penalty", "kl_coef: 0.0 is its present value"),
        ("1.3 times the group size", "job.group_size = 10.4: give a whole number"),
        ("twice the loss", "job.recipe.loss.name: it cannot be multiplied by 2"),
        ("lr -3 vs 1", r"job\.optimizer\.lr = -3\.0: give a value from 1e-08 to 0\.1"),
        ("ablation of kl penalty 0.1 vs 0.2", "an ablation takes one value away, and 2 are named; name one"),
        ("ablation of kl penalty 0", "'no kl' does not differ from arm 'all'"),
        ("does warmup help without a learning rate", "it cannot be turned off; name the values"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(topic)


@pytest.mark.parametrize(
    ("topic", "expected", "tuned"),
    [
        (
            "does dropping zero-variance groups help without a kl penalty?",
            [{DROP: True, KL: 0.0}, {DROP: False, KL: 0.0}],
            {LR},
        ),
        ("does warmup help when the learning rate is 1e-4?", [{WARMUP: 5, LR: 1e-4}, {WARMUP: 0, LR: 1e-4}], set()),
        ("when the lr is 1e-4, does warmup help?", [{WARMUP: 5, LR: 1e-4}, {WARMUP: 0, LR: 1e-4}], set()),
        (
            "without a kl penalty, is gspo better than cispo",
            [{LOSS: "gspo", KL: 0.0}, {LOSS: "cispo", KL: 0.0}],
            {LR},
        ),
        (
            "does a kl penalty help with 16 rollouts per prompt",
            [{KL: 0.02, GROUP: 16}, {KL: 0.0, GROUP: 16}],
            {LR},
        ),
        ("best lr for rloo", [{LR: 2e-5, ADVANTAGE: "rloo"}, {ADVANTAGE: "rloo"}], {LR}),
        ("is training better with a kl penalty or with dual clip", [{KL: 0.02, DUAL: 0}, {KL: 0, DUAL: 3}], {LR}),
        ("compare kl penalty with dual clip", [{KL: 0.02, DUAL: 0}, {KL: 0, DUAL: 3}], {LR}),
        ("should I use lora or full fine-tuning", [{LORA: 16}, {LORA: 0}], {LR}),
        ("is lora worse than full", [{LORA: 16}, {LORA: 0}], {LR}),
    ],
)
def test_arms_differ_in_what_is_asked_alone(topic: str, expected: list[Setting], tuned: set[str]) -> None:
    study = made(topic).study
    assert [dict(arm.changes) for arm in study.arms] == expected
    assert {knob.name for arm in study.arms for knob in arm.nuisance} == tuned


def test_conditions_stand_in_the_plan() -> None:
    page = made("does dropping zero-variance groups help without a kl penalty?").to_markdown()
    assert "Note: job.recipe.kl_coef = 0.0 in all arms." in page
    [collapsing, lower, *_] = arms("why does my training collapse at lr 1e-3?")
    assert (collapsing, lower) == ({LR: 1e-3}, {LR: 3.3e-4})
    assert "job.recipe.loss.dual_clip is not varied" in made("does a kl penalty and dual clip help").to_markdown()
    assert "job.optimizer.lr is not varied" in made("does warmup help when the learning rate matters").to_markdown()
    assert "here a remedy; set it" in made("why does my training with this learning rate collapse").to_markdown()
    smaller = made("is group size 4 or 16 better when the batch size is 8").to_markdown()
    assert "job.batch_size = 8 in all arms, except where an arm sets it" in smaller


@pytest.mark.parametrize(
    "topic",
    [
        "does a smaller learning rate help, and does a bigger batch help?",
        "does a smaller learning rate help? Does a bigger batch help?",
        "Our runs diverge. Does a bigger batch help?",
    ],
)
def test_one_question_a_study(topic: str) -> None:
    with pytest.raises(
        ConfigError, match=r"asks two questions, '.*' and '.* a bigger batch help': plan one study per question"
    ):
        made(topic)


def test_what_asks_nothing_is_listed_whole() -> None:
    found = made("does a kl penalty help, and does a bigger vocabulary help?")
    assert (found.kind, found.ignored) == ("a_against_b", ("does a bigger vocabulary help",))
    assert made("does a kl penalty help? and does it hurt?").ignored == ()


def test_what_is_said_twice_is_listed_once() -> None:
    found = made("I do not want a KL penalty; is no KL penalty worse, want or no want?")
    assert found.understood == (("kl penalty", KL),)
    assert found.ignored == ("want",)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("x " * 5000, r"^the topic has 10000 characters: ask one question in 500 or fewer"),
        (
            "does a kl penalty help \ud800?",
            r"^the topic has the character '\\ud800', which cannot be printed: remove it",
        ),
        ("does a kl penalty\nhelp?", r"^the topic has the character '\\n'"),
    ],
)
def test_a_topic_is_a_title(topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(topic)
