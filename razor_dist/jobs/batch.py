"""OpenAI's batch files as a job: a request in each line, and its answer in a line of the output.

A request is ``{"custom_id", "method": "POST", "url", "body"}``; its body is checked by the server's
own code for that url. A line of the output is ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``: a body that is refused has the response that the server would
give; a malformed line, and a request at which the engine failed, has no response and an ``error``
of ``code`` and ``message``.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from razor_dist.api.errors import Failure
from razor_dist.api.fields import renamed
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits
from razor_dist.api.responses_format import FORMATS
from razor_dist.api.strict_json import parse_json
from razor_dist.api.validate import warn_of
from razor_dist.config.errors import ConfigError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.files import Line, digest_of, read_lines
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from razor_dist.jobs.results import Record
from razor_dist.jobs.task import RETRYABLE, Item, ItemSize, Update, Updates
from razor_dist.llm.llm import LLM
from razor_dist.llm.progress import ReadingLog
from razor_dist.protocol.messages import CacheScope

log = logging.getLogger(__name__)

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}
_FIELDS = ("custom_id", "method", "url", "body")
# Prompts of one request; the engine holds as many as it has room for.
_MAX_PROMPTS = 1024


@dataclass(frozen=True)
class BatchLine:
    """A line of a batch file; ``problem`` is the reason if it is no valid request."""

    line: Line
    custom_id: str | None
    problem: str | None = None

    @property
    def item_id(self) -> str:
        """The name of its record in the results, which changes with the request."""
        return f"{self.custom_id}#{self.line.digest}"


def read_batch(path: str | Path) -> list[BatchLine]:
    """Return a file's entries, their bodies unchecked; `ConfigError` if two have one custom_id."""
    entries: list[BatchLine] = []
    lines: dict[str, list[str]] = {}
    for line, data in read_lines(path):
        custom_id: str | None = None
        problem: str | None = None
        try:
            request = _parse(data)
            custom_id = request.get("custom_id")
            if not isinstance(custom_id, str) or not custom_id:
                custom_id = None
                raise RequestError("custom_id must be a string that is not empty")
            lines.setdefault(custom_id, []).append(str(line.number))
            _check(request)
        except RequestError as error:
            problem = str(error)
        entries.append(BatchLine(line, custom_id, problem))
    for custom_id, numbers in lines.items():
        if len(numbers) > 1:
            raise ConfigError(
                f"{path}: lines {', '.join(numbers)} have the same custom_id {custom_id!r:.80}; "
                "each request needs its own, by which its answer is found"
            )
    return entries


def _parse(data: bytes) -> dict[str, Any]:
    try:
        request = parse_json(data.removeprefix(codecs.BOM_UTF8))
    except RequestError as error:  # the server's words are of a body
        raise RequestError(str(error).replace("the body", "the line", 1)) from None
    if not isinstance(request, dict):
        raise RequestError("the line must be a JSON object")
    return request


def _check(request: Mapping[str, Any]) -> None:
    unknown = sorted(set(request) - set(_FIELDS))
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    if request.get("method") != "POST":
        raise RequestError(f"method must be 'POST', got {request.get('method')!r:.80}")
    url = request.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(f"url must be {' or '.join(ENDPOINTS)}, got {url!r:.80}")
    if not isinstance(request.get("body"), dict):
        raise RequestError("body must be a JSON object")


@dataclass(frozen=True)
class BatchTask:
    """One item for each request; the bodies name the model ``model``."""

    engines: Mapping[str, EngineConfig]
    model: str
    entries: list[BatchLine]
    unknown_fields: Literal["refuse", "warn"] = "refuse"  # `ServerConfig.unknown_fields`

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"task": "batch", "model": self.model, "unknown_fields": self.unknown_fields}

    @property
    def at_once(self) -> int:
        """Requests that an engine gets at a time."""
        return min(config.max_num_seqs for config in self.engines.values())

    def items(self) -> Sequence[Item]:
        return [
            Item(entry.item_id, max(1, entry.line.length // 4), data={"line": entry.line})
            for entry in self.entries
            if entry.problem is None
        ]

    def run(self, llm: LLM, item: Item) -> Updates:
        request = _parse(item.data["line"].read())
        try:
            limits = self._limits(llm)
            body = yield from _answer(llm, request, limits, item.id)
        except RequestError as error:
            yield ItemSize(0)  # it has read nothing
            failure = Failure.of(error)
            refused = {"status_code": failure.status, "body": failure.body()}
            return {**refused, "retryable": True} if error.code in RETRYABLE else refused
        return {"status_code": 200, "body": body}

    def _limits(self, llm: LLM) -> Limits:
        return Limits(
            self.model,
            _MAX_PROMPTS,
            # Answers do not depend on kv_tokens.
            PromptLimits.of(llm.info, llm.config, fit_max_tokens=False),
            llm.sampling_defaults,
            unknown_fields=self.unknown_fields,
        )


def _answer(
    llm: LLM, request: Mapping[str, Any], limits: Limits, item_id: str
) -> Generator[Update, None, dict[str, Any]]:
    endpoint, body, tokenizer = ENDPOINTS[request["url"]], request["body"], llm.get_tokenizer()
    parsed = parse_request(endpoint, body, PromptEncoder(tokenizer), limits)
    warn_of(parsed.ignored)
    if parsed.stream:
        raise RequestError("stream must be false in a batch", param="stream")
    if parsed.timeout is not None:
        raise RequestError("timeout is not supported in a batch", param="timeout")
    if parsed.context is not None:
        raise RequestError("context is not supported in a batch", param="context")
    # Draws depend on the request and `--seed` alone, so that a second run repeats them.
    named = item_id if llm.config.seed is None else f"{item_id}#{llm.config.seed}"
    digest = hashlib.sha256(named.encode()).hexdigest()
    prompts = []
    for number, prompt in enumerate(parsed.prompts):
        seed = prompt.params.seed
        if seed is None:
            seed = int(digest[:12], 16) + number * prompt.params.n
        prompts.append(prompt._replace(params=replace(prompt.params, seed=seed)))
    yield ItemSize(sum(len(prompt.tokens) for prompt in prompts))
    # A log of its own: other requests are read at the same time.
    with renamed(parsed.names):
        scope = CacheScope(parsed.cache_salt, parsed.cache_prompt)
        answers = llm.call().choices(prompts, scope, ReadingLog(item_id))
        choices = llm.loop.run(answers)
    form = FORMATS[endpoint](parsed, limits.model, choices, tokenizer)
    return {**form.whole(), "id": f"{form.prefix}-{digest[:32]}"}


def output_lines(
    entries: Sequence[BatchLine], records: Mapping[str, Record]
) -> Iterator[dict[str, Any]]:
    """Yield the output's lines in the order of the batch file, by the records of a `BatchTask`."""
    for entry in entries:
        response: dict[str, Any] | None = None
        error: dict[str, str] | None = None
        number = entry.line.number
        digest = digest_of(f"{number}#{entry.item_id}".encode())
        if entry.problem is not None:
            error = {"code": "invalid_request", "message": f"line {number}: {entry.problem}"}
        elif (record := records[entry.item_id])["status"] == "done":
            answer = {name: record["result"][name] for name in ("status_code", "body")}
            response = {"request_id": f"req_{digest}", **answer}
        else:
            message = "line {}: {type}: {message}".format(number, **record["error"])
            error = {"code": "engine_error", "message": message}
        ids = {"id": f"batch_req_{digest}", "custom_id": entry.custom_id}
        yield {**ids, "response": response, "error": error}
