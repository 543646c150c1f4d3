"""The overlays of `agentjet episodes show`: styles by probability, version, advantage; marks that need no colour."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.cli.overlays import (
    CONTEXT,
    NEGATIVE,
    POSITIVE,
    UNTRAINED,
    VERSIONS,
    EpisodeAdvantages,
    advantage_bar,
    overlaid,
)
from agentjet.client import Swarm
from agentjet.protocol import CallView
from tests.fakes import saying
from tests.server.serving import TOKEN, Served, in_thread, serving


def call(**more: Any) -> CallView:
    """A call with one token of context and four sampled ones."""
    fields = {
        "call_id": "c1", "role": "", "parent": None, "kept": 0, "fork": "", "retry_of": None, "orphan": "",
        "after": None, "messages": [], "tools": [], "response": {}, "tokens": [1, 2, 3, 4, 5],
        "texts": ["Q", "sure", "rare", "odd\x1b", "!"], "mask": [0, 1, 1, 1, 1],
        "logprobs": [None, 0.0, math.log(0.004), math.log(0.07), math.log(0.6)], "versions": [None, 7, 7, 8, 8],
        "temperature": 1.0, "finish_reason": "stop", "created": 0.0, **more,
    }  # fmt: skip
    return CallView.model_validate(fields)


def styles(shown: Any) -> list[str]:
    return [str(span.style) for span in shown.spans]


def test_unlikely_tokens_are_bright_and_marked() -> None:
    shown = overlaid(call(), "logprob")
    assert shown.plain == "Qsurerare⟨0.4%⟩odd\\x1b⟨7%⟩!"
    assert styles(shown)[0] == CONTEXT
    assert styles(shown)[2].endswith("underline") and not styles(shown)[1].endswith("underline")


def test_versions_are_marked_where_they_change() -> None:
    shown = overlaid(call(), "version")
    assert shown.plain == "Q⟨v7⟩surerare⟨v8⟩odd\\x1b!"
    assert [style for style in styles(shown) if style in VERSIONS] == [VERSIONS[3]] * 2 + [VERSIONS[0]] * 2


def test_signs_of_advantages() -> None:
    assert styles(overlaid(call(), "advantage", 1.2)) == [CONTEXT] + [POSITIVE] * 4
    assert styles(overlaid(call(), "advantage", -0.5)) == [CONTEXT] + [NEGATIVE] * 4
    assert styles(overlaid(call(orphan="retry"), "advantage", 1.2)) == [CONTEXT] + [UNTRAINED] * 4
    assert POSITIVE not in styles(overlaid(call(), "advantage"))
    assert advantage_bar(1.5) == "advantage +1.5 ▇▇▇▇▇▇" and advantage_bar(-30.0).endswith("░" * 12)
    assert advantage_bar(None) == "advantage unknown" and advantage_bar(0.0) == "advantage +0"


def test_tokens_without_texts_have_their_ids() -> None:
    assert overlaid(call(texts=[]), "version").plain == "<1>⟨v7⟩<2><3>⟨v8⟩<4><5>"


def test_the_advantage_of_a_group(tmp_path: Path) -> None:
    """A group of rewards 1 and 0 has advantages of both signs once it is in a batch; an evaluation has none."""
    job = {"batch_size": 1, "group_size": 2}
    with (
        in_thread(serving(tmp_path / "data", saying(lambda prompt: "3"), job=job)) as (served, loop),
        Swarm(served.url, TOKEN, client_id="c") as swarm,
    ):
        ids = []
        for reward in (1.0, 0.0):
            with swarm.episode("sum") as episode:
                with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as agent:
                    agent.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "What is 1 + 2"}]
                    )
                ids.append(episode.id)
                episode.finish(reward)
        loop.run(served.run.until(lambda: served.run.gateway.swarm.policy_version == 1))
        at = ["--overlay", "advantage", "--url", served.url, "--token", TOKEN]
        shown = [CliRunner().invoke(app, ["episodes", "show", id, *at], catch_exceptions=False).output for id in ids]
        assert "advantage +" in shown[0] and "▇" in shown[0]
        assert "advantage -" in shown[1] and "░" in shown[1]
        with swarm.episode("sum", mode="eval") as episode:
            with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as agent:
                agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "What is 1 + 2"}])
            one = CliRunner().invoke(app, ["episodes", "show", episode.id, *at], catch_exceptions=False).output
            assert "advantage unknown: an episode of an evaluation has no advantage" in one
            episode.finish(1.0)


def test_advantages_by_role() -> None:
    found = EpisodeAdvantages(None, {"planner": 1.0, "planner/critic": -2.0})
    roles = ("planner", "planner/critic", "planner/other", "coder")
    assert [found.of_call(call(role=role)) for role in roles] == [1.0, -2.0, 1.0, None]


def test_the_command(served: Served) -> None:
    with Swarm(served.url, TOKEN) as swarm, swarm.episode("sum") as episode:
        at = [episode.id, "--url", served.url, "--token", TOKEN]
        done = CliRunner().invoke(app, ["episodes", "show", "--overlay", "logprob", *at], catch_exceptions=False)
        assert done.exit_code == 0 and "calls: none" in done.output
        refused = CliRunner().invoke(app, ["episodes", "show", "--overlay", "mood", *at])
        assert refused.exit_code == 2 and "'logprob'" in refused.output
        episode.abort("")


@pytest.mark.parametrize("overlay", ["logprob", "version"])
def test_an_episode_with_an_overlay(served: Served, overlay: str) -> None:
    with Swarm(served.url, TOKEN) as swarm, swarm.episode("sum") as episode:
        with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as agent:
            agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "What is 1 + 2"}])
        arguments = ["episodes", "show", "--overlay", overlay, episode.id, "--url", served.url, "--token", TOKEN]
        shown = CliRunner().invoke(app, arguments, catch_exceptions=False).output
        assert "of each sampled token" in shown and ("⟨v0⟩1 + 2 = 3" in shown) == (overlay == "version")
        episode.finish(1.0)
