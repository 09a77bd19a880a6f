"""RULER's question answering (section 3.4): a question's own paragraphs among those of others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.sample import Question, Sample, Units
from razor_dist.evals.suites.tasks import Making, Task, any_of


@dataclass(frozen=True)
class QAQuestion:
    text: str
    answers: tuple[str, ...]  # any of them is right
    documents: tuple[int, ...]  # indices of those that it came with
    nearest: tuple[int, ...] = ()  # others of its article, which are put beside them first
    # Document, begin and end of what answers it, as far as the file tells.
    places: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class QAData:
    documents: tuple[str, ...]  # each once
    questions: tuple[QAQuestion, ...]  # those that have an answer

    def units(self, making: Making) -> Units:
        """Return a question's sample, a unit being a document that it did not come with."""
        draw = making.draw
        question = draw.choice(self.questions)
        nearest = list(question.nearest)
        near = {*question.documents, *nearest}
        others = [index for index in range(len(self.documents)) if index not in near]
        draw.shuffle(nearest)
        draw.shuffle(others)
        others = nearest + others
        seed = draw.getrandbits(64)

        def build(count: int) -> Sample:
            chosen = [*question.documents, *others[:count]]
            random.Random(seed).shuffle(chosen)
            texts = "\n\n".join(
                f"Document {place}:\n{self.documents[index]}"
                for place, index in enumerate(chosen, 1)
            )
            text = (
                "Answer the question from the documents below. Give the answer alone, in as few "
                f"words as it takes.\n\n{texts}\n"
            )
            asked = f"Question, to be answered from the documents above: {question.text}"
            places = []
            for index, begin, end in question.places:
                heading = f"Document {chosen.index(index) + 1}:\n"
                at = text.index(heading + self.documents[index]) + len(heading)
                places.append((at + begin, at + end))
            return Sample(text, (Question(asked, "Answer:", question.answers, tuple(places)),))

        return Units(build, most=len(others))


def read_squad(path: Path) -> QAData:
    """Read SQuAD's JSON (version 1.1 or 2.0); questions without an answer are left out."""
    return _read(path, "SQuAD", _squad)


def read_hotpotqa(path: Path) -> QAData:
    """Read HotpotQA's JSON (distractor setting): a list of questions with ten documents each."""
    return _read(path, "HotpotQA", _hotpotqa)


def _squad(content: Any, index: Callable[[str], int]) -> Iterator[QAQuestion]:
    for article in content["data"]:
        paragraphs = [(index(p["context"]), p["qas"]) for p in article["paragraphs"]]
        for own, questions in paragraphs:
            nearest = tuple(dict.fromkeys(other for other, _ in paragraphs if other != own))
            for question in questions:
                answers = dict.fromkeys(answer["text"] for answer in question["answers"])
                if answers and not question.get("is_impossible"):
                    first = question["answers"][0]
                    begin = first.get("answer_start")
                    end = None if begin is None else begin + len(first["text"])
                    places = () if end is None else ((own, begin, end),)
                    yield QAQuestion(question["question"], tuple(answers), (own,), nearest, places)


def _hotpotqa(content: Any, index: Callable[[str], int]) -> Iterator[QAQuestion]:
    for question in content:
        context = question["context"]
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in context]
        own = tuple(dict.fromkeys(map(index, texts)))
        places = []
        for title, number in question.get("supporting_facts", ()):
            at = [title for title, _ in context].index(title)
            if number < len(sentences := context[at][1]):  # a few that are named are not there
                begin = len(title) + 1 + len("".join(sentences[:number]))
                fact = sentences[number]
                begin += len(fact) - len(fact.lstrip())
                places.append((index(texts[at]), begin, begin + len(fact.strip())))
        yield QAQuestion(question["question"], (question["answer"],), own, places=tuple(places))


def _read(
    path: Path, form: str, read: Callable[[Any, Callable[[str], int]], Iterator[QAQuestion]]
) -> QAData:
    """Read a data set by a function that takes its JSON, and one that numbers documents."""
    documents: dict[str, int] = {}
    try:
        content = json.loads(path.read_text("utf-8-sig"))
        questions = tuple(read(content, lambda text: documents.setdefault(text, len(documents))))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not {form}'s JSON") from None
    if not questions:
        raise ConfigError(f"{path} holds no question with an answer")
    return QAData(tuple(documents), questions)


READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}
QA = dict.fromkeys(READERS, Task(None, 32, any_of))
