"""The bench of drafts: its arithmetic, its prompts, and one small run."""

from __future__ import annotations

import pytest

from razor_dist.documents.corpus import reference_paragraphs, reference_prose
from razor_dist.evals.bench import drafts, prefix, start
from razor_dist.evals.bench.drafts import TASKS, Timed, compared, copied, prompts, run
from razor_dist.evals.bench.settings import DraftsBenchSettings
from tests.tokenizer import smollm2_tokenizer

CHOSEN = ("repeat a passage", "free chat")


def test_speeds_are_held_against_their_bars() -> None:
    def timed(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), accepted: int = 0) -> Timed:
        return Timed([9.0, seconds, seconds], tokens, accepted=accepted, steps=2)

    prompt = [9, 1, 2, 3, 4, 9]
    found = {"none": timed(3.0), "lookup": timed(1.5, accepted=3), "ngram": timed(6.0)}
    figure, row = compared("repeat a passage", 1, prompt, found)
    assert figure["tokens_per_second"] == {"none": 1.0, "lookup": 2.0, "ngram": 0.5}
    assert row[1:] == ["100%", "1.0", "2.00 x", "0.50 x", "1.50", "0.00", "≥ 2", "met"]
    assert compared("repeat a passage", 8, prompt, found)[1][-2:] == ["≥ 3", "missed"]
    assert compared("free chat", 1, prompt, found | {"lookup": timed(3.2)})[1][-1] == "missed"
    assert compared("summary", 1, prompt, found)[1][-2:] == ["", ""]
    others = found | {"ngram": timed(1.0, (1, 2, 3, 5))}
    figure, row = compared("repeat a passage", 1, prompt, others)
    assert not figure["same_tokens"] and row[-1] == "other tokens"


def test_prompts_have_the_document_and_its_passage() -> None:
    tokenizer = smollm2_tokenizer()
    found = dict(prompts(tokenizer, 900))
    assert found.keys() == TASKS.keys()
    assert all(900 < len(ids) < 1500 for ids in found.values())
    document, _, end = tokenizer.decode(found["repeat a passage"]).partition("word for word:")
    passage, _, answer = end.strip().partition("<|im_end|>")
    assert passage[:300] in document
    assert passage.startswith(answer.split("assistant\n")[1])
    corrected = tokenizer.decode(found["correct a word"]).split("assistant\n")[1]
    assert "MODULE" in corrected and corrected.replace("MODULE", "module") in passage
    listed = tokenizer.decode(found["extract a list"]).split("assistant\n")[1]
    assert listed.startswith("- ") and listed[2:].split("\n")[0] in passage


def test_prose_begins_anew_where_it_ends() -> None:
    once = reference_paragraphs()
    words = [word for paragraph in once for word in paragraph.split()]
    assert reference_prose(len(words) + 1, lambda text: len(text.split())) == [*once, once[0]]
    assert prefix.prose(40, len(words) - 20).split() == words[-20:] + words[:20]
    # Twice as long as all of it; prompts of one length, no two of which begin alike.
    length = 2 * prefix.words_of(10_000)
    texts = start.prompts(20_000)
    assert [len(text.split()) for text in texts] == [14] * 3 + [length + 2] * 3
    assert len({text[:60] for text in texts}) == 6
    tokenizer = smollm2_tokenizer()
    assert all(len(ids) > 40_000 for _, ids in prompts(tokenizer, 40_000))


def test_a_document_of_one_paragraph_is_its_passage() -> None:
    tokenizer = smollm2_tokenizer()
    text = tokenizer.decode(dict(prompts(tokenizer, 1))["repeat a passage"])
    paragraph = " ".join(reference_paragraphs()[0].split())
    assert paragraph in text.partition("word for word:")[2]


def test_only_rows_of_four_tokens_count_as_copied() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    assert copied(prompt, [9, 2, 3, 4, 5, 9, 4, 5, 6, 9]) == 0.4
    assert copied(prompt, [1, 2, 3, 4, 5, 6]) == 1
    assert copied(prompt, [1, 2, 3]) == 0


@pytest.mark.long
def test_a_run_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "TASKS", {task: TASKS[task] for task in CHOSEN})
    record = run(
        DraftsBenchSettings(tokens="300", new_tokens=24, repeats=1, world_sizes="2", threads=2)
    )
    tasks = record.figures["tasks"]
    assert [task["task"] for task in tasks] == [*CHOSEN]
    assert all(task["same_tokens"] for task in tasks)
    repeated = tasks[0]["accepted_per_step"]
    assert repeated["none"] == 0 and repeated["lookup"] > 0
    assert "repeat a passage" in record.page()
