"""1. Topics are read as a researcher would, or refused with a reason; no word is ignored silently.
2. A question becomes arms and claims, at equal amounts.
3. Claims about several arms, and other metrics than the score, are tested like others.
4. The answer is a sentence: yes, no, no difference, or how much more would decide.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Finding, Hypothesis, Outcome, Study, Subject, Value
from agentjet.research.plan import Space, SpaceArm, plan
from agentjet.research.question import PlannedArm, answer, arms_of, factors, given_levels
from agentjet.research.report import StudyView, gather, plan_page
from agentjet.research.scheduler import conduct, estimate_cost
from agentjet.research.statistics import welch
from agentjet.research.topic import read_topic
from bench.topics import judged, study_of, topics
from tests.research.world import Formula

AGENT = "def agent(task, episode): return 0.0\n\n\ndef other(task, episode): return 1.0\n"


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.chdir(tmp_path)
    for name, number in (("tasks", 32), ("held_out", 4)):
        lines = [json.dumps({"id": f"{name}{i}", "q": i}) for i in range(number)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    Path("agent.py").write_text(AGENT)
    return Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl", steps=40)


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", topics(), ids=lambda topic: topic["text"][:60])
def test_no_topic_is_read_as_another_one(topic: dict[str, object]) -> None:
    result, text = judged(topic)
    assert result != "other", text


def test_most_topics_are_read_as_asked() -> None:
    results = [judged(topic)[0] for topic in topics()]
    assert results.count("as_asked") >= 0.8 * len(results)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("", "the topic is empty"),
        ("?!", "the topic is empty"),
        ("Does it work?", r"its words 'work' name nothing that a study can change\. Near ones are 'Does the"),
        ("Does the learning-rat matter?", "'rat' name nothing .* 'Does the learning rate matter"),
        ("¿Importa la tasa de aprendizaje?", "was not understood: .* Ask in English .* or give a language model"),
        ("How sensitive is GRPO to the clip range?", "its words 'clip', 'range' name nothing that a study can change"),
        ("Do users prefer it?", "asks about people: .* give a judge"),
        (
            "Does KL help? Does the temperature matter?",
            "asks 2 questions, 'Does KL help' and 'Does the temp.*': ask one at",
        ),
        ("Find the best learning rate. Then test if a curriculum helps", "asks 2 questions, 'Find the best"),
        ("Does the seed matter?", "asks about seed: .* ask about a setting"),
        ("temperature " + "1" * 5000, "5012 characters: give a question of at most 1000"),
        ("学习率", "'学习率' is not in English: translate it, or give a language model"),
        ("Temperature 1 or 1", r"job\.temperature = 1 is named twice"),
        ("Does group size matter at equal tokens and at equal steps?", "holds steps and tokens equal: keep one"),
        *(
            (f"Is a learning rate of {number} better?", f"has '{re.escape(number)}.?', which is no plain number")
            for number in (
                "10^-5",
                "1·10^-4",
                "1/100000",
                "0,7",
                ".7",
                "-1",
                "5%",
                "4k",
                "10x",
                "1,024",
                "1_000",
                "1e400",
            )
        ),
    ],
)
def test_a_topic_that_is_not_understood_is_refused(topic: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_topic(topic)


def test_a_reading_is_a_sentence() -> None:
    question = read_topic("Does the KL penalty matter?")
    assert question.reading() == ("Which is better: job.recipe.kl_coef (0, 0.01); measured: score, at equal episodes")


def test_two_metrics_of_one_factor_are_a_trade_off() -> None:
    question = read_topic("How do score and training time change with a turn limit of 1, 3 and 5?")
    assert (question.form, question.metrics) == ("trade_off", ("score", "seconds"))


def test_a_reading_has_the_levels_that_are_given() -> None:
    assert "model (a, b);" in read_topic("How does the score grow with model size?").reading({"model": ["a", "b"]})


def test_a_reading_names_the_words_that_played_no_part() -> None:
    assert "these words played no part: penality" in read_topic("Does the kl penality matter?").reading()


LR, TEMPERATURE, SIZE = "job.optimizer.lr", "job.temperature", "job.group_size"


@pytest.mark.parametrize(
    ("topic", "levels", "unread"),
    [
        ("GRPO at 1e-5 versus RLOO at 3e-5", {"job.recipe": ("grpo", "rloo")}, ("1e-5", "3e-5")),
        ("After 20 steps, does the KL penalty help?", {"job.recipe.kl_coef": (0.0, 0.01)}, ("20 step",)),
        ("Does training 3 times longer help?", {"steps": (40, 20, 80, 160)}, ("3 time",)),
        ("Does GRPO work if the group size is only 2?", {SIZE: (8, 2)}, ("work",)),
        ("Does training on hard tasks first hurt?", {"tasks.order": ("shuffled", "hard_first")}, ()),
        ("Is a KL penalty of 0.05 worse than none?", {"job.recipe.kl_coef": (0.0, 0.05)}, ("none",)),
        ("Compare training for 20 steps with training for 80 steps", {"steps": (20, 80)}, ()),
        ("Temperature 0.7 for 20 steps or 1.0 for 40 steps?", {TEMPERATURE: (0.7, 1.0)}, ("20 step", "40 step")),
        ("Staleness of 4 steps", {"job.max_staleness": (0, 1, 4)}, ()),
        ("Does the learning rate matter more with 12 steps?", {LR: (2e-5, 6e-6, 6e-5)}, ("12 step",)),
        ("Group sizes 2, 4 and 16 × learning rates 1e-6, 1e-5", {SIZE: (2, 4, 16), LR: (1e-6, 1e-5)}, ()),
        ("Does group size 8 beat 4 at temperature 0.7?", {SIZE: (4, 8), TEMPERATURE: (1.0, 0.7)}, ()),
        ("job.max_tokens 64 or 128", {"job.max_tokens": (64, 128)}, ()),
        ("Is Qwen3-1.7B better than Qwen3-0.6B?", {"model": ("0.6B", "1.7B")}, ("qwen3",)),
    ],
)
def test_a_number_is_a_level_or_named(
    topic: str, levels: dict[str, tuple[Value, ...]], unread: tuple[str, ...]
) -> None:
    question = read_topic(topic)
    assert {one.factor: {*one.levels} for one in question.varied} == {name: {*own} for name, own in levels.items()}
    assert question.unread == unread


OWN = {
    LR: 0.01,
    "job.max_tokens": 12,
    "job.recipe.name": "rloo",
    "job.recipe.kl_coef": 0.02,
    "job.optimizer.total_steps": 20,
}


@pytest.mark.parametrize(
    ("topic", "levels"),
    [
        ("Does a learning rate of 0.02 help?", (0.01, 0.02)),
        ("Learning rate 0.01", (0.01, 0.003, 0.03)),
        ("Do longer answers help?", (12, 3, 48)),
        ("Group size?", (8, 4, 16)),
        ("Does the KL penalty matter?", (0.02, 0.0, 0.01)),
        ("How does the score scale with the steps?", (20, 10, 40, 80)),
        ("Is dapo better?", ("rloo", "dapo")),
        ("GRPO against GSPO", ("grpo", "gspo")),
        ("Is a learning rate of 1e-5 better than 1e-4?", (1e-5, 1e-4)),
    ],
)
def test_usual_levels_are_around_the_value_of_the_subject(topic: str, levels: tuple[Value, ...]) -> None:
    assert read_topic(topic, OWN).varied[0].levels == levels


def test_the_reading_of_an_interaction_says_that_ends_are_compared() -> None:
    reading = read_topic("Group sizes 2, 4 and 16 × learning rates 1e-6, 1e-5").reading()
    assert "job.group_size (2 and 16, the ends of 2, 4, 16) × job.optimizer.lr (1e-06, 1e-05);" in reading


def test_every_setting_of_a_job_is_a_factor() -> None:
    assert {
        "job.batch_size",
        "job.optimizer.weight_decay",
        "job.recipe.kl_coef",
        "job.optimizer.beta2",
    } <= factors().keys()
    assert read_topic("Is a beta2 of 0.9, 0.99 or 0.999 best?").varied[0].levels == (0.9, 0.99, 0.999)


# ---- arms and claims -------------------------------------------------------------------------------------------------


KL, GROUP, BATCH = "job.recipe.kl_coef", "job.group_size", "job.batch_size"
NAME = "job.recipe.name"


@pytest.mark.parametrize(
    ("topic", "levels", "arms"),
    [
        ("Does the KL penalty matter?", [], [{KL: 0.0}, {KL: 0.01}]),
        ("Does the KL penalty matter?", [f"{KL}=0", f"{KL}=0.1"], [{KL: 0}, {KL: 0.1}]),
        (
            "How many tasks are enough?",
            ["tasks.number=1/4", "tasks.number=all"],
            [{"tasks.number": 8}, {"tasks.number": 32}],
        ),
        ("Group size 4 or 16", [], [{GROUP: 4, BATCH: 16}, {GROUP: 16, BATCH: 4}]),
        ("Batch size 4 or 16 at equal episodes", [], [{BATCH: 4, "steps": 80}, {BATCH: 16, "steps": 20}]),
        ("Is an own loss better?", ["job.recipe=rloo"], [{NAME: "grpo"}, {NAME: "rloo"}]),
        (
            "Does distillation from a teacher help?",
            ["teacher=/model"],
            [{NAME: "grpo"}, {NAME: "distill", "job.recipe.teacher": "/model"}],
        ),
        (
            "Does the temperature depend on the epochs?",
            ["job.temperature=1", "job.temperature=2"],
            [{"job.temperature": t, "job.recipe.epochs": e} for t in (1, 2) for e in (1, 4)],
        ),
    ],
)
def test_a_question_becomes_arms(subject: Subject, topic: str, levels: list[str], arms: list[object]) -> None:
    assert [dict(arm.changes) for arm in arms_by_name(topic, levels, subject).values()] == arms


def arms_by_name(topic: str, levels: list[str], subject: Subject) -> dict[str, PlannedArm]:
    return arms_of(read_topic(topic), given_levels(levels), subject, lambda: 32)[0]


def test_arms_whose_names_would_be_equal_are_all_planned(subject: Subject) -> None:
    folder = "a_folder_with_a_very_long_name_of_its_own"
    levels = [f"agent={folder}/team.py:{name}" for name in ("one", "two", "one")]
    arms = arms_by_name("Is the critic role worth it?", levels, subject)
    assert [arm.keys["agent"][-3:] for arm in arms.values()] == ["one", "two"]


@pytest.mark.parametrize(
    ("topic", "level", "keys"),
    [
        ("Is the critic role worth it?", "agent=team.py:agent", {"agent": "team.py:agent"}),
        ("Does a system prompt help?", "prompt=terse.py:agent", {"agent": "terse.py:agent"}),
        ("Binary or graded reward?", "reward=graded.py:score", {"reward": "graded.py:score"}),
        ("Does my agent survive noisy tools?", "world=noisy.py:agent", {"deployed": "noisy.py:agent"}),
        ("Are hard tasks better than easy ones?", "tasks.filter=hard.jsonl", {"tasks": "hard.jsonl"}),
    ],
)
def test_one_level_that_is_code_is_compared_with_that_of_the_subject(
    subject: Subject, topic: str, level: str, keys: dict[str, str]
) -> None:
    given, other = arms_by_name(topic, [level], subject).values()
    assert given == PlannedArm({}) and other == PlannedArm({}, keys)


def test_a_warm_start_is_a_model(subject: Subject) -> None:
    Path("warm").mkdir()
    Path("warm/config.json").write_text("{}")
    arms = arms_by_name("SFT warm start or RL only?", ["warm_start=warm"], subject)
    assert [arm.changes for arm in arms.values()] == [{}, {"model": str(Path("warm").resolve())}]
    assert "warm_start warm" in arms, "the name is without the place of the folder"


def test_a_patch_makes_a_level(subject: Subject) -> None:
    question = read_topic("Does a system prompt help?")
    varied = tuple(one.model_copy(update={"levels": ("terse",)}) for one in question.varied)
    question = question.model_copy(update={"varied": varied, "patches": {"terse": "diff"}})
    arms, _ = arms_of(question, {}, subject, lambda: 32)
    assert [arm.patch for arm in arms.values()] == ["", "diff"]


@pytest.mark.parametrize(
    ("topic", "levels", "said"),
    [
        ("Is a critic role worth it?", [], r"needs the agents: --level agent=FILE\.py:FUNCTION"),
        ("Does the KL penalty matter?", ["job.temperature=1"], r"job\.temperature: the question is about job\.recipe"),
        ("Does the KL penalty matter?", ["job.recipe.kl_coef"], "give FACTOR=VALUE"),
        ("Does the KL penalty matter?", ["job.recipe.kl_coeff=1"], r"did you mean 'job\.recipe\.kl_coef'"),
        ("Does the KL penalty matter?", ["job.recipe.kl_coef=1"], "two levels or more"),
        ("Group size 4 or 6", [], "64 is no multiple of it"),
        ("How many tasks are enough?", ["tasks.number=2/3", "tasks.number=4"], "give a number, a share"),
        ("Are 16 tasks enough, or 800 training tasks?", [], "tasks.number = 800: there are 32 training tasks"),
        ("Does my agent survive noisy tools?", [], r"needs the agent in each changed world: --level world="),
        ("Does a curriculum help?", [], r"needs the key of the payloads"),
        ("SFT warm start or RL only?", ["warm_start=a.jsonl"], r"--level warm_start 'a\.jsonl' is neither a folder"),
    ],
)  # fmt: skip
def test_a_question_that_cannot_begin_says_what_is_missing(
    subject: Subject, topic: str, levels: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        arms_by_name(topic, levels, subject)


def test_the_models_of_arms_are_locked(subject: Subject) -> None:
    """A changed file of any model of a study is found before a run."""
    for name in ("tiny", "small", "large"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")
        Path(name, "weights").write_text(name)
    space = Space(arms={name: SpaceArm(changes={"model": f"./{name}"}) for name in ("small", "large")})
    study = plan("t", budget=100, subject=replace(subject, model="./tiny").with_hashes(), space=space)
    assert study.subject is not None and study.subject.models == ("./small", "./large")
    assert "models" not in subject.to_json()
    study.subject.varied({"model": "./large"}).check_code()
    Path("large", "weights").write_text("other")
    with pytest.raises(ConfigError, match=r"subject\.model: large/weights changed"):
        study.subject.check_code()


def test_longer_runs_cost_more(subject: Subject) -> None:
    study = study_of("How does the score scale with the steps: 20, 40, 80?")
    assert estimate_cost(study).least == 4 * (0.5 + 1 + 2)
    assert subject.varied({"steps": 80}).steps == 80 and subject.varied({}) == subject
    assert subject.varied({"model": "other"}).model == "other"


def test_arms_choose_and_order_their_tasks(subject: Subject) -> None:
    def ids(**of_arm: object) -> list[str]:
        setting = {f"tasks.{name}": value for name, value in of_arm.items()}
        return [task.id for task in subject.varied(setting).training_tasks()]  # type: ignore[arg-type]

    every = [f"tasks{i}" for i in range(32)]
    assert ids() == ids(order="given") == ids(order="q") == every and ids(order="-q") == every[::-1]
    assert sorted(ids(order="shuffled")) == sorted(every) and ids(order="shuffled") != every
    few = ids(number=5)
    assert len(few) == 5 and {*few} < {*ids(number=6)} and few == sorted(few, key=every.index)
    assert {*few} == {*ids(number=5, order="shuffled")} and few[::-1] == ids(number=5, order="-q")
    with pytest.raises(ConfigError, match=r"tasks\.order = 'hard': the payload of task 'tasks0' has no number 'hard'"):
        ids(order="hard")
    with pytest.raises(ConfigError, match=r"tasks\.number = 33: there are 32 training tasks"):
        ids(number=33)


# ---- contrasts and metrics -------------------------------------------------------------------------------------------


def test_a_contrast_is_a_weighted_sum_of_means() -> None:
    """By hand: means 1, 2, 4; variances 2, 2, 8 of two scores each; weights 1, -2, 1."""
    found = welch([0, 2], [1, 3], [2, 6], weights=(1, -2, 1))
    assert found.estimate == pytest.approx(1 - 4 + 4)
    assert found.error == pytest.approx(math.sqrt(2 / 2 + 4 * 2 / 2 + 8 / 2))
    assert found.degrees == pytest.approx((1 + 4 + 4) ** 2 / (1 + 16 + 16))
    assert welch([0, 2], [1, 3]) == welch([0, 2], [1, 3], weights=(1, -1))


def test_the_weights_of_a_claim_add_up_to_0() -> None:
    arms, claim = (Arm("a"), Arm("b")), Hypothesis("c", "a", "b", weights={"a": 1.0, "b": -0.5})
    with pytest.raises(ConfigError, match=r"add up to 0\.5, not to 0"):
        Study("t", "m", 0.1, arms, (claim,), budget=10)


def test_slopes_and_interactions_find_what_is_planted() -> None:
    def score(level: float) -> float:
        return 0.2 + 0.1 * math.log2(level / 20)

    study = study_of("How does the score scale with the steps: 20, 40, 80?")
    runner = Formula(lambda setting, _: score(float(setting["steps"])), noise=0.01)
    findings, _ = conduct(study, log := StudyLog(), runner)
    assert findings[0].verdict == "supported" and findings[0].estimate == pytest.approx(0.1, abs=0.02)
    view = StudyView(log)
    assert gather(view)["answer"][0].startswith("Score grows with each doubling of steps: yes, +0.")
    assert "The topic was read as: *How does the result grow with it: steps" in plan_page(study)


def test_tokens_and_seconds_are_measured_as_logarithms() -> None:
    signals = {
        "completion/tokens": (9.0,) * 6 + (math.e, math.e),
        "time/sample": (1.0, 2.0),
        "time/wait": (0.0, 0.0),
        "time/learn": (1.0, 1.0),
    }
    outcome = Outcome("t", "completed", score=0.5, signals=signals)
    assert outcome.measured("score") == 0.5
    assert outcome.measured("tokens") == pytest.approx(1.0)
    assert outcome.measured("seconds") == pytest.approx(math.log(5))
    assert Outcome("t", "infra_failed").measured("tokens") is None
    assert Outcome("t", "completed", score=0.5).measured("seconds") is None


# ---- answers --------------------------------------------------------------------------------------------------------

CLAIM = Hypothesis("b scores higher than a", "b", "a")
STUDY = Study("t", "m", 0.1, (Arm("a"), Arm("b"), Arm("c")), (CLAIM,), budget=10)


OPEN = "not decided, +0.1 (-0.1 to +0.3); more than 1000 seeds an arm would be needed, because the effect is about as"


@pytest.mark.parametrize(
    ("verdict", "interval", "said"),
    [
        ("supported", (0.3, 0.2, 0.4), "yes, +0.3 (+0.2 to +0.4)."),
        ("refuted", (-0.3, -0.4, -0.2), "no, the opposite, -0.3 (-0.4 to -0.2)."),
        ("practically_equivalent", (0.01, -0.05, 0.07), "no difference of 0.1 or more, +0.01 (-0.05 to +0.07)."),
        ("inconclusive", (0.2, 0.0, 0.4), "not decided, +0.2 (+0 to +0.4); about 12 more seeds an arm would."),
        ("inconclusive", (0.2, 0.2, 0.2), "not decided, +0.2 (+0.2 to +0.2); more seeds alone would not decide it: r."),
        ("inconclusive", (0.1, -0.1, 0.3), f"{OPEN} large as matters."),
    ],
)
def test_the_answer_is_a_sentence(verdict: str, interval: tuple[float, float, float], said: str) -> None:
    estimate, low, high = interval
    finding = Finding(CLAIM.id, verdict, "r", estimate, low, high, 0.95, seeds=4)  # type: ignore[arg-type]
    assert answer(STUDY, {CLAIM.id: finding}) == [f"B scores higher than a: {said}"]
    assert answer(STUDY, {}) == []


def test_the_answer_of_a_dose_and_of_a_trade_off() -> None:
    steps = (Hypothesis("b scores higher than a", "b", "a"), Hypothesis("c scores higher than b", "c", "b"))
    dose = replace(STUDY, hypotheses=steps, form="dose_response")
    found = {
        steps[0].id: Finding(steps[0].id, "supported", "r", 0.3, 0.2, 0.4, 0.95, seeds=4),
        steps[1].id: Finding(steps[1].id, "refuted", "r", -0.3, -0.4, -0.2, 0.95, seeds=4),
    }
    assert answer(dose, found)[0] == "More of it helps up to b; from c on it harms."
    both = (Hypothesis("s", "b", "a"), Hypothesis("t", "b", "a", metric="tokens", sesoi=0.1))
    trade = replace(STUDY, hypotheses=both, form="trade_off")
    found = {
        both[0].id: Finding(both[0].id, "practically_equivalent", "r", 0.0, -0.05, 0.05, 0.95, seeds=4),
        both[1].id: Finding(both[1].id, "refuted", "r", -0.5, -0.6, -0.4, 0.95, seeds=4),
    }
    assert answer(trade, found)[0] == "b costs less without a loss of score."
    assert answer(trade, found)[2] == "T: no, the opposite, -0.5 (-0.6 to -0.4) in logarithms, which is -39%."
