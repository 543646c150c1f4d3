"""A server that changes its run has the new one up when it has answered, and one that failed to is asked again.

Pinned here: a worker that cannot be ended, when a run is left, is told to whoever asked; the run asked for is up all
the same, and the one that was left can be entered again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from agentjet.cli import runs
from agentjet.config import JobConfig, ServeConfig
from tests.fakes import Clock, ScriptedCompute, make_card, saying

pytestmark = pytest.mark.anyio


class Stubborn(ScriptedCompute):
    """A worker whose end fails once."""

    ends = 0

    async def close(self) -> None:
        await super().close()
        self.ends += 1
        if self.ends == 1:
            raise OSError("the worker would not end")


async def test_a_run_is_up_although_the_one_before_would_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = make_card(tmp_path / "tokenizer")
    monkeypatch.setattr(runs, "EmbeddedCompute", lambda config: Stubborn(card, saying(lambda prompt: "hi")))
    config = ServeConfig.model_validate({"model": {"name": card.name}, "server": {"data_dir": tmp_path / "d"}})
    served = runs.ServedRuns(config, Clock())
    await served.gateway.start()
    await served.gateway.ready()
    with pytest.raises(OSError, match="would not end"):
        await served.enter("a", JobConfig())
    await served.enter("a", JobConfig())
    await served.gateway.ready()
    assert (served.name, served.gateway.status().state) == ("a", "rolling")
    with pytest.raises(OSError, match="would not end"):
        await served.enter("", None)
    await served.gateway.ready()
    assert (served.name, served.gateway.status().state) == ("", "rolling")
    with pytest.raises(OSError, match="would not end"):
        await served.close()
