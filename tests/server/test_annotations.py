"""``return_annotations``: sources in the shape of OpenAI's annotations, through its client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from razor_dist.api.annotations import titles
from razor_dist.frontend.passages import Part, PromptText
from tests.server.process import server_on

CASTLE = "The castle \N{CASTLE} says 数据."
FILLER = "The grass is green. "
# The fake engine's answers look at " castle" and are the question again and again.
TEXT = f'Document "a.txt":\n\n{FILLER}{CASTLE}\r\n{FILLER}\n\nDocument "b":\n\n{FILLER}\n\nWhy so?'
MESSAGES: list[Any] = [
    {"role": "user", "content": f"{FILLER}{CASTLE}"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": TEXT},
]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with server_on("tests.server.page_rank") as server:
        yield openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none", max_retries=0)


def check(found: list[dict[str, Any]], answer: str) -> None:
    """Each annotation is of a sentence, and its URL of the castle's one."""
    assert len(found) >= 4
    spans = [(a["start_index"], a["end_index"]) for a in found]
    assert spans == sorted(spans)
    for annotation in found:
        said = answer[annotation["start_index"] : annotation["end_index"]]
        assert said and said == said.strip() and said in answer
        place = re.fullmatch(r"message:(\d+)#char=(\d+),(\d+)", annotation["url"])
        assert place is not None
        message, begin, end = map(int, place.groups())
        assert MESSAGES[message]["content"][begin:end] == CASTLE
        assert annotation["title"] == {0: "messages[0]", 2: "a.txt"}[message]
    assert {a["title"] for a in found} == {"messages[0]", "a.txt"}


@pytest.mark.long
def test_a_chat_is_annotated(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 120}
    extra = {"return_annotations": True}
    whole = client.chat.completions.create(**asked, extra_body=extra)
    [choice] = whole.choices
    assert choice.message.content is not None and choice.message.annotations is not None
    assert {a.type for a in choice.message.annotations} == {"url_citation"}
    found = [a.url_citation.to_dict() for a in choice.message.annotations]
    check(found, choice.message.content)
    assert not hasattr(choice, "sources") and not hasattr(choice, "sentences")
    stream = client.chat.completions.create(**asked, stream=True, extra_body=extra)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(d.content or "" for d in deltas) == choice.message.content
    told = [a["url_citation"] for d in deltas for a in getattr(d, "annotations", None) or ()]
    assert told == found
    # An answer that is put back into the conversation is taken with its annotations.
    history = [*MESSAGES, choice.message.model_dump(), {"role": "user", "content": "Why?"}]
    client.chat.completions.create(**asked | {"messages": history, "max_tokens": 1})
    both = client.chat.completions.create(**asked, extra_body=extra | {"return_sources": 1})
    first = both.choices[0]
    assert [s["text"] for s in first.sources] == [CASTLE]  # type: ignore[attr-defined]
    assert first.message.annotations and len(first.message.annotations) == len(found) // 2
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].message.annotations is None


def test_a_response_is_annotated(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "input": MESSAGES, "max_output_tokens": 120}
    extra = {"return_annotations": True}
    whole = client.responses.create(**asked, extra_body=extra)
    [message] = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    found = [annotation.to_dict() for annotation in part.annotations]
    assert {a.pop("type") for a in found} == {"url_citation"}
    check(found, part.text)
    with client.responses.stream(**asked, extra_body=extra) as events:
        every: list[Any] = list(events)
    added = [e for e in every if e.type == "response.output_text.annotation.added"]
    final = every[-1].response  # cut by its length
    assert [e.annotation_index for e in added] == list(range(len(found)))
    assert [e.annotation.to_dict() for e in added] == [a.to_dict() for a in part.annotations]
    assert final.output[0].content[0].annotations == part.annotations
    back = [*MESSAGES, message.model_dump(), {"role": "user", "content": "Why?"}]
    client.responses.create(**asked | {"input": back, "max_output_tokens": 1})


def test_titles_are_those_of_the_documents_however_they_are_quoted() -> None:
    text = 'Document "a \\"b\\" \\\\ c":\n\n1\n\nDocument "d "e"":\n\n2\n\nDocument "f\\g":\n\n3'
    found = titles(PromptText([Part(text, 0, len(text), 0)], np.array([len(text)])))
    assert [title for _, _, title in found] == ['a "b" \\ c', 'd "e"', "f\\g"]


def test_what_excludes_annotations_is_told(client: openai.OpenAI) -> None:
    extra: Any = {"return_annotations": True, "truncate_prompt_tokens": 9}
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens excludes return_an"):
        client.chat.completions.create(model="smollm2", messages=MESSAGES, extra_body=extra)
    with pytest.raises(openai.BadRequestError, match="unsupported field 'return_annotations'"):
        client.completions.create(model="smollm2", prompt="a", extra_body=extra)


def test_what_the_engine_refuses_is_named_as_it_was_asked() -> None:
    ask: dict[str, Any] = {"model": "smollm2", "max_tokens": 9}
    source = {"type": "text", "media_type": "text/plain", "data": TEXT}
    document = {"type": "document", "source": source, "citations": {"enabled": True}}
    question = [{"role": "user", "content": [document, {"type": "text", "text": "Why?"}]}]
    with server_on("tests.fake_engine", "--attention", "streaming") as server:
        for path, name, more in (
            ("messages", "citations", {"messages": question}),
            ("chat/completions", "return_annotations", {"messages": MESSAGES}),
            ("responses", "return_annotations", {"input": "Why?"}),
            ("completions", "return_sources", {"prompt": "Why?", "return_sources": 1}),
        ):
            named = {name: True} if name == "return_annotations" else {}
            limit = {"max_output_tokens": 9, "max_tokens": None} if path == "responses" else {}
            body = {k: v for k, v in (ask | more | named | limit).items() if v is not None}
            for stream in (False, True):
                answer = httpx.post(f"{server.url()}/v1/{path}", json=body | {"stream": stream})
                assert answer.status_code == 400
                assert answer.json()["error"]["message"].startswith(f"{name} asks heads")
