"""Token-in, token-out: the client renders by itself, and the policy gets exactly its token ids.

Pinned here:
1. a conversation of two turns by ids is one timeline, and exactly its sampled tokens are trained, behind its ids;
2. ids that spell a known text in other tokens are used as they stand;
3. a chat continues the tokens of a call by ids, and the other way round;
4. stop tokens end an answer, stop strings too; log-probabilities are those of the sampled tokens;
5. every dialect takes the key in the path, of any run, and no key is printed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from agentjet.client import AsyncEpisode
from agentjet.client.connection import Connection
from agentjet.client.episode import Endpoint, abort_reason
from agentjet.compute.protocol import LossSpec, Outputs
from agentjet.errors import ConfigError
from agentjet.protocol import BeginRequest, BeginResponse
from agentjet.timeline import Forest
from agentjet.types import Op
from tests.fakes import ScriptedCompute, saying
from tests.server.serving import ADMIN, TOKEN, bearer, serving
from tests.server.speaking import CHAT, COMPLETIONS, GENERATE, HELLO, MESSAGES, SPEECHES, Speech, calls_of
from tests.tiny import SPECIAL, tokenizer

pytestmark = pytest.mark.anyio
END = SPECIAL.index("<|im_end|>")
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def letters(text: str) -> list[int]:
    """Returns a text in tokens of one letter, as no tokenizer would."""
    return [ids(letter)[0] for letter in text]


class Learned:
    """Keeps the forests that a scripted worker gets to learn."""

    def __init__(self) -> None:
        self.forests: list[Forest] = []

    def attach(self, compute: ScriptedCompute) -> None:
        forward_backward = compute.forward_backward

        async def keep(op: Op, batch_id: int, loss: LossSpec) -> Outputs:
            batch = compute.policies[op.policy_id].batch
            assert batch is not None
            self.forests.append(loss.recipe.columns(batch, {})[0])
            return await forward_backward(op, batch_id, loss)

        compute.forward_backward = keep  # type: ignore[method-assign]

    def contexts(self) -> Counter[tuple[int, ...]]:
        """Returns each trained token with all tokens before it."""
        [forest] = self.forests
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
            paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
        return Counter(paths[node] for node in forest.node.tolist())


async def test_two_turns_by_ids_are_one_timeline_and_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    said = [letters(" hello"), letters(" the end")]
    learned, job = Learned(), {"batch_size": 1, "group_size": 2, "recipe": "dr_grpo", "max_tokens": 20}

    def script(prompt: Any, params: Any) -> list[int]:
        return [*said[len(prompt) > 5], END]

    async with serving(tmp_path / "d", script, job=job, prepare=learned.attach) as served:
        wanted = Counter[tuple[int, ...]]()
        for member in range(2):
            episode = await served.begin(group="g")
            prompt = ids("hello") if member == 0 else ids("the")
            for _ in range(2):
                answer = await GENERATE.ask(served, episode, token_ids=prompt, logprobs=1)
                whole = (*prompt, *answer.raw.ids)
                wanted.update(whole[: end + 1] for end in range(len(prompt), len(whole)))
                # The next question has a control token and, again, tokens that no tokenizer would choose.
                prompt = [*whole, SPECIAL.index("<|im_start|>"), *letters("hello")]
            first, second = calls_of(served, episode)
            assert (second.parent, second.kept, second.fork, second.after) == (
                first.id,
                len(first.suffix) + len(first.completion),
                "",
                first.id,
            )
            tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
            assert tree.leaves() == (second,) and tree.tokens(second.id) == whole
            path = f"/swarm/v1/episodes/{episode['episode_id']}/finish"
            assert (await served.http.post(path, json={"reward": float(member)})).status_code == 200
        await served.run.until(lambda: bool(learned.forests))
        assert learned.contexts() == wanted


async def test_known_text_in_other_tokens_is_used_as_it_stands(tmp_path: Path) -> None:
    """Text completions would replace the ids by the sampled tokens; here the client has chosen them."""
    async with serving(tmp_path / "d", lambda prompt, params: [*letters(" hello"), END]) as served:
        episode = await served.begin()
        first = await GENERATE.ask(served, episode)
        again = [*ids("hello"), *ids(" hello"), END]
        known = [*ids("hello"), *first.raw.ids]
        common = next(i for i, (one, other) in enumerate(zip(again, known, strict=False)) if one != other)
        await GENERATE.ask(served, episode, token_ids=again)
        one, two = calls_of(served, episode)
        assert list(served.run.compute.asked[1].prompt) == again
        assert (two.kept, two.fork, two.after) == (common, "branch", None) and two.parent == one.id
        # Answers to the same prompt are votes: neither proves that the other arrived.
        await GENERATE.ask(served, episode)
        assert calls_of(served, episode)[2].after is None


@pytest.mark.parametrize("begins", ["chat", "ids"])
async def test_a_chat_and_a_call_by_ids_continue_each_other(tmp_path: Path, begins: str) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    async with serving(tmp_path / "d") as served:
        probe = await served.begin()
        await CHAT.ask(served, probe)
        await CHAT.ask(served, probe, messages=turns)
        prompts = [list(asked.prompt) for asked in served.run.compute.asked]
        episode = await served.begin()
        for turn, by_chat in enumerate((begins == "chat", begins != "chat")):
            if by_chat:
                await CHAT.ask(served, episode, messages=turns if turn else HELLO)
            else:
                await GENERATE.ask(served, episode, token_ids=prompts[turn])
        first, second = calls_of(served, episode)
        assert [list(asked.prompt) for asked in served.run.compute.asked[2:]] == prompts
        whole = len(prompts[0]) + len(first.completion)
        assert (second.parent, second.kept, second.fork) == (first.id, whole, "")


@STREAMED
async def test_stop_tokens_and_stop_strings(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "one; two END three")) as served:
        episode = await served.begin()
        stop = ids("one; two END three")[5]
        for more, end in (({"stop_token_ids": [stop, END]}, 6), ({"stop": ["END"]}, len(ids("one; two END")))):
            answer = await GENERATE.ask(served, episode, stream=stream, logprobs=1, max_tokens=64, **more)
            assert answer.raw.ids == ids("one; two END three")[:end] and answer.end == "stop"
            asked = served.run.compute.asked[-1]
            assert not asked.finished and asked.params.stream_seconds, "the rest is not sampled"
            call = calls_of(served, episode)[-1]
            assert list(call.completion) == answer.raw.ids and call.finish_reason == "stop"
            assert [entry["logprob"] for entry in answer.raw.logprobs] == list(call.logprobs)
            assert [entry["token"] for entry in answer.raw.logprobs] == [f"token_id:{one}" for one in answer.raw.ids]
        own_end = await GENERATE.ask(served, episode, stream=stream, max_tokens=64, stop_token_ids=[END])
        assert own_end.raw.ids[-1] == END and own_end.raw.logprobs == []
        pace = served.run.compute.asked[-1].params.stream_seconds
        assert (pace is not None) == stream, "the sampler knows its end tokens"


async def test_the_prompt_comes_back_on_request_and_choices_are_apart(tmp_path: Path) -> None:
    said = iter(["one", "two"])
    async with serving(tmp_path / "d", saying(lambda prompt: next(said))) as served:
        answer = await GENERATE.ask(served, await served.begin(), n=2, return_token_ids=True)
        body = answer.raw.body
        assert body["prompt_token_ids"] == ids("hello") and body["system_fingerprint"] == "policy-0"
        assert [choice["token_ids"] for choice in body["choices"]] == [[*ids("one"), END], [*ids("two"), END]]
        assert answer.usage[0] == len(ids("hello"))


async def test_an_unknown_id_is_refused_with_its_place(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        for body, place in (
            (GENERATE.body(token_ids=[5, 100_000]), "token_ids.1 = 100000"),
            (GENERATE.body(stop_token_ids=[5, 6, 70_000]), "sampling_params.stop_token_ids.2 = 70000"),
        ):
            answer = await served.http.post(GENERATE.path, json=body, headers=bearer(episode["api_key"]))
            assert answer.status_code == 400 and place in answer.json()["error"]["message"], answer.text
        assert not calls_of(served, episode)


def handle(episode: dict[str, Any]) -> AsyncEpisode:
    """Returns what an agent in Python gets."""
    connection = cast(Connection, object())
    return AsyncEpisode(connection, BeginResponse.model_validate(episode), BeginRequest(task_id="t"))


@pytest.mark.parametrize("run", ["default", "other"])
@pytest.mark.parametrize("dialect", SPEECHES, ids=str)
async def test_every_dialect_takes_the_key_in_the_path(tmp_path: Path, dialect: Speech, run: str) -> None:
    """With the SDK of its provider, whose own key is wrong."""
    async with serving(tmp_path / "d") as served:
        path, token = "", TOKEN
        if run == "other":
            path, admin = "/runs/other", bearer(ADMIN)
            assert (await served.http.put("/swarm/v1/runs/other", json={}, headers=admin)).status_code == 200
            await served.run.of_run(run).gateway.engine.wait_until_up()
            token = ADMIN
        begun = await served.http.post(f"{path}/swarm/v1/episodes", json={"task_id": "t"}, headers=bearer(token))
        episode = begun.json()
        keyed = {**episode, "base_url": handle(episode).url_with_key, "api_key": "none"}
        assert keyed["base_url"] == f"{served.url}{path}/k/{episode['api_key']}/v1"
        for stream in (False, True):
            assert (await dialect.ask(served, keyed, stream=stream)).text == "hi"
        models = await served.openai(keyed).models.list()
        assert [model.id for model in models.data] == ["tiny"]
        if dialect is MESSAGES:
            counted = await served.anthropic(keyed).messages.count_tokens(model="policy", messages=HELLO)
            assert counted.input_tokens > 0
        swarm = served.run.of_run(run).gateway.swarm
        assert len(swarm.tree(episode["episode_id"], "").calls) == 2


async def test_the_key_of_a_url_is_not_printed(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = handle(await served.begin())
        key = episode.api_key
        assert key in episode.url_with_key and key not in repr(episode)
        async with httpx.AsyncClient(verify=False, trust_env=False) as http:
            refused = await http.post(f"{episode.url_with_key}/chat/completions", json={"model": "policy"})
            with pytest.raises(httpx.HTTPStatusError, match=key) as raised:
                refused.raise_for_status()
        reason = abort_reason(raised.value)
        assert key.rpartition(".")[2] not in reason and "messages" in reason, reason
        for path in (f"/k/{key}/inference/v1/nowhere", f"/k/{key}/inference/v1/generate", f"/k/{key}/inference/v2"):
            answer = await served.http.get(path)
            assert answer.status_code in (400, 404, 405) and key not in answer.text, answer.text
            assert GENERATE.path in answer.text or "not_found" in answer.text, answer.text


def test_an_endpoint_takes_its_key_in_a_header() -> None:
    episode = Endpoint("http://127.0.0.1:2/v1", "theirs", "their-key").begin(BeginRequest(task_id="t"))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:2/v1.*episode\.base_url and episode\.api_key") as raised:
        _ = episode.url_with_key
    assert "their-key" not in str(raised.value)


async def test_text_completions_of_the_same_ids_are_the_same_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        for dialect in (GENERATE, COMPLETIONS):
            more = {} if dialect is GENERATE else {"prompt": ids("hello")}
            await dialect.ask(served, episode, **more)
        first, second = served.run.compute.asked
        assert first.prompt == second.prompt
