"""Prometheus metrics: what vLLM has too, by its names, and what only this engine has.

All have the prefix ``razor:``. With ``metrics_prefix: vllm`` those of vLLM have its prefix and its
label ``engine``, so that gateways and dashboards made for it find them.
Those of requests are kept here, from the messages that pass the frontend. Those of the ranks are
asked of them at a scrape; while a chunk keeps rank 0 busy the last ones are repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from razor_dist.frontend.observer import Observer
from razor_dist.protocol.counters import (
    Counters,
    DraftCounters,
    PrefixCounters,
    StepSeconds,
    TierCounters,
)
from razor_dist.protocol.messages import AboutRequest, EngineInfo, Progress, Token
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

_COUNTERS = {
    "prompt_tokens": "Prompt tokens read.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens that were in a cache.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From submission.", _FIRST),
    "inter_token_latency_seconds": ("Between two tokens.", _NEXT),
    "request_time_per_output_token_seconds": ("An answer's mean, but for the first.", _NEXT),
    "e2e_request_latency_seconds": ("Of an answer.", _SECONDS),
    "request_queue_time_seconds": ("Until its admission.", _SECONDS),
    "request_prefill_time_seconds": ("To its first token.", _SECONDS),
    "request_decode_time_seconds": ("From its first token.", _SECONDS),
    "request_inference_time_seconds": ("From its admission to its end.", _SECONDS),
    "request_prompt_tokens": ("Of a prompt.", _TOKENS),
    "request_generation_tokens": ("Of an answer.", _TOKENS),
    "request_params_max_tokens": ("Asked for.", _TOKENS),
    "request_params_n": ("Answers asked for.", [1, 2, 5, 10, 20]),
}


_TIERS = {
    "hits": "Prompts that began with what was cached, by where it was.",
    "hit_tokens": "Their tokens that were not read.",
    "evictions": "Entries that went when others needed the room.",
}

# Of a metric's samples, by the value of their label, or a tuple of several labels' values.
Values = Mapping[Any, float]


def full_name(prefix: str, name: str) -> str:
    """Return a metric's full name; metrics that vLLM has too get the ``prefix``."""
    return f"{prefix if name in VLLM else 'razor'}:{name}"


@dataclass
class AnswerTimes:
    """One answer on its way, with the times of what has happened to it."""

    record: RequestRecord
    params: SamplingParams
    submitted: float
    is_first: bool  # of the answers to its prompt
    prompt_tokens: int
    admitted: float | None = None
    read: int | None = None  # tokens of the prompt
    cached: int = 0  # of the prompt, as in usage
    first_token: float | None = None
    last_token: float = 0.0
    tokens: int = 0


