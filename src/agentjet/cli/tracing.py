"""OpenTelemetry's SDK, set up for a server: where spans go and how. The spans themselves are `gateway.tracing`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentjet import __version__
from agentjet.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_LINKS = 8192
"""Of one step, to its calls; the SDK's own default is 128."""


def tracer_provider(endpoint: str) -> TracerProvider:
    """Sends spans to `endpoint` in the background; `shutdown()` sends the last ones.

    Raises `ConfigError` when the packages are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"server.trace_endpoint = {endpoint!r} needs the package {error.name!r}: pip install 'agentjet[otel]', or "
            "leave the setting out"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "agentjet", "service.version": __version__}),
        span_limits=SpanLimits(max_links=MAX_LINKS),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
