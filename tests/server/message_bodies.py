"""Bodies for ``/v1/messages`` with documents, read by the server, and answers by the client."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import httpx2

from razor_dist.api.formats import Format
from razor_dist.api.parsing import ParsedRequest, parse_request
from razor_dist.documents.read import Document
from razor_dist.frontend.assembler import TextPiece
from razor_dist.frontend.prompts import PromptEncoder
from tests.server.tool_calls import LIMITS
from tests.tokenizer import smollm2_tokenizer

QUESTION = "What does the castle say?"
SSE = {"Content-Type": "text/event-stream"}


def client(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def text_source(text: str) -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": text}


def content_source(*texts: str) -> dict[str, Any]:
    return {"type": "content", "content": [{"type": "text", "text": text} for text in texts]}


def pdf_source(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "base64", "media_type": "application/pdf", "data": encoded}


def document(source: dict[str, Any], cited: bool = True, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "citations": {"enabled": cited}, **fields}


def asking(*blocks: dict[str, Any], question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    content = [*blocks, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return {"model": "smollm2", "max_tokens": 80, "messages": messages, **fields}


def parse(
    endpoint: Any, body: dict[str, Any], files: Sequence[Document] = (), **limits: Any
) -> Any:
    known = LIMITS._replace(model="smollm2", **limits)
    return parse_request(endpoint, body, PromptEncoder(smollm2_tokenizer()), known, files)


def prompt_of(request: ParsedRequest) -> str:
    return smollm2_tokenizer().decode(request.prompts[0].tokens.tolist())


def lines_of(form: Format, pieces: Sequence[TextPiece]) -> str:
    chunks = [*form.opening(), *(chunk for piece in pieces for chunk in form.piece(0, piece))]
    return "".join(map(form.frame, [*chunks, *form.closing(False)])) + form.end


def through_client(form: Any, pieces: Sequence[TextPiece]) -> tuple[Any, Any, list[Any]]:
    """Read an answer by the client, whole and streamed; return both, and the stream's events."""
    whole, lines = form().whole(), lines_of(form(), pieces)

    def answer(request: httpx2.Request) -> httpx2.Response:
        if json.loads(request.content).get("stream"):
            return httpx2.Response(200, headers=SSE, text=lines)
        return httpx2.Response(200, json=whole)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        ours = anthropic.Anthropic(base_url="http://m", api_key="none", http_client=http)
        found = ours.messages.create(**asking())
        with ours.messages.stream(**asking()) as events:
            seen = list(events)
            final = events.get_final_message()
    return found, final, seen
