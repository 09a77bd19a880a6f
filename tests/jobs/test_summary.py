"""Summaries of texts that fit the context, and of those that do not."""

from __future__ import annotations

import copy
import re
import threading
from typing import Any, cast

import pytest

from razor_dist.config.errors import ConfigError, DocumentError, EngineError, RequestError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.read import Document
from razor_dist.frontend.detokenizer import token_texts
from razor_dist.frontend.outputs import AnswerSentence, CompletionOutput, RequestOutput
from razor_dist.jobs.style import Style
from razor_dist.jobs.summarize import Summarizer
from razor_dist.jobs.task import ANSWER_TOKEN, ItemSize, PartResult, TokensDone, Update
from razor_dist.llm.llm import LLM
from tests.jobs.quoter import Quoter, document, plain_tokenizer
from tests.tokenizer import sentencepiece_tokenizer, smollm2_tokenizer


def summarize(llm: Quoter, text: str, **style: Any) -> dict[str, Any]:
    return steps(llm, text, {}, **style)[1]


def steps(
    llm: Quoter, text: str, stored: dict[str, Any], draft_seconds: float = 3.0, **style: Any
) -> tuple[list[Update], dict[str, Any]]:
    """The updates and the summary."""
    summarizer = Summarizer(cast(LLM, llm), Style(**style), draft_seconds=draft_seconds)
    work = summarizer.summarize(Document(text), stored)
    updates = []
    while True:
        try:
            updates.append(next(work))
        except StopIteration as end:
            return updates, end.value


def test_what_fits_is_one_prompt() -> None:
    llm, text = Quoter(4096), document(3)
    result = summarize(llm, text, words=10, language="French")
    assert result == {
        "tokens": len(smollm2_tokenizer()(text)["input_ids"]),
        "summary": "fact0 fact1 fact2",
        "finish_reason": "stop",
        "parts": 1,
        "levels": 0,
    }
    [prompt] = llm.prompts
    assert "Below is a document." in prompt and "about 10 words, in French." in prompt
    assert llm.params is not None and (llm.params.max_tokens, llm.params.temperature) == (30, 0)


def test_the_context_is_used_to_its_last_token() -> None:
    text = document(3)
    llm = Quoter(4096)
    summarize(llm, text, max_tokens=30)
    length = len(smollm2_tokenizer()(llm.prompts[0])["input_ids"])
    for context, parts in ((length + 30, 1), (length + 29, 2)):
        assert summarize(Quoter(context), text, max_tokens=30)["parts"] == parts


def test_what_does_not_fit_is_cut_at_chapters_and_summarised_twice() -> None:
    llm = Quoter(512)
    result = summarize(llm, document(6), max_tokens=40)
    assert result["summary"] == " ".join(f"fact{n}" for n in range(6))
    assert (result["levels"], result["parts"]) == (1, 2)
    *parts, last = llm.prompts
    for number, prompt in enumerate(parts, start=1):
        assert f"Below is part {number} of 2 of a long document" in prompt
    summaries = [part["summary"] for part in result["part_summaries"]]
    assert summaries == ["fact0 fact1 fact2", "fact3 fact4 fact5"]
    # Tokens may meet otherwise where the text is cut.
    parts_tokens = sum(part["tokens"] for part in result["part_summaries"])
    assert abs(parts_tokens - result["tokens"]) <= 1
    assert "# Part 1\n\nfact0 fact1 fact2\n\n# Part 2\n\nfact3" in last
    assert "the summaries of the consecutive parts" in last


