"""Changes of single job settings: a read, an edit and a compare-and-set, repeated if another change came first."""

from __future__ import annotations

import copy
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentjet.errors import ConfigError, Conflict
from agentjet.protocol import JobBody

ATTEMPTS = 5
"""Number of tries. Another client may replace the settings between the read and the write."""
FIXED = ("model", "sampler", "server")
"""Sections of the settings that a running server keeps."""


def edited(job: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the job settings with `changes`, whose keys are dotted names with or without `job.` in front.

    Raises `ConfigError` for a setting that is not the job's, or a key that leads through a value. The server checks
    everything else.
    """
    edited = copy.deepcopy(dict(job))
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if section in FIXED and rest:
            raise ConfigError(
                f"{key} = {value!r}: a running server keeps its {section}.* settings; stop it and start it again with "
                f"--set {key}=VALUE (`agentjet serve`)"
            )
        *sections, name = key.removeprefix("job.").split(".")
        values = edited
        for depth, inner in enumerate(sections, 1):
            values = values.setdefault(inner, {})
            if not isinstance(values, dict):
                held = ".".join(["job", *sections[:depth]])
                raise ConfigError(f"{key} = {value!r}: {held} is a value, {values!r}, and has no settings in it")
        values[name] = value
    return edited


def check_finite(values: Mapping[str, Any], prefix: str = "job.") -> None:
    """Raises `ConfigError` for a number that is not finite: JSON has none, and the server would be given `null`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{name} = {value}: it must be a finite number")


async def change(
    read: Callable[[], Awaitable[JobBody]], write: Callable[[JobBody], Awaitable[JobBody]], changes: Mapping[str, Any]
) -> JobBody:
    """The job settings after `changes`. Raises `Conflict` if other changes came first `ATTEMPTS` times in a row."""
    for attempt in range(1, ATTEMPTS + 1):
        now = await read()
        try:
            return await write(JobBody(revision=now.revision, job=edited(now.job, changes)))
        except Conflict as conflict:
            if conflict.code != "job_revision_changed" or attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")
