"""A language model's API on loopback, whose answers are a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Call = tuple[str, Mapping[str, Any]]
"""A tool and its arguments."""


@dataclass
class LlmServer:
    answer: Callable[[Any], tuple[int, Iterable[bytes]]]
    """Gets the body of a request. Returns the status and the parts of the answer."""
    url: str = ""
    requests: list[tuple[str, Mapping[str, str], Any]] = field(default_factory=list)
    """Path, headers and body of each."""
    closing: threading.Event = field(default_factory=threading.Event)
    """Set at the end, so that slow answers end, too."""

    @contextmanager
    def serve(self) -> Iterator[LlmServer]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                script.requests.append((self.path, dict(self.headers), body))
                status, parts = script.answer(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                try:
                    for part in parts:
                        self.wfile.write(part)
                except OSError:  # The client has what it wanted.
                    pass

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            self.url = f"http://127.0.0.1:{server.server_port}/v1"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield self
            finally:
                self.closing.set()
                server.shutdown()
                thread.join()


def as_json(content: Any, status: int = 200) -> tuple[int, list[bytes]]:
    return status, [json.dumps(content).encode()]


def openai_answer(*calls: Call, text: str | None = None) -> tuple[int, list[bytes]]:
    """An answer that read 100 tokens and wrote 10."""
    listed = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": text, **({"tool_calls": listed} if listed else {})}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return as_json(
        {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage}
    )


def anthropic_answer(*calls: Call) -> tuple[int, list[bytes]]:
    """An answer that read 70 + 30 tokens and wrote 10."""
    blocks = [{"type": "tool_use", "id": f"c{n}", "name": name, "input": a} for n, (name, a) in enumerate(calls)]
    usage = {"input_tokens": 70, "cache_read_input_tokens": 30, "output_tokens": 10}
    return as_json({"type": "message", "content": [{"type": "text", "text": "Let me see."}, *blocks], "usage": usage})