def test_too_many_summaries_are_summarised_again() -> None:
    llm = Quoter(300)
    result = summarize(llm, document(60), max_tokens=60)
    assert result["levels"] >= 2 and result["parts"] == len(result["part_summaries"])
    kinds = [re.search(r"Below is (.*?)\.\n", prompt)[1] for prompt in llm.prompts]
    sizes = [int(kind.split()[3]) for kind in kinds if kind.startswith("part 1 of")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == result["parts"]
    assert kinds[-1] == "the summaries of the consecutive parts of a long document"
    # 60 facts do not fit into 60 tokens, so the last answer is cut.
    assert result["finish_reason"] == "length" and result["summary"].startswith("fact0 fact1")


def test_stored_parts_are_not_asked_for_again() -> None:
    text = document(60)
    first, again = Quoter(300), Quoter(300)
    updates, result = steps(first, text, {}, max_tokens=60)
    parts = [update for update in updates if isinstance(update, PartResult)]
    assert len({part.key for part in parts}) == len(parts) == len(first.prompts) - 1
    assert isinstance(updates[0], ItemSize) and updates[0].parts == result["parts"]
    sizes = [len(first.get_tokenizer()(prompt)["input_ids"]) for prompt in first.prompts]
    work = [size + ANSWER_TOKEN * 60 for size in sizes[: result["parts"]]]
    assert updates[0].tokens == sum(work)
    assert sum(part.tokens for part in parts[: result["parts"]]) == sum(
        part["tokens"] for part in result["part_summaries"]
    )
    done = {part.key: part.result for part in parts[:5]}
    updates, repeated = steps(again, text, done, max_tokens=60)
    assert repeated == result and len(again.prompts) == len(first.prompts) - 5
    assert updates[0] == ItemSize(sum(work[5:]), result["parts"], 5)


def test_a_part_that_fails_leaves_the_others_in_work_to_be_stored() -> None:
    begun, failed = threading.Event(), threading.Event()

    class Failing(Quoter):
        def stream(self, prompt: Any, params: Any, *, on_progress: Any) -> Any:
            if "part 1 of" in self._tokenizer.decode(prompt.ids):
                assert begun.wait(10)
                raise EngineError("a rank died")
            begun.set()
            assert failed.wait(10), "the failure is seen while this part is in work"
            yield from super().stream(prompt, params, on_progress=on_progress)

    llm = Failing(512)
    llm.config = EngineConfig(max_num_seqs=2)
    work = Summarizer(cast(LLM, llm), Style(max_tokens=40)).summarize(Document(document(6)), {})
    updates = []
    with pytest.raises(EngineError, match="a rank died"):
        for update in work:
            updates.append(update)
            if isinstance(update, TokensDone):
                failed.set()
    [part] = [update for update in updates if isinstance(update, PartResult)]
    assert part.result["summary"] == "fact3 fact4 fact5" and part.whole


@pytest.mark.parametrize(
    ("answer", "once"),
    [
        (" it is said again," * 12, "it is said again,"),
        ("A sentence. " + "it is said again, " * 12 + "it is", "A sentence. it is said again,"),
        (" no" * 50, "no"),
        ("no " * 40, None),
        ("it is said again, " * 2 + "and that is all there is to be said of it here.", None),
    ],
)
def test_loops_are_ended_and_told_once(answer: str, once: str | None) -> None:
    class Parrot(Quoter):
        def generate(self, prompts: Any, params: Any) -> Any:
            [output] = super().generate(prompts, params)
            ids = self._tokenizer(answer)["input_ids"]
            end = params.repetition_detection.first_loop(ids)
            [said] = output.outputs
            said.token_ids, said.text = tuple(ids[:end]), self._tokenizer.decode(ids[:end])
            said.finish_reason = "stop" if end is None else "repetition"
            return [output]

    result = summarize(Parrot(4096), "fact1")
    assert result["finish_reason"] == ("stop" if once is None else "repetition")
    assert result["summary"] == (answer.strip() if once is None else once)


@pytest.mark.parametrize("context", [70, 130])
def test_a_context_that_is_too_short_is_refused(context: int) -> None:
    facts = " ".join(f"fact{n}" for n in range(300))
    with pytest.raises(DocumentError, match=rf"a context of {context} tokens .*fewer words"):
        summarize(Quoter(context), facts, max_tokens=60)


def test_a_model_without_a_chat_template_gets_a_text() -> None:
    llm = Quoter(4096, plain_tokenizer())
    assert summarize(llm, document(2))["summary"] == "fact0 fact1"
    assert llm.prompts[0].endswith("Write only the summary.\n\nSummary:")


@pytest.mark.parametrize("sources", [False, True])
def test_models_are_asked_to_summarise_without_thinking_or_the_days_date(sources: bool) -> None:
    tokenizer = copy.copy(smollm2_tokenizer())
    tokenizer.chat_template += "{% if enable_thinking is false %}No thoughts.{% endif %}"
    tokenizer.chat_template += "{{ date_string if date_string is defined else strftime_now('%c') }}"
    llm = Quoter(4096, tokenizer)
    summarize(llm, document(2), sources=sources)
    assert llm.prompts[0].endswith("No thoughts.26 Jul 2024")


def test_templates() -> None:
    style = Style(words=7, template="{language}/{words}/{kind}: {document} {}")
    assert style.prompt("{words}", "a part") == "the language of the text/7/a part: {words} {}"


@pytest.mark.parametrize(
    ("style", "problem"),
    [
        ({"words": 0}, "words must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"language": " "}, "language must not be empty"),
        ({"template": "{document} {word}"}, r"unknown placeholder \{word\}"),
        ({"template": "{words}"}, r"no \{document\}"),
        ({"template": "{document} {words} {document}"}, r"\{document\} twice"),
    ],
)
def test_a_style_that_makes_no_sense_is_refused(style: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Style(**style)
    with pytest.raises(RequestError, match="temperature must be at most 2"):
        Style(temperature=3)


class Typist(Quoter):
    """Answers token by token, and goes on with an answer that stands at the end of a prompt."""

    def stream(self, prompt: Any, params: Any, *, on_progress: Any) -> Any:
        after = self._tokenizer("<|im_start|>assistant\n")["input_ids"]
        ends = range(len(prompt.ids), 0, -1)
        at = next(n for n in ends if prompt.ids[n - len(after) : n] == after)
        begun = prompt.ids[at:]
        before = prompt._replace(ids=prompt.ids[:at])
        [asked] = super().stream(before, params, on_progress=on_progress)
        whole, output = asked.outputs[0].token_ids, asked.outputs[0]
        assert whole[: len(begun)] == begun, "the prompt ends with the beginning of its answer"
        for end in range(len(begun) + 1, len(whole) + 1):
            output.token_ids = whole[len(begun) : end]
            output.text = self._tokenizer.decode(output.token_ids)
            asked.finished = end == len(whole)
            yield asked


@pytest.mark.parametrize("stored", [1, 4, 6])
def test_an_answer_in_work_goes_on_where_it_was(stored: int) -> None:
    text = document(4)
    updates, result = steps(Typist(4096), text, {}, 0, max_tokens=60)
    drafts = [update for update in updates if isinstance(update, PartResult)]
    assert len(drafts) > stored and not any(draft.whole for draft in drafts)
    assert sum(u.generated for u in updates if isinstance(u, TokensDone)) == len(drafts) + 1
    again = Typist(4096)
    kept = {draft.key: draft.result for draft in drafts[:stored]}
    updates, repeated = steps(again, text, kept, 0, max_tokens=60)
    assert repeated == result and result["summary"] == "fact0 fact1 fact2 fact3"
    done = [update for update in updates if isinstance(update, TokensDone)]
    assert sum(u.found_answer for u in done) == stored
    assert sum(u.generated for u in done) == len(drafts) + 1 - stored


@pytest.mark.parametrize("style", [{"temperature": 0.5}, {"sources": True}, {}])
def test_answers_that_cannot_go_on_are_not_stored_in_part(style: dict[str, Any]) -> None:
    llm = Quoter(4096) if "sources" in style else Typist(4096)
    if not style:  # the beginning would be read in full, and was written with windows
        llm.config = EngineConfig(max_num_seqs=1, prefill="exact")
    updates, _ = steps(llm, document(4), {}, 0, max_tokens=60, **style)
    assert not [update for update in updates if isinstance(update, PartResult)]


def test_a_very_long_text_is_tokenized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text, longest = document(60), 1000
    expected = summarize(Quoter(300), text, max_tokens=60)
    tokenizer, calls = copy.copy(smollm2_tokenizer()), list[list[str]]()

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: Any, **how: Any) -> Any:
            calls.append([texts] if isinstance(texts, str) else texts)
            return super().__call__(texts, **how)

    tokenizer.__class__ = Counting
    monkeypatch.setattr("razor_dist.models.tokenizer._CHARACTERS_AT_ONCE", longest)
    monkeypatch.setattr("razor_dist.jobs.summarize._BEGINNING_CHARACTERS", 0)
    assert summarize(Quoter(300, tokenizer), text, max_tokens=60) == expected
    assert max(len("".join(call)) for call in calls) < 2 * longest + 300
    assert sum(len("".join(call)) for call in calls) < 12 * len(text)


def test_a_long_text_of_few_tokens_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["\n" * 500 + document(chapters) for chapters in (2, 6)]
    expected = [summarize(Quoter(512), text, max_tokens=40) for text in texts]
    assert expected[0]["parts"] == 1 < expected[1]["parts"]
    monkeypatch.setattr("razor_dist.jobs.summarize._BEGINNING_CHARACTERS", 0)
    monkeypatch.setattr("razor_dist.jobs.summarize._TOKEN_CHARACTERS", 1)
    assert [summarize(Quoter(512), text, max_tokens=40) for text in texts] == expected


def test_sentences_of_a_summary_that_ends_in_a_loop_are_at_their_words() -> None:
    tokenizer = sentencepiece_tokenizer()

    class Parrot(Quoter):
        def generate(self, prompts: Any, params: Any) -> Any:
            ids = self._tokenizer("the world says a time. " + "the time says a world. " * 20)
            ids = ids["input_ids"][1:]
            text = token_texts(self._tokenizer).decode(ids)
            places = [found.span() for found in re.finditer(r"\S[^.]*\.", text)]
            said = CompletionOutput(0, text, tuple(ids), None, finish_reason="repetition")
            said.sentences = [AnswerSentence(*place, [], 0.0) for place in places]
            return [RequestOutput("r", None, prompts[0].ids, outputs=[said])]

    result = summarize(Parrot(4096, tokenizer), "a", sources=True)
    places = [(one["start"], one["end"]) for one in result["sentences"]]
    words = [result["summary"][start:end] for start, end in places]
    assert words == ["the world says a time.", "the time says a world"]
