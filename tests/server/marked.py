"""Requests with marked blocks, read as the server reads them."""

from __future__ import annotations

import json
from typing import Any

from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, Limits, ParsedRequest
from razor_dist.frontend.prompts import PromptEncoder, PromptLimits
from tests.server.tool_calls import encoder
from tests.tokenizer import smollm2_tokenizer

ENCODER = PromptEncoder(smollm2_tokenizer())
LIMITS = Limits("m", 8, PromptLimits(10_000, 49152), {}, pins=True)
DOCUMENT = "The door of the house is red. The sky is blue.\n\n" * 12
MARK = {"type": "ephemeral", "ttl": "1h"}


# Of a template that shows calls of tools.
CALLING = encoder(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parsed(
    endpoint: Endpoint, kept: Any = None, by: PromptEncoder = ENCODER, **body: Any
) -> ParsedRequest:
    raw = json.dumps({"model": "m", **body}).encode()
    return parse_request(endpoint, raw, by, LIMITS, (), kept)


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}
