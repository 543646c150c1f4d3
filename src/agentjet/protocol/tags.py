"""Names that a checkpoint can have, checked by client and server alike."""

from __future__ import annotations

import re

from agentjet.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")


def check_tag(name: str) -> None:
    """Raises `InvalidRequest` for what is no name of a checkpoint."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"The tag {name!r} is not a name: give a letter, then up to 63 letters, digits, dots, dashes or "
            "underscores.",
            code="tag_invalid",
            status=422,
            param="name",
        )
