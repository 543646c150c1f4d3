"""The train client of verifiers, which renders and tokenises by itself, on a server of real processes.

The tokens that it says it sent and got are those that the server recorded, sampled and trains.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentjet.types import Task
from tests.e2e.server import Server
from tests.needs import need
from tests.tiny import make_model

need("verifiers")
pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

TURNS = ("hello", "What is the weather?")


async def converse(model: Path, url: str) -> list[Any]:
    """Plays two turns with `TrainClient` and, for the second, the bridge of its renderer. Returns their tokens."""
    from renderers.client import generate
    from verifiers.v1.clients import resolve_client
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=url,
        api_key_var="NO_SUCH_VARIABLE",
        renderer={"name": "qwen3", "enable_thinking": False},
        renderer_model_name=str(model),
    )
    client = resolve_client(config)
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=8, logprobs=True, extra_body={"top_k": -1})
    body = {"model": "policy", "messages": [{"role": "user", "content": TURNS[0]}]}
    try:
        first = (await client.get_response(ChatDialect(), body, sampling, session_id="trace")).tokens
        [slot, *_] = client_pool(config).renderers
        tail = [{"role": "user", "content": TURNS[1]}]
        bridged = slot.renderer.bridge_to_next_turn(first.prompt_ids, first.completion_ids, tail, tools=None)
        assert bridged is not None
        second = await generate(
            client=client.client,
            renderer=slot.renderer,
            messages=tail,
            model="policy",
            prompt_ids=bridged.token_ids,
            sampling_params={"max_tokens": 8, "routed_experts_prompt_start": len(first.prompt_ids)},
        )
    finally:
        await client.close()
    return [
        (first.prompt_ids, first.completion_ids, first.completion_logprobs),
        (second["prompt_ids"], second["completion_ids"], second["completion_logprobs"]),
    ]


def make_qwen(folder: Path) -> Path:
    """Returns a tiny model whose tokenizer has all tokens that the renderer of Qwen3 writes."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoModelForCausalLM

    path = make_model(folder, template="qwen3")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<tool_response>", "</tool_response>")])
    tokenizer.save(str(path / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(tokenizer.get_vocab_size())
    model.save_pretrained(path)
    return path


def client_pool(config: Any) -> Any:
    from verifiers.v1.clients.train import ElasticRendererPool

    return ElasticRendererPool(config.renderer_model_name, config.renderer, multiplex=config.multiplex)


def test_the_train_client_of_verifiers(tmp_path: Path) -> None:
    model = make_qwen(tmp_path / "model")
    with Server(model, tmp_path / "data", job__batch_size=1) as server:
        for member in range(2):
            episode = server.begin(task_id=Task("t").id, group="g")
            url = f"{server.url}/k/{episode['api_key']}/v1"
            turns = asyncio.run(converse(model, url))
            shown = server.get(f"/episodes/{episode['episode_id']}")
            first, second = shown["calls"]
            assert (second["parent"], second["fork"], shown["refused"]) == (first["call_id"], "", {})
            whole: list[int] = []
            for call, (prompt, completion, logprobs) in zip((first, second), turns, strict=True):
                whole = [*whole[: call["kept"]], *call["tokens"]]
                assert whole == [*prompt, *completion], "recorded as sent and received"
                assert call["mask"] == [0] * (len(call["tokens"]) - len(completion)) + [1] * len(completion)
                assert len(logprobs) == len(completion) and max(logprobs) <= 0
            assert second["kept"] == len(turns[0][0]) + len(turns[0][1]), "one timeline"
            server.post(f"/episodes/{episode['episode_id']}/finish", reward=float(member))
        server.until(lambda: server.get("/status")["policy_version"] == 1)
        metrics = server.get("/steps")["metrics"]
        num = sum(value[-1] for name, value in metrics.items() if name == "policy/mismatch_kl")
        assert num < 1e-3, "the learner scores the tokens as the sampler did"
