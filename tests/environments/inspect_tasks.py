"""Tasks of inspect for the tests."""

import math
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import CORRECT, Score, Scorer, Target, accuracy, includes, match, model_graded_fact, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import Tool, bash, tool


@scorer(metrics=[accuracy()])
def giving(value: Any) -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=value, explanation="because")

    return score


@solver
def failing() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        raise ValueError("the solver breaks")

    return solve


@solver
def looping() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        while True:
            state = await generate(state)

    return solve


@tool
def double() -> Tool:
    async def execute(number: int) -> str:
        """Doubles a number.

        Args:
            number: The number.
        """
        return str(2 * number)

    return execute


SAMPLES = [Sample(input=f"Twice {number}?", target=str(2 * number)) for number in (3, 4, 5)]


@task
def doubles(num: int = 3) -> Task:
    samples = [Sample(input=sample.input, target=sample.target) for sample in SAMPLES[:num]]
    samples[0].id = "three"
    return Task(samples, solver=generate(), scorer=[includes(), match()])


@task
def with_tool() -> Task:
    return Task(SAMPLES, solver=[use_tools(double()), generate()], scorer=includes())


@task
def with_bash() -> Task:
    return Task(SAMPLES, solver=[use_tools(bash()), generate()], scorer=includes(), sandbox="docker")


@task
def scored(value: Any = None) -> Task:
    if value in (None, "NaN"):  # Settings are JSON, which has no such number.
        value = math.nan if value else CORRECT
    return Task(SAMPLES[:1], solver=generate(), scorer=giving(value))


@task
def broken() -> Task:
    return Task(SAMPLES[:1], solver=failing(), scorer=includes())


@task
def endless() -> Task:
    return Task(SAMPLES[:1], solver=looping(), scorer=includes())


@task
def unscored() -> Task:
    return Task(SAMPLES[:1], solver=generate())


def grading(*_: object) -> ModelOutput:
    raise ValueError("the grader of the task is asked")


@task
def graded(has_grader: bool = False) -> Task:
    roles = {"grader": get_model("mockllm/model", custom_outputs=grading)} if has_grader else None
    return Task(SAMPLES[:1], solver=generate(), scorer=model_graded_fact(), model_roles=roles)
