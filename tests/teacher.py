"""A teacher in a process of its own: `python -m tests.teacher MODEL PORT` serves the folder of a model, which it names
`teacher`, as vLLM answers requests for `prompt_logprobs`.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import ROOT, environment

NAME = "teacher"
PATIENCE = 120.0


def serve(folder: str, port: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lock = threading.Lock()

    @torch.inference_mode()
    def graded(body: dict[str, Any]) -> dict[str, Any]:
        prompt, num = body["prompt"], body["prompt_logprobs"]
        with lock:
            logits = model(torch.tensor([prompt])).logits[0, :-1]
        logprobs = logits.double().log_softmax(-1)
        given: list[Any] = [None]
        for token, at in zip(prompt[1:], logprobs, strict=True):
            ids = [token, *at.topk(num).indices.tolist()]
            given.append({str(i): {"logprob": at[i].item(), "decoded_token": tokenizer.decode([i])} for i in ids})
        return {"model": NAME, "choices": [{"text": "", "prompt_logprobs": given}]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": NAME, "max_model_len": model.config.max_position_embeddings}]})

        def do_POST(self) -> None:
            self.reply(graded(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def reply(self, answer: Any) -> None:
            raw = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Teacher:
    """The process. It can be killed and started again, at the same address."""

    NAME = NAME

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "tests.teacher", str(folder), str(port)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=environment(), cwd=ROOT)
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, "the teacher did not start"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/v1/models", trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
