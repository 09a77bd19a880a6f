"""Prometheus metrics: what vLLM has too, by its names, and what only this engine has.

All have the prefix ``razor:``. With ``metrics_prefix: vllm`` those of vLLM have its prefix and its
label ``engine``, so that gateways and dashboards made for it find them.
Those of requests are kept here, from the messages that pass the frontend. Those of the ranks are
asked of them at a scrape; while a chunk keeps rank 0 busy the last ones are repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from razor_dist.frontend.observer import Observer
from razor_dist.protocol.messages import AboutRequest, Failed, Fields, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.request_log import RequestRecord, current_record

# Metrics of vLLM's, as docs.vllm.ai/en/stable/usage/metrics has them, without their suffixes.
_VLLM = """
    cache_config_info e2e_request_latency_seconds generation_tokens inter_token_latency_seconds
    kv_cache_usage_perc num_requests_running num_requests_waiting prefix_cache_hits
    prefix_cache_queries prompt_tokens request_decode_time_seconds request_generation_tokens
    request_inference_time_seconds request_params_max_tokens request_params_n
    request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds request_success
    request_time_per_output_token_seconds spec_decode_num_accepted_tokens
    spec_decode_num_accepted_tokens_per_pos spec_decode_num_draft_tokens spec_decode_num_drafts
    time_to_first_token_seconds
"""
VLLM = frozenset(_VLLM.split())

# vLLM's buckets, so that its dashboards need no others.
_SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920]
_FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
_FIRST += [20, 40, 80, 160, 640, 2560]
_NEXT = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
_NEXT += [20, 40, 80]
_TOKENS = [float(digit * 10**power) for power in range(7) for digit in (1, 2, 5)]


class Names:
    """Full names of metrics, and the labels of all that are about the model."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self.labels = {"model_name": model_name}
        if prefix == "vllm":
            self.labels["engine"] = "0"

    def __call__(self, name: str) -> str:
        return f"{self._prefix if name in VLLM else 'razor'}:{name}"


@dataclass
class Answer:
    """One answer on its way, with the times of what has happened to it."""

    record: RequestRecord
    params: SamplingParams
    submitted: float
    is_first: bool  # of those to its prompt
    prompt_tokens: int
    admitted: float | None = None
    read: int | None = None  # tokens of the prompt
    cached: int = 0  # of these
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0


