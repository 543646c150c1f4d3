"""Spans really leave the process, with all their links, and a missing package is named with the way out."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from agentjet.cli.server_process import tracer_provider
from agentjet.errors import ConfigError

NUM_LINKS = 1000
"""More than the SDK keeps by default."""


class Collector(BaseHTTPRequestHandler):
    """Notes what is posted to it."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_spans_arrive_with_their_links() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.trace import Link

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        provider = tracer_provider(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        tracer = provider.get_tracer("test")
        call = tracer.start_span("call")
        call.end()
        tracer.start_span("step", links=[Link(call.get_span_context())] * NUM_LINKS).end()
        provider.shutdown()
        collector.shutdown()
        thread.join()
    spans = {}
    for path, body in Collector.received:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans |= {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert len(spans["step"].links) == NUM_LINKS
    assert {link.span_id for link in spans["step"].links} == {spans["call"].span_id}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"server\.trace_endpoint = 'http://x' needs .*agentjet\[otel\]"):
        tracer_provider("http://x")
