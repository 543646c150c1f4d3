"""The judge: eight digits or more."""


def score(task, messages):
    """1 for eight digits or more in the answer, less for fewer."""
    text = messages[-1]["content"] or ""
    return min(1.0, sum(character in "0123456789" for character in text) / 8)
