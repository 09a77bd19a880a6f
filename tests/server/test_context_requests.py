"""Requests with marks and handles, read without an engine: the same tokens as with the text."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import pytest

from razor_dist.api.contexts import KeptContext
from razor_dist.api.messages import CountTokensBody
from razor_dist.api.parsing import parse_request
from razor_dist.api.request import Endpoint, ParsedRequest
from razor_dist.config.errors import RequestError
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.protocol.messages import encode
from tests.server.marked import CALLING, DOCUMENT, ENCODER, LIMITS, MARK, parsed, part, user
from tests.server.tool_calls import encoder as with_template
from tests.tokenizer import smollm2_tokenizer

HELLO = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("question", ["What is red?", " \n\nWhat?", "s and more", "世界", "'s"])
@pytest.mark.parametrize("ending", ["", " ", "\n\n", " The roo", "世"])
def test_a_handle_stands_for_the_text(ending: str, question: str) -> None:
    text = DOCUMENT + ending
    marked = [SYSTEM, user(part(text, cache_control=MARK), part("Which?"))]
    [kept] = parsed("chat", messages=marked).contexts
    assert kept.ttl == 3600 and len(kept.text.tokens) > 150
    for then in ([user(question)], [user(part(question)), HELLO, user("And?")], [HELLO, user("?")]):
        joined = then[0]["role"] == "user"
        whole = [SYSTEM, user(part(text), part(question) if joined else part("")), *then[joined:]]
        want = parsed("chat", messages=whole, return_sources=2).prompts[0]
        assert parsed("chat", messages=then, context="ctx_1").context == "ctx_1"
        got = parsed("chat", kept, messages=then, context="ctx_1", return_sources=2).prompts[0]
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.text is not None and want.text is not None
        assert encode(got.text) == encode(want.text)
        told = [{"type": "message", **message} for message in then]
        for item in told:
            if isinstance(item["content"], list):
                item["content"] = "".join(p["text"] for p in item["content"])
        got = parsed("responses", kept, input=told, context="ctx_1").prompts[0]
        assert got.tokens.tolist() == want.tokens.tolist()


def test_a_system_prompt_without_text_asks_for_nothing() -> None:
    said: dict[str, Any] = {"messages": [user("Hello")], "max_tokens": 9}
    want = parsed("messages", **said).prompts[0].tokens.tolist()
    for system in ("", [], [part("")], [part(""), part("")]):
        assert parsed("messages", system=system, **said).prompts[0].tokens.tolist() == want
        answer = parsed("count_tokens", messages=said["messages"], system=system).answer
        assert json.loads(answer or b"") == {"input_tokens": len(want)}
    got = parsed("responses", input="Hello", instructions="").prompts[0].tokens.tolist()
    assert got == want
    [kept] = parsed("chat", messages=[user(part(DOCUMENT, cache_control=MARK))]).contexts
    want = parsed("messages", kept, context="c", **said).prompts[0].tokens.tolist()
    found = parsed("messages", kept, system="", context="c", **said)
    assert found.prompts[0].tokens.tolist() == want


def test_documents_in_a_context_are_cited_as_if_they_were_sent() -> None:
    def document(text: str, title: str, **more: Any) -> dict[str, Any]:
        source = {"type": "text", "media_type": "text/plain", "data": text}
        on = {"citations": {"enabled": True}, "title": title}
        return {"type": "document", "source": source, **on, **more}

    first, other = document(f" {DOCUMENT}", "a.txt"), document("The roof is green.", "b.txt")
    ask: dict[str, Any] = {"max_tokens": 9, "system": "Be brief."}
    marked = parsed(
        "messages", messages=[user(first | {"cache_control": MARK}, part("Why?"))], **ask
    )
    [kept] = marked.contexts
    del ask["system"]
    for blocks in ([part("What is red?")], [other, part("What is green?")]):
        want = parsed("messages", messages=[user(first, *blocks)], system="Be brief.", **ask)
        got = parsed("messages", kept, messages=[user(*blocks)], context="c", **ask)
        assert got.prompts[0].tokens.tolist() == want.prompts[0].tokens.tolist()
        assert got.described == want.described
        assert got.prompts[0].text is not None and want.prompts[0].text is not None
        assert encode(got.prompts[0].text) == encode(want.prompts[0].text)
        counted = parsed("count_tokens", kept, messages=[user(*blocks)], context="c").answer
        assert json.loads(counted or b"") == {"input_tokens": len(want.prompts[0].tokens)}
    with pytest.raises(RequestError, match="system is not allowed with a context") as error:
        parsed("messages", kept, messages=[user("?")], context="c", system="Else.", **ask)
    assert error.value.param == "system"


@pytest.mark.parametrize("of_part", [True, False])
@pytest.mark.parametrize("cited", [True, False])
@pytest.mark.parametrize("turns", [False, True])
def test_documents_stay_where_a_chat_goes_on(of_part: bool, cited: bool, turns: bool) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
    document = {"type": "document", "source": source, "citations": {"enabled": cited}}
    marked = [user(document | {"cache_control": MARK})]
    [first] = parsed("messages", messages=marked, max_tokens=9).contexts
    more, mark = part("A roof is green. " * 9), {"cache_control": MARK}
    then = [user("Why?"), HELLO] * turns
    then.append(user(more | mark, part("So?")) if of_part else user(more) | mark)
    [kept] = parsed("chat", first, messages=then, context="c").contexts
    assert kept.documents == first.documents and kept.cites is cited
    rest = [document, part("What is green?")]
    begin = [user(document, part("Why?")), HELLO, user(more, *rest)]
    whole = begin if turns else [user(document, more, *rest)]
    want = parsed("messages", messages=whole, max_tokens=9)
    got = parsed("messages", kept, messages=[user(*rest)], context="c", max_tokens=9)
    assert got.prompts[0].tokens.tolist() == want.prompts[0].tokens.tolist()
    assert got.described == want.described and len(got.described["documents"]) == 2
    assert got.prompts[0].params == want.prompts[0].params
    texts = [found.prompts[0].text for found in (got, want)]
    assert encode(texts[0]) == encode(texts[1]) and (texts[0] is not None) is cited


def test_what_follows_a_kept_message_stands_apart() -> None:
    [kept] = parsed("chat", messages=[user(DOCUMENT) | {"cache_control": MARK}]).contexts
    asked: dict[str, Any] = {"max_tokens": 9}
    want = parsed("messages", messages=[user(DOCUMENT), user("Why?")], **asked).prompts[0]
    got = parsed("messages", kept, messages=[user("Why?")], context="c", **asked).prompts[0]
    assert got.tokens.tolist() == want.tokens.tolist()


def test_all_documents_or_none_are_cited_with_those_of_the_context() -> None:
    def document(cited: bool) -> dict[str, Any]:
        source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
        return {"type": "document", "source": source, "citations": {"enabled": cited}}

    for kept_cited, cited in ((True, False), (False, True)):
        marked = user(document(kept_cited) | {"cache_control": MARK}, part("Why?"))
        [kept] = parsed("messages", messages=[marked], max_tokens=9).contexts
        then = [user(document(cited), part("Why?"))]
        with pytest.raises(RequestError, match="citations must be enabled for all documents"):
            parsed("messages", kept, messages=then, context="c", max_tokens=9)


def test_what_does_not_fit_a_context_is_refused() -> None:
    marked = [user(part(DOCUMENT, cache_control=MARK))]
    [kept] = parsed("chat", messages=marked).contexts
    for field, value in (
        ("cache_salt", "a"),
        ("truncate_prompt_tokens", 9),
        ("cache_prompt", False),
    ):
        with pytest.raises(RequestError, match="is not allowed with context") as error:
            parsed("chat", kept, messages=[user("?")], context="c", **{field: value})
        assert error.value.param == field
    for field, value in (("truncate_prompt_tokens", 9), ("cache_prompt", False)):
        with pytest.raises(RequestError, match="is not allowed with cache_control") as error:
            parsed("chat", messages=marked, **{field: value})
        assert error.value.param == field
    with pytest.raises(RequestError, match="at most 4 blocks may have cache_control, got 5"):
        parsed("chat", messages=[user(*[part(DOCUMENT, cache_control=MARK)] * 5)])
    assert parsed("chat", messages=[user(part("Too short.", cache_control=MARK))]).contexts == []
    [closed] = parsed("chat", messages=[user(DOCUMENT) | {"cache_control": MARK}]).contexts
    two = parsed("chat", closed, messages=[user("What?")], context="c").prompts[0]
    want = parsed("chat", messages=[user(DOCUMENT), user("What?")]).prompts[0]
    assert two.tokens.tolist() == want.tokens.tolist()
    prompt = parsed("completions", kept, prompt=" What?", context="c").prompts[0]
    assert smollm2_tokenizer().decode(prompt.tokens).endswith(f"{DOCUMENT.rstrip()} What?")


def test_contexts_of_one_text_differ_by_what_is_cited() -> None:
    def document(**citations: bool) -> dict[str, Any]:
        source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
        return {"type": "document", "source": source, "citations": citations, "cache_control": MARK}

    def kept(**citations: bool) -> KeptContext:
        [found] = parsed("messages", messages=[user(document(**citations))], max_tokens=9).contexts
        return found

    plain, cited = kept(enabled=False), kept(enabled=True)
    assert plain.text == cited.text and plain.digest != cited.digest
    assert kept(enabled=True) == cited and cited.digest == cited.computed_digest


def test_another_tool_result_is_no_more_of_the_kept_one() -> None:
    def result(number: int, *parts: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": list(parts)}

    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": f"call_{n}", "type": "function", "function": function} for n in range(2)]
    begin = [user("Look."), {"role": "assistant", "content": "Yes.", "tool_calls": calls}]
    marked = [*begin, result(0, part(DOCUMENT, cache_control=MARK))]
    [kept] = parsed("chat", by=CALLING, messages=marked).contexts
    for then, joined in ((result(1, part("red")), False), (result(0, part("red")), True)):
        whole = [*begin, result(0, part(DOCUMENT + "red" * joined)), *[then] * (not joined)]
        want = parsed("chat", by=CALLING, messages=whole).prompts[0].tokens.tolist()
        got = parsed("chat", kept, CALLING, messages=[then], context="c").prompts[0].tokens.tolist()
        assert got == want


def test_a_mark_on_tools_keeps_all_before_the_first_message() -> None:
    encoder = with_template(
        "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call: <tool_call> arguments\n"
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    look = {"name": "look", "description": DOCUMENT, "input_schema": {"type": "object"}}
    ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "system": "Be brief."}

    def read(kept: Any = None, **body: Any) -> ParsedRequest:
        return parse_request("messages", json.dumps(body).encode(), encoder, LIMITS, (), kept)

    marked = {"tools": [look, look | {"name": "see", "cache_control": MARK}]}
    first = read(**ask, **marked, messages=[user("What is red?")])
    [kept] = first.contexts
    assert kept.messages == [SYSTEM, user("")]
    assert '"name": "see"' in smollm2_tokenizer().decode(kept.text.tokens)
    del ask["system"]
    again = read(kept, **ask, **marked, messages=[user("What is red?")], context="c")
    assert again.prompts[0].tokens.tolist() == first.prompts[0].tokens.tolist()
    with pytest.raises(RequestError, match="does not begin with its context: tools,"):
        read(kept, **ask, tools=[look], messages=[user("What?")], context="c")


@pytest.mark.parametrize("place", ["messages[2].content[1]", "system[0]", "tools[1]"])
def test_a_mark_up_to_which_nothing_can_be_kept_is_left_out(place: str) -> None:
    encoder = with_template(
        "{{ tools }} <tool_call> arguments\n"
        "{% for m in messages %}{{ m.role }}: {{ m.content[:9] }}\n{% endfor %}"
    )
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "system": [part(DOCUMENT)],
        "messages": [user("Hi."), HELLO, user(part("What?"), part(DOCUMENT))],
        "tools": [tool, {"name": "see", "input_schema": {"type": "object"}}],
    }
    marked = {
        "messages[2].content[1]": body["messages"][2]["content"][1],
        "system[0]": body["system"][0],
        "tools[1]": body["tools"][1],
    }
    marked[place]["cache_control"] = MARK
    marked_too = parse_request("messages", json.dumps(body).encode(), encoder, LIMITS)
    assert marked_too.contexts == []
    assert marked_too.ignored == [re.sub(r"\d", "", place) + ".cache_control"]
    del marked[place]["cache_control"]
    bare = parse_request("messages", json.dumps(body).encode(), encoder, LIMITS)
    assert bare.prompts[0].tokens.tolist() == marked_too.prompts[0].tokens.tolist()


@pytest.mark.parametrize("endpoint", ["chat", "messages"])
def test_a_mark_is_left_out_if_the_tokenizer_tells_no_places(endpoint: Endpoint) -> None:
    with mock.patch("transformers.BatchEncoding.encodings", None):  # as one in Python
        encoder, ask = PromptEncoder(smollm2_tokenizer()), {"max_tokens": 9}
        marked = parsed(
            endpoint, by=encoder, messages=[user(part(DOCUMENT, cache_control=MARK))], **ask
        )
        with pytest.raises(RequestError, match="need a tokenizer that knows where tokens are"):
            parsed("chat", by=encoder, messages=[user(DOCUMENT)], return_sources=2)
    bare = parsed(endpoint, messages=[user(part(DOCUMENT))], **ask)
    assert marked.prompts[0].tokens.tolist() == bare.prompts[0].tokens.tolist()
    place = "messages[].content[]" if endpoint == "messages" else "messages[]"
    assert (marked.contexts, marked.ignored) == ([], [f"{place}.cache_control"])


@pytest.mark.parametrize("system", ["Translate.", "1 2 3", "\N{CJK UNIFIED IDEOGRAPH-4F60}" * 9])
def test_a_short_beginning_without_a_place_to_cut_is_not_kept(system: str) -> None:
    encoder = with_template("<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [user("What is red?")]}

    def read(text: str) -> ParsedRequest:
        marked = json.dumps(body | {"system": [part(text, cache_control=MARK)]})
        return parse_request("messages", marked.encode(), encoder, LIMITS)

    assert read(system).contexts == []
    assert len(read(DOCUMENT).contexts) == 1
    long = read(system * 64)
    assert long.contexts == [] and long.ignored == ["system[].cache_control"]


@pytest.mark.parametrize("marked", [0, 1])
def test_calls_behind_a_mark_are_not_kept(marked: int) -> None:
    """A turn's text is kept, or its text and the first of its two calls."""
    encoder = with_template(
        "{{ tools }} <tool_call> arguments\n"
        "{% for m in messages %}{{ m.role }}: {{ m.content }} "
        "{% for call in m.tool_calls or () %}<tool_call> {{ call.function | tojson }}{% endfor %}\n"
        "{% endfor %}"
    )
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"n": n}} for n in (1, 2)]
    turn: list[Any] = [part(DOCUMENT), *calls]
    results = [{"type": "tool_result", "tool_use_id": f"c{n}", "content": "red"} for n in (1, 2)]
    ask = {"model": "m", "max_tokens": 9}
    ask |= {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}

    def read(kept: Any = None, **body: Any) -> ParsedRequest:
        return parse_request("messages", json.dumps(ask | body).encode(), encoder, LIMITS, (), kept)

    def messages(*blocks: Any) -> list[Any]:
        return [user("Look."), {"role": "assistant", "content": list(blocks)}, user(*results)]

    want = read(messages=messages(*turn))
    turn[marked] = turn[marked] | {"cache_control": MARK}
    [kept] = read(messages=messages(*turn)).contexts
    assert len(kept.messages[-1].get("tool_calls", ())) == marked
    got = read(kept, messages=messages(*turn[marked + 1 :])[1:], context="c")
    assert got.prompts[0].tokens.tolist() == want.prompts[0].tokens.tolist()


