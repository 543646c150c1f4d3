"""Spans really leave the process, and a missing package is named with the way out."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from agentjet.cli.server_process import tracer_provider
from agentjet.errors import ConfigError


class Collector(BaseHTTPRequestHandler):
    """Notes what is posted to it."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_spans_arrive() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = tracer_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        tracer = provider.get_tracer("test")
        for name in ("call", "step"):
            tracer.start_span(name).end()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    spans = set()
    for path, body in Collector.received:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert spans == {"call", "step"}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"server\.trace_endpoint = 'http://x' needs .*\[otel\]"):
        tracer_provider("http://x")
