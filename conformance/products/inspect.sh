cat > task.py <<END
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.tool import bash, text_editor


@task
def repair():
    return Task(
        [Sample(input="""$1""", target="corrected")],
        solver=react(tools=[bash(timeout=30), text_editor()]),
        scorer=includes(),
        sandbox="local",
    )
END
inspect eval task.py --model "openai/$OPENAI_MODEL" -M responses_api=false --display plain --log-dir logs
