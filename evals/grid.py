"""Needles at lengths and depths, one a document, asked by many settings of one model.

A document is prefilled and kept; the question continues it, so that with ``prefill: exact`` it is
asked after the cache was compressed. The task runs in this process: see `replay`. `Check` is a
short grid with full attention and with a head map, to see what the map loses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from razor_dist.config.errors import ConfigError, ModelError
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.fidelity.model import FidelityModel, Scored
from razor_dist.evals.methods import FULL, FULL_METHOD, Method, check_lengths, shape_of
from razor_dist.evals.needle.config import GridConfig, Place
from razor_dist.evals.needle.documents import Documents, Reading, Spot
from razor_dist.evals.needle.model import check_needle_model
from razor_dist.evals.needle.presets import PRESETS, Preset
from razor_dist.evals.needle.results import NeedleResults
from razor_dist.evals.needle.task import ask, run_here
from razor_dist.evals.one_rank import MethodEngine, ReplayModel, StreamingPolicy
from razor_dist.evals.settings import STREAMING_SETTINGS, streaming_settings
from razor_dist.evals.texts import Corpus, Haystack, Prompter, same_haystack
from razor_dist.heads.head_map import Fidelity, HeadMap, Verification
from razor_dist.jobs.task import ExternalEngineConfig, Item
from razor_dist.llm.llm import LLM
from razor_dist.models.registry import display_name

KIND = "grid"  # of task, in a folder's settings
_NUMBER = "number"
PRESET = PRESETS[_NUMBER]

_LEAST_TOKENS = 2500
# Of the context, for the chat template, the question and the answer.
ROOM = 100 + PRESET.answer_tokens


def place_seed(place: Place, seed: int) -> int:
    """Return the seed of the document at a place, which no other place and seed has."""
    length, depth, needle = place
    # Further pairs of needles are so far away that no other seed, length and depth comes there.
    pair, which = divmod(needle, 2)
    return ((seed * 100_003 + length) * 101 + depth) * 2 + which + (pair << 64)


def grid_reading(
    prompter: Prompter,
    haystack: Haystack | None,
    place: Place,
    seed: int,
    preset: Preset = PRESET,
) -> Reading:
    """Make the document at a place, and its question; the same for every method."""
    length, depth, needle = place
    spots, own = [Spot(depth, needle)], place_seed(place, seed)
    documents = Documents(preset, prompter, haystack)
    [made] = documents.readings("after", length, spots, own, document_alone=True)
    return made


@dataclass(frozen=True)
class GridTask:
    """A task of `razor_dist.jobs`; build it with `plan`.

    A folder may be continued with other methods, lengths, depths and needles: the ids of what is
    there name the method's fingerprint.
    """

    config: ExternalEngineConfig  # shared by all methods; one rank
    grid: GridConfig
    methods: tuple[Method, ...]
    haystack: Corpus | None  # None where the preset makes the text
    preset: str = _NUMBER  # its name: a preset has functions, which do not travel

    @classmethod
    def plan(
        cls,
        grid: GridConfig,
        methods: Sequence[Method],
        head_maps: Sequence[HeadMap] = (),
        preset: str = _NUMBER,
    ) -> GridTask:
        """Settle the haystack by what is installed; refuse what does not fit the model."""
        shape = shape_of(grid, *head_maps)
        check_lengths(grid, shape, max(grid.lengths), ROOM)
        if preset == "words":
            check_needle_model("preset words", grid.model, shape.vocab_size)
        haystack = Corpus.of(grid.haystack) if PRESETS[preset].haystack else None
        own = grid.model_dump(include=set(EngineConfig.model_fields))
        # What heads see is the methods', and so are the blocks that are chosen.
        names = ("prefill", *STREAMING_SETTINGS, "retrieval_share")
        own |= {name: EngineConfig.model_fields[name].default for name in names}
        own |= {"attention": "full", "head_map": None, "seed": None, "world_size": 1}
        shared = ExternalEngineConfig(opens="razor_dist.evals.one_rank:ReplayModel", **own)
        return cls(shared, grid, tuple(methods), haystack, preset)

    @property
    def settings(self) -> Mapping[str, Any]:
        name, text = self.haystack or (None, None)
        return {
            "kind": KIND,
            "model": display_name(self.config.model),
            "haystack": name,
            "haystack_fingerprint": text,
            "seed": self.grid.seed,
            "version": PRESETS[self.preset].version,
        }

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {"grid": self.config}

    def items(self) -> Sequence[Item]:
        """Return each method's turn at each document; first those that share its prefill."""
        methods = list(enumerate(self.methods))
        return [
            Item(
                "/".join(map(str, (method.name, *place, method.fingerprint))),
                place[0],
                "grid",
                {"method": number, "place": place},
            )
            for shared in (True, False)
            for place, (number, method) in itertools.product(self.grid.places, methods)
            if method.shares_prefill is shared
        ]

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        """Read a document by a method's settings, and ask a `ReplayModel` for its needle."""
        model: ReplayModel = llm
        method, place = self.methods[item.data["method"]], item.data["place"]
        prompter, preset = model.prompter, PRESETS[self.preset]
        haystack = self.haystack and same_haystack(*self.haystack, prompter.tokenizer)
        reading = grid_reading(prompter, haystack, place, self.grid.seed, preset)
        tokens = len(reading.prefix) + len(reading.questions[0].ids) + preset.answer_tokens
        result = ask(cast("LLM", MethodEngine(model, method, tokens)), preset, [reading])
        return {"method": method.name, "length": place[0], "repeat": 0, **result}

    def run_in(self, folder: Path) -> NeedleResults:
        """Run what a folder lacks, or refuse it; return the results of this task's items."""
        return NeedleResults(run_here(self, folder))


