"""RULER's question answering: a question's own paragraphs among those of others (section 3.4)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.evals.ruler.sample import Sample, Units


@dataclass(frozen=True)
class Question:
    """A question of a data set.

    Attributes
    ----------
    text : str
    answers : tuple of str
        Any of them is right.
    documents : tuple of int
        Which of the set's documents it came with.
    nearest : tuple of int
        Others that are put beside them before any else: the same article's paragraphs.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    nearest: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """A data set: its documents, each once, and its questions that have an answer."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    def units(self, draw: random.Random) -> Units:
        """A question's sample, a unit being a document that it did not come with."""
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
                f"words as it takes.\n\n{texts}\n\n"
                f"Question, to be answered from the documents above: {question.text}"
            )
            return Sample(text, "Answer:", question.answers)

        return Units(build, most=len(others))


def read_squad(path: Path) -> Questions:
    """SQuAD's JSON (version 1.1 or 2.0); questions without an answer are left out.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not of this form.
    """

    def read(content: Any, documents: dict[str, int]) -> list[Question]:
        found = []
        for article in content["data"]:
            paragraphs = [
                (documents.setdefault(paragraph["context"], len(documents)), paragraph["qas"])
                for paragraph in article["paragraphs"]
            ]
            for own, questions in paragraphs:
                nearest = tuple(dict.fromkeys(index for index, _ in paragraphs if index != own))
                for question in questions:
                    answers = dict.fromkeys(answer["text"] for answer in question["answers"])
                    if answers and not question.get("is_impossible"):
                        text = question["question"]
                        found.append(Question(text, tuple(answers), (own,), nearest))
        return found

    return _read(path, "SQuAD", read)


def read_hotpotqa(path: Path) -> Questions:
    """HotpotQA's JSON (distractor setting): a list of questions with ten documents each.

    Raises
    ------
    ConfigError
        If the file cannot be read or is not of this form.
    """

    def read(content: Any, documents: dict[str, int]) -> list[Question]:
        found = []
        for question in content:
            own = [
                documents.setdefault(f"{title}\n{''.join(sentences)}", len(documents))
                for title, sentences in question["context"]
            ]
            indices = tuple(dict.fromkeys(own))
            found.append(Question(question["question"], (question["answer"],), indices))
        return found

    return _read(path, "HotpotQA", read)


def _read(path: Path, form: str, read: Any) -> Questions:
    documents: dict[str, int] = {}
    try:
        questions: Sequence[Question] = read(json.loads(path.read_text("utf-8")), documents)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not {form}'s JSON") from None
    if not questions:
        raise ConfigError(f"{path} holds no question with an answer")
    return Questions(tuple(documents), tuple(questions))
