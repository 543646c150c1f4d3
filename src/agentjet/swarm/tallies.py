"""`CodeVersions`: what became of the training episodes of each version of the agents' code."""

from __future__ import annotations

from agentjet.swarm.journal import Journal
from agentjet.swarm.records import Episode, Tally

KEPT = 20
"""Versions in memory, by last use; what the journal knows of the others is looked up when they are used again."""


class CodeVersions:
    """Equal at any time to what the journal would give. Episodes that name no version are in none."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.tallies: dict[str, Tally] = journal.code_versions(KEPT)
        """By version, the one last begun last."""

    def put(self, before: Episode | None, episode: Episode) -> None:
        """An episode was journaled as new (`before` is None), or as changed."""
        version = episode.code_version
        if not version or episode.mode != "train":
            return
        if before is None:
            tally = self.tallies.pop(version, None)
            self.tallies[version] = self._journal.code_version(version) if tally is None else tally.begun()
            if len(self.tallies) > KEPT:
                del self.tallies[next(iter(self.tallies))]
        elif before.ended is None and episode.ended is not None and version in self.tallies:
            self.tallies[version] = self.tallies[version].ended(episode.reward)
