"""vLLM's own API, for `python -m bench.sampler --replica`: SAMPLER_PYTHON -m bench.scaling.own_api JOB.

JOB is JSON: settings of the model, the sampler and the model's info, and the number of new tokens. Reads a batch of
prompts as a line of JSON, and answers with a line when it is sampled. Answers go to a file descriptor that the job
names, because vLLM prints anything. Imports no library that only the server has.
"""

from __future__ import annotations

import json
import os
import sys

from agentjet.compute.vllm.engine import engine_settings, set_environment
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.types import ModelInfo


def main() -> None:
    job = json.loads(sys.argv[1])
    model, sampler = ModelConfig.model_validate(job["model"]), SamplerConfig.model_validate(job["sampler"])
    compute, answers = ComputeConfig(), os.fdopen(job["answers"], "w", buffering=1)
    set_environment(model, compute)
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    engine = LLM(**engine_settings(model, ModelInfo(**job["info"]), sampler.limits, compute))
    params = SamplingParams(max_tokens=job["new_tokens"], logprobs=0, detokenize=False, ignore_eos=True)
    for line in sys.stdin:
        prompts = [tokens_input(prompt) for prompt in json.loads(line)]
        found = engine.generate(prompts, params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == job["new_tokens"] for one in found)
        answers.write("done\n")


if __name__ == "__main__":  # vLLM's processes import this module again.
    main()
