"""The job settings that hold: given when the server starts, replaced while it runs, kept over restarts."""

from __future__ import annotations

from agentjet.config import JobConfig, changed_settings
from agentjet.swarm.journal import Journal
from agentjet.swarm.records import JobSettings


def take_up(journal: Journal, given: JobConfig) -> str:
    """Put in force what was in force before the restart, or `given`, where that is not what was given then.

    Returns, in words, what somebody who knows only the one may not expect; empty where there is nothing to say.
    """
    kept = journal.job_settings()
    if kept is None:
        journal.put_job_settings(JobSettings(1, given, given))
        return ""
    if kept.given.in_force() == given.in_force():
        if changed := changed_settings(given, kept.job):
            return (
                f"the job settings are those of revision {kept.revision}, which replaced the given ones: "
                f"{', '.join(changed)}"
            )
        return ""
    journal.put_job_settings(JobSettings(kept.revision + 1, given, given))
    lost = f" (those in force were of revision {kept.revision})" if kept.job != kept.given else ""
    changed = changed_settings(kept.job, given)
    return f"the job settings are the ones given at this start{lost}: {', '.join(changed) or 'nothing changed'}"
