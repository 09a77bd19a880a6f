"""Metrics count what happened, logs tell it once, and the dashboard asks for what there is."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from razor_dist.config.logs import JsonFormatter, TextFormatter
from razor_dist.config.schema import ServerConfig
from razor_dist.frontend.client import EngineClient
from razor_dist.frontend.stream import RequestStream
from razor_dist.protocol.counters import Counters
from razor_dist.protocol.messages import EngineInfo, Progress, Token
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.server.app import build_app
from razor_dist.server.metrics import VLLM, Metrics
from razor_dist.server.request_log import RequestRecord
from razor_dist.server.service import Service
from tests import fake_engine
from tests.server.process import ROOT, ServerProcess, fake_server, hang_up, wait_until

MODEL = {"model_name": "smollm2"}
LOG = "razor_dist.server.request_log"
SECRET = "sk-very-secret-0123456789"
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with fake_server("--log-format", "json", "--log-level", "debug", "--api-key", SECRET) as server:
        server.url()
        yield server


def scrape(server: ServerProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels."""
    answer = httpx.get(f"{server.url()}/metrics", headers=key())
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def key() -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRET}"}


def ask(server: ServerProcess, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, **fields}
    return httpx.post(f"{server.url()}/v1/completions", json=body, headers=key(), timeout=20)


def stream(server: ServerProcess, prompt: list[int]) -> Any:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 400, "stream": True}
    url = f"{server.url()}/v1/completions"
    return httpx.stream("POST", url, json=body, headers=key(), timeout=20)


def test_metrics_count_what_happened(server: ServerProcess) -> None:
    before = scrape(server)

    def grown(name: str, **labels: str) -> float:
        at = (f"razor:{name}", frozenset({**MODEL, **labels}.items()))
        return after[at] - before.get(at, 0.0)

    # 5 tokens backwards, then the end; 3 tokens, of which 2; two answers of 2; one is refused.
    assert ask(server, [5, 6, 7, 8, 9]).json()["usage"]["completion_tokens"] == 6
    assert ask(server, [5, 6, 7], max_tokens=2).status_code == 200
    assert ask(server, [[5, 6], [7, 8]], max_tokens=2).status_code == 200
    assert ask(server, [fake_engine.REFUSE, 5]).status_code == 400
    hang_up(server.url(), {"model": "smollm2", "prompt": [fake_engine.HANG]}, key())

    def statuses() -> dict[str, float]:
        """Return the number of this test's requests by HTTP status."""
        asked = {"handler": "/v1/completions", "method": "POST"}
        return {
            dict(labels)["status"]: value - before.get((name, labels), 0.0)
            for (name, labels), value in scrape(server).items()
            if name == "razor:http_requests_total" and asked.items() <= dict(labels).items()
        }

    assert wait_until(lambda: statuses() == {"200": 3, "400": 1, "499": 1}, 20), statuses()
    after = scrape(server)
    assert grown("prompt_tokens_total") == 5 + 3 + 4
    assert grown("generation_tokens_total") == 6 + 2 + 4
    assert grown("prefix_cache_queries_total") == 12 and grown("prefix_cache_hits_total") == 0
    reasons = {r: grown("request_success_total", finished_reason=r) for r in ("stop", "length")}
    assert reasons == {"stop": 1, "length": 3}
    assert grown("request_success_total", finished_reason="error") == 1
    assert grown("request_success_total", finished_reason="abort") == 1
    assert grown("time_to_first_token_seconds_count") == 4
    assert grown("inter_token_latency_seconds_count") == 5 + 1 + 2
    assert grown("e2e_request_latency_seconds_count") == 6
    assert grown("request_generation_tokens_bucket", le="2.0") == 5
    assert grown("request_prompt_tokens_sum") == 5 + 3 + 4 + 2 + 1
    assert grown("num_requests_running") == 0


def test_what_is_read_of_contexts_counts(tmp_path: Path) -> None:
    """And the prompt of an answer has all tokens, those of its context too."""
    metrics, client = Metrics("smollm2"), EngineClient(tmp_path / "engine")
    client.observer, client.rank0, client.require_ready = metrics, mock.Mock(), mock.Mock()  # type: ignore[method-assign]
    [before] = client.submit("before", [5] * 20, SamplingParams(), pin=True)
    [pin] = client.submit("pin", [5] * 70, SamplingParams(), pin=True, prefix=before)
    answers = client.submit("answer", [5] * 3, SamplingParams(n=2), prefix=pin)
    assert [answer.prompt_tokens for answer in answers] == [93, 93]
    for processed in (40, 70, 90):
        metrics.received(Progress("pin", processed, 90, 20, 40, 0.0))
    pin.close()
    metrics.received(Progress("pin", 90, 90, 20, 40, 0.0))  # read late
    metrics.submitted(["answer", "answer/1"], 93, SamplingParams(n=2))
    metrics.received(Progress("answer", 90, 93, 90, 90, 0.0))
    metrics.received(Progress("answer", 93, 93, 90, 90, 0.0))
    families = text_string_to_metric_families(metrics.render(True, None).decode())
    counts = {sample.name: sample.value for family in families for sample in family.samples}
    names = ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
    assert [counts[f"razor:{name}_total"] for name in names] == [53, 73, 20]


