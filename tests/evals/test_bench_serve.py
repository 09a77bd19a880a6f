"""Load on a server: figures from streams whose times are made up, and runs against servers."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from razor_dist import cli
from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench.serve import LoadRequest, arrivals, make_requests, run, summary
from razor_dist.evals.bench.serve_settings import ServeBenchSettings
from tests.server.process import fake_server

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def text_event(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}], usage=None)


def usage_event(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


def answered(name: str, sent: float, *lines: tuple[float, bytes]) -> LoadRequest:
    """Return a request whose stream's lines came so many seconds after it was sent."""
    request = LoadRequest(name, sent, {}, sent=sent)
    for after, line in lines:
        request.take(line, sent + after)
    return request


def test_an_answers_times_are_those_of_its_text() -> None:
    def chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
        return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    request = answered(
        "short-0",
        10.0,
        (0.25, b""),
        (0.25, b": heartbeat"),
        (0.5, chunk({"role": "assistant", "content": ""})),
        (1.0, chunk({"content": "a"})),
        (1.0, b""),
        (1.5, chunk({"reasoning_content": "b"})),
        (3.5, chunk({"content": "c\u2028"})),
        (4.0, chunk({}, "stop")),
        (9.0, usage_event(7, 5)),  # says nothing of when the last token came
        (9.0, DONE),
    )
    assert request.text == "abc\u2028" and request.finished and request.failure is None
    assert (request.prompt_tokens, request.output_tokens) == (7, 5)
    assert request.seconds["ttft"] == [1.0]
    assert request.seconds["itl"] == [0.5, 2.0]
    assert request.seconds["tpot"] == [0.75]  # three seconds for the four tokens after the first
    assert request.seconds["e2el"] == [4.0]


def test_an_answer_without_text_has_its_end_for_a_first_token() -> None:
    request = answered("short-0", 0.0, (2.0, text_event("", "stop")), (2.0, usage_event(3, 1)))
    assert request.seconds["ttft"] == request.seconds["e2el"] == [2.0]
    assert request.seconds["itl"] == request.seconds["tpot"] == []


def test_chunks_are_tokens_where_a_server_tells_none() -> None:
    lines = [(0.5 + n, text_event("x", "length" if n == 2 else None)) for n in range(3)]
    request = answered("short-0", 0.0, *lines)
    assert (request.prompt_tokens, request.output_tokens) == (0, 3)
    assert request.seconds["tpot"] == [1.0]


def test_figures_are_those_of_whole_answers() -> None:
    requests = [
        answered(
            f"short-{n}",
            float(n),
            (1.0 + n, text_event("x")),
            (2.0 + n, text_event("y", "length")),
            (2.0 + n, usage_event(10, 2)),
        )
        for n in range(4)  # TTFT 1, 2, 3, 4 s; the last token at 1 + 2 * 4 = 8 s
    ]
    failed = LoadRequest("short-4", 0.0, {}, failure="429 queue_full")
    figures = summary([failed, *requests], ServeBenchSettings(metric_percentiles="50,95,99.5"))
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 8)
    assert figures["duration"] == 8.0
    assert figures["request_throughput"] == 0.5
    assert figures["output_throughput"] == 1.0
    assert figures["total_token_throughput"] == 6.0
    ttft = {name: figures[f"{name}_ttft_ms"] for name in ("mean", "median", "p50", "max")}
    assert ttft == {"mean": 2500, "median": 2500, "p50": 2500, "max": 4000}
    assert figures["p95_ttft_ms"] == pytest.approx(3850)  # of 1..4 at place 0.95 * 3
    assert figures["p99.5_ttft_ms"] == pytest.approx(3985)
    assert figures["std_ttft_ms"] == pytest.approx(1000 * 1.25**0.5)
    assert figures["mean_tpot_ms"] == figures["p95_itl_ms"] == 1000
    assert figures["mean_e2el_ms"] == 3500
    assert summary([failed], ServeBenchSettings()) == {"completed": 0, "failed": 1}