class Metrics(Observer):
    """The server's metrics, those of requests from what an `EngineClient` tells its observer."""

    def __init__(
        self, model_name: str, prefix: str = "razor", *, caches_prefixes: bool = True
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._names = partial(full_name, prefix)
        # Labels of all that is about the model.
        self._model = {"model_name": model_name} | ({"engine": "0"} if prefix == "vllm" else {})
        self._answers: dict[str, AnswerTimes] = {}
        # By pinned prefix, the tokens read so far; None until the ranks have reported progress.
        self._prefixes: dict[str, int | None] = {}
        # Hears of each answer that ends, why, and when (monotonic seconds).
        self.on_end: Callable[[AnswerTimes, str, float], None] | None = None
        self._ranks = RankMetrics(self._names, self._model, caches_prefixes)
        self.registry.register(self._ranks)
        for name, (text, value) in {
            "num_requests_running": (
                "Answers whose prompt is being read or that are written.",
                lambda: max(0, len(self._answers) - self._waiting()),
            ),
            "num_requests_waiting": ("Answers that wait for room in the caches.", self._waiting),
        }.items():
            self._add(Gauge, name, text).labels(**self._model).set_function(value)
        self._counters = {
            name: self._add(Counter, name, text).labels(**self._model)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: self._add(Histogram, name, text, buckets=buckets).labels(**self._model)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        text = "Answers that ended, by their reason."
        self._success = self._add(Counter, "request_success", text, "finished_reason")
        self.http_requests = Counter(
            self._names("http_requests"),
            "HTTP requests.",
            ["handler", "method", "status"],
            registry=self.registry,
        )

    def _add(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        """Return a new metric about the model."""
        names = [*self._model, *labels]
        return kind(self._names(name), text, names, registry=self.registry, **more)

    def gauge(self, name: str, text: str, value: Any) -> None:
        """Add a gauge of the process, which ``value()`` returns at a scrape."""
        Gauge(self._names(name), text, registry=self.registry).set_function(value)

    def render(self, ready: bool, ranks: tuple[EngineInfo, Counters] | None) -> bytes:
        """Return the text of a scrape; with None for ``ranks`` it repeats the last counters."""
        self._ranks.ready = ready
        if ranks is not None:
            self._ranks.last, self._ranks.reported = ranks, time.monotonic()
        return generate_latest(self.registry)

    # ------------------------------------------------------------- the client's observer

    def submitted(self, ids: Sequence[str], prompt_tokens: int, params: SamplingParams) -> None:
        record, now = current_record(), time.monotonic()
        record.prompt_tokens += prompt_tokens
        self._observe("request_prompt_tokens", prompt_tokens)
        self._observe("request_params_n", params.n)
        if params.max_tokens is not None:
            self._observe("request_params_max_tokens", params.max_tokens)
        for id_ in ids:
            self._answers[id_] = AnswerTimes(record, params, now, id_ == ids[0], prompt_tokens)

    def asked_again(self, before: Sequence[str], ids: Sequence[str]) -> None:
        for old, new in zip(before, ids, strict=True):
            if answer := self._answers.pop(old, None):
                answer.read = None
                self._answers[new] = answer

    def reading(self, request_id: str) -> None:
        if answer := self._answers.get(request_id):
            self._admit(answer, time.monotonic())

    def cached(self, request_id: str, tokens: int) -> None:
        if answer := self._answers.get(request_id):
            answer.cached = tokens

    def pinned(self, request_id: str) -> None:
        self._prefixes[request_id] = None

    def received(self, message: AboutRequest) -> None:
        answer, now = self._answers.get(message.id), time.monotonic()
        if message.id in self._prefixes and isinstance(message, Progress):
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

    def _admit(self, answer: AnswerTimes, now: float) -> None:
        if answer.admitted is None:
            answer.admitted = now
            self._observe("request_queue_time_seconds", now - answer.submitted)

    def _progress(self, answer: AnswerTimes, message: Progress, now: float) -> None:
        self._admit(answer, now)
        if answer.read is None:
            answer.read = message.cached
            self._looked_up(message)
        self._counters["prompt_tokens"].inc(message.processed - answer.read)
        answer.read = message.processed

    def _looked_up(self, message: Progress) -> None:
        """Count a prompt's tokens in the caches, as the ranks do: without its pinned prefix."""
        self._counters["prefix_cache_queries"].inc(message.total - message.prefix)
        self._counters["prefix_cache_hits"].inc(message.cached - message.prefix)

    def _prefix(self, message: Progress) -> None:
        """Count what is read of a pinned prefix, which is no answer's prompt."""
        read = self._prefixes[message.id]
        if read is None:
            read = message.cached
            self._looked_up(message)
        self._counters["prompt_tokens"].inc(message.processed - read)
        self._prefixes[message.id] = message.processed

    def _token(self, answer: AnswerTimes, now: float) -> None:
        self._counters["generation_tokens"].inc()
        answer.record.completion_tokens += 1
        answer.tokens += 1
        if answer.first_token is None:
            answer.first_token = now
            self._observe("time_to_first_token_seconds", now - answer.submitted)
            if answer.admitted is not None:
                self._observe("request_prefill_time_seconds", now - answer.admitted)
        else:
            self._observe("inter_token_latency_seconds", now - answer.last_token)
        answer.last_token = now

    def _end(self, request_id: str, reason: str, now: float) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return
        if self.on_end is not None:
            self.on_end(answer, reason, now)
        self._success.labels(**self._model, finished_reason=reason).inc()
        self._observe("e2e_request_latency_seconds", now - answer.submitted)
        self._observe("request_generation_tokens", answer.tokens)
        if answer.first_token is not None:
            decoding = answer.last_token - answer.first_token
            self._observe("request_decode_time_seconds", decoding)
            if answer.tokens > 1:
                self._observe(
                    "request_time_per_output_token_seconds", decoding / (answer.tokens - 1)
                )
        if answer.admitted is not None:
            self._observe("request_inference_time_seconds", now - answer.admitted)

    def _waiting(self) -> int:
        """Count the answers to prompts of which nothing has been heard yet."""
        firsts = [a for a in self._answers.values() if a.is_first]
        return sum(a.params.n for a in firsts if a.admitted is None)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class RankMetrics(Collector):
    """The ranks' counters as last reported (`EngineCore.stats`)."""

    def __init__(
        self, names: Callable[[str], str], labels: Mapping[str, str], caches_prefixes: bool
    ) -> None:
        self._names, self._labels, self._caches_prefixes = names, labels, caches_prefixes
        self.ready = False
        self.last: tuple[EngineInfo, Counters] | None = None
        self.reported = 0.0  # monotonic seconds

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("engine_ready", "1 if the ranks are ready.", {(): float(self.ready)})
        if self.last is None:
            return
        (info, stats), age = self.last, time.monotonic() - self.reported
        text = "Since the ranks reported what follows."
        yield self._gauge("engine_stats_age_seconds", text, {(): age})
        held, reserved = stats.kv_bytes_per_rank, info.kv_reserved_bytes_per_rank
        if reserved:
            text = "Of the room for KV, 1 is all of it."
            yield self._gauge("kv_cache_usage_perc", text, {(): max(held) / reserved})
        yield self._cache_config(info)
        kv = {}
        for rank, part in enumerate(stats.retrieval_kv_bytes_per_rank):
            kv[rank, "retrieval"], kv[rank, "streaming"] = part, held[rank] - part
        text = "KV that sequences hold, by kind of head."
        yield self._gauge("kv_cache_bytes", text, kv, "rank", "heads")
        resident = dict(enumerate(stats.rss_per_rank))
        yield self._gauge("resident_memory_bytes", "Of a rank.", resident, "rank")
        cpu = {rank: us / 1e6 for rank, us in enumerate(stats.cpu_us_per_rank)}
        yield self._counter("rank_cpu_seconds", "Processor time of a rank.", cpu, "rank")
        sent = stats.bytes_sent
        yield self._counter("bytes_sent", "Between ranks, by purpose.", sent, "purpose")
        yield from self._prefixes(stats.prefix_cache)
        if isinstance(stats.spec_decode, DraftCounters):
            yield from self._drafts(stats.spec_decode)
        yield self._steps(stats.step_seconds)

    def _steps(self, reported: Mapping[str, StepSeconds]) -> HistogramMetricFamily:
        steps = HistogramMetricFamily(
            self._names("step_seconds"),
            "Of a step of all ranks: prefill (with a chunk of a prompt) or decode.",
            labels=[*self._labels, "kind"],
        )
        for kind, of in reported.items():
            buckets = zip([*map(str, of.bounds), "+Inf"], accumulate(of.counts), strict=True)
            steps.add_metric([*self._labels.values(), kind], list(buckets), of.total)
        return steps

    def _cache_config(self, info: EngineInfo) -> Metric:
        """Return what routers that score prefixes want to know; its value says nothing."""
        labels = {
            "block_size": info.page_size,
            "num_gpu_blocks": info.num_pages,
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": self._caches_prefixes,
        }
        values = {tuple(labels.values()): 1}
        return self._gauge("cache_config_info", "The paged KV caches.", values, *labels)

    def _drafts(self, reported: DraftCounters) -> Iterator[Metric]:
        texts = {
            "num_drafts": "Drafts that a step verified.",
            "num_draft_tokens": "Their tokens.",
            "num_accepted_tokens": "Those that came true.",
        }
        for name, text in texts.items():
            yield self._counter(f"spec_decode_{name}", text, {(): getattr(reported, name)})
        by_position = dict(enumerate(reported.num_accepted_tokens_per_pos))
        text = "Those that came true, by their position in a draft."
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counter(name, text, by_position, "position")

    def _prefixes(self, reported: PrefixCounters) -> Iterator[Metric]:
        """Stream what is cached of prompts, and what of it was used, by tier."""
        lower = reported.lower
        # The whole counts what came from below as well.
        device = TierCounters(
            reported.hits - sum(tier.hits for tier in lower.values()),
            reported.hit_tokens - sum(tier.hit_tokens for tier in lower.values()),
            reported.evictions,
            bytes=sum(reported.bytes_per_rank),
        )
        tiers = lower | {"device": device}
        for name, text in _TIERS.items():
            values = {tier: getattr(counts, name) for tier, counts in tiers.items()}
            yield self._counter(f"prefix_cache_tier_{name}", text, values, "tier")
        held = {tier: counts.bytes for tier, counts in tiers.items()}
        yield self._gauge("prefix_cache_bytes", "Keys and values that are cached.", held, "tier")

    def _gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._family(GaugeMetricFamily, name, text, values, labels)

    def _counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._family(CounterMetricFamily, name, text, values, labels)

    def _family(
        self, kind: Any, name: str, text: str, values: Values, labels: Sequence[str]
    ) -> Metric:
        """Return a metric about the model."""
        family = kind(self._names(name), text, labels=[*self._labels, *labels])
        for which, value in values.items():
            own = which if isinstance(which, tuple) else (which,)
            family.add_metric([*self._labels.values(), *map(str, own)], value)
        return cast(Metric, family)
