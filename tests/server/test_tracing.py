"""OpenTelemetry: the spans of answers, in its in-memory exporter and at a collector."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from unittest import mock

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from razor_dist.config.errors import ConfigError
from razor_dist.protocol.messages import Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server import request_log
from razor_dist.server.metrics import Metrics
from razor_dist.server.request_log import RequestRecord
from razor_dist.server.tracing import Traces, exporting
from tests import fake_engine
from tests.server.process import fake_server, hang_up

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}


@contextmanager
def observed(trace: Mapping[str, str]) -> Iterator[tuple[Metrics, InMemorySpanExporter]]:
    """Metrics whose answers are traced, in a request that came with these headers."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = Metrics("m")
    metrics.on_end = Traces(provider, "m").ended
    record = RequestRecord("r1", operation="chat", trace=trace)
    token = request_log._record.set(record)
    try:
        yield metrics, exporter
    finally:
        request_log._record.reset(token)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_an_answer_is_a_span_with_its_parts() -> None:
    with observed(PARENT) as (metrics, exporter):
        metrics.submitted(["a"], 9, SamplingParams(max_tokens=4, temperature=0.5, seed=7, n=1))
        metrics.received(Progress("a", 4, 9, 0, 4, 0.0))
        metrics.cached("a", 4)
        metrics.received(Progress("a", 9, 9, 0, 4, 0.1))
        metrics.received(Token("a", 5, None, [], None))
        metrics.received(Token("a", 6, None, [], "stop"))
    spans = by_name(exporter)
    whole = spans.pop("chat m")
    assert whole.kind is SpanKind.SERVER and whole.status.status_code is StatusCode.UNSET
    assert whole.parent is not None and whole.context is not None
    assert f"{whole.parent.span_id:016x}" == CALLER and f"{whole.context.trace_id:032x}" == TRACE
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "razor_dist",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 2,
        "razor_dist.request_id": "r1",
    }
    assert list(spans) == ["queue", "prefill", "decode"]
    assert all(span.parent == whole.context for span in spans.values())
    begins = [span.start_time for span in spans.values()]
    ends = [span.end_time for span in spans.values()]
    assert begins == [whole.start_time, *ends[:-1]] and ends[-1] == whole.end_time


def test_a_second_answer_has_no_prefill_of_its_own() -> None:
    with observed({}) as (metrics, exporter):
        metrics.submitted(["a", "b"], 9, SamplingParams(n=2))
        metrics.received(Token("b", 5, None, [], "stop"))
    spans = by_name(exporter)
    assert set(spans) == {"chat m", "decode"}
    assert (spans["chat m"].attributes or {})["gen_ai.request.choice.count"] == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_an_answer_that_fails_ends_where_it_was(parts: int) -> None:
    with observed({"traceparent": "nonsense"}) as (metrics, exporter):
        metrics.submitted(["a"], 9, SamplingParams())
        if parts > 1:
            metrics.received(Progress("a", 0, 9, 0, 0, 0.0))
        metrics.ended("a", "error")
        metrics.ended("a", "abort")  # it has ended already
    spans = by_name(exporter)
    whole = spans.pop("chat m")
    assert list(spans) == ["queue", "prefill"][:parts]
    assert whole.status.status_code is StatusCode.ERROR and whole.parent is None
    assert (whole.attributes or {})["error.type"] == "engine_error"
    assert spans[list(spans)[-1]].end_time == whole.end_time


class Collector(BaseHTTPRequestHandler):
    taken: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_collector_hears_of_requests() -> None:
    """Also of those that end with the server; the words of clients do not reach it."""
    handler = type("Taking", (Collector,), {"taken": []})
    collector = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    secret = "A sentence that nobody else should read"
    with fake_server("--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}") as server:
        url = server.url()
        asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 3}
        body = asked | {"messages": [{"role": "user", "content": secret}], "n": 2}
        headers = PARENT | {"X-Request-Id": "mine"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        hang_up(url, asked | {"prompt": [fake_engine.HANG]})
    collector.shutdown()
    assert {path for path, _ in handler.taken} == {"/v1/traces"}
    groups = [group for _, request in handler.taken for group in request.resource_spans]
    about = {a.key: a.value.string_value for a in groups[0].resource.attributes}
    assert about["service.name"] == "razor_dist"
    spans = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    names = sorted(span.name for span in spans)
    whole = ["chat smollm2"] * 2 + ["text_completion smollm2"]
    parts = ["queue"] * 3 + ["prefill", "decode"] * 2
    assert names == sorted([*whole, *parts])
    chats = [span for span in spans if span.name == "chat smollm2"]
    assert {(s.trace_id.hex(), s.parent_span_id.hex()) for s in chats} == {(TRACE, CALLER)}
    [cut] = [span for span in spans if span.name == "text_completion smollm2"]
    [reason] = [a for a in cut.attributes if a.key == "gen_ai.response.finish_reasons"]
    assert reason.value.array_value.values[0].string_value == "abort"
    assert secret not in str(handler.taken)
    assert any(a.value.string_value == "mine" for a in chats[0].attributes)


def test_without_opentelemetry_the_setting_is_refused() -> None:
    missing = {"opentelemetry.exporter.otlp.proto.http.trace_exporter": None}
    with (
        mock.patch.dict(sys.modules, missing),
        pytest.raises(ConfigError, match=r"otlp_endpoint needs OpenTelemetry .*pip install .*otel"),
    ):
        exporting("http://127.0.0.1:4318")
    provider = exporting("http://127.0.0.1:4318/own/path")
    provider.shutdown()