def test_arrivals_follow_from_seed_rate_and_burstiness() -> None:
    assert arrivals(ServeBenchSettings(), 3) == [0.0, 0.0, 0.0]
    assert arrivals(ServeBenchSettings(arrival_window=5.0), 0) == []
    settings = ServeBenchSettings(request_rate=2.0, seed=3)
    found = arrivals(settings, 1000)
    assert found == arrivals(settings, 1000) == sorted(found)
    assert found != arrivals(ServeBenchSettings(request_rate=2.0, seed=4), 1000)
    assert (
        found[-1] == pytest.approx(500) == arrivals(ServeBenchSettings(arrival_window=500.0), 9)[-1]
    )

    def spread(burstiness: float) -> float:
        """Standard deviation of the gaps over their mean, which is 1 for a Poisson process."""
        moments = arrivals(ServeBenchSettings(request_rate=2.0, burstiness=burstiness), 1000)
        gaps = [after - before for before, after in itertools.pairwise(moments)]
        mean = sum(gaps) / len(gaps)
        return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)

    assert spread(1.0) == pytest.approx(1.0, abs=0.1)
    assert spread(0.25) == pytest.approx(2.0, abs=0.3)  # a gamma distribution's 1 / sqrt(shape)
    assert spread(float("inf")) == pytest.approx(0.0, abs=1e-9)


def test_prompts_are_the_same_alone_and_in_company() -> None:
    alone = ServeBenchSettings(num_prompts=2, random_input_len=5, endpoint=CHAT, ignore_eos=True)
    company = ServeBenchSettings(
        num_prompts=3, random_input_len=5, endpoint=CHAT, long_prompts=1, long_output_len=7
    )
    short, *_ = make_requests(alone, "m")
    long, *shorts = make_requests(company, "m")
    assert short.body["messages"] == shorts[0].body["messages"] != shorts[1].body["messages"]
    assert len(short.body["messages"][0]["content"].split()) == 5
    assert len(long.body["messages"][0]["content"].split()) == 7000
    assert (long.body["max_tokens"], short.body["max_tokens"]) == (7, 32)
    assert short.body["ignore_eos"] and "ignore_eos" not in long.body
    assert short.body["temperature"] == 0 and short.body["stream_options"]["include_usage"]
    assert [r.name for r in (long, *shorts)] == ["long-0", "short-0", "short-1", "short-2"]


def test_requests_are_read_from_a_dataset(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "One", "max_tokens": 3}, {"messages": messages, "priority": 1}]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = make_requests(ServeBenchSettings(dataset=file, endpoint=CHAT), "m")
    assert first.body["messages"] == [{"role": "user", "content": "One"}]
    assert first.body["max_tokens"] == 3 and "prompt" not in first.body
    assert second.body["messages"] == messages and second.body["max_tokens"] == 32
    assert second.body["priority"] == 1
    [only] = make_requests(ServeBenchSettings(dataset=file, num_prompts=1), "m")
    assert only.body["prompt"] == "One"
    with pytest.raises(ConfigError, match="has 2 requests; num_prompts asks for more"):
        make_requests(ServeBenchSettings(dataset=file, num_prompts=3), "m")
    assert make_requests(ServeBenchSettings(dataset=file, num_prompts=0, long_prompts=1), "m")
    for wrong in ("[]", '"text"', "{", '{"text": "One"}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"line 1 of .* must be an object with prompt or"):
            make_requests(ServeBenchSettings(dataset=file), "m")


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT])
def test_our_server_is_measured(
    endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / kind for kind in ("json", "markdown", "plot", "answers")}
    flags = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    load = "--num-prompts 4 --random-input-len 6 --random-output-len 5 --long-prompts 1"
    more = "--long-input-len 200 --request-rate 50 --max-concurrency 3"
    with fake_server() as server:
        command = f"bench serve --base-url {server.url()}/v1/ --endpoint {endpoint} {load} {more}"
        assert cli.main([*command.split(), *flags]) == 0
    page = files["markdown"].read_text()
    assert page in capsys.readouterr().out
    assert (
        "short |" in page and "long |" in page and "| p95_ttft_ms" in page and "failed:" not in page
    )
    stored = json.loads(files["json"].read_text())
    assert stored["model_id"] == "smollm2" and stored["settings"]["burstiness"] == 1.0
    short, long = stored["classes"]["short"], stored["classes"]["long"]
    assert (short["completed"], short["failed"], long["completed"], long["failed"]) == (4, 0, 1, 0)
    assert short["total_output_tokens"] == 20 and long["total_output_tokens"] == 5
    # Words are a token each; a chat's template adds some.
    added = 0 if endpoint == "/v1/completions" else 40
    assert 24 <= short["total_input_tokens"] <= 24 + 4 * added + 4
    assert 200 <= long["total_input_tokens"] <= 201 + added
    assert short["p99_ttft_ms"] > 0 and long["max_itl_ms"] >= 0
    assert [r["name"] for r in stored["requests"]] == ["long-0", *(f"short-{n}" for n in range(4))]
    assert len(stored["requests"][1]["stamps"]) > 0 and "body" not in stored["requests"][0]
    answers = [json.loads(line) for line in files["answers"].read_text().splitlines()]
    assert [a["request"] for a in answers] == [r["name"] for r in stored["requests"]]
    assert all(a["text"] for a in answers)
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


