"""The engine starts with the policy that the data dir was created with, or not at all.

1. Other base weights end the start, or the run if a worker is replaced: nothing is loaded, learned or tried again.
2. A checkpoint of other settings does so, too, even if an older one or a replay would serve.
3. If no checkpoint can be read and the journal does not reach back, the message begins with that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import CheckpointError, ConfigError
from agentjet.types import CheckpointStamp, PolicyId
from tests.fakes import RUN, ScriptedCompute, running
from tests.tiny import make_model_info

pytestmark = pytest.mark.anyio


async def test_other_base_weights_end_the_start(tmp_path: Path) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), weights="a1")
    async with running(tmp_path / "d", card=card) as run:
        await run.batch()
        run.compute.fail_save = [CheckpointError("as if the gateway had been killed")]
    async with running(tmp_path / "d", card=replace(card, weights="b2"), wait_ready=False) as run:
        with pytest.raises(ConfigError, match=r"was created with model_weights = 'a1' .*; 'b2' would change"):
            await run.gateway.engine.wait_until_up()
        assert run.compute.starts == 1 and run.compute.learned == []
        assert run.gateway.phase.state == "failed"
    async with running(tmp_path / "d", card=card) as run:
        assert run.compute.learned == [0]


async def test_base_weights_that_change_under_a_running_server_end_it(tmp_path: Path) -> None:
    card = replace(make_model_info(tmp_path / "tokenizer"), weights="a1")
    async with running(tmp_path / "d", card=card) as run:
        await run.batch()
        run.compute.card = replace(card, weights="b2")
        run.compute.die()
        await run.until(lambda: run.gateway.phase.state == "failed")
        assert isinstance(run.gateway.engine.fatal, ConfigError) and "'b2'" in run.gateway.phase.reason
        assert run.compute.starts == 2 and run.compute.learned == []


async def test_a_checkpoint_of_other_settings_is_not_passed_over(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1}) as run:
        await run.batch()
        await run.batch()

    class Other(ScriptedCompute):
        async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
            raise ConfigError(f"checkpoint {path} has model.lora.rank = 4, this server 8")

    def become_other(compute: ScriptedCompute) -> None:
        compute.__class__ = Other

    card = replace(make_model_info(tmp_path / "tokenizer"), weights="b2")
    async with running(tmp_path / "d", card=card, prepare=become_other, wait_ready=False) as run:
        with pytest.raises(ConfigError, match=r"step_000002 has model.lora.rank = 4"):
            await run.gateway.engine.wait_until_up()
        assert run.compute.starts == 1
    async with running(tmp_path / "d", card=replace(card, weights="a1")) as run:
        assert run.gateway.swarm.policy_version == 2, "what was refused is not recorded"


async def test_why_a_checkpoint_is_of_no_use_is_said_first(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"checkpoint_every": 1, "keep_checkpoints": 1}) as run:
        await run.batch()
    (tmp_path / "d" / RUN / "checkpoints" / "step_000001" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_000001 cannot be read: .*; The journal cannot replay"):
        async with running(tmp_path / "d"):
            pass