def test_a_stop_string_is_no_abort(server: ServerProcess) -> None:
    def ended() -> dict[str, float]:
        found, name = scrape(server), "razor:request_success_total"
        reasons = ("stop", "abort")
        at = {r: (name, frozenset({**MODEL, "finished_reason": r}.items())) for r in reasons}
        return {reason: found.get(where, 0.0) for reason, where in at.items()}

    before = ended()
    endless = [fake_engine.ENDLESS, 5000]
    text = ask(server, endless, max_tokens=2).json()["choices"][0]["text"]
    [choice] = ask(server, endless, stop=text).json()["choices"]
    assert text and (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert ended() == {"stop": before["stop"] + 1, "abort": before["abort"]}


@pytest.mark.parametrize("finish", [None, "length"])
@pytest.mark.anyio
async def test_what_a_draft_brings_behind_a_stop_string_is_not_counted(finish: str | None) -> None:
    metrics, record = Metrics("m"), RequestRecord("a")
    with mock.patch("razor_dist.server.metrics.current_record", return_value=record):
        metrics.submitted(["a"], 3, SamplingParams())
    stream = RequestStream("a", mock.Mock(), metrics)
    for n in range(4):  # of one step
        ends = finish if n == 3 else None
        stream.put(Token("a", n, finish=ends), last=ends is not None)
    assert [await anext(stream), await anext(stream)] == [Token("a", 0), Token("a", 1)]
    stream.close("stop")
    lines = metrics.render(True, None).decode().splitlines()
    assert 'razor:generation_tokens_total{model_name="m"} 2.0' in lines
    assert 'razor:request_success_total{finished_reason="stop",model_name="m"} 1.0' in lines
    assert 'razor:request_generation_tokens_sum{model_name="m"} 2.0' in lines
    assert record.completion_tokens == 2


def test_the_ranks_counters_are_metrics(server: ServerProcess) -> None:
    with stream(server, [fake_engine.HANG]):
        assert wait_until(
            lambda: scrape(server)[("razor:kv_cache_usage_perc", frozenset(MODEL.items()))] > 0, 5
        )
        found = scrape(server)

    def value(name: str, **labels: str) -> float:
        return found[(f"razor:{name}", frozenset({**MODEL, **labels}.items()))]

    assert value("engine_ready") == 1
    assert value("bytes_sent_total", purpose="ring") == 10
    assert value("kv_cache_bytes", rank="1", heads="retrieval") == 64
    assert value("kv_cache_bytes", rank="1", heads="streaming") == 36
    assert value("kv_cache_usage_perc") == 0.1
    assert value("resident_memory_bytes", rank="0") == 4096
    assert value("rank_cpu_seconds_total", rank="1") == 0.0015
    buckets = [value("step_seconds_bucket", kind="prefill", le=le) for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 3]
    assert value("step_seconds_sum", kind="prefill") == 0.75
    assert 0 <= value("engine_stats_age_seconds") < 5


@pytest.mark.parametrize("caches", [False, True])
def test_gateways_see_if_prefixes_are_cached(caches: bool) -> None:
    metrics = Metrics("m", caches_prefixes=caches)
    text = metrics.render(True, (EngineInfo(512, 100), Counters(kv_bytes_per_rank=[0]))).decode()
    assert f'enable_prefix_caching="{caches}"' in text


# What llm-d's inference scheduler and the Gateway API inference extension scrape
# (docs/proposals/003-model-server-protocol of the latter), with the labels that they read.
GATEWAY = {
    "vllm:num_requests_waiting": {},
    "vllm:num_requests_running": {},
    "vllm:kv_cache_usage_perc": {},
    "vllm:cache_config_info": {"block_size": "64", "num_gpu_blocks": "50"},
}


@pytest.mark.long
def test_gateways_find_vllms_names() -> None:
    with fake_server("--metrics-prefix", "vllm") as server:
        body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 2}
        assert httpx.post(f"{server.url()}/v1/completions", json=body).status_code == 200
        text = httpx.get(f"{server.url()}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, labels in GATEWAY.items():
        [sample] = families[name].samples
        assert families[name].type == "gauge"
        assert labels.items() <= sample.labels.items()
        assert {"model_name": "smollm2", "engine": "0"}.items() <= sample.labels.items()
    info = families["vllm:cache_config_info"].samples[0]
    assert info.value == 1 and info.labels["cache_dtype"] == "int8"
    assert info.labels["enable_prefix_caching"] == "True"
    named = {name for name in families if not name.endswith("_created")}
    theirs = {name.removeprefix("vllm:") for name in named if name.startswith("vllm:")}
    assert theirs <= VLLM and all("spec_decode" in name for name in VLLM - theirs)
    assert families["vllm:prompt_tokens"].samples[0].value == 3
    # What vLLM has not stays ours, and nothing is told twice.
    ours = {name.removeprefix("razor:") for name in families if name.startswith("razor:")}
    assert {"kv_cache_bytes", "http_requests", "engine_ready"} <= ours and not ours & VLLM


def test_waiting_and_running_are_told_apart(server: ServerProcess) -> None:
    def now() -> tuple[float, float]:
        found = scrape(server)
        names = ("razor:num_requests_waiting", "razor:num_requests_running")
        waiting, running = (found[(name, frozenset(MODEL.items()))] for name in names)
        return waiting, running

    with stream(server, [fake_engine.HANG]), stream(server, [fake_engine.ENDLESS, 20]) as running:
        lines = running.iter_lines()  # whose end would be the stream's
        next(lines)
        assert wait_until(lambda: now() == (1, 1), 5), now()
    assert wait_until(lambda: now() == (0, 0), 5), now()


def test_a_line_of_json_tells_of_each_request(server: ServerProcess) -> None:
    prompt = "A sentence that nobody else should read"
    path = "/v1/no-such-path-of-mine"
    assert ask(server, prompt, user="someone").status_code == 200
    mine = httpx.get(server.url() + path, headers=key() | {"X-Request-Id": "abc-1.2_3:4"})
    assert (mine.status_code, mine.headers["x-request-id"]) == (404, "abc-1.2_3:4")
    forged = httpx.get(server.url() + path, headers=key() | {"X-Request-Id": 'a" status=200'})
    assert re.fullmatch("[0-9a-f]{32}", forged.headers["x-request-id"])
    assert httpx.get(f"{server.url()}/v1/models?api_key={SECRET}").status_code == 401

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        return [line for line in found if line["logger"] == LOG]

    assert wait_until(lambda: lines()[-1]["status"] == 401, 5)
    asked, unknown, _, refused = lines()[-4:]
    assert re.fullmatch("[0-9a-f]{32}", asked["request_id"])
    assert (unknown["request_id"], lines()[-2]["request_id"]) == (
        "abc-1.2_3:4",
        forged.headers["x-request-id"],
    )
    assert asked["route"] == "/v1/completions"
    assert (asked["status"], asked["complete"]) == (200, True)
    assert (asked["prompt_tokens"], asked["completion_tokens"]) == (7, 8)
    assert re.fullmatch("[0-9a-f]{16}", asked["key"])
    assert (unknown["route"], unknown["status"]) == ("unknown", 404)
    assert unknown["key"] == asked["key"]
    assert refused["key"] is None
    # Also at the level debug, nothing of a client's is in the log.
    for secret in (SECRET, prompt, path, "someone", str(ROOT)):
        assert secret not in server.log


def test_the_dashboard_asks_for_metrics_that_exist(server: ServerProcess) -> None:
    ask(server, [5, 6, 7])
    names = {name for name, _ in scrape(server)}
    labels = {label for _, found in scrape(server) for label, _ in found}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        asked = re.findall(r"razor:\w+", query)
        assert asked and set(asked) <= names, query
        # A comparison keeps parentheses and braces in pairs, too.
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {name.strip() for name in group.split(",")} <= labels, query
    # And it shows every metric of the engine's.
    shown = " ".join(queries)
    for name in names:
        plain = re.sub(r"_(bucket|count|sum|created)$", "", name)
        if name.startswith("razor:") and not name.endswith("_created"):
            assert plain in shown, plain


@pytest.mark.anyio
async def test_the_ranks_are_asked_once_for_all_who_ask(tmp_path: Path) -> None:
    service = Service(ServerConfig(), EngineClient(tmp_path / "engine"))
    asked = 0

    async def stats(timeout: float) -> Counters:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return Counters(running=asked)

    service.client.stats = stats  # type: ignore[method-assign]
    for round_ in (1, 2):
        found = await asyncio.gather(*(service.counters() for _ in range(20)))
        assert [answer.running for answer in found] == [round_] * 20
    assert asked == 2


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_a_log_does_not_repeat_what_an_exception_quotes(formatter: type[TextFormatter]) -> None:
    try:
        int("a prompt")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    discreet, whole = (
        formatter(discreet=True).format(record),
        formatter().format(logging.makeLogRecord({**vars(record), "exc_text": None})),
    )
    assert "ValueError" in discreet and "test_metrics.py" in discreet
    assert "a prompt'" not in discreet and "a prompt'" in whole


def test_a_failure_of_ours_is_told_without_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(ServerConfig(), EngineClient(tmp_path / "engine"))

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/v1/models")

    caplog.set_level("INFO", LOG)
    with mock.patch.object(service, "model_card", side_effect=ValueError("a secret")):
        answer = asyncio.run(main())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a secret" not in answer.text
    failure, line = [record for record in caplog.records if record.name == LOG]
    assert answer.headers["x-request-id"] in failure.getMessage()
    assert "a secret" not in TextFormatter(discreet=True).format(failure)
    assert line.fields["status"] == 500  # type: ignore[attr-defined]
