"""One answer made of all engines' answers: health, statistics, metrics, contexts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from razor_dist.api.errors import NotReadyError
from razor_dist.frontend.client import Status
from razor_dist.ray_serve.engine import Head

Answers = Sequence[tuple[Head, bytes]]


def merged(path: str, answers: Answers) -> Response:
    """Return one answer for a path of `MERGED`: engines' answers merged, or else a refusal.

    Raises `NotReadyError` if no engine answers, except for health.
    """
    good = [(head, body) for head, body in answers if head.status == 200 or path in HEALTH]
    if good:
        return MERGED[path](good)
    if not answers:
        state = Status("restarting", "no engine answers")
        if path in HEALTH:
            about = {"status": state.state, "reason": state.reason, "engines": {}}
            return JSONResponse(about, 503)
        raise NotReadyError(state)
    head, body = answers[0]
    response = Response(body, head.status)
    response.raw_headers = head.headers
    return response


def _health(answers: Answers) -> Response:
    """The best engine's state: the application is ready if one engine is."""
    states = {str(head.engine): json.loads(body)["status"] for head, body in answers}
    head, body = min(answers, key=lambda answer: answer[0].status)
    return JSONResponse({**json.loads(body), "engines": states}, head.status)


def _stats(answers: Answers) -> Response:
    return JSONResponse({"engines": {str(head.engine): json.loads(b) for head, b in answers}})


def _contexts(answers: Answers) -> Response:
    """All engines' contexts and room; a context in a shared store is listed as its holder's."""
    found: dict[str, Any] = {}
    lists = [json.loads(body) for _, body in answers]
    for context in (context for one in lists for context in one["data"]):
        known = found.setdefault(context["id"], context)
        if context["bytes"]["device"] > known["bytes"]["device"]:
            found[context["id"]] = context
    limit = sum(one["limit_bytes"] for one in lists)
    return JSONResponse({"object": "list", "data": list(found.values()), "limit_bytes": limit})


def _metrics(answers: Answers) -> Response:
    """All engines' metrics, each sample with its engine's number as the label ``engine``."""
    merged: dict[str, Metric] = {}
    for head, body in answers:
        for family in text_string_to_metric_families(body.decode()):
            known = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "engine": str(head.engine)}
                known.add_sample(sample.name, labels, sample.value, sample.timestamp)
    whole = SimpleNamespace(collect=merged.values)
    return Response(generate_latest(cast(Any, whole)), media_type=CONTENT_TYPE_LATEST)


HEALTH = ("/health", "/ping")
MERGED: dict[str, Callable[[Answers], Response]] = {
    **dict.fromkeys(HEALTH, _health),
    "/stats": _stats,
    "/metrics": _metrics,
    "/v1/contexts": _contexts,
}
