"""The judge: the share of eighteen digits that came, over the turns of the dialogue."""


def score(task, messages):
    said = "".join(message["content"] or "" for message in messages if message["role"] == "assistant")
    return min(18, sum(character in "0123456789" for character in said)) / 18