@dataclass(frozen=True)
class Check:
    """A verification of a head map, settled before the work of finding it."""

    config: EngineConfig  # model, and what a streaming head without a window of its own sees
    tokens: int | None  # of a document; None: twice the least window, at least 2500, at most `most`
    most: int  # what the model's context holds with a question and its answer
    haystack: str
    seed: int

    @classmethod
    def plan(cls, config: EngineConfig, tokens: int | None, haystack: str, seed: int) -> Check:
        """Refuse a verification that is known to be of no use; see `Check` for the parameters.

        A document must fit the model but not the window (an ALiBi model's are its map's, which
        `settle` looks at), so that something is tested, and the model must have a tokenizer.
        """
        Prompter.of(config)
        shape = shape_of(config)
        context = shape.max_positions
        check = cls(config, tokens, context - ROOM, haystack, seed)
        length = check._length(config.window_min)
        if not 0 < length <= check.most:
            raise ConfigError(
                f"--verify-tokens is {length}, but the model's context of {context} tokens holds "
                f"documents of 1 to {check.most} with a question and its answer"
            )
        if not shape.alibi:
            check._refuse_nothing(length, None, "give a smaller --verify-window")
        return check

    def _length(self, window: int) -> int:
        """Return the tokens of a document, where the least window is ``window``."""
        if self.tokens is not None:
            return self.tokens
        return min(self.most, max(_LEAST_TOKENS, 2 * window))

    def _refuse_nothing(self, length: int, window: int | None, *remedies: str) -> None:
        """Refuse documents that fit whole into a streaming head's window (its own, if given)."""
        policy = StreamingPolicy.of(self.config).with_window(window, alibi=True)
        if policy.dropped(length - 1):
            return
        if length < self.most:
            remedies += (f"give more --verify-tokens, up to {self.most}",)
        advice = "; " + ", or ".join(remedies) if remedies else ", the longest that fits"
        raise ConfigError(
            f"--verify would test nothing: a streaming head's window of at least "
            f"{window or self.config.window_min} tokens holds a document of {length} whole{advice}"
        )

    def settle(self, head_map: HeadMap) -> tuple[int, dict[str, Any]]:
        """Return a document's tokens, and the settings that act on the map's streaming heads.

        Refuse documents that fit into the map's smallest window, and maps without streaming heads.
        """
        settings = streaming_settings(self.config, self.config.prefill)
        if head_map.windows is None:
            return self._length(self.config.window_min), settings
        windows = [w for row in head_map.windows for w in row if w is not None]
        if not windows:
            raise ConfigError("--verify would test nothing: every head keeps the whole context")
        length = self._length(min(windows))
        self._refuse_nothing(length, min(windows))
        acting = ["prefill", "block"]
        if not shape_of(self.config).alibi:
            acting += ["sink_tokens", "compensation"]
        return length, {name: settings[name] for name in acting}

    def run(self, head_map: HeadMap, say: Callable[[str], None]) -> Verification:
        """Ask for the needles with full attention and with a head map, saying each answer.

        Then compare both on as much of the haystack without a needle.
        """
        tokens, settings = self.settle(head_map)
        documents = {"lengths": (tokens,), "needles": 1}
        about = {"haystack": self.haystack, "seed": self.seed}
        grid = GridConfig(**self.config.model_dump() | documents | about)
        own = Method(head_map.method, settings, head_map.retrieval, head_map.windows)
        task = GridTask.plan(grid, [FULL_METHOD, own], [head_map])
        model, results = FidelityModel(task.config), []
        for item in task.items():
            results.append(task.run(model, item))
            [cell] = results[-1]["cells"]
            say(f"{item.id}: {'right' if cell['score'] else 'WRONG'}, {cell['answer']!r}")
        found = NeedleResults(results)
        of_full, of_map = found.summary(FULL), found.summary(own.name)
        right = [cell.method for cell in found.cells if cell.score == 1]
        assert task.haystack is not None, "numbers are hidden in prose"
        begin, _ = model.prompter.around("", "", chat=False)
        haystack = same_haystack(*task.haystack, model.prompter.tokenizer)
        prose = [*begin, *haystack.hide(tokens - len(begin), [], self.seed)]
        try:
            figures, _ = model.measure(own, Scored(tuple(prose), tokens // 2))
        except ModelError as error:  # the needles were asked all the same
            say(f"prose is not compared: {error}")
            fidelity = None
        else:
            about_prose = figures.summary()
            fidelity = Fidelity(**{f.name: about_prose[f.name] for f in fields(Fidelity)})
        return Verification(
            documents=of_map.cells,
            tokens=tokens,
            **task.haystack._asdict(),
            seed=self.seed,
            dtype=model.dtype,
            settings=settings,
            found_full=right.count(FULL),
            found=right.count(own.name),
            lost=of_map.lost,
            gained=of_map.gained,
            kv_bytes_full=round(of_full.kv_bytes or 0),
            kv_bytes=round(of_map.kv_bytes or 0),
            fidelity=fidelity,
        )
