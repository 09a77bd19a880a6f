"""OpenTelemetry: a span for each answer, and in it spans for its wait, its prefill and its decode.

Attributes have the names of OpenTelemetry's conventions for generative AI. Spans are made when an
answer ends, with the times that the metrics have kept, so that nothing is done while it is written.
What clients have written is in none of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from razor_dist import __version__
from razor_dist.config.errors import ConfigError
from razor_dist.config.extras import install_command
from razor_dist.server.metrics import AnswerTimes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

# Time-out of an export.
_EXPORT_SECONDS = 2.0


def exporting(endpoint: str) -> TracerProvider:
    """Return a provider whose spans go to a collector, as OTLP over HTTP, in the background.

    Its environment variables hold: ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER`` and others.

    Raises `ConfigError` if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_endpoint needs OpenTelemetry ({error}): {install_command('otel')}"
        ) from None
    if not urlsplit(endpoint).path.strip("/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    named = Resource.create({"service.name": "razor_dist", "service.version": __version__})
    resource = named.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Traces:
    """Makes the spans of answers to one model's requests."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api, self._provider, self._model = trace, provider, model
        self._tracer = provider.get_tracer("razor_dist", __version__)
        self._caller = TraceContextTextMapPropagator()

    def ended(self, answer: AnswerTimes, reason: str, now: float) -> None:
        """Make the spans of an answer that has ended for a ``reason``; times are monotonic."""
        shift = time.time() - time.monotonic()
        record = answer.record

        def ns(at: float) -> int:
            return int((at + shift) * 1e9)

        whole = self._tracer.start_span(
            f"{record.operation} {self._model}",
            context=self._caller.extract(record.trace),
            kind=self._api.SpanKind.SERVER,
            start_time=ns(answer.submitted),
            attributes=self._attributes(answer, reason),
        )
        if reason == "error":
            whole.set_status(self._api.StatusCode.ERROR)
        inside = self._api.set_span_in_context(whole)
        admitted, first = answer.admitted, answer.first_token
        # The prompt of several answers is read for the first of them.
        parts = [] if admitted is None and first else [("queue", answer.submitted, admitted)]
        for name, begin, end in (*parts, ("prefill", admitted, first), ("decode", first, now)):
            if begin is not None:
                span = self._tracer.start_span(name, context=inside, start_time=ns(begin))
                span.end(ns(now if end is None else end))
        whole.end(ns(now))

    def close(self) -> None:
        """Send what has not been sent, as far as the collector takes it."""
        self._provider.shutdown()

    def _attributes(self, answer: AnswerTimes, reason: str) -> dict[str, Any]:
        params = answer.params
        found = {
            "gen_ai.operation.name": answer.record.operation,
            "gen_ai.provider.name": "razor_dist",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": answer.cached,
            "gen_ai.usage.output_tokens": answer.tokens,
            "razor_dist.request_id": answer.record.request_id,
            "error.type": "engine_error" if reason == "error" else None,
        }
        return {name: value for name, value in found.items() if value is not None}
