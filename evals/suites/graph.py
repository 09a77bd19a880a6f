"""Walks on a graph that is given as a list of edges: the idea of OpenAI's GraphWalks, made anew."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from razor_dist.evals.suites.sample import QUESTIONS, HiddenText, SuiteQuestion, Units, never_twice
from razor_dist.evals.suites.tasks import Making, Suite, Task

Edge = tuple[str, str]

_CHILDREN, _GRANDCHILDREN, _PARENTS = 3, 2, 3
_NAME = re.compile(r"\b[0-9a-f]{6}\b")
_ABOUT = (
    "Below is a directed graph, one edge on each line: `aaaaaa -> bbbbbb` leads from node aaaaaa "
    "to node bbbbbb, so that aaaaaa is a parent of bbbbbb."
)


@dataclass(frozen=True)
class Walk:
    """Edges that decide an answer, and the nodes at which further edges would change it."""

    edges: list[Edge]
    question: str
    answers: dict[str, Edge]  # the nodes asked for, each with an edge that shows it
    no_more_from: frozenset[str] = frozenset()
    no_more_to: frozenset[str] = frozenset()

    @property
    def asked(self) -> SuiteQuestion:
        stated = {node: f"{a} -> {b}" for node, (a, b) in self.answers.items()}
        question = f"{self.question} Answer with a list in brackets."
        return SuiteQuestion(question, "The nodes are [", list(self.answers), stated)


def _further(walks: Sequence[Walk], draw: random.Random, names: Iterator[str]) -> Iterator[str]:
    """Yield lines of edges that do not change an answer, half of them with a new node."""
    seen = {edge for walk in walks for edge in walk.edges}
    core = sorted({node for edge in seen for node in edge})
    begins = [node for node in core if not any(node in walk.no_more_from for walk in walks)]
    ends = [node for node in core if not any(node in walk.no_more_to for walk in walks)]
    nodes = [next(names), next(names)]

    def chosen(more: Sequence[str]) -> str:
        number = draw.randrange(len(nodes) + len(more))
        return nodes[number] if number < len(nodes) else more[number - len(nodes)]

    while True:
        if draw.random() < 0.5:
            nodes.append(next(names))
        edge = chosen(begins), chosen(ends)
        if edge[0] != edge[1] and edge not in seen:
            seen.add(edge)
            yield f"{edge[0]} -> {edge[1]}"


def _names(draw: random.Random) -> Iterator[str]:
    return never_twice(lambda: f"{draw.getrandbits(24):06x}")


def _reached(draw: random.Random, names: Iterator[str], steps: int) -> Walk:
    start, *children = (next(names) for _ in range(1 + _CHILDREN))
    edges = [(start, child) for child in children]
    answers = dict(zip(children, edges, strict=True))
    if steps == 2:
        answers = {}
        for child in children:
            for grandchild in (next(names) for _ in range(_GRANDCHILDREN)):
                edges.append((child, grandchild))
                answers[grandchild] = edges[-1]
        # A second way to one node, which counts once.
        edges.append((children[-1], next(iter(answers))))
    # Ways back, and to a node that fewer steps reach, which do not count.
    edges += [(children[0], start), (children[0], children[1])]
    times = "one step" if steps == 1 else f"exactly {steps} steps, and not in fewer"
    return Walk(
        edges,
        f"Which nodes are reached from {start} in {times}?",
        answers,
        no_more_from=frozenset([start, *children]),
    )


def _parents(draw: random.Random, names: Iterator[str]) -> Walk:
    node, *others = (next(names) for _ in range(1 + 2 * _PARENTS))
    parents, children = others[:_PARENTS], others[_PARENTS:]
    edges = [(parent, node) for parent in parents]
    answers = dict(zip(parents, edges, strict=True))
    edges += [(node, child) for child in children]
    edges += [(parent, draw.choice(children)) for parent in parents]
    return Walk(edges, f"Which nodes are parents of {node}?", answers, no_more_to=frozenset([node]))


def _f1(answer: str, wanted: Sequence[str]) -> float:
    """Return the F1 of the nodes named up to the first bracket or line's end: GraphWalks' score."""
    named = set(_NAME.findall(re.split(r"[\]\n]", answer.strip())[0].lower()))
    return 2 * len(named & set(wanted)) / (len(named) + len(wanted))


def _task(walk: Callable[[random.Random, Iterator[str]], Walk]) -> Task:
    def units(making: Making) -> Units:
        draw = making.draw
        names = _names(draw)
        walks = [walk(draw, names) for _ in range(QUESTIONS)]
        hidden = [(draw.random(), f"{a} -> {b}") for own in walks for a, b in own.edges]
        others = _further(walks, draw, names)
        return HiddenText(_ABOUT, hidden, others, [own.asked for own in walks]).units

    return Task(units, 64, _f1, stop=("]",))


GRAPH = Suite(
    "graph",
    "Walks on a graph",
    {
        "children": _task(partial(_reached, steps=1)),
        "grandchildren": _task(partial(_reached, steps=2)),
        "parents": _task(_parents),
    },
    several_questions=True,
    version=2,  # 2: several questions
)
