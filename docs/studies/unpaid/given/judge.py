"""The judge: the share of digits among eight characters."""


def score(task, messages):
    return min(1.0, sum(character in "0123456789" for character in messages[-1]["content"] or "") / 8)
