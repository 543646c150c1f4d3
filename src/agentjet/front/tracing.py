"""The run and the episode of log lines and spans, and OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from agentjet import __version__
from agentjet.errors import ConfigError, install_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

present_run: ContextVar[str] = ContextVar("run", default="")
"""Name of the run whose work is done, or ''."""
present_episode: ContextVar[str] = ContextVar("episode_id", default="")


class Tracing:
    """OpenTelemetry spans of a server: one per sampled choice, one per learned batch. None while `tracer` is unset."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None

    def connect(self, endpoint: str) -> Callable[[], object]:
        """Sends spans to an endpoint, unless it is ''. Returns a function that sends the last ones.

        Raises `ConfigError` if the packages are missing.
        """
        if not endpoint:
            return lambda: None
        provider = tracer_provider(endpoint)
        self.tracer = provider.get_tracer("agentjet", __version__)
        return provider.shutdown

    def span(self, name: str, **attributes: str | int) -> AbstractContextManager[object]:
        """Context of a span. Its attributes, and the name of the run, get the prefix `agentjet.`."""
        if self.tracer is None:
            return nullcontext()
        return self.tracer.start_as_current_span(name, attributes=_prefixed({"run": present_run.get(), **attributes}))

    def annotate(self, **attributes: str | int) -> None:
        if self.tracer is not None:
            from opentelemetry import trace

            trace.get_current_span().set_attributes(_prefixed(attributes))


def _prefixed(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"agentjet.{name}": value for name, value in attributes.items()}


def tracer_provider(endpoint: str) -> TracerProvider:
    """OpenTelemetry's SDK: sends spans to `endpoint` in the background; `shutdown()` sends the last ones.

    Raises `ConfigError` if the packages are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"server.trace_endpoint = {endpoint!r} needs the package {error.name!r}: {install_extra('otel')}. Or "
            "leave the setting out"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": "agentjet", "service.version": __version__}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
