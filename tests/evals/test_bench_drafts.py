"""The bench of drafts: its arithmetic, its prompts, and one small run."""

from __future__ import annotations

from razor_dist.evals.bench.drafts import TASKS, Timed, compared, prompts, run
from razor_dist.evals.bench.settings import DraftsBenchSettings
from tests.tokenizer import smollm2_tokenizer


def test_speeds_are_held_against_their_bars() -> None:
    def timed(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), accepted: int = 0) -> Timed:
        return Timed([9.0, seconds, seconds], tokens, accepted=accepted, steps=2)

    found = {"none": timed(3.0), "lookup": timed(1.5, accepted=3), "ngram": timed(6.0)}
    figure, row = compared("repeat a passage", 1, 7, found)
    assert figure["tokens_per_second"] == {"none": 1.0, "lookup": 2.0, "ngram": 0.5}
    assert row[1:] == ["1.0", "2.00 x", "0.50 x", "1.50", "0.00", "≥ 2", "met"]
    assert compared("repeat a passage", 8, 7, found)[1][-2:] == ["≥ 3", "missed"]
    assert compared("free chat", 1, 7, found | {"lookup": timed(3.2)})[1][-1] == "missed"
    assert compared("summary", 1, 7, found)[1][-2:] == ["", ""]
    others = found | {"ngram": timed(1.0, (1, 2, 3, 5))}
    figure, row = compared("repeat a passage", 1, 7, others)
    assert not figure["same_tokens"] and row[-1] == "other tokens"


def test_prompts_have_the_document_and_its_passage() -> None:
    tokenizer = smollm2_tokenizer()
    found = dict(prompts(tokenizer, 900))
    assert found.keys() == TASKS.keys()
    assert all(900 < len(ids) < 1300 for ids in found.values())
    text = tokenizer.decode(found["repeat a passage"])
    passage = text.split("word for word:")[1].strip()[:300]
    assert text.count(passage) == 2


def test_a_run_on_two_ranks() -> None:
    record = run(
        DraftsBenchSettings(tokens="300", new_tokens=24, repeats=1, world_sizes="2", threads=2)
    )
    tasks = record.figures["tasks"]
    assert [task["task"] for task in tasks] == list(TASKS)
    assert all(task["same_tokens"] for task in tasks)
    repeated = tasks[0]["accepted_per_step"]
    assert repeated["none"] == 0 and repeated["lookup"] > 0
    assert "repeat a passage" in record.page()