@contextmanager
def stub(status: int, *lines: bytes, **headers: str) -> Iterator[str]:
    """Serve the same answer to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(b"".join(line + b"\n\n" for line in lines))

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measured(url: str, tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Measure two requests; return their figures, the first request's, and the page."""
    plot = tmp_path / "plot.png"
    record = run(ServeBenchSettings(base_url=url, model="m", num_prompts=2, plot=plot))
    record.write()
    assert plot.read_bytes().startswith(b"\x89PNG")
    return record.figures["classes"]["short"], record.figures["requests"][0], record.page()


def test_refusals_are_counted_and_not_repeated(tmp_path: Path) -> None:
    error = {"message": "too many", "type": "rate_limit_error", "code": "queue_full"}
    body = json.dumps({"error": error}).encode()
    with stub(429, body, Retry_After="7") as url:
        figures, first, page = measured(url, tmp_path)
    assert figures == {"completed": 0, "failed": 2}
    assert (first["failure"], first["retry_after"]) == ("429 queue_full", "7")
    assert "2 failed: 429 queue_full (Retry-After: 7): too many" in page


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (503, b'{"error": {"code": 503, "type": "unavailable_error"}}', "503 unavailable_error"),
        (400, b'{"object": "error", "message": "no", "type": "BadRequestError"}', "400 BadRequest"),
        (502, b"<html>", "502"),
        (404, b'{"error": "no"}', "404"),
        (404, b'{"detail": "no"}', "404"),
        (200, event(error="no"), "in the stream"),
        (200, event(error={"message": "no", "code": "engine_error"}), "in the stream engine_error"),
        (200, text_event("x") + b"\n", "the stream ended early"),
        (200, b"data: {", "JSONDecodeError"),
    ],
)
def test_other_failures_have_a_name(status: int, body: bytes, failure: str, tmp_path: Path) -> None:
    with stub(status, body) as url:
        figures, first, _ = measured(url, tmp_path)
    assert figures["failed"] == 2 and first["failure"].startswith(failure)
    if b'"no"' in body:
        assert first["message"] == "no"


def test_the_models_name_is_asked_for_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server("--api-key", "secret") as server:
        settings = ServeBenchSettings(base_url=server.url(), num_prompts=1)
        with pytest.raises(ConfigError, match="401 Unauthorized"):
            run(settings)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert run(settings).figures["classes"]["short"]["completed"] == 1


def test_a_server_that_is_not_there_fails_every_request(tmp_path: Path) -> None:
    with stub(200) as url:
        pass
    figures, first, _ = measured(url, tmp_path)
    assert figures["failed"] == 2 and first["failure"] == "ConnectError"
    with pytest.raises(ConfigError, match=r"cannot read a model from .*; give --model"):
        run(ServeBenchSettings(base_url=url))


def test_a_server_without_usage_has_its_chunks_counted(tmp_path: Path) -> None:
    with stub(200, text_event("one\u2028"), text_event(" two", "stop"), DONE) as url:
        figures, first, page = measured(url, tmp_path)
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 4)
    assert first["output_tokens"] == 2 and figures["total_input_tokens"] == 0
    assert "2 answers came without `usage`: their tokens are chunks of text." in page


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'; give something like http"),
        ({"percentile_metrics": "ttft,ttfb"}, "percentile_metrics is 'ttft,ttfb'"),
        ({"metric_percentiles": "101"}, "metric_percentiles is '101'; give something like 95,99"),
        ({"request_rate": 0.0}, "request_rate must be greater than 0, got 0.0"),
        ({"burstiness": float("nan")}, "burstiness must be greater than 0, got nan"),
        ({"request_rate": 1.0, "arrival_window": 1.0}, "--request-rate or --arrival-window"),
        ({"num_prompts": 0}, "nothing to send"),
        ({"plot": Path("a"), "answers": Path("a")}, "a is given twice; give two files"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServeBenchSettings(**wrong)
