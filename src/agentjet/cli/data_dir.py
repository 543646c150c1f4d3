"""Whether a folder can be a server's data dir: it is one, it is empty, or it is still to be made."""

from __future__ import annotations

from pathlib import Path

from agentjet.errors import ConfigError

JOURNAL = "journal.sqlite"
PREPARED = frozenset(
    {
        f"{JOURNAL}.lock",
        "token",
        "admin-token",
        "viewer-token",
        "checkpoints",  # of another run, for the policy to begin at
        "logs",
        "serve.log",  # of the commands that start a server of their own
        "lost+found",  # of a file system that was mounted for this
    }
)
"""What may lie there before there is a journal: put there on purpose, or left by a server that could not begin."""
NUM_SHOWN = 3


def check_data_dir(folder: Path) -> None:
    """Raises `ConfigError` for a folder that holds somebody else's files."""
    if not folder.is_dir() or (folder / JOURNAL).exists():
        return
    try:
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in PREPARED)
    except OSError as error:
        raise ConfigError(f"server.data_dir = {str(folder)!r} cannot be read: {error.strerror}") from None
    if foreign:
        shown = ", ".join(foreign[:NUM_SHOWN]) + (", …" if len(foreign) > NUM_SHOWN else "")
        raise ConfigError(
            f"server.data_dir = {str(folder)!r} is no data dir of AgentJet (it has no {JOURNAL}) and not empty either "
            f"({shown}): give an empty folder, or one that does not exist yet"
        )
