"""The train client of verifiers: it renders and tokenises by itself, and asks for token ids with the key in the URL."""

import asyncio
import os

from verifiers.v1.clients import resolve_client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

QUESTIONS = ("What is 17 + 25?", "Now double it.")
TOKENIZER = "../smollm2"
"""The folder of the policy's tokenizer, beside that of this process."""


async def converse() -> str:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    config = TrainClientConfig(
        base_url=f"{url.removesuffix('/v1')}/k/{key}/v1",
        api_key_var="NO_SUCH_VARIABLE",
        renderer={"name": "default"},
        renderer_model_name=TOKENIZER,
    )
    client = resolve_client(config)
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=1000, logprobs=True)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
        response = await client.get_response(ChatDialect(), body, sampling, session_id="trace")
        tokens, content = response.tokens, response.message.content
        assert len(tokens.completion_ids) == len(tokens.completion_logprobs) > 0
        messages.append({"role": "assistant", "content": content})
    await client.close()
    return content


if __name__ == "__main__":
    print(asyncio.run(converse()))
