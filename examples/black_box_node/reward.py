"""The reward of an answer: 1 for the right equation and nothing else, otherwise 0."""


def score(task, result):
    """`task` is the row of tasks.jsonl, `result` what the program left: stdout, stderr, exit_code, seconds, folder."""
    return float(result.stdout.strip() == f"{task['a']} + {task['b']} = {task['a'] + task['b']}")
