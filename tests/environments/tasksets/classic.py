"""A classic environment of verifiers, up to 0.3."""


def load_environment(split: str = "train") -> object:
    return object()
