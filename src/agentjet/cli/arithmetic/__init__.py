"""What `agentjet demo` trains on: sums of two numbers. The settings of the training are in `job.toml` beside this
file."""

from pathlib import Path

from agentjet.cli.arithmetic.agent import FirstAnswer, agent
from agentjet.cli.arithmetic.tasks import held_out_tasks, training_tasks

SETTINGS = Path(__file__).with_name("job.toml")

__all__ = ["SETTINGS", "FirstAnswer", "agent", "held_out_tasks", "training_tasks"]
