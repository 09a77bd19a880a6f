"""Sources of right, wrong and impossible answers: does the top passage hold what was asked for?

Every document of `eval grid` is asked once with its needle and once without, and tasks of suites
where it is known where their answers stand. The engine's strongest retrieval heads are traced one
by one, so that one run tells how many of them are best, and what random ones would say, or the last
layer's. BM25 over the document's sentences, asked with question and answer, stands beside them
(`razor_dist.evals.sources.report`).
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from razor_dist.config.errors import ConfigError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.grid import PRESET, ROOM, place_seed
from razor_dist.evals.methods import check_lengths, shape_of
from razor_dist.evals.needle.config import Place
from razor_dist.evals.needle.presets import Fact
from razor_dist.evals.one_rank import TOP, TracedModel
from razor_dist.evals.sources.config import GRID, SUITE_OF, SourcesConfig
from razor_dist.evals.suites.job import data_fingerprints, material_of
from razor_dist.evals.suites.published import has_word
from razor_dist.evals.suites.sample import Sample, Span
from razor_dist.evals.suites.tasks import Score
from razor_dist.evals.texts import Corpus, Haystack, Prompter, same_haystack
from razor_dist.frontend.passages import question_begin
from razor_dist.jobs.task import ExternalEngineConfig, Item
from razor_dist.models.registry import display_name


class Document(NamedTuple):
    content: str  # of the user's message
    question: str
    answers: tuple[str, ...]  # that are wanted
    places: tuple[Span, ...] = ()  # characters of the content that hold them; none: not there
    cue: str = ""  # begins the answer
    answer_tokens: int = PRESET.answer_tokens
    score: Score = lambda answer, wanted: PRESET.score(answer, *wanted)

    @property
    def alone(self) -> str:
        """The content without the question: several tasks may ask about the same document."""
        return self.content.removesuffix(self.question)


def fact_at(place: Place, seed: int) -> Fact:
    """Return what is hidden at a place."""
    [fact] = PRESET.draw([place[1]], place_seed(place, seed))
    return fact


def document_at(
    prompter: Prompter, haystack: Haystack, place: Place, seed: int, *, absent: bool
) -> Document:
    """Make the document at a place, and its question; the needle may be ``absent``."""
    length, depth, _ = place
    fact = fact_at(place, seed)
    hidden = [] if absent else [(fact.sentence, float(depth))]
    text = prompter.decode(haystack.hide(length, hidden, place_seed(place, seed))).strip()
    content = text + PRESET.layouts["after"].fill("after", fact)
    places: tuple[Span, ...] = ()
    if not absent:
        begin = content.index(fact.sentence) + fact.sentence.index(fact.answer)
        places = ((begin, begin + len(fact.answer)),)
    return Document(content, fact.question, (fact.answer,), places)


@dataclass(frozen=True)
class SourcesTask:
    config: SourcesConfig
    traced: ExternalEngineConfig
    haystack: Corpus
    data: Mapping[str, str]  # fingerprint of each question task's file

    @classmethod
    def plan(cls, config: SourcesConfig) -> SourcesTask:
        beside = ROOM if GRID in config.task_names else 0
        check_lengths(config, shape_of(config), max(config.lengths), beside)
        own = config.model_dump(include=set(EngineConfig.model_fields))
        # Every query head of the retrieval heads, the strongest first.
        own |= {"source_heads": 1 << 20, "prefix_cache": False, "world_size": 1}
        traced = ExternalEngineConfig(opens="razor_dist.evals.one_rank:TracedModel", **own)
        haystack = Corpus.of(config.haystack)
        return cls(config, traced, haystack, data_fingerprints(config.files))

    @property
    def settings(self) -> Mapping[str, Any]:
        about = {**self.haystack._asdict(), "seed": self.config.seed}
        suites = [SUITE_OF[name] for name in self.config.task_names if name != GRID]
        # The report makes their documents again.
        versions = {GRID: PRESET.version} | {suite.name: suite.version for suite in suites}
        model = display_name(self.config.model)
        return {"kind": "sources", "model": model, **about, "data": self.data, "versions": versions}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {"traced": self.traced}

    def items(self) -> Sequence[Item]:
        config, others = self.config, [name for name in self.config.task_names if name != GRID]
        absent = config.absent_lengths or ()
        at: list[tuple[str, tuple[int, ...]]] = [
            (kind, place)
            for place, kind in itertools.product(config.places, ("needle", "absent"))
            if GRID in config.task_names and (kind == "needle" or place[0] in absent)
        ]
        samples = itertools.product(sorted(config.lengths), range(config.samples))
        at += itertools.product(others, samples)
        return [
            Item("/".join(map(str, (kind, *place))), place[0], "traced", {"at": (kind, place)})
            for kind, place in at
        ]

    def document(self, prompter: Prompter, item: Item) -> Document:
        kind, place = item.data["at"]
        if kind in SUITE_OF:
            return self._sample(prompter, kind, *place)
        haystack = same_haystack(*self.haystack, prompter.tokenizer)
        absent = kind == "absent"
        return document_at(prompter, haystack, place, self.config.seed, absent=absent)

    def _sample(self, prompter: Prompter, task: str, length: int, number: int) -> Document:
        material = material_of(self.haystack, self.config.files, self.data)

        def tokens(sample: Sample) -> int:
            asked = sample.questions
            return max(len(prompter.whole(sample.message(one), one.cue)) for one in asked)

        suite = SUITE_OF[task]
        made = suite.sample(task, length, number, self.config.seed, material, tokens)
        asked = made.of_task(task).questions[0]  # one question a document
        if not asked.places:
            raise ConfigError(f"the data of {task} do not tell where its answer stands")
        content = made.message(asked)
        question = content[question_begin(content) :]
        own = suite.tasks[task]
        # RULER's rule for questions counts "I do not know" as "no".
        word = {answer.lower() for answer in asked.answers} <= {"yes", "no"}
        score = has_word if word else own.score
        about = (asked.answers, asked.places, asked.cue, own.answer_tokens, score)
        return Document(content, question, *about)

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        model: TracedModel = llm
        kind, place = item.data["at"]
        document = self.document(model.prompter, item)
        ids = model.prompter.whole(document.content, document.cue)
        tokens, traced_now = model.answer(ids, document.answer_tokens)
        answer = model.prompter.decode(tokens)
        shape = (len(traced_now), -1, TOP)
        positions = np.array([t.positions.numpy() for t in traced_now], "<i4").reshape(shape)
        weights = np.array([t.weights.numpy() for t in traced_now], "<f4").reshape(shape)
        return {
            "kind": kind,
            "length": place[0],
            "number" if kind in SUITE_OF else "depth": place[1],
            "prompt_tokens": len(ids),
            "expected": ", ".join(document.answers),
            "answer": answer,
            "score": document.score(answer, document.answers),
            "heads": positions.shape[1],
            "positions": base64.b64encode(positions.tobytes()).decode(),
            "weights": base64.b64encode(weights.tobytes()).decode(),
        }