def test_a_mark_within_a_block_keeps_the_block() -> None:
    text = part(DOCUMENT, cache_control=MARK)
    source = {"type": "content", "content": [text, part("The end.")]}
    for block in (
        {"type": "tool_result", "tool_use_id": "c1", "content": [text, part("The end.")]},
        {"type": "document", "source": source},
    ):
        messages = [user(block, part("Why?")), HELLO, user("So?")]
        [kept] = parsed("messages", messages=messages, max_tokens=9).contexts
        assert kept.messages[-1]["content"].endswith("The end.") and kept.ttl == 3600


def test_many_documents_and_marks_are_looked_at_once() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Red."}
    document = {"type": "document", "source": source, "cache_control": MARK}
    with mock.patch.object(CountTokensBody, "cites", mock.PropertyMock(return_value=False)) as seen:
        with pytest.raises(RequestError, match="at most 4 blocks may have cache_control, got 300"):
            parsed("messages", messages=[user(*[document] * 300)], max_tokens=9)
        assert seen.call_count <= 4


@pytest.mark.parametrize("endpoint", ["responses", "completions"])
def test_other_endpoints_refuse_cache_control_by_name(endpoint: Endpoint) -> None:
    named = {"prompt": DOCUMENT} if endpoint == "completions" else {"input": DOCUMENT}
    with pytest.raises(RequestError, match="unsupported field 'cache_control'"):
        parsed(endpoint, **named, cache_control=MARK)
    if endpoint == "responses":
        part = {"type": "input_text", "text": DOCUMENT, "cache_control": MARK}
        with pytest.raises(RequestError, match="cache_control"):
            parsed(endpoint, input=[{"type": "message", "role": "user", "content": [part]}])


def test_cache_control_is_checked_where_it_stands() -> None:
    for wrong in ({"type": "ephemeral", "ttl": "2h"}, {"type": "other"}, "1h", {"ttl": "1h"}):
        with pytest.raises(RequestError, match=r"messages\[0\].content\[1\].cache_control"):
            parsed("chat", messages=[user(part("a"), part("b", cache_control=wrong))])
    with pytest.raises(RequestError, match=r"unsupported field 'messages\[0\].content\[1\].title'"):
        parsed("chat", messages=[user(part("a"), part("b", title="c"))])


def test_without_pins_marks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    want = parsed("chat", messages=[user(DOCUMENT)]).prompts[0].tokens.tolist()
    monkeypatch.setattr(PromptEncoder, "with_ends", mock.Mock(side_effect=AssertionError))
    raw = json.dumps({"model": "m", "messages": [user(part(DOCUMENT, cache_control=MARK))]})
    found = parse_request("chat", raw.encode(), ENCODER, LIMITS._replace(pins=False))
    assert found.prompts[0].tokens.tolist() == want and not found.contexts
