"""The job settings that hold: given when the server starts, replaced while it runs, kept over restarts."""

from __future__ import annotations

from agentjet.config import JobConfig
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
    if kept.given == given:
        if kept.job == given:
            return ""
        return f"the job settings are those of revision {kept.revision}, which replaced the given ones"
    journal.put_job_settings(JobSettings(kept.revision + 1, given, given))
    lost = f", and no longer those that replaced them in revision {kept.revision}" if kept.job != kept.given else ""
    return f"the job settings are the ones given at this start, others than at the last{lost}"
