"""vLLM's own offline API, for `samplers.sampler_efficiency`: `SAMPLER_PYTHON -m bench.scaling.offline JOB_FILE`.

Writes the seconds of each round as JSON to the file `result` of the job: vLLM itself may print anything. It imports no
library that only the server has.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from agentjet.compute.cluster.vllm_engine import engine_settings, set_environment
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.types import ModelInfo


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model, sampler = ModelConfig.model_validate(job["model"]), SamplerConfig.model_validate(job["sampler"])
    compute = ComputeConfig()
    set_environment(model, compute)
    from vllm import LLM, SamplingParams
    from vllm.inputs import tokens_input

    engine = LLM(**engine_settings(model, ModelInfo(**job["info"]), sampler, compute))
    seconds = []
    for number in range(job["rounds"]):
        prompts = [tokens_input(prompt) for prompt in job["prompts"][number]]
        params = [
            SamplingParams(max_tokens=job["new_tokens"], seed=i, logprobs=0, detokenize=False, ignore_eos=True)
            for i in range(len(prompts))
        ]
        started = time.monotonic()
        found = engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.monotonic() - started)
        assert all(len(one.outputs[0].token_ids) == job["new_tokens"] for one in found)
    Path(job["result"]).write_text(json.dumps(seconds))


if __name__ == "__main__":  # vLLM's processes import this module again.
    main()
