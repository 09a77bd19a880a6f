"""RULER's tasks: what is in a sample, how long it is, and how answers count."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import reference_paragraphs, sentences_of
from razor_dist.evals.suites.qa import read_hotpotqa, read_squad
from razor_dist.evals.suites.ruler import NEEDLES, RULER
from razor_dist.evals.suites.sample import Question, Sample, Span, Units, fit
from razor_dist.evals.suites.tasks import Material
from tests.evals.samples import words

NEEDLE = re.compile(r"The special magic (number|uuid) of (\S+) is (\S+)\.")
QA = ("qa_1", "qa_2")
TASKS = tuple(RULER.tasks)
ANSWER_TOKENS = {name: task.answer_tokens for name, task in RULER.tasks.items()}


class Made(NamedTuple):
    """A sample's one question, and the message that asks it."""

    text: str
    cue: str
    answers: tuple[str, ...]
    places: tuple[Span, ...]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of SQuAD's and HotpotQA's form."""
    folder = tmp_path_factory.mktemp("data")
    paragraphs: list[dict[str, Any]] = [
        {
            "context": f"Town {n} lies at river {n}. " + f"Its trade is {n} barrels of salt. " * 5,
            "qas": [
                {
                    "question": f"Where is town {n}?",
                    "answers": [
                        {"text": f"river {n}", "answer_start": len(f"Town {n} lies at ")},
                        {"text": f"at river {n}", "answer_start": len(f"Town {n} lies ")},
                    ],
                },
                {"question": "Who knows?", "answers": [], "is_impossible": True},
            ],
        }
        for n in range(300)
    ]
    hotpot = [
        {
            "question": f"Which saint is hill {n} named for?",
            "answer": f"Saint {n}",
            "supporting_facts": [[f"Hill {n}", 0], [f"Hill {n + 3}", 1], [f"Hill {n}", 9]],
            "context": [
                [f"Hill {n + d}", [f"Hill {n + d} is named for Saint {n + d}.", " It is steep."]]
                for d in range(10)
            ],
        }
        for n in range(0, 300, 5)
    ]
    squad_file, hotpot_file = folder / "squad.json", folder / "hotpot.json"
    articles = [{"paragraphs": paragraphs[n : n + 10]} for n in range(0, 300, 10)]
    squad_file.write_text(json.dumps({"version": "2.0", "data": articles}))
    hotpot_file.write_text(json.dumps(hotpot))
    return {"qa_1": squad_file, "qa_2": hotpot_file}


@pytest.fixture(scope="module")
def material(data: dict[str, Path]) -> Material:
    essay = [s for paragraph in reference_paragraphs() for s in sentences_of(paragraph)]
    questions = {"qa_1": read_squad(data["qa_1"]), "qa_2": read_hotpotqa(data["qa_2"])}
    return Material(essay, questions)


def make(task: str, material: Material, length: int = 4096, number: int = 0, seed: int = 0) -> Made:
    sample = RULER.sample(task, length, number, seed, material, words)
    [question] = sample.questions
    return Made(sample.message(question), question.cue, question.answers, question.places)


def words_of(task: str, material: Material, length: int) -> int:
    return words(RULER.sample(task, length, 0, 0, material, words))


@pytest.mark.parametrize("length", [2000, 4096, 9000])
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_as_long_as_asked(task: str, length: int, material: Material) -> None:
    if task.startswith("qa") and length == 9000:
        pytest.skip("the data are too few")
    used = words_of(task, material, length) + ANSWER_TOKENS[task]
    # The largest unit is a sentence of prose or a common word with all its occurrences.
    assert length - 150 <= used <= length


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_the_seeds(task: str, material: Material) -> None:
    first = make(task, material, 2000)
    assert make(task, material, 2000) == first
    other = make(task, material, 2000, number=1)
    assert other.text != first.text and other.answers != first.answers
    assert make(task, material, 2000, seed=1) != first


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_are_there_as_often_as_stated(task: str, material: Material) -> None:
    settings = NEEDLES[task]
    sample = make(task, material)
    found = NEEDLE.findall(sample.text)
    values = [value for _, _, value in found]
    assert len(set(values)) == len(values), "no two needles share a value"
    for answer in sample.answers:
        assert sample.text.count(answer) == 1
    assert len(sample.answers) == settings.num_queries * settings.num_values
    per_key = Counter(key for _, key, _ in found)
    assert set(per_key.values()) == {settings.num_values}
    if settings.haystack == "needles":
        assert len(per_key) > 50
    else:
        assert len(per_key) == settings.num_keys
    question = sample.text[sample.text.index("Question:") :]
    asked = {key for key in per_key if key in question}
    assert asked == {key for _, key, value in found if value in sample.answers}
    assert len(asked) == settings.num_queries
    assert all(key in sample.cue for key in asked)
    assert not any(answer in question + sample.cue for answer in sample.answers)
    shapes = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    assert all(re.fullmatch(shapes[settings.values], value) for value in values)


def test_needles_among_noise_stand_before_any_line(material: Material) -> None:
    places = set()
    for number in range(60):
        lines = make("niah_single_1", material, 4096, number).text.split("\n")
        places.add(next(i for i, line in enumerate(lines) if NEEDLE.match(line)) / len(lines))
    # More than the 40 depths of prose.
    assert min(places) < 0.15 and max(places) > 0.8 and len(places) > 40


def test_a_chain_leads_to_every_answer(material: Material) -> None:
    sample = make("vt", material)
    asked = sample.text.rsplit("hold the value ", 1)[1][:5]
    task = sample.text.rsplit("Follow the assignments.", 1)[1]
    statements = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", task, re.MULTILINE)
    assert len(statements) == 5
    value: dict[str, str] = {}
    for name, source in statements:  # in the text's order: no variable is used before it is set
        value[name] = value.get(source, source)
    assert [name for name, own in value.items() if own == asked] == list(sample.answers)
    assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.answers)
    # The worked example has names and a value of its own.
    example = sample.text.removesuffix(task)
    assert asked not in example and not any(name in example for name in sample.answers)


@pytest.mark.parametrize(("length", "often", "seldom"), [(2000, 6, 1), (4096, 30, 3)])
def test_ten_words_are_common(length: int, often: int, seldom: int, material: Material) -> None:
    sample = make("cwe", material, length)
    listing = sample.text.rsplit("Remember which.", 1)[1]
    times = Counter(re.findall(r"\d+\. (\S+)", listing))
    assert {word for word, n in times.items() if n == often} == set(sample.answers)
    assert Counter(times.values()).keys() == {often, seldom}
    assert len(sample.answers) == 10 and len(times) > 30
    example = sample.text.removesuffix(listing)
    shown = re.findall(r"\d+\. (\S+)", example)
    assert shown and not set(shown) & set(times), "the example's words are others"


def test_more_common_words_than_there_are_words(material: Material) -> None:
    sample = make("cwe", material, 40_000)
    listing = sample.text.rsplit("Remember which.", 1)[1]
    times = Counter(re.findall(r"\d+\. (\S+)", listing))
    assert len(times) > 1000
    assert {word for word, n in times.items() if n == 30} == set(sample.answers)
    assert len({"-" in word for word in times}) == 1, "no word is told by its form"


def test_frequencies_fall_as_a_zeta_distribution(material: Material) -> None:
    sample = make("fwe", material)
    coded = sample.text.split("\n")[1].split()
    (dots, most), *ranks = Counter(coded).most_common()
    assert dots == "..." and [word for word, _ in ranks[:3]] == list(sample.answers)
    # floor(x / k^2) and floor(floor(x) / k^2) are the same; x is n / zeta(2).
    for rank, (_, times) in enumerate(ranks, 2):
        assert times == most // rank**2
    assert len(ranks) + 1 == math.isqrt(most), "every word that would occur does"
    assert ranks[2][1] > ranks[3][1], "the third is more frequent than the fourth"
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranks)


@pytest.mark.parametrize("task", QA)
def test_a_question_comes_with_its_documents(task: str, material: Material) -> None:
    sample = make(task, material, 2000)
    bodies = re.split(r"Document \d+:\n", sample.text)[1:]
    assert len(set(bodies)) == len(bodies) > 20
    [number] = re.findall(r"\d+", sample.answers[0])
    of = f"Town {number} lies" if task == "qa_1" else f"Hill {number} is named"
    assert sum(of in body for body in bodies) == 1
    assert ("Town" if task == "qa_1" else "Hill").lower() in sample.text.rsplit("\n", 1)[1].lower()


def test_paragraphs_of_a_questions_article_come_first(material: Material) -> None:
    for length, articles in ((400, 1), (2000, None)):
        sample = make("qa_1", material, length)
        towns = [int(n) for n in re.findall(r"Town (\d+) lies", sample.text)]
        own = int(re.findall(r"\d+", sample.answers[0])[0]) // 10
        if articles == 1:
            assert 1 < len(towns) < 10 and {town // 10 for town in towns} == {own}
        else:
            assert len(towns) > 10 and sum(town // 10 == own for town in towns) == 10


@pytest.mark.parametrize("task", TASKS)
def test_it_is_known_where_answers_stand(task: str, material: Material) -> None:
    sample = make(task, material, 2000, number=3)
    found = [sample.text[begin:end] for begin, end in sample.places]
    before = [sample.text[:begin] for begin, _ in sample.places]
    if task in ("cwe", "fwe"):
        assert not found
    elif task == "qa_1":
        [answer] = found
        assert answer == sample.answers[0]
        assert before[0].endswith(f"Town {answer.removeprefix('river ')} lies at ")
    elif task == "qa_2":
        number = int(sample.answers[0].removeprefix("Saint "))
        assert found == [f"Hill {number} is named for Saint {number}.", "It is steep."]
        assert [text.rsplit(":\n", 1)[1] for text in before] == [
            f"Hill {number}\n",
            f"Hill {number + 3}\nHill {number + 3} is named for Saint {number + 3}. ",
        ]
    else:
        assert found == list(sample.answers)
        stated = {"vt": r"\nVAR $"}.get(task, r"The special magic (number|uuid) of \S+ is $")
        assert all(re.search(stated, text) for text in before)


def test_a_question_without_an_answer_is_left_out(data: dict[str, Path]) -> None:
    squad = read_squad(data["qa_1"])
    assert len(squad.questions) == len(squad.documents) == 300
    hotpot = read_hotpotqa(data["qa_2"])
    assert len(hotpot.questions) == 60
    assert len(hotpot.documents) == 305, "documents of several questions are there once"


@pytest.mark.parametrize(
    ("task", "answer", "wanted", "expected"),
    [
        ("niah_single_1", "It is 1234567.", ["1234567"], 1.0),
        ("niah_single_1", "It is 123 4567.", ["1234567"], 0.0),
        ("vt", "abcde FGHIJ", ["ABCDE", "FGHIJ", "KLMNO"], 2 / 3),
        ("cwe", "1. tables 2. chair", ["table", "chair"], 1.0),  # anywhere in the answer
        ("fwe", "qwe\x00rty", ["qwerty"], 0.0),  # control characters are line breaks
        ("cwe", "1. table\x0b2. chair", ["table", "chair"], 1.0),
        ("fwe", "", ["qwerty"], 0.0),
        ("qa_1", "in the year 1066", ["1066", "AD 1066"], 1.0),
        ("qa_2", "Nobody knows", ["1066", "AD 1066"], 0.0),
    ],
)
def test_scores(task: str, answer: str, wanted: list[str], expected: float) -> None:
    assert RULER.tasks[task].score(answer, wanted) == pytest.approx(expected)


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_short_is_told_the_least(task: str, material: Material) -> None:
    with pytest.raises(ConfigError, match=f"{task} cannot be made at length 60") as error:
        make(task, material, 60)
    least = re.search(r"at least (\d+) tokens of prompt", str(error.value))
    assert least is not None
    enough = int(least[1]) + ANSWER_TOKENS[task]
    if enough < 4096:  # from there on common words are more frequent, and the least is another
        assert words_of(task, material, enough) <= int(least[1]) + 40


def test_data_too_few_for_the_length(material: Material) -> None:
    with pytest.raises(ConfigError, match=r"qa_1 cannot be made at length 99000: its data fill \d"):
        make("qa_1", material, 99_000)


@pytest.mark.parametrize("least", [0, 3])
def test_fit_finds_the_largest_that_fits(least: int) -> None:
    draw = random.Random(0)
    sizes = [0]
    for _ in range(5000):
        sizes.append(sizes[-1] + draw.choice([1, 2, 50]))
    asked: list[int] = []

    def build(count: int) -> Sample:
        asked.append(count)
        return Sample(str(count), (Question("", "", ()),))

    for room in (sizes[3], 1000, 1001, 20_000):
        asked.clear()
        found = int(fit(Units(build, least), lambda s: sizes[int(s.document)], room).document)
        assert sizes[found] <= room < sizes[found + 1]
        assert len(asked) < 40
