"""Requests with marked blocks, read as the server reads them."""

from __future__ import annotations

import json
from typing import Any

from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.frontend.prompts import PromptEncoder
from tests.tokenizer import smollm2_tokenizer

ENCODER = PromptEncoder(smollm2_tokenizer())
LIMITS = Limits("m", 8, 10_000, 49152, {}, pins=True)
DOCUMENT = "The door of the house is red. The sky is blue.\n\n" * 12
MARK = {"type": "ephemeral", "ttl": "1h"}


def parsed(endpoint: Endpoint, kept: Any = None, **body: Any) -> ParsedRequest:
    raw = json.dumps({"model": "m", **body}).encode()
    return parse_request(endpoint, raw, ENCODER, LIMITS, (), kept)


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}
