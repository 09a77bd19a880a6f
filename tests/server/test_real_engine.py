"""The server with real ranks and the real embedded model, through real clients."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest
from playwright.sync_api import expect
from prometheus_client.parser import text_string_to_metric_families

from tests.documents import files
from tests.preloaded import executed
from tests.server.browser import chromium
from tests.server.process import ServerProcess, wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "model_name"  # the label of every metric


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    command = [sys.executable, "launch/serve.py", "--world-size", "2", "--max-model-len", "4096"]
    # Shorter than a chunk of 3900 tokens takes: a busy rank 0 must not be taken for a stuck one.
    command += ["--heartbeat-timeout", "10", "--speculative-config", '{"method": "lookup"}']
    with executed():
        started = ServerProcess(*command)
    with started as process:
        process.url(timeout=180)
        yield process


@pytest.mark.long
def test_the_first_question_is_answered_by_the_defaults(server: ServerProcess) -> None:
    """No temperature and no limit: the answers are right, and end."""
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    for _ in range(5):
        answer = client.chat.completions.create(model="smollm2", messages=QUESTION)
        assert answer.choices[0].message.content == "The capital of France is Paris."
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_ends_on_two_ranks_with_a_grammar_and_two_answers(
    server: ServerProcess, stream: bool
) -> None:
    grammar = {"regex": "(no )+"}
    short = {"max_pattern_size": 8, "min_count": 3, "min_length": 12}
    extra: dict[str, Any] = {"structured_outputs": grammar, "repetition_detection": short}
    client: Any = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        n=2,
        max_tokens=60,
        logit_bias={2: -100},
        stream=stream,
        extra_body=extra,
    )
    chunks = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    reasons = {c.index: c.finish_reason for c in choices if c.finish_reason}
    assert reasons == {0: "repetition", 1: "repetition"}
    if not stream:
        assert 24 <= answer.usage.completion_tokens < 120
        assert all(re.fullmatch("(no )+", c.message.content.rstrip() + " ") for c in choices)


@pytest.mark.long
def test_the_openai_client_streams_an_answer(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    whole = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=16
    )
    assert whole.choices[0].message.content == text
    assert whole.usage is not None and chunks[-1].usage is not None
    # How much is drafted follows from how long steps take.
    drafts = {"completion_tokens_details"}
    assert chunks[-1].usage.model_dump(exclude=drafts) == whole.usage.model_dump(exclude=drafts)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    longer = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=20,
        extra_body={"min_tokens": 20},
    )
    assert longer.usage is not None and whole.usage.completion_tokens < 16
    assert longer.usage.completion_tokens == 20
    assert (longer.choices[0].message.content or "").startswith(text)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


@pytest.mark.long
def test_what_was_read_before_is_told_and_answers_are_the_same(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    document = "The door of the house is red. " * 40

    def ask(question: str, **extra: str) -> tuple[str | None, int]:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
            temperature=0,
            max_tokens=8,
            extra_body=extra,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached is not None and cached < answer.usage.prompt_tokens
        return answer.choices[0].message.content, cached

    fresh, cached = ask("What colour is the door?")
    assert cached < 64  # the template's beginning, at most
    _, other = ask("What is red?")
    assert other > 300
    again, cached = ask("What colour is the door?")
    assert again == fresh and cached > 300
    response = client.responses.create(
        model="smollm2", input=f"{document}\n\nWhat is red?", temperature=0, max_output_tokens=1
    )
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > 300
    assert ask("What colour is the door?", cache_salt="mine") == (fresh, 0)
    assert ask("What colour is the door?", cache_salt="mine")[0] == fresh
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        ask("What colour is the door?", cache_salt="")


@pytest.mark.slow
def test_sources_are_passages_of_what_was_sent(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    fact = "The secret code of the castle \N{CASTLE} is 48213."
    filler = "Größe zählt nicht. The grass is green. The sky is blue. The sun is yellow. " * 12
    documents = ["Here is a letter. It says nothing of castles.", f"{filler}{fact} {filler}"]
    messages = [{"role": "user", "content": text} for text in documents]
    messages[1:1] = [{"role": "assistant", "content": "Thank you."}]
    messages[-1]["content"] += "\n\nWhat is the secret code of the castle?"
    asked = {"model": "smollm2", "temperature": 0, "max_tokens": 24}

    def ask(count: int = 3, **more: Any) -> Any:
        extra = {"return_sources": count}
        return client.chat.completions.create(messages=messages, **asked, **more, extra_body=extra)

    choice = ask().choices[0]
    assert "48213" in choice.message.content
    top, *others = choice.sources
    assert (top["text"], top["message"]) == (fact, 2)
    assert len(others) == 2 and top["weight"] > 2 * others[0]["weight"] > 0
    for source in choice.sources:
        content = messages[source["message"]]["content"]
        assert content[source["start"] : source["end"]] == source["text"]
    assert 0.5 < choice.grounded <= 1 == choice.question_match
    [sentence, *_] = choice.sentences
    said = choice.message.content[sentence["start"] : sentence["end"]]
    assert "48213" in said and sentence["sources"][0]["text"] == fact
    # The same from the cache, from a stream, and in the completion's prompt.
    chunks = list(ask(stream=True))
    for again in (ask().choices[0], chunks[-1].choices[0]):
        for one, same in zip(again.sources, choice.sources, strict=True):
            assert one == {**same, "weight": pytest.approx(same["weight"], abs=1e-4)}
    assert all(not hasattr(chunk.choices[0], "sources") for chunk in chunks[:-1])
    streamed = [s for c in chunks for s in getattr(c.choices[0], "sentences", [])]
    assert [s["end"] for s in streamed] == [s["end"] for s in choice.sentences]
    prompt = f"{documents[1]}\n\nQuestion: What is the secret code of the castle?\n\nAnswer: It is"
    found = client.completions.create(prompt=prompt, **asked, extra_body={"return_sources": 1})
    [source] = found.choices[0].sources
    assert source["text"] == fact and prompt[source["start"] : source["end"]] == fact
    assert "message" not in source
    # Nothing is told where nobody asked, and nothing is known of an answer of one token.
    assert not hasattr(ask(0).choices[0], "sources")
    single = client.completions.create(
        prompt="A", model="smollm2", max_tokens=1, extra_body={"return_sources": 1}
    )
    assert (single.choices[0].sources, single.choices[0].grounded) == ([], None)


@pytest.mark.long
def test_the_anthropic_client_gets_citations(server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=server.url(), api_key="none")
    fact = "The secret code of the castle is 48213."
    filler = "The grass is green. The sky is blue. "
    pdf = base64.b64encode(files.pdf(filler * 3, fact, filler)).decode()
    sources: list[Any] = [
        {
            "type": "text",
            "media_type": "text/plain",
            "data": f"\N{CASTLE}\r\n{filler * 3}{fact} {filler}",
        },
        {"type": "base64", "media_type": "application/pdf", "data": pdf},
    ]
    places = []
    for source in sources:
        document = {"type": "document", "source": source, "citations": {"enabled": True}}
        question = {"type": "text", "text": "What is the secret code of the castle?"}
        asked: Any = {
            "model": "smollm2",
            "max_tokens": 32,
            "messages": [{"role": "user", "content": [document, question]}],
        }
        message = client.messages.create(**asked)
        [citation] = message.content[0].citations
        assert "48213" in message.content[0].text and citation.cited_text == fact
        places.append(citation)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].citations == [citation]
        assert streamed.usage.cache_read_input_tokens > 0
        read = streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens
        counted = client.messages.count_tokens(model="smollm2", messages=asked["messages"])
        assert counted.input_tokens == read == message.usage.input_tokens
    assert sources[0]["data"][places[0].start_char_index : places[0].end_char_index] == fact
    assert (places[1].start_page_number, places[1].end_page_number) == (2, 3)


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    country: Literal["France", "Spain"]
    population: int = pydantic.Field(ge=0, le=10**8)


@pytest.mark.long
def test_the_openai_client_parses_what_it_asks_for(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    asked: Any = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 64}
    parsed = client.chat.completions.parse(**asked, response_format=City)
    [choice] = parsed.choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed is not None and choice.message.parsed.country == "France"
    chosen = client.chat.completions.create(
        **asked | {"temperature": 2}, n=3, extra_body={"structured_outputs": {"regex": "[A-C]{3}!"}}
    )
    assert all(re.fullmatch("[A-C]{3}!", c.message.content or "") for c in chosen.choices)


@pytest.mark.long
def test_metrics_are_what_the_ranks_count(server: ServerProcess) -> None:
    url = server.url()

    def scrape() -> dict[str, float]:
        """Samples by name and the values of their labels, but for the model's."""
        text = httpx.get(f"{url}/metrics", timeout=20).text
        found = {}
        for sample in (s for f in text_string_to_metric_families(text) for s in f.samples):
            labels = [value for name, value in sorted(sample.labels.items()) if name != MODEL]
            found[" ".join([sample.name.removeprefix("razor:"), *labels])] = sample.value
        return found

    body = {"model": "smollm2", "prompt": [100] * 100, "max_tokens": 300, "ignore_eos": True}
    path = f"{url}/v1/completions"
    running: dict[str, float] = {}

    def runs() -> bool:
        running.update(scrape())
        return running.get("kv_cache_usage_perc", 0) > 0

    with httpx.stream("POST", path, json=body | {"stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert wait_until(runs, 10)
        for rank in "01":
            assert running[f"kv_cache_bytes retrieval {rank}"] > 0
            assert running[f"kv_cache_bytes streaming {rank}"] > 0
        assert running["num_requests_running"] == 1
        assert len(list(lines)) > 300
    found, stats = scrape(), httpx.get(f"{url}/stats", timeout=20).json()
    assert found["prompt_tokens_total"] == stats["prompt_tokens"]
    assert found["generation_tokens_total"] == stats["generated_tokens"]
    assert found["step_seconds_count prefill"] + found["step_seconds_count decode"] >= 32
    sent = {purpose: n for purpose, n in stats["bytes_sent"].items() if purpose != "control"}
    assert sent == {purpose: found[f"bytes_sent_total {purpose}"] for purpose in sent}
    assert found["resident_memory_bytes 1"] > 2**27


@pytest.mark.long
def test_drafts_are_counted(server: ServerProcess) -> None:
    """An answer that repeats a passage has drafts that come true; its usage and metrics say so."""
    passage = "The old mill stood by the river, and its wheel had not turned for thirty years. "
    question = f"{passage * 3}\n\nRepeat the text above word by word."
    client = openai.OpenAI(base_url=f"{server.url()}/v1", api_key="none")
    names = [
        "razor:spec_decode_num_drafts_total",
        "razor:spec_decode_num_draft_tokens_total",
        "razor:spec_decode_num_accepted_tokens_total",
    ]
    by_position = "razor:spec_decode_num_accepted_tokens_per_pos_total"

    def counts() -> tuple[list[float], float]:
        text = httpx.get(server.url() + "/metrics").text
        found = {sample.name: 0.0 for sample in _samples(text)}
        for sample in _samples(text):
            found[sample.name] += sample.value
        return [found[name] for name in names], found[by_position]

    before, _ = counts()
    usages = []
    for stream in (False, True):
        answer: Any = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=60,
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        usages.append((list(answer)[-1] if stream else answer).usage)
    after, positions = counts()
    drafts, drafted, accepted = (now - then for now, then in zip(after, before, strict=True))
    details = [usage.completion_tokens_details for usage in usages]
    assert accepted == sum(of.accepted_prediction_tokens for of in details) > 30
    assert drafted - accepted == sum(of.rejected_prediction_tokens for of in details)
    assert drafts <= drafted and positions == after[2]
    stats = httpx.get(server.url() + "/stats").json()["spec_decode"]
    assert [stats[n] for n in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")] == after
    assert usages[0].completion_tokens == usages[1].completion_tokens


def _samples(text: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


@pytest.mark.long
def test_the_page_reads_and_asks_the_real_model(server: ServerProcess) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(server.url())
        page.evaluate(
            "sessionStorage['razor_dist settings'] = '{\"maxTokens\": 24, \"temperature\": 0}'"
        )
        page.reload()
        city = b"<title>x</title><p>The capital of Ruritania is the town of Strelsau."
        file: Any = {"name": "atlas.html", "mimeType": "", "buffer": city}
        page.set_input_files("#files", file)
        for question in (
            "What is the capital of Ruritania?",
            "Which town is it? Answer in a word.",
        ):
            page.fill("#question", question)
            page.press("#question", "Enter")
            turn = page.locator("article").last
            expect(turn.locator(".usage")).to_contain_text("of them new", timeout=30_000)
            expect(turn.locator(".answer")).to_contain_text("Strelsau")
        words = turn.locator(".usage").inner_text().replace(",", "")
        prompt, new, _ = map(int, re.findall(r"\d+", words))
        assert new < prompt / 2  # the document is not read again
        expect(page.locator("#gauge")).to_contain_text("Sent between 2 ranks", timeout=10_000)


@pytest.mark.long
def test_a_client_that_vanishes_in_mid_prefill_frees_its_cache(server: ServerProcess) -> None:
    url = server.url()
    body = {"model": "smollm2", "prompt": [100] * 3900, "max_tokens": 100, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=1)

    def freed() -> bool:
        answer = httpx.get(f"{url}/stats", timeout=60)
        if answer.status_code == 503:  # the chunk is not done yet
            assert answer.json()["error"]["code"] == "engine_busy"
            return False
        stats = answer.json()
        return stats["running"] == 0 and sum(stats["kv_bytes_per_rank"]) == 0

    assert wait_until(freed, 60)
    peak = httpx.get(f"{url}/stats", timeout=60).json()["peak_kv_bytes_per_rank"]
    assert min(peak) > 0
    assert "no sign of life" not in server.log
