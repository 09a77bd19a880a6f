"""Latency and throughput of a server with OpenAI's API under load, long documents apart."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from razor_dist.config.errors import ConfigError
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.serve_settings import ServeBenchSettings
from razor_dist.evals.needle.model import needle_words
from razor_dist.evals.report import save_picture
from razor_dist.files import read_lines

log = logging.getLogger(__name__)


@dataclass
class LoadRequest:
    """A request and what came of it; moments are seconds since the load began."""

    name: str  # such as short-3: the same in every run, whatever else is sent
    arrival: float
    body: dict[str, Any]
    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)  # moment of each chunk of text
    ended: float = 0.0  # moment of the last text, or of the reason for the end
    text: str = ""
    prompt_tokens: int = 0  # if the server tells them
    output_tokens: int = 0  # chunks of text, if the server does not tell them
    finished: bool = False
    failure: str | None = None  # a code, such as "429 queue_full"
    message: str = ""
    retry_after: str | None = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """A whole answer's times as vLLM defines them; a short one has no ``tpot``, no ``itl``."""
        first, others = self.stamps[0], self.output_tokens - 1
        return {
            "ttft": [first - self.sent],
            "tpot": [(self.ended - first) / others] if others > 0 else [],
            "itl": [later - before for before, later in itertools.pairwise(self.stamps)],
            "e2el": [self.ended - self.sent],
        }

    def take(self, line: bytes, now: float) -> None:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            self.fail("in the stream", event)
        for choice in event.get("choices", []):
            piece = choice.get("delta") or choice
            text = piece.get("text") or piece.get("content") or piece.get("reasoning_content") or ""
            self.text += text
            self.finished |= choice.get("finish_reason") is not None
            # The chunk with the role has no text, and says nothing of the first token.
            if text or (self.finished and not self.stamps):
                self.stamps.append(now)
                self.output_tokens += 1
            if text or self.finished:
                self.ended = now
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.output_tokens = usage["completion_tokens"]

    def fail(self, where: str, body: Any) -> None:
        """Note the failure that an error tells: an object, OpenAI's or alike, or a text."""
        error = (body.get("error") or body) if isinstance(body, dict) else body
        if not isinstance(error, dict):
            error = {"message": error}
        code = error["code"] if isinstance(error.get("code"), str) else error.get("type")
        self.failure = f"{where} {code or ''}".strip()
        self.message = str(error.get("message") or error.get("detail") or "")

    async def send(self, client: httpx.AsyncClient, url: str, clock: Callable[[], float]) -> None:
        """Send it and take the stream; a failure is noted, and nothing is tried again."""
        content = json.dumps(self.body).encode()
        self.sent = clock()
        try:
            async with client.stream("POST", url, content=content) as response:
                if response.status_code != 200:
                    self.retry_after = response.headers.get("retry-after")
                    content = await response.aread()
                    body: Any = content.decode(errors="replace")
                    with suppress(ValueError):
                        body = json.loads(content)
                    self.fail(str(response.status_code), body)
                    return
                rest = b""
                # Not by `aiter_lines`, to which U+2028 within an answer is the end of a line.
                async for block in response.aiter_bytes():
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        self.take(line, clock())
            if not self.finished:
                self.failure = self.failure or "the stream ended early"
        except Exception as error:  # whatever a server sends, the others' figures are wanted
            self.failure = self.failure or type(error).__name__
            self.message = self.message or str(error)


def make_requests(settings: ServeBenchSettings, model: str) -> list[LoadRequest]:
    """Make the requests of a load, long ones first; raises `ConfigError` if the dataset is wrong.

    The words follow from the seed and a request's name.
    """
    vocabulary = needle_words()  # common enough to be a token each in most vocabularies

    def prompt(name: str, words: int) -> dict[str, Any]:
        generator = random.Random(f"{settings.seed} {name}")
        return _prompt(settings, " ".join(generator.choices(vocabulary, k=words)))

    if settings.dataset is not None:
        shorts = _read(settings.dataset, settings)
    else:
        count = 20 if settings.num_prompts is None else settings.num_prompts
        shorts = [prompt(f"short-{i}", settings.random_input_len) for i in range(count)]
    longs = [prompt(f"long-{i}", settings.long_input_len) for i in range(settings.long_prompts)]
    shared = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": settings.temperature,
        "max_tokens": settings.random_output_len,
        **({"ignore_eos": True} if settings.ignore_eos else {}),
    }
    longer = {"max_tokens": settings.long_output_len or settings.random_output_len}
    times = arrivals(settings, len(shorts))
    return [
        *(LoadRequest(f"long-{i}", 0.0, shared | longer | body) for i, body in enumerate(longs)),
        *(LoadRequest(f"short-{i}", times[i], shared | body) for i, body in enumerate(shorts)),
    ]


def _prompt(settings: ServeBenchSettings, text: str) -> dict[str, Any]:
    if settings.endpoint == "/v1/completions":
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def _read(dataset: Path, settings: ServeBenchSettings) -> list[dict[str, Any]]:
    """Read requests; fields beside the prompt or messages go into the body as they are."""
    bodies = []
    for line, data in itertools.islice(read_lines(dataset), settings.num_prompts):
        try:
            body = json.loads(data)
            prompt = {} if "messages" in body else _prompt(settings, body.pop("prompt"))
        except (ValueError, TypeError, KeyError, AttributeError):
            where = f"line {line.number} of {dataset}"
            raise ConfigError(f"{where} must be an object with prompt or messages") from None
        bodies.append(body | prompt)
    if len(bodies) < (1 if settings.num_prompts is None else settings.num_prompts):
        raise ConfigError(f"{dataset} has {len(bodies)} requests; num_prompts asks for more")
    return bodies