class Metrics(Observer):
    """The server's metrics, those of requests from what an `EngineClient` tells its observer."""

    def __init__(self, model_name: str, prefix: str = "razor") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._names = Names(prefix, model_name)
        self._model = self._names.labels
        self._answers: dict[str, Answer] = {}
        # Prefixes that are pinned, and how many of their tokens are read; None until the first is.
        self._prefixes: dict[str, int | None] = {}
        # Hears of each answer that ends, why, and when (monotonic seconds).
        self.on_end: Callable[[Answer, str, float], None] | None = None
        self._ranks = RankMetrics(self._names)
        self.registry.register(self._ranks)
        gauge, counter = self._gauge, self._counter
        gauge("num_requests_running", "Answers whose prompt is being read or that are written.", 0)
        gauge("num_requests_waiting", "Answers that wait for room in the caches.", 1)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens read.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens that were in a cache.")
        self._success = counter(
            "request_success", "Answers that ended, by their reason.", "finished_reason"
        )
        histogram = self._histogram
        self._first = histogram("time_to_first_token_seconds", "From submission.", _FIRST)
        self._next = histogram("inter_token_latency_seconds", "Between two tokens.", _NEXT)
        self._mean_next = histogram(
            "request_time_per_output_token_seconds", "An answer's mean, but for the first.", _NEXT
        )
        self._whole = histogram("e2e_request_latency_seconds", "Of an answer.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Until its admission.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "To its first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "From its first token.", _SECONDS)
        self._inference = histogram(
            "request_inference_time_seconds", "From its admission to its end.", _SECONDS
        )
        self._prompt_length = histogram("request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._length = histogram("request_generation_tokens", "Of an answer.", _TOKENS)
        self._most = histogram("request_params_max_tokens", "Asked for.", _TOKENS)
        self._n = histogram("request_params_n", "Answers asked for.", [1, 2, 5, 10, 20])
        self.http_requests = Counter(
            self._names("http_requests"),
            "HTTP requests.",
            ["handler", "method", "status"],
            registry=self.registry,
        )

    def gauge(self, name: str, text: str, value: Any) -> None:
        """Add a gauge of the process, which ``value()`` returns at a scrape."""
        Gauge(self._names(name), text, registry=self.registry).set_function(value)

    def render(self, ready: bool, ranks: Fields | None) -> bytes:
        """Return the text of a scrape; ``ranks`` is the engine's description with its counters."""
        self._ranks.ready = ready
        if ranks is not None:
            self._ranks.stats, self._ranks.reported = ranks, time.monotonic()
        return generate_latest(self.registry)

    # ------------------------------------------------------------- the client's observer

    def submitted(self, ids: Sequence[str], prompt_tokens: int, params: SamplingParams) -> None:
        record, now = current_record(), time.monotonic()
        record.prompt_tokens += prompt_tokens
        self._prompt_length.observe(prompt_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._most.observe(params.max_tokens)
        for id_ in ids:
            self._answers[id_] = Answer(record, params, now, id_ == ids[0], prompt_tokens)

    def reading(self, request_id: str) -> None:
        if answer := self._answers.get(request_id):
            self._admit(answer, time.monotonic())

    def pinned(self, request_id: str) -> None:
        self._prefixes[request_id] = None

    def received(self, message: AboutRequest) -> None:
        answer, now = self._answers.get(message.id), time.monotonic()
        if isinstance(message, Failed):
            self.ended(message.id, "error")
        elif message.id in self._prefixes and isinstance(message, Progress):
            self._prefix(message)
        elif answer is not None and isinstance(message, Progress):
            self._progress(answer, message, now)
        elif answer is not None and isinstance(message, Token):
            self._token(answer, now)
            if message.finish is not None:
                self._end(message.id, message.finish, now)

    def ended(self, request_id: str, reason: str) -> None:
        self._prefixes.pop(request_id, None)
        self._end(request_id, reason, time.monotonic())

    def _admit(self, answer: Answer, now: float) -> None:
        if answer.admitted is None:
            answer.admitted = now
            self._queue.observe(now - answer.submitted)

    def _progress(self, answer: Answer, message: Progress, now: float) -> None:
        self._admit(answer, now)
        if answer.read is None:
            answer.read = answer.cached = message.cached
            self._cache_queries.inc(message.total)
            self._cache_hits.inc(message.cached)
        self._prompt_tokens.inc(message.processed - answer.read)
        answer.read = message.processed

    def _prefix(self, message: Progress) -> None:
        """Count what is read of a pinned prefix, which is no answer's prompt."""
        read = self._prefixes[message.id]
        if read is None:
            read = message.cached
            self._cache_queries.inc(message.total - message.prefix)
            self._cache_hits.inc(message.cached - message.prefix)
        self._prompt_tokens.inc(message.processed - read)
        self._prefixes[message.id] = message.processed

    def _token(self, answer: Answer, now: float) -> None:
        self._generation_tokens.inc()
        answer.record.completion_tokens += 1
        answer.tokens += 1
        if answer.first_token is None:
            answer.first_token = now
            self._first.observe(now - answer.submitted)
            if answer.admitted is not None:
                self._prefill.observe(now - answer.admitted)
        else:
            self._next.observe(now - answer.last_token)
        answer.last_token = now

    def _end(self, request_id: str, reason: str, now: float) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        if self.on_end is not None:
            self.on_end(answer, reason, now)
        self._success.labels(**self._model, finished_reason=reason).inc()
        self._whole.observe(now - answer.submitted)
        self._length.observe(answer.tokens)
        if answer.first_token is not None:
            decoding = answer.last_token - answer.first_token
            self._decode.observe(decoding)
            if answer.tokens > 1:
                self._mean_next.observe(decoding / (answer.tokens - 1))
        if answer.admitted is not None:
            self._inference.observe(now - answer.admitted)

    def _waiting(self) -> int:
        """Count the answers to prompts of which nothing has been heard yet."""
        firsts = [a for a in self._answers.values() if a.is_first]
        return sum(a.params.n for a in firsts if a.admitted is None)

    # ------------------------------------------------------------------- how they are made

    def _gauge(self, name: str, text: str, which: int) -> None:
        found = Gauge(self._names(name), text, list(self._model), registry=self.registry)

        def value() -> float:
            waiting = self._waiting()
            return (max(0, len(self._answers) - waiting), waiting)[which]

        found.labels(**self._model).set_function(value)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        names = [*self._model, *labels]
        found = Counter(self._names(name), text, names, registry=self.registry)
        return found if labels else found.labels(**self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        found = Histogram(
            self._names(name), text, list(self._model), buckets=buckets, registry=self.registry
        )
        return found.labels(**self._model)


class RankMetrics(Collector):
    """The ranks' counters as last reported (`EngineCore.stats`)."""

    def __init__(self, names: Names) -> None:
        self._names, self._labels = names, names.labels
        self.ready = False
        self.stats: Fields = {}
        self.reported: float | None = None

    def collect(self) -> Iterator[Any]:
        yield self._one("engine_ready", "1 if the ranks are ready.", float(self.ready))
        if self.reported is None:
            return
        stats, age = self.stats, time.monotonic() - self.reported
        yield self._one("engine_stats_age_seconds", "Since the ranks reported what follows.", age)
        held, reserved = stats["kv_bytes_per_rank"], stats.get("kv_reserved_bytes_per_rank")
        if reserved:
            used = max(held) / reserved
            yield self._one("kv_cache_usage_perc", "Of the room for KV, 1 is all of it.", used)
        yield self._cache_config(stats)
        retrieval = stats.get("retrieval_kv_bytes_per_rank", [])
        kv = self._family(
            "kv_cache_bytes", "KV that sequences hold, by kind of head.", "rank heads"
        )
        for rank, (whole, part) in enumerate(zip(held, retrieval, strict=False)):
            kv.add_metric([*self._labels.values(), str(rank), "retrieval"], part)
            kv.add_metric([*self._labels.values(), str(rank), "streaming"], whole - part)
        yield kv
        yield from self._per_rank("resident_memory_bytes", "Of a rank.", stats.get("rss_per_rank"))
        yield self._counters(
            "rank_cpu_seconds",
            "Processor time of a rank.",
            "rank",
            {rank: us / 1e6 for rank, us in enumerate(stats.get("cpu_us_per_rank", []))},
        )
        sent = stats.get("bytes_sent", {})
        yield self._counters("bytes_sent", "Between ranks, by purpose.", "purpose", sent)
        yield from self._prefixes(stats.get("prefix_cache", {}))
        yield from self._drafts(stats.get("spec_decode", {}))
        steps = HistogramMetricFamily(
            self._names("step_seconds"),
            "Of a step of all ranks: prefill (with a chunk of a prompt) or decode.",
            labels=[*self._labels, "kind"],
        )
        for kind, (bounds, counts, total) in stats.get("step_seconds", {}).items():
            running, buckets = 0, []
            for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
                running += count
                buckets.append((bound, running))
            steps.add_metric([*self._labels.values(), kind], buckets, total)
        yield steps

    def _cache_config(self, stats: Fields) -> GaugeMetricFamily:
        """Return what routers that score prefixes want to know; its value says nothing."""
        labels = {
            "block_size": stats["page_size"],
            "num_gpu_blocks": stats["num_pages"],
            "cache_dtype": stats["kv_dtype"],
            "enable_prefix_caching": bool(stats.get("prefix_cache")),
        }
        family = self._family("cache_config_info", "The paged KV caches.", " ".join(labels))
        family.add_metric([*self._labels.values(), *map(str, labels.values())], 1)
        return family

    def _drafts(self, reported: Fields) -> Iterator[Any]:
        """Stream what was drafted, and what of it came true; nothing for an engine without."""
        texts = {
            "spec_decode_num_drafts": "Drafts that a step verified.",
            "spec_decode_num_draft_tokens": "Their tokens.",
            "spec_decode_num_accepted_tokens": "Those that came true.",
        }
        for name, text in texts.items() if reported else ():
            family = CounterMetricFamily(self._names(name), text, labels=list(self._labels))
            family.add_metric(
                list(self._labels.values()), reported[name.removeprefix("spec_decode_")]
            )
            yield family
        by_position = dict(enumerate(reported.get("num_accepted_tokens_per_pos", ())))
        text = "Those that came true, by their position in a draft."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(name, text, "position", by_position)

    def _prefixes(self, reported: Fields) -> Iterator[Any]:
        """Stream what is cached of prompts, and what of it was used, by tier."""
        lower: dict[str, Any] = {
            tier: reported[tier] for tier in ("host", "disk") if tier in reported
        }
        device = {
            name: reported[name] for name in ("hits", "hit_tokens", "evictions") if name in reported
        }
        for name in ("hits", "hit_tokens"):  # what came from below was counted above as well
            if name in device:
                device[name] -= sum(tier[name] for tier in lower.values())
        tiers: dict[str, Any] = {"device": device, **lower} if device else lower
        names = {
            "hits": "Prompts that began with what was cached, by where it was.",
            "hit_tokens": "Their tokens that were not read.",
            "evictions": "Entries that went when others needed the room.",
        }
        for name, text in names.items():
            values = {tier: of.get(name, 0) for tier, of in tiers.items()}
            yield self._counters(f"prefix_cache_tier_{name}", text, "tier", values)
        sizes = self._family("prefix_cache_bytes", "Keys and values that are cached.", "tier")
        held = {tier: of["bytes"] for tier, of in lower.items()}
        if device:
            held["device"] = sum(reported.get("bytes_per_rank", []))
        for tier, nbytes in held.items():
            sizes.add_metric([*self._labels.values(), tier], nbytes)
        yield sizes

    def _family(self, name: str, text: str, labels: str = "") -> GaugeMetricFamily:
        names = [*self._labels, *labels.split()]
        return GaugeMetricFamily(self._names(name), text, labels=names)

    def _one(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = self._family(name, text)
        family.add_metric(list(self._labels.values()), value)
        return family

    def _per_rank(self, name: str, text: str, values: Sequence[float] | None) -> Iterator[Any]:
        family = self._family(name, text, "rank")
        for rank, value in enumerate(values or []):
            family.add_metric([*self._labels.values(), str(rank)], value)
        yield family

    def _counters(self, name: str, text: str, label: str, values: dict[Any, float]) -> Any:
        names = [*self._labels, label]
        family = CounterMetricFamily(self._names(name), text, labels=names)
        for key, value in values.items():
            family.add_metric([*self._labels.values(), str(key)], value)
        return family
