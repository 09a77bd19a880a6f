"""RULER's thirteen tasks by name: how each is made, how long its answer is, how it is scored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from razor_dist.config.errors import ConfigError
from razor_dist.evals.ruler.aggregation import common_words, frequent_words
from razor_dist.evals.ruler.needles import Needles
from razor_dist.evals.ruler.qa import Questions
from razor_dist.evals.ruler.sample import Sample, Units, fit
from razor_dist.evals.ruler.tracing import variable_tracking

NEEDLES = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(values="uuids"),
    "niah_multikey_1": Needles(num_keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Needles(num_values=4),
    "niah_multiquery": Needles(num_keys=4, num_queries=4),
}
ANSWER_TOKENS = dict.fromkeys(NEEDLES, 128) | {
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
"""Tokens to generate; they count as part of a sample's length."""

TASKS = tuple(ANSWER_TOKENS)
QUESTION_TASKS = ("qa_1", "qa_2")
"""On SQuAD and on HotpotQA."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Material:
    """What the tasks are made of beside words and numbers.

    Attributes
    ----------
    essay : sequence of str
        Sentences of prose.
    questions : dict
        The data of `QUESTION_TASKS`, of those that are run.
    """

    essay: Sequence[str]
    questions: dict[str, Questions]


def make_sample(
    task: str,
    length: int,
    number: int,
    seed: int,
    material: Material,
    tokens: Callable[[Sample], int],
) -> Sample:
    """A task's sample number ``number`` at a length.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    length : int
        Tokens of the prompt and of the longest answer together.
    number, seed : int
        The same ones give the same sample.
    material : Material
    tokens : callable
        Tokens of a sample's prompt.

    Raises
    ------
    ConfigError
        If the length is too short for the task; the message says the least that is not. If the
        task's data are too few for the length.
    """
    room = length - ANSWER_TOKENS[task]
    draw = random.Random(f"{seed}:{task}:{length}:{number}")
    units = _units(task, length, draw, material)
    try:
        return fit(units, tokens, room)
    except ConfigError as error:
        raise ConfigError(
            f"{task} cannot be made at length {length}: {error} "
            f"({ANSWER_TOKENS[task]} more are for the answer)"
        ) from None


def _units(task: str, length: int, draw: random.Random, material: Material) -> Units:
    if task in NEEDLES:
        return NEEDLES[task].units(draw, material.essay)
    if task in QUESTION_TASKS:
        return material.questions[task].units(draw)
    if task == "vt":
        return variable_tracking(draw)
    return common_words(draw, length) if task == "cwe" else frequent_words(draw)


def score(task: str, answer: str, wanted: Sequence[str]) -> float:
    """The part of the wanted strings that an answer contains, or whether it contains any.

    RULER's ``string_match_all``, and for `QUESTION_TASKS` its ``string_match_part``: case does not
    count, control characters are line breaks, and a string may stand anywhere in the answer.

    Returns
    -------
    float
        From 0 to 1.
    """
    said = _UNPRINTABLE.sub("\n", answer).lower()
    found = [text.lower() in said for text in wanted]
    return float(any(found)) if task in QUESTION_TASKS else sum(found) / len(found)
