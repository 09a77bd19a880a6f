"""Published sets in their own files: forms, scores, a run; the records here are ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.config import PublishedConfig
from razor_dist.evals.suites.job import SuiteTask
from razor_dist.evals.suites.published import (
    any_plain,
    first_number,
    has_word,
    letter,
    read_published,
    word_f1,
)
from razor_dist.evals.suites.sample import Sample
from razor_dist.evals.suites.tasks import Material, any_of
from razor_dist.evals.texts import Prompter
from razor_dist.jobs.results import read_job
from tests.evals.samples import words

STORY = " ".join(f"On day {n} the ferry carried {n} crates to the island." for n in range(200))
LONGBENCH = {
    "_id": "1",
    "domain": "Ours",
    "sub_domain": "Boats",
    "difficulty": "easy",
    "length": "short",
    "question": "What did the ferry carry?",
    **{f"choice_{own}": what for own, what in zip("ABCD", ("goats", "crates", "hay", "mail"))},  # noqa: B905
    "answer": "B",
    "context": STORY,
}
INFINITE = {"id": 0, "context": STORY, "input": "Which crates?", "answer": ["7"], "options": []}
KILT = {
    "id": "0",
    "question": "Who mends the ferry?",
    "answers": ["Old Tam", "Tam"],
    "ctxs": [
        {"title": "Ferry", "text": "Old Tam mends the ferry.", "has_answer": True},
        {"title": "", "text": "The island has no road."},
    ],
}
JSON_KV = {
    "context": '{"k1": "v1", "k2": "v2"}',
    "question": "k2",
    "answer": "v2",
    "num_kvs": 2,
    "demos": [["k1", "v1"]],
}
CITE = {
    "id": 1,
    "question": "Who rows?",
    "answer": ["Ann the rower"],
    "docs": ["Ann rows.", "Bo sails."],
    "length": 9,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of each form."""
    data = tmp_path / "data"
    (data / "kilt").mkdir(parents=True)
    choice = {**INFINITE, "input": "What is it?", "options": ["hay", "mail", "goats", "crates"]}
    files: dict[str, Any] = {
        "longbench_v2.json": [LONGBENCH],
        "passkey.jsonl": [INFINITE, {**INFINITE, "answer": "8"}, {**INFINITE, "answer": "9"}],
        "longbook_choice_eng.jsonl": [
            {**choice, "answer": ["crates"]},
            {**choice, "answer": ["crates", "D"]},
            {**choice, "answer": "crates"},
        ],
        "number_string.jsonl": [{**INFINITE, "answer": ["0011223344"]}],
        "kv_retrieval.jsonl": [{**INFINITE, "answer": ["0d1-9e2"]}],
        "longdialogue_qa_eng.jsonl": [{**INFINITE, "answer": ["TAM", "OLD TAM"]}],
        "longbook_qa_eng.jsonl": [{**INFINITE, "answer": ["the old ferry", "a ferry"]}],
        "math_find.jsonl": [{**INFINITE, "answer": [7.0]}],
        "code_run.jsonl": [{**INFINITE, "answer": [-7]}],
        "code_debug.jsonl": [{**choice, "answer": ["crates", "D"]}],
        "kilt/nq.jsonl": [KILT],
        "json_kv.jsonl": [JSON_KV],
        "narrativeqa.json": [CITE],
    }
    for name, records in files.items():
        lines = name.endswith("l")
        text = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
        (data / name).write_text(text)
    return data


def sample(folder: Path, task: str, length: int = 100_000, number: int = 0) -> Sample:
    config = PublishedConfig(data=str(folder), tasks=task)
    content = config.files[task].content
    return config.suite.sample(task, length, number, 0, Material((), {task: content}), words)


@pytest.mark.parametrize(
    ("task", "score", "question", "cue", "answers", "held"),
    [
        ("longbench_v2", letter, "carry?\n(A) goats\n(B) crates\n(C) hay", "is (", ("B",), STORY),
        ("passkey", first_number, "Question: Which crates?", "Answer:", None, STORY),
        ("longbook_choice_eng", letter, "(C) goats\n(D) crates", "is (", ("D",), STORY),
        ("number_string", first_number, "Question: Which", "Answer:", ("0011223344",), STORY),
        ("kv_retrieval", has_word, "Question: Which", "Answer:", ("0d1-9e2",), STORY),
        ("longdialogue_qa_eng", has_word, "Question: Which", "Answer:", ("TAM", "OLD TAM"), STORY),
        ("longbook_qa_eng", word_f1, "Question: Which", "Answer:", None, STORY),
        ("math_find", first_number, "Question: Which", "Answer:", ("7.0",), STORY),
        ("code_run", first_number, "Question: Which", "Answer:", ("-7",), STORY),
        ("code_debug", letter, "(C) goats\n(D) crates", "is (", ("D",), STORY),
        ("kilt/nq", any_plain, "mends the ferry?", "Answer:", ("Old Tam", "Tam"), "[1] (Ferry):"),
        ("json_kv", any_of, "the key k2 in", "Answer:", ("v2",), '"k2": "v2"'),
        ("narrativeqa", word_f1, "Who rows?", "Answer:", ("Ann the rower",), "[2]: Bo sails."),
    ],
)
def test_forms(
    task: str,
    score: Callable[[str, Sequence[str]], float],
    question: str,
    cue: str,
    answers: tuple[str, ...] | None,
    held: str,
    folder: Path,
) -> None:
    config = PublishedConfig(data=str(folder), tasks=task)
    assert config.suite.tasks[task].score is score
    for number in range(config.count(task)):
        made = sample(folder, task, number=number)
        [asked] = made.questions
        assert question in asked.text and asked.cue.endswith(cue) and held in made.document
        assert asked.answers == answers or answers is None
        assert score(f" {asked.answers[0]}, or so", asked.answers) > 0.5


