"""Train a model to add: the job of `agentjet demo`, spelled out against a server that you started yourself.

agentjet serve --config src/agentjet/cli/arithmetic/job.toml      # one terminal
python examples/arithmetic/agent.py                               # another, with AGENTJET_TOKEN set
"""

from agentjet import Swarm
from agentjet.cli.arithmetic import FirstAnswer, agent, held_out_tasks, training_tasks


def main(steps: int = 60) -> None:
    """Evaluate, train, evaluate again."""
    with Swarm() as swarm:
        before = swarm.evaluate(FirstAnswer(), held_out_tasks(200))
        report = swarm.train(agent, training_tasks(), steps=steps, concurrency=128)
        after = swarm.evaluate(FirstAnswer(), held_out_tasks(200))
    print(report)
    print(f"right at the first try: {before.mean_reward:.1%} before, {after.mean_reward:.1%} after")


if __name__ == "__main__":
    main()
