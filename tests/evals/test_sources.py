"""Sources of needles, measured on the embedded model; and the arithmetic of the baselines."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from razor_dist import cli
from razor_dist.attention.sources import TOP
from razor_dist.config.errors import ConfigError
from razor_dist.config.sources import load_config
from razor_dist.evals.needle.config import NeedleConfig
from razor_dist.evals.needle.task import NeedleTask
from razor_dist.evals.sources.citations import CitationsTask
from razor_dist.evals.sources.config import CitationsConfig, SourcesConfig
from razor_dist.evals.sources.report import SourcesReport, bm25, page
from razor_dist.evals.sources.separation import auc_interval, roc_auc, separation
from razor_dist.evals.sources.task import Document, SourcesTask
from razor_dist.evals.suites.config import CONFIGS
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.nonliteral import NONLITERAL, facts
from razor_dist.evals.suites.ruler import RULER
from razor_dist.evals.texts import Prompter
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.heads.head_map import shipped_head_map
from razor_dist.jobs.task import Task
from tests.tokenizer import smollm2_tokenizer


@pytest.mark.slow
def test_the_command_finds_a_needle_and_misses_none(tmp_path: Path) -> None:
    places = "--lengths 400 --absent-lengths 400 --depths 50 --needles 1 --haystack reference"
    command = ["eval", "sources", *places.split(), "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    found = json.loads((tmp_path / "run/sources.json").read_text())
    grid = found["tasks"]["grid"]
    assert (grid["asked"], grid["right"], grid["absent"]) == (1, 1, 1)
    there, absent = found["answers"]
    assert there["ranks"] == [1] and there["expected"] in there["sources"][0]["text"]
    assert there["grounded"] > absent["grounded"]
    rows = {row["heads"]: row for row in grid["heads"]}
    assert rows["4 strongest"]["top_right"] == 1
    assert set(rows) > {"1 strongest", "all 117", "4 random", "last layer's 9", "BM25"}
    assert "| 4 strongest | 100 % |" in (tmp_path / "run/report.md").read_text()
    # What is there is not run again.
    assert cli.main(command) == 0


@pytest.mark.parametrize(
    "planned",
    [
        lambda **given: SourcesTask.plan(SourcesConfig(**given)),
        lambda **given: CitationsTask.plan(CitationsConfig(**given)),
        lambda **given: SuiteTask.plan(CONFIGS["ruler"](methods="razor", lengths="512", **given)),
        lambda **given: NeedleTask.plan(NeedleConfig(methods="razor", **given)),
    ],
    ids=["sources", "citations", "ruler", "needle"],
)
def test_a_shipped_map_is_named_as_by_its_path(planned: Callable[..., Task]) -> None:
    path = shipped_head_map("smollm2-14-1")
    for given in ("smollm2-14-1", str(path)):
        [engine] = planned(head_map=given, haystack="reference").engines.values()
        assert engine.head_map == str(path)


def traced(
    task: SourcesTask, number: int, answer: str, score: float, looks: list[tuple[int, float]]
) -> dict[str, Any]:
    """A result whose four strongest heads look at a character, and the last layer's at another.

    ``looks`` has for each token of the answer the character of the content, and the weight.
    """
    tokenizer = smollm2_tokenizer()
    item = task.items()[number]
    kind, place = item.data["at"]
    document = task.document(Prompter(tokenizer), item)
    message = {"role": "user", "content": document.content}
    _, text = PromptEncoder(tokenizer).chat_with_ends([message])
    [part] = text.parts
    positions = np.full((len(looks), 117, TOP), -1, "<i4")
    weights = np.zeros((len(looks), 117, TOP), "<f4")
    for token, (character, weight) in enumerate(looks):
        positions[token, :4, 0] = np.flatnonzero(text.ends > part.begin + character)[0]
        weights[token, :4, 0] = weight
        # The rest is what the first token and the question get.
        positions[token, :4, 1], weights[token, :4, 1] = 0, 1 - weight
    return {
        "kind": kind,
        "length": place[0],
        "number": place[1],
        "prompt_tokens": len(text.ends),
        "expected": ", ".join(document.answers),
        "answer": answer,
        "score": score,
        "heads": 117,
        "positions": base64.b64encode(positions.tobytes()).decode(),
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }


def test_another_version_of_a_suite_is_another_job() -> None:
    task = SourcesTask.plan(SourcesConfig(tasks="grid,vt,near", haystack="reference"))
    versions = {"grid": 2, "ruler": RULER.version, "nonliteral": NONLITERAL.version}
    assert task.settings["versions"] == versions


def documents(task: SourcesTask) -> list[Document]:
    prompter = Prompter(smollm2_tokenizer())
    return [task.document(prompter, item) for item in task.items()]


def test_a_question_in_other_words_has_its_sentence() -> None:
    tasks = ("near", "far")
    config = SourcesConfig(tasks=",".join(tasks), lengths="900", samples=1, haystack="reference")
    for task, found in zip(tasks, documents(SourcesTask.plan(config)), strict=True):
        [name], [(begin, end)] = found.answers, found.places
        assert found.content[begin:end] == name and name not in found.question
        said = found.content[: begin - len(" is ")].rpartition("The one who ")[2]
        [fact] = [fact for fact in facts() if fact.said == said]
        assert getattr(fact, task) in found.question and found.content.endswith(found.question)


def test_places_of_rulers_tasks_are_judged_one_by_one() -> None:
    tasks = "niah_multivalue,niah_multikey_1"
    config = SourcesConfig(tasks=tasks, lengths="700", samples=1, haystack="reference")
    task = SourcesTask.plan(config)
    keys, values = documents(task)
    assert len(keys.places) == 1 and len(values.places) == 4
    [wanted] = keys.answers
    [other, *_] = [n for n in re.findall(r"is (\d{7})\.", keys.content) if n != wanted]
    begins = [begin for begin, _ in values.places]
    said = f"{values.answers[0]} and {values.answers[2]}"
    results = [
        # Another key's number, from that key's needle.
        traced(task, 0, f"It is {other}.", 0.0, [(keys.content.index(other), 0.8)]),
        # Two of four, from their places, the second one heavier; and a look at a third.
        traced(task, 1, said, 0.5, [(begins[0], 0.5), (begins[2], 0.75), (begins[1], 0.25)]),
    ]
    found = SourcesReport.of(task, results).summary()
    assert [one["said"] for one in found["answers"]] == [[False], [True, False, True, False]]
    assert [one["ranks"] for one in found["answers"]] == [[None], [2, 3, 1, None]]
    multikey = {row["heads"]: row for row in found["tasks"]["niah_multikey_1"]["heads"]}
    figures = {name: value for name, value in multikey["4 strongest"].items() if name != "heads"}
    assert figures == {
        "top_wrong": 0,
        "top_mistaken": 1,
        "shown_unsaid": 0,
        "told_wrong": 1,
        "grounded_wrong": pytest.approx(1),
    }
    multivalue = {row["heads"]: row for row in found["tasks"]["niah_multivalue"]["heads"]}
    own = multivalue["4 strongest"]
    assert (own["top_wrong"], own["shown_said"], own["shown_unsaid"]) == (1, 1, 0.5)
    # All heads but four look nowhere, among them the last layer's; BM25 knows the key.
    last = multivalue["last layer's 9"]
    assert (last["top_wrong"], last["shown_said"], last["told_wrong"]) == (0, 0, 0)
    bm25_row = multivalue["BM25"]
    assert (bm25_row["top_wrong"], bm25_row["shown_said"], bm25_row["shown_unsaid"]) == (1, 1, 1)
    text = page(found, 4)
    assert "## By task: 4 strongest heads" in text
    assert "| niah_multikey_1, 0 of 1 right | 0 % | 100 % |" in text


def test_questions_about_one_document_are_one_sample() -> None:
    given = {"lengths": "900", "samples": 2, "haystack": "reference"}
    rows = []
    for tasks in ("near,far", "near"):
        task = SourcesTask.plan(SourcesConfig(tasks=tasks, **given))
        results = []
        for number, (document, item) in enumerate(zip(documents(task), task.items(), strict=True)):
            right = item.data["at"][1][1] == 0  # the first document's
            looks = [(document.places[0][0], 0.9 if right else 0.1)]
            answer = document.answers[0] if right else "Nobody."
            results.append(traced(task, number, answer, float(right), looks))
        rows.append(SourcesReport.of(task, results).summary()["separation"][-3])
    both, alone = rows
    assert (both["task"], both["counts"], alone["counts"]) == ("all", (2, 2), (1, 1))
    assert both["auc"] == alone["auc"] == 1 and both["interval"] == alone["interval"]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "base"])
def test_a_document_is_where_its_prompt_has_it(chat: bool) -> None:
    config = SourcesConfig(tasks="grid,vt", lengths="900", depths="50", needles=1, samples=1)
    config = config.model_copy(update={"haystack": "reference"})
    tokenizer = copy.copy(smollm2_tokenizer())
    if not chat:
        tokenizer.chat_template = None
    prompter, task = Prompter(tokenizer), SourcesTask.plan(config)
    for item in task.items():
        document = task.document(prompter, item)
        ids, text = prompter.whole(document.content, document.cue), prompter.place(document.content)
        before = prompter.whole(document.content, "")
        # Of a base model's prompt the cue, and the space before it, follow.
        assert (
            ids[: len(text.ends)] == before[: len(text.ends)] and len(before) - len(text.ends) < 2
        )
        [part] = text.parts
        # No place is in the question, where there can be no source.
        assert all(end <= part.searched for _, end in document.places)
        assert document.question in document.content[part.searched :]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "cwe"}, "tasks: 'cwe' is none of grid, ruler, and the tasks with known"),
        ({"tasks": "ruler,qa_1"}, "task qa_1 needs squad, the path of its data"),
        ({"hotpotqa": "dev.json"}, "hotpotqa is for task qa_2, which is not among the tasks"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"lengths": "4K", "absent_lengths": "3000"}, "3000 is none of lengths, 4096"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SourcesConfig(**settings)


def test_lengths_without_needles_are_of_the_grids() -> None:
    assert SourcesConfig(lengths="2500,8000").absent_lengths == (1500, 2500)
    assert SourcesConfig(lengths="4000,3000", absent_lengths="4000").absent_lengths == (4000,)
    assert load_config(SourcesConfig, {"absent_lengths": "none"}).absent_lengths is None


def test_tasks_are_in_the_papers_order() -> None:
    names = SourcesConfig(tasks="vt,ruler,grid").task_names
    assert names[0] == "grid" and names[-1] == "vt" and len(names) == 10
    assert SourcesConfig().task_names == ("grid",)


def test_data_without_places_are_refused(tmp_path: Path) -> None:
    question = {"question": "Where?", "answers": [{"text": "here"}]}
    texts = [f"Town {n} is here. " + "It is small. " * 5 for n in range(60)]
    article = {"paragraphs": [{"context": text, "qas": [question]} for text in texts]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [article]}))
    own = {"tasks": "qa_1", "lengths": "400", "samples": 1, "haystack": "reference"}
    task = SourcesTask.plan(SourcesConfig(**own, squad=str(tmp_path / "squad.json")))
    with pytest.raises(ConfigError, match="the data of qa_1 do not tell where its answer stands"):
        documents(task)


def test_an_answer_that_contains_no_is_not_no(tmp_path: Path) -> None:
    questions = []
    for name in ("Ann", "Ben"):
        context = [[f"{name}'s town {n}", ["It is small.", " Nobody rows."]] for n in range(20)]
        question = {"question": f"Does {name} row?", "answer": "no", "context": context}
        questions.append({**question, "supporting_facts": [[context[3][0], 1]]})
    (tmp_path / "hotpot.json").write_text(json.dumps(questions))
    own = {"tasks": "qa_2", "lengths": "700", "samples": 1, "haystack": "reference"}
    config = SourcesConfig(**own, hotpotqa=str(tmp_path / "hotpot.json"))
    [document] = documents(SourcesTask.plan(config))
    scores = [document.score(said, ["no"]) for said in ("I do not know.", "No, she does not.")]
    assert scores == [0, 1]


@pytest.mark.parametrize("asked", ["whole", "around", "place"])
def test_models_are_asked_to_answer_without_thinking_or_the_days_date(asked: str) -> None:
    tokenizer = copy.copy(smollm2_tokenizer())
    thinking = "{% if enable_thinking is defined and not enable_thinking %}No thoughts.{% endif %}"
    date = "{{ date_string if date_string is defined else strftime_now('%c') }}"
    tokenizer.chat_template += thinking + date
    prompter = Prompter(tokenizer)
    added = "No thoughts.26 Jul 2024"
    if asked == "place":
        plain, end = Prompter(smollm2_tokenizer()).place("A question"), prompter.encode(added)
        assert len(prompter.place("A question").ends) == len(plain.ends) + len(end)
        return
    ids = prompter.whole("A", "") if asked == "whole" else prompter.around("A", "B")[1]
    assert prompter.decode(ids).endswith(added)


def test_bm25_prefers_rare_words_and_short_sentences() -> None:
    sentences = [text.split() for text in ("a b c", "a x", "a x y z w v u t", "a a a")]
    scores = bm25(["a", "x"], sentences)
    assert sorted(range(4), key=lambda i: -scores[i])[:2] == [1, 2]
    # One sentence of mean length with one of the word: idf * 2.2 / 2.2.
    assert bm25(["q"], [["q"]]) == [pytest.approx(0.28768207)]
    assert bm25([], [["a"]]) == [0.0]


def test_roc_auc() -> None:
    assert roc_auc([0.9, 0.8], [0.1]) == 1
    assert roc_auc([0.5], [0.5]) == 0.5
    assert roc_auc([0.1, 0.7], [0.5]) == 0.5


def test_separation_has_means_areas_and_their_intervals() -> None:
    answers = [("right", "1", {"a": 0.9, "b": 0.5}), ("right", "2", {"a": 0.7, "b": 0.5})]
    answers += [("wrong", "3", {"a": 0.8, "b": 0.1}), ("wrong", "4", {"a": 0.4, "b": 0.3})]
    rows = separation("vt", answers)
    assert [(row["others"], row["number"], row["auc"]) for row in rows] == [
        ("wrong", "a", 0.75),
        ("wrong", "b", 1.0),
    ]
    assert rows[0]["means"] == (pytest.approx(0.8), pytest.approx(0.6))
    assert rows[0]["interval"] == (0, 1) and rows[1]["interval"] == pytest.approx(
        (0.158, 1), abs=1e-3
    )
    assert auc_interval([[1.0]], [[0.0]]) == pytest.approx((0.025, 1)), "one pair says nothing"
    yes, no = [[0.1 * n] for n in range(10)], [[0.1 * n - 0.25] for n in range(10)]
    many = auc_interval(yes, no)
    assert 0.4 < many[0] < 0.7 < many[1] < 0.95
    thrice = [[one for [one] in of for _ in range(3)] for of in (yes, no)]
    answers_alike = [[[one] * 3 for [one] in of] for of in (yes, no)]
    assert auc_interval(*answers_alike) == pytest.approx(many), "documents count, not answers"
    alone = auc_interval(*([[one] for one in of] for of in thrice))
    assert alone[1] - alone[0] < 0.8 * (many[1] - many[0])
    assert separation("vt", answers[:2]) == separation("vt", answers[2:]) == []