def test_every_record_is_asked_once_and_no_more(folder: Path) -> None:
    config = PublishedConfig(data=str(folder), tasks="passkey,json_kv", samples=2)
    assert (config.count("passkey"), config.count("json_kv")) == (2, 1)
    answers = {sample(folder, "passkey", number=n).questions[0].answers for n in range(3)}
    assert answers == {("7",), ("8",), ("9",)}


def test_a_long_context_loses_its_middle(folder: Path) -> None:
    made = sample(folder, "longbench_v2", 400)
    room = 400 - 8
    assert room - 4 <= words(made) <= room
    first, last = made.document.split("\n", 1)[1].split("\n...\n")
    assert STORY.startswith(first) and STORY.endswith(last)
    assert abs(len(first.split()) - len(last.split())) <= 1
    whole = sample(folder, "longbench_v2", 100_000)
    assert whole.document.endswith(STORY) and "..." not in whole.document


@pytest.mark.parametrize(
    ("score", "answer", "wanted", "expected"),
    [
        (letter, "B) crates", ["B"], 1.0),
        (letter, "Both A", ["A"], 1.0),
        (letter, "Because", ["B"], 0.0),
        (first_number, "about 12, not 7", ["7"], 0.0),
        (first_number, "7.", ["7"], 1.0),
        (first_number, "2.50", ["2.5"], 1.0),
        (first_number, "0071", ["71"], 0.0),
        (has_word, 'It is "v-2".', ["V-2"], 1.0),
        (has_word, "v-21", ["v-2"], 0.0),
        (has_word, "JOHN DOE", ["JOHN DOE"], 1.0),
        (has_word, "I am\nDr. Who!", ["Dr. Who"], 1.0),
        (has_word, "JOHN DOEBERL", ["JOHN DOE"], 0.0),
        (has_word, "anything", ["?"], 0.0),
        (any_plain, "Beatles", ["The Beatles"], 1.0),
        (any_plain, "It was John F Kennedy.", ["John F. Kennedy"], 1.0),
        (any_plain, "the Stones", ["The Beatles", "The"], 0.0),
        (word_f1, "Ann, a rower [1]\nand more", ["the rower Ann", "x"], 1.0),
        (word_f1, "Ann of the ferry", ["Ann"], 0.5),
        (word_f1, "", ["Ann"], 0.0),
    ],
)
def test_scores(
    score: Callable[[str, Sequence[str]], float], answer: str, wanted: list[str], expected: float
) -> None:
    assert score(answer, wanted) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", "a.json is not JSON"),
        ("a.json", "{}", "must hold a list of records"),
        ("a.jsonl", "\n", "must hold a list of records"),
        ("a.json", '[{"x": 1}]', r"a.json: records with the fields x are none of LongBench"),
        ("longbook_sum_eng.jsonl", json.dumps(INFINITE), "by the file's name"),
        ("counting_stars.json", json.dumps([CITE]), "are none of LongBench"),
        ("a.json", json.dumps([KILT, {"question": "x"}]), "record 2 lacks or misstates 'ctxs'"),
    ],
)
def test_wrong_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_published(file)
    with pytest.raises(ConfigError, match=message):
        PublishedConfig(data=str(tmp_path))


def test_a_record_ends_at_the_end_of_its_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "cite.jsonl"
    docs = ["Ann\u2028rows.", "Bo\u0085sails."]
    text = json.dumps({**CITE, "docs": docs}, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8-sig")  # with a byte order mark
    assert len(read_published(file).records) == 1


def test_wrong_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data: .*/empty holds no \.json or \.jsonl files"):
        PublishedConfig(data=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"unknown task 'nq'; files in .*, json_kv, kilt/nq, "):
        PublishedConfig(data=str(folder), tasks="nq")
    (folder / "passkey.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"holds passkey\.json and passkey\.jsonl; move one"):
        PublishedConfig(data=str(folder), tasks="json_kv")


def test_a_node_with_another_file_is_refused(folder: Path) -> None:
    config = PublishedConfig(
        data=str(folder), tasks="passkey", lengths="600", methods="streaming", haystack="reference"
    )
    task, prompter = SuiteTask.plan(config), Prompter.of(config)
    assert task.sample(prompter, "passkey", 600, 0).questions
    elsewhere = replace(task, data={"passkey": "of another file"})
    with pytest.raises(ConfigError, match=r"passkey\.jsonl differs from the file with which"):
        elsewhere.sample(prompter, "passkey", 600, 0)


@pytest.mark.long
def test_a_run(evaluate: Callable[..., int], folder: Path, tmp_path: Path) -> None:
    flags, out = f"--data {folder} --lengths 600 --methods streaming --samples 2", tmp_path / "out"
    flags += " --tasks passkey,kilt/nq"
    assert evaluate("published", flags) == 0
    ids = [record["id"] for record in read_job(out).records]
    assert ids == ["streaming/passkey/600/0", "streaming/passkey/600/1", "streaming/kilt/nq/600/0"]
    assert "not been asked" not in (out / "report.md").read_text()
    (folder / "passkey.jsonl").write_text(json.dumps(INFINITE))
    assert evaluate("published", flags) == 2, "another file is another job"


@pytest.mark.long
def test_results_among_the_data_are_no_task(evaluate: Callable[..., int], folder: Path) -> None:
    flags = f"--data {folder} --lengths 600 --methods streaming --samples 1"
    for _ in range(2):
        assert evaluate("published", flags, folder / "out") == 0
        assert len(read_job(folder / "out").records) == 13
