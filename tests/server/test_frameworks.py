"""LangChain and LlamaIndex through their own clients, where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.process import server_on

CASTLE = "The castle \N{CASTLE} is old."
TEXT = f"The grass is green. {CASTLE} The sky is blue."
KEYS: dict[str, Any] = {"api_key": "none", "max_retries": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose answers repeat the question, and look at the castle."""
    with server_on("tests.server.page_rank") as server:
        yield server.url()


def test_langchains_citations_are_the_same_in_a_stream(url: str) -> None:
    anthropic = pytest.importorskip("langchain_anthropic")
    chat = anthropic.ChatAnthropic(model="smollm2", base_url=url, max_tokens=60, **KEYS)
    source = {"type": "text", "media_type": "text/plain", "data": TEXT}
    document = {"type": "document", "source": source, "citations": {"enabled": True}}
    asked = [("user", [document, {"type": "text", "text": "Why so? Who says it?"}])]
    whole = chat.invoke(asked)
    cited = [c for block in whole.content for c in block.get("citations") or ()]
    assert cited and {c["cited_text"] for c in cited} == {CASTLE}
    assert {TEXT[c["start_char_index"] : c["end_char_index"]] for c in cited} == {CASTLE}
    chunks = list(chat.stream(asked))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert len(chunks) > 3 and str(streamed.text) == str(whole.text)
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 60
    found = [c for block in streamed.content for c in block.get("citations") or ()]
    assert [c["cited_text"] for c in found] == [c["cited_text"] for c in cited]


def test_langchain_over_openais_routes(url: str) -> None:
    openai = pytest.importorskip("langchain_openai")
    given = {"model": "smollm2", "base_url": f"{url}/v1", "max_tokens": 60}
    chat = openai.ChatOpenAI(stream_usage=True, **given, **KEYS)
    asked = [("user", f"{TEXT}\n\nWhy so? Who says it?")]
    whole = chat.invoke(asked)
    chunks = list(chat.stream(asked))
    assert "".join(str(chunk.text) for chunk in chunks) == str(whole.text)
    last = next(chunk for chunk in reversed(chunks) if chunk.usage_metadata)
    assert last.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == 60


def test_llama_index_over_openais_routes(url: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like")
    given = {"model": "smollm2", "api_base": f"{url}/v1", "is_chat_model": True, "max_tokens": 60}
    model = like.OpenAILike(api_key="none", max_retries=0, **given)
    whole = model.complete("Why so? Who says it?").text
    assert whole and list(model.stream_complete("Why so? Who says it?"))[-1].text == whole
