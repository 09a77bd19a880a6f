"""Published sets in their own files: LongBench v2, InfiniteBench, HELMET, L-CiteEval.

The fields of its records tell which form a file has. A context that is longer than the length
loses its middle, as in LongBench's and InfiniteBench's own code. Instructions are worded anew, and
scores are the sets' own rules where no other model and no ROUGE is needed: the rest is refused.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.sample import Question, Sample, Units
from razor_dist.evals.suites.tasks import DataFile, Making, Score, Suite, Task, any_of
from razor_dist.jobs.results import HEADER

PUBLISHED = "published"  # the suite's name
_LETTERS = "ABCD"
_OMITTED = "\n...\n"


class Record(NamedTuple):
    context: str
    question: str
    answers: tuple[str, ...]  # any of them is right
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedData:
    """A file's records, how long their answers may be, and how these count."""

    records: tuple[Record, ...]
    answer_tokens: int
    score: Score

    def units(self, making: Making) -> Units:
        """Return the sample of a record, in an order of their own; a unit is a word of context."""
        order = list(range(len(self.records)))
        random.Random(0).shuffle(order)
        record = self.records[order[making.number]]
        words = re.findall(r"\S+\s*", record.context)
        question, cue = f"Question: {record.question}", "Answer:"
        if record.options:
            choices = zip(_LETTERS, record.options, strict=False)
            question += "".join(f"\n({letter}) {option}" for letter, option in choices)
            cue = "Answer: The letter of the right choice is ("

        def build(count: int) -> Sample:
            first = -(-count // 2)
            text = "".join(words)
            if count < len(words):
                text = "".join(words[:first]) + _OMITTED + "".join(words[len(words) - count // 2 :])
            document = f"Answer the question that follows the text below.\n{text.rstrip()}"
            return Sample(document, (Question(question, cue, record.answers),))

        return Units(build, most=len(words), may_be_short=True)


def letter(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if an answer's first stand-alone letter A to D is the wanted one."""
    found = re.search(r"\b[A-D]\b", answer)
    return float(found is not None and found[0] in wanted)


def first_number(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if an answer's first number equals a wanted number, in digits or in value."""
    found = re.search(r"-?\d+(?:\.\d+)?", answer)
    return float(found is not None and any(_same_number(found[0], text) for text in wanted))


def _same_number(one: str, other: str) -> bool:
    return one == other or ("." in one + other and float(one) == float(other))


def has_word(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if a wanted string stands in an answer between marks, spaces or its ends."""
    said = f" {_apart(answer)} "
    return float(any(f" {_apart(text)} " in said for text in wanted))


def _apart(text: str) -> str:
    return " ".join(re.sub(r"[\n:\"'.,?!{}]", " ", text).upper().split())


def _plain_words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def any_plain(answer: str, wanted: Sequence[str]) -> float:
    """Return 1 if an answer contains any wanted string, both in lower case without marks, articles.

    It is HELMET's substring_exact_match.
    """
    said = " ".join(_plain_words(answer))
    plain = (" ".join(_plain_words(text)) for text in wanted)
    return float(any(text in said for text in plain if text))


def word_f1(answer: str, wanted: Sequence[str]) -> float:
    """Return the best F1 of an answer's words: SQuAD's, of the first line, without citations."""
    line = re.sub(r"\s?\[\d+\]", "", answer.strip().split("\n")[0])
    said = Counter(_plain_words(line))
    best = 0.0
    for text in wanted:
        words = Counter(_plain_words(text))
        if same := (said & words).total():
            best = max(best, 2 * same / (said.total() + words.total()))
    return best


Form = tuple[Callable[[Mapping[str, Any]], Record], int, Score]

# Of InfiniteBench's files, by their names: tokens of an answer and its score.
_INFINITE: Mapping[str, tuple[int, Score]] = {
    "passkey": (8, first_number),
    "number_string": (16, first_number),
    "kv_retrieval": (50, has_word),
    "longbook_choice_eng": (8, letter),
    "longbook_qa_eng": (40, word_f1),
    "longdialogue_qa_eng": (40, has_word),
    "math_find": (8, first_number),
    "code_run": (8, first_number),
    "code_debug": (8, letter),
}


def _listed(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value if isinstance(value, list) else [value]))


def _longbench(record: Mapping[str, Any]) -> Record:
    options = tuple(record[f"choice_{letter}"] for letter in _LETTERS)
    return Record(record["context"], record["question"], (record["answer"],), options)


def _infinite(record: Mapping[str, Any], score: Score) -> Record:
    answers, options = _listed(record["answer"]), _listed(record.get("options") or [])
    if score is not letter:
        return Record(record["context"], record["input"], answers)
    # An option, an option and its letter, or the letter.
    if answers[-1] not in list(_LETTERS):
        answers = (_LETTERS[options.index(answers[0])],)
    return Record(record["context"], record["input"], answers[-1:], options)


def _numbered(documents: Sequence[Any]) -> str:
    texts = []
    for number, document in enumerate(documents, 1):
        title, text = "", document
        if isinstance(document, Mapping):
            title, text = document.get("title") or "", document["text"]
        texts.append(f"Document [{number}]{f' ({title})' if title else ''}: {text}")
    return "\n\n".join(texts)


def _documents(record: Mapping[str, Any], texts: str, answers: str) -> Record:
    return Record(_numbered(record[texts]), record["question"], _listed(record[answers]))


def _json_kv(record: Mapping[str, Any]) -> Record:
    question = f"What is the value of the key {record['question']} in the JSON object above?"
    return Record(record["context"], question, _listed(record["answer"]))


def _form(name: str, fields: set[str]) -> Form:
    """Return how records with these fields are read; ``name`` is their file's, without suffix."""
    if {"context", "question", "answer", "choice_A"} <= fields:
        return _longbench, 8, letter
    if {"ctxs", "question", "answers"} <= fields:
        return partial(_documents, texts="ctxs", answers="answers"), 20, any_plain
    if {"context", "question", "answer", "num_kvs"} <= fields:
        return _json_kv, 100, any_of
    if {"context", "input", "answer"} <= fields and name in _INFINITE:
        tokens, score = _INFINITE[name]
        return partial(_infinite, score=score), tokens, score
    if {"docs", "question", "answer"} <= fields and name != "counting_stars":
        return partial(_documents, texts="docs", answers="answer"), 200, word_f1
    raise ConfigError(
        f"records with the fields {', '.join(sorted(fields))} are none of LongBench v2's, of "
        f"InfiniteBench's {', '.join(_INFINITE)} (by the file's name), of HELMET's kilt and "
        "json_kv, or of L-CiteEval's questions"
    )


def read_published(path: Path) -> PublishedData:
    """Read a file of one of the sets: a JSON list, or a JSON object on each line."""
    try:
        text = path.read_text("utf-8-sig")
        records = (
            [json.loads(line) for line in text.split("\n") if line.strip()]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(records, list) or not records or not isinstance(records[0], dict):
        raise ConfigError(f"{path} must hold a list of records, or a record on each line")
    try:
        read, tokens, score = _form(path.stem, set(records[0]))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    found = []
    for number, record in enumerate(records, 1):
        try:
            found.append(read(record))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"{path}: record {number} lacks or misstates {error}") from None
    return PublishedData(tuple(found), tokens, score)


def published_files(folder: str) -> Mapping[str, DataFile]:
    """Return the files beneath a folder by their paths in it, without suffix."""
    root = Path(folder).expanduser()
    paths = sorted(
        path
        for path in root.rglob("*.json*")
        # Results of a run may lie among the data.
        if path.suffix in (".json", ".jsonl") and not (path.parent / HEADER).exists()
    )
    if not paths:
        raise ConfigError(f"data: {root} holds no .json or .jsonl files")
    names = {path: str(path.relative_to(root).with_suffix("")) for path in paths}
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise ConfigError(f"data: {root} holds {twice[0]}.json and {twice[0]}.jsonl; move one")
    return {name: DataFile(str(path), read_published) for path, name in names.items()}


@lru_cache(maxsize=4)
def published_suite(folder: str, names: tuple[str, ...]) -> Suite:
    """Return the suite whose tasks are files of a folder; refuse one that cannot be read."""
    files = published_files(folder)
    tasks = {}
    for name in names:
        if name not in files:
            raise ConfigError(
                f"tasks: unknown task {name!r}; files in {folder}: {', '.join(files)}"
            )
        content = files[name].content
        assert isinstance(content, PublishedData), content
        tasks[name] = Task(None, content.answer_tokens, content.score)
    return Suite(PUBLISHED, "Published sets", tasks, version=2)
