"""Trains a model to add: the run of `agentjet demo` as a script, against a server that you started yourself.

agentjet serve --config examples/arithmetic/job.toml      # one terminal
python -m examples.arithmetic.train                       # another, with AGENTJET_TOKEN set
"""

from agentjet import Swarm

from .agent import FirstAnswer, agent, held_out_tasks, training_tasks


def main(steps: int = 60) -> None:
    """Evaluates, trains, and evaluates again."""
    with Swarm() as swarm:
        before = swarm.evaluate(FirstAnswer(), held_out_tasks(200))
        report = swarm.train(agent, training_tasks(), steps=steps, concurrency=128)
        after = swarm.evaluate(FirstAnswer(), held_out_tasks(200))
    print(report)
    print(f"right at the first try: {before.mean_reward:.1%} before, {after.mean_reward:.1%} after")


if __name__ == "__main__":
    main()
