"""`trackio:PROJECT`: Trackio's database on this machine. `trackio sync` sends it to a Space.

The rows are written as Trackio's own importers do, because `trackio.log` stores them later, in a thread. Each row has a
key, so Trackio ignores a step that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from trackio.sqlite_storage import SQLiteStorage

from agentjet.trackers.sink import Run, Step


class TrackioSink:
    """Metrics by name; the step is the policy version. Settings are the config."""

    def __init__(self, target: str) -> None:
        SQLiteStorage.validate_project_name(target)
        self._project = target
        self._run: Run | None = None

    def begin(self, run: Run) -> int | None:
        self._run = run
        return SQLiteStorage.get_max_step_for_run(self._project, run.name, run_id=run.id) or 0

    def write(self, steps: Sequence[Step]) -> None:
        run = self._run
        assert run is not None
        SQLiteStorage.bulk_log(
            self._project,
            run.name,
            [dict(step.metrics) for step in steps],
            steps=[step.version for step in steps],
            timestamps=[datetime.fromtimestamp(step.time, UTC).isoformat() for step in steps],
            config=dict(run.settings),
            log_ids=[f"agentjet-{run.id}-{step.version}" for step in steps],
            run_id=run.id,
        )

    def end(self) -> None: ...
