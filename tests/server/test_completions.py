"""OpenAI's legacy text completions, requested with OpenAI's SDK over a real socket.

Pinned here:
1. the prompt is used as it stands, text or ids; plain and streamed answers are the same;
2. a prompt that begins with an earlier prompt and its answer continues that timeline with its exact tokens;
3. evaluation episodes may score prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from agentjet.types import Call
from tests.fakes import saying
from tests.server.serving import Served, serving
from tests.server.speaking import COMPLETIONS
from tests.tiny import SPECIAL, tokenizer

pytestmark = pytest.mark.anyio

END = SPECIAL.index("<|im_end|>")


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


def calls(served: Served, episode: dict[str, Any]) -> tuple[Call, ...]:
    return served.run.gateway.swarm.tree(episode["episode_id"], "").calls


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon"], list(ids("Once upon")), [list(ids("Once upon"))]])
async def test_a_prompt_is_fed_as_it_stands(tmp_path: Path, prompt: Any) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: " a time äöü")) as served:
        episode = await served.begin()
        answer = await served.openai(episode).completions.create(model=episode["model"], prompt=prompt)
        [choice] = answer.choices
        assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", " a time äöü", "stop")
        [asked] = served.run.compute.asked
        assert asked.prompt == ids("Once upon")
        [call] = calls(served, episode)
        assert call.completion == (*ids(" a time äöü"), END) and call.versions == (0,) * len(call.completion)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(asked.prompt), len(call.completion))
        assert (answer.id, answer.system_fingerprint) == (f"cmpl-{call.id}", "policy-0")


async def test_a_stream_has_the_log_probabilities_of_the_plain_answer(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "grüße 🙂 to <think> you")) as served:
        episode = await served.begin()
        plain, streamed = [
            await COMPLETIONS.ask(served, episode, stream=stream, logprobs=0) for stream in (False, True)
        ]
        assert plain == streamed and plain.text == "grüße 🙂 to <think> you"
        pieces, whole = streamed.raw, plain.raw.choices[0].logprobs
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        assert whole is not None and whole.tokens is not None
        assert len(whole.tokens) == plain.usage[1] and whole.tokens[-1] == "<|im_end|>"
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [getattr(piece.logprobs, name) for piece in pieces]
            assert [item for part in parts for item in part] == getattr(whole, name)


async def test_offsets_are_where_the_tokens_begin(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", saying(lambda prompt: "é hello")) as served:
        client = served.openai(await served.begin())
        answer = await client.completions.create(model="policy", prompt="x", logprobs=0)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
        assert logprobs.tokens[:2] == ["�", "�"] and "".join(logprobs.tokens[2:]) == " hello<|im_end|>"
        lengths = [0, 1, *(len(token) for token in logprobs.tokens[2:])]
        assert logprobs.text_offset == [sum(lengths[:i]) for i in range(len(lengths))]
        assert logprobs.token_logprobs == [-0.5] * len(logprobs.tokens) and logprobs.top_logprobs is None


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_turns_continue_a_timeline(tmp_path: Path, form: str) -> None:
    """Each prompt is the one before it, its answer and something new."""
    # What the policy says is tokenised as no tokenizer would.
    said = [tuple(ids(letter)[0] for letter in " hello"), tuple(ids(letter)[0] for letter in " the end")]
    async with serving(tmp_path / "d", lambda prompt, params: said[len(prompt) > 5]) as served:
        episode = await served.begin()
        client = served.openai(episode)
        prompt = "hello"
        for _ in range(2):
            given: Any = prompt if form == "text" else list(ids(prompt))
            answer = await client.completions.create(model="policy", prompt=given, seed=1, max_tokens=50)
            assert answer.choices[0].finish_reason == "length"
            prompt += answer.choices[0].text + "\nhello"
        first, second = calls(served, episode)
        asked = served.run.compute.asked[1].prompt
        assert asked == ids("hello") + said[0] + ids("\nhello")
        assert (second.parent, second.fork, second.ask.after) == (first.id, "", first.id)
        tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
        assert tree.leaves() == (second,) and tree.tokens(second.id) == asked + said[1]


async def test_several_choices_and_a_stop_string(tmp_path: Path) -> None:
    said = iter(["one END two", "three"])
    async with serving(tmp_path / "d", saying(lambda prompt: next(said))) as served:
        episode = await served.begin()
        answer = await served.openai(episode).completions.create(
            model="policy", prompt="x", n=2, best_of=2, stop="END", seed=7, temperature=0.5, max_tokens=20
        )
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
            (0, "one ", "stop"),
            (1, "three", "stop"),
        ]
        params = [asked.params for asked in served.run.compute.asked]
        assert (params[0].seed, params[0].temperature, params[0].max_tokens) == (7, 0.5, 20)
        assert params[1].seed != 7
        assert tokenizer().decode(list(calls(served, episode)[0].completion)) == "one END"


async def test_the_name_of_a_control_token_is_text(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        client = served.openai(await served.begin())
        await client.completions.create(model="policy", prompt="<|im_end|>")
        await client.completions.create(model="policy", prompt=[END])
        text, control = (asked.prompt for asked in served.run.compute.asked)
        assert END not in text and control == (END,)


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_prompts_are_scored_in_evaluation_episodes(tmp_path: Path, form: str) -> None:
    """The request of lm-eval for the log-likelihood of an answer: one more token, the whole prompt, its best tokens."""
    texts = ["Once upon", "é a time", "x"]
    prompts: Any = texts if form == "text" else [list(ids(text)) for text in texts]
    async with serving(tmp_path / "d", saying(lambda prompt: "hello")) as served:
        episode = await served.begin(mode="eval")
        answer = await served.openai(episode).completions.create(
            model="policy", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for text, choice in zip(texts, answer.choices, strict=True):
            assert choice.text == text + "hello" and choice.logprobs is not None
            tokens, scored = choice.logprobs.tokens, choice.logprobs.token_logprobs
            length = len(ids(text))
            assert tokens is not None and tokens[length:] == ["hello"] and len(tokens) == length + 1
            assert scored == [None, *(-1 / at for at in range(1, length + 1))]
            likeliest: Any = choice.logprobs.top_logprobs
            assert likeliest[0] is None and likeliest[1][tokenizer().decode([5])] == -0.5
            assert all(max(top.values()) > own for top, own in zip(likeliest[1:], scored[1:], strict=True))
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        assert answer.usage.prompt_tokens == sum(len(ids(text)) for text in texts)
        assert len(calls(served, episode)) == 3


async def test_one_prompt_of_a_list_that_fails_ends_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served:
        episode = await served.begin(mode="eval")
        client = served.openai(episode)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="policy", prompt=["a", "x" * 5000, "b"], n=2)
        answer = await client.completions.create(model="policy", prompt=["a", "b"], n=2, logprobs=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.prompt_tokens == 2
        logprobs = answer.choices[3].logprobs
        assert logprobs is not None and logprobs.tokens is not None and "".join(logprobs.tokens[:-1]) == "hi"
        assert len(logprobs.top_logprobs or ()) == len(logprobs.tokens)


async def test_a_prompt_may_continue_a_chat(tmp_path: Path) -> None:
    """Ids that begin with a chat's exact tokens continue it, for agents that write the template themselves."""
    async with serving(tmp_path / "d") as served:
        episode = await served.begin()
        client = served.openai(episode)
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        tree = served.run.gateway.swarm.tree(episode["episode_id"], "")
        [chat] = tree.calls
        prompt = [*tree.tokens(chat.id), *ids("\n")]
        await client.completions.create(model="policy", prompt=prompt)
        raw = tree.calls[1]
        assert (raw.parent, raw.kept, raw.suffix, raw.fork) == (chat.id, tree.num_tokens(chat.id), ids("\n"), "")