def arrivals(settings: ServeBenchSettings, count: int) -> list[float]:
    """Return when short requests arrive: gaps of a gamma distribution, drawn by the seed.

    As in vLLM they are stretched, so that the last one arrives after exactly ``count / rate``.
    """
    gaps = np.ones(count)
    if math.isfinite(settings.burstiness):
        gaps = np.random.default_rng(settings.seed).gamma(settings.burstiness, size=count)
    sums, window = np.cumsum(gaps), settings.arrival_window or count / settings.request_rate
    moments: list[float] = (sums / sums[-1:] * window).tolist()
    return moments


async def run_load(requests: Sequence[LoadRequest], url: str, most: int | None) -> None:
    """Send each request when it arrives, or once fewer than ``most`` are in flight."""
    gate, headers = asyncio.Semaphore(most or len(requests)), _access()
    headers["Content-Type"] = "application/json"
    # Each user has a connection of their own, and a million tokens take as long as they take.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None) as client:
        begin = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - begin

        async def serve(request: LoadRequest) -> None:
            await asyncio.sleep(request.arrival - clock())
            async with gate:
                await request.send(client, url, clock)
            described = request.failure or f"{request.output_tokens} tokens"
            log.info("%s after %.1f s: %s", request.name, clock(), described)

        await asyncio.gather(*map(serve, requests))


def run(settings: ServeBenchSettings) -> BenchRecord:
    """Put a load on a server; raises `ConfigError` if it does not tell its model's name."""
    url = settings.base_url.rstrip("/").removesuffix("/v1")
    model = settings.model or _first_model(f"{url}/v1/models")
    requests = make_requests(settings, model)
    asyncio.run(run_load(requests, url + settings.endpoint, settings.max_concurrency))
    groups = {kind: [r for r in requests if kind in r.name] for kind in ("short", "long")}
    classes = {kind: summary(own, settings) for kind, own in groups.items() if own}
    notes = [
        f"{len(own)} failed: {failure} (Retry-After: {own[0].retry_after}): {own[0].message}"
        for failure in dict.fromkeys(r.failure for r in requests if r.failure)
        if (own := [r for r in requests if r.failure == failure])
    ]
    if uncounted := sum(not (r.failure or r.prompt_tokens) for r in requests):
        notes.append(f"{uncounted} answers came without `usage`: their tokens are chunks of text.")
    names = dict.fromkeys(name for own in classes.values() for name in own)
    rows = [
        [name, *(f"{round(own.get(name, math.nan), 1):,}" for own in classes.values())]
        for name in names
    ]
    files: dict[Path, bytes] = {}
    if settings.answers:
        lines = (json.dumps({"request": r.name, "text": r.text}) + "\n" for r in requests)
        files[settings.answers] = "".join(lines).encode()
    if settings.plot:
        files[settings.plot] = ttft_over_time(groups)
    described = [
        {k: v for k, v in asdict(r).items() if k not in ("body", "text")} for r in requests
    ]
    figures = {"model_id": model, "classes": classes, "requests": described}
    table = Table("", [["", *classes], *rows])
    return BenchRecord("serve", settings, figures, [table], notes, files)


def _access() -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}


def _first_model(url: str) -> str:
    try:
        found = httpx.get(url, headers=_access()).raise_for_status().json()
        return str(found["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"cannot read a model from {url} ({error}); give --model") from None


def summary(requests: Sequence[LoadRequest], settings: ServeBenchSettings) -> dict[str, Any]:
    """Return counts, rates a second, and statistics of whole answers' times in milliseconds.

    The names are those of vLLM's results. ``duration`` is from sending the first of the requests
    that were answered to the last token.
    """
    done = [r for r in requests if r.failure is None]
    figures: dict[str, Any] = {"completed": len(done), "failed": len(requests) - len(done)}
    if not done:
        return figures
    duration = max(r.ended for r in done) - min(r.sent for r in done)
    read, written = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    figures |= {"duration": duration, "total_input_tokens": read, "total_output_tokens": written}
    figures["request_throughput"] = len(done) / duration
    figures["output_throughput"] = written / duration
    figures["total_token_throughput"] = (read + written) / duration
    for metric in settings.percentile_metrics.split(","):
        if values := [1000 * seconds for r in done for seconds in r.seconds[metric]]:
            for name in ("mean", "median", "std", "max"):
                figures[f"{name}_{metric}_ms"] = float(getattr(np, name)(values))
            for p in settings.metric_percentiles.split(","):
                figures[f"p{p}_{metric}_ms"] = float(np.percentile(values, float(p)))
    return figures


def ttft_over_time(groups: dict[str, list[LoadRequest]]) -> bytes:
    """Draw the time to each answer's first token over the request's arrival, as a PNG."""
    figure, file = Figure((7, 4), dpi=150, layout="constrained"), BytesIO()
    axis = figure.subplots()
    for kind, requests in groups.items():
        done = [r for r in requests if r.failure is None]
        times = [r.seconds["ttft"][0] for r in done]
        axis.plot([r.arrival for r in done], times, "o", label=f"{kind}, {len(done)} answered")
    failed = [r.arrival for requests in groups.values() for r in requests if r.failure]
    ground = axis.get_xaxis_transform()
    axis.plot(failed, [0.02] * len(failed), "x", transform=ground, label=f"{len(failed)} failed")
    axis.set(xlabel="arrival, s", ylabel="time to first token, s", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axis.legend()
    save_picture(figure, file)
    return file.getvalue()
