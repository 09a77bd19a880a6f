"""``eval fidelity`` as a job: an item is one text, read by one method and by full attention."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.config.schema import EngineConfig
from razor_dist.documents.corpus import haystack_paragraphs
from razor_dist.documents.read import kind_of, read_document
from razor_dist.evals.fidelity.config import FidelityConfig
from razor_dist.evals.fidelity.model import FidelityModel, Figures, Scored
from razor_dist.evals.methods import Method, methods_of, shape_of
from razor_dist.evals.selection import BLOCK, RECENT
from razor_dist.evals.texts import Prompter, repeat_passages
from razor_dist.frontend.prompts import PromptEncoder
from razor_dist.jobs.task import Item
from razor_dist.models.registry import display_name

KIND = "fidelity"  # of task, in a folder's settings
# Most texts have more tokens than are wanted in 8 characters for each and 2**20 more.
_BEGINNING_CHARACTERS, _TOKEN_CHARACTERS = 2**20, 8
GROUP = 32  # tokens of a copy that are counted together: those side by side are not independent


@dataclass(frozen=True)
class Text:
    name: str
    scored: Scored
    copies: tuple[range, ...] = ()  # tokens that stand in the text before

    @property
    def digest(self) -> str:
        about = np.array(self.scored.ids, "<i4").tobytes() + self.scored.prompt.to_bytes(8)
        return hashlib.sha256(about).hexdigest()[:12]

    def parts(self, count: int) -> list[tuple[int, int, bool]]:
        """Return begin and end of the positions to report on, and whether they copy.

        Text and copies, without the tokens between them, which cannot be foreseen; or ``count``
        ranges of text.
        """
        prompt, end = self.scored.prompt, self.scored.positions.stop
        edges = [prompt + (end - prompt) * part // count for part in range(count + 1)]
        parts = [(*pair, False) for pair in itertools.pairwise(edges)]
        if self.copies:
            starts = [prompt, *(copy.stop for copy in self.copies)]
            parts = []
            for start, copy in zip(starts, self.copies, strict=False):
                parts += [(start, copy.start - 1, False), (copy.start, copy.stop - 1, True)]
        return [part for part in parts if prompt <= part[0] < part[1]]


@dataclass(frozen=True)
class FidelityTask:
    """A task of `razor_dist.jobs`; build it with `plan`.

    A folder may be continued with other texts and methods: the ids of what is there name both by
    their content.
    """

    config: FidelityConfig
    texts: tuple[Text, ...]
    methods: tuple[Method, ...]

    @classmethod
    def plan(cls, config: FidelityConfig, files: Sequence[Path]) -> FidelityTask:
        """Read and tokenise the texts; without a file it is the haystack of the needle tests."""
        methods = tuple(methods_of(config, config.method_settings))
        context = shape_of(config).max_positions
        most = min(config.max_model_len or context, context) - 1  # one is generated
        name, tokens = "tokens", config.tokens
        if config.repeat_at:
            name, tokens = "repeat_at", config.repeat_at[-1]
        if tokens is not None and tokens > most:
            raise ConfigError(
                f"{name} is {tokens}, but {config.model} holds {most} and one that follows"
            )
        names = [file.name for file in files]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two texts are named {min(twice)}; rename one")
        found = dict(zip(names, map(_text_of, files), strict=True))
        if not files:
            name, paragraphs = haystack_paragraphs("auto")
            found = {name: "\n\n".join(paragraphs)}
        encoder = PromptEncoder(Prompter.of(config).tokenizer)
        texts = []
        for name, text in found.items():
            ids = _first_tokens(encoder, text, tokens or most)
            copies: list[range] = []
            wanted, prompt = tokens or (config.prompt_tokens or 1) + 2, config.prompt_tokens
            if config.repeat_at:
                # Nothing is chosen before this; and a passage must not stand in what all read.
                prompt, away = prompt or RECENT + BLOCK, RECENT + BLOCK
                try:
                    ids, copies = repeat_passages(
                        ids, config.repeat_at, config.repeat_tokens, BLOCK, away
                    )
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from None
            if len(ids) < wanted:
                raise ConfigError(f"{name} has {len(ids)} tokens, fewer than the {wanted} wanted")
            scored = Scored(tuple(ids), prompt or len(ids) // 2)
            texts.append(Text(name, scored, tuple(copies)))
        return cls(config, tuple(texts), methods)

    @property
    def settings(self) -> Mapping[str, Any]:
        config = self.config
        return {
            "kind": KIND,
            "model": display_name(config.model),
            "ranges": config.ranges,
            "steps": config.steps,
            "repeat_at": config.repeat_at,
        }

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        return {"shared": self.config.engine}

    def items(self) -> Sequence[Item]:
        """Return each text with all methods, one after the other: full attention reads it once."""
        every = itertools.product(enumerate(self.texts), enumerate(self.methods))
        return [
            Item(
                "/".join((text.name, text.digest, method.name, method.fingerprint)),
                len(text.scored.ids),
                "shared",
                {"text": number, "method": index},
            )
            for (number, text), (index, method) in every
        ]

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        model: FidelityModel = llm
        text, method = self.texts[item.data["text"]], self.methods[item.data["method"]]
        one_by_one = self.config.steps == "decode"
        figures, cost = model.measure(method, text.scored, one_by_one=one_by_one)
        return {
            "text": text.name,
            "digest": text.digest,
            "fingerprint": method.fingerprint,
            "tokens": len(text.scored.ids),
            "prompt_tokens": text.scored.prompt,
            "method": method.name,
            "method_settings": dict(method.settings),
            "retrieval_heads": method.retrieval and sum(map(sum, method.retrieval)),
            "dtype": model.dtype,
            "kv_bytes": cost["kv_bytes"],
            "kv_bytes_full": cost["kv_bytes_full"],
            "all": figures.summary(),
            "ranges": [_about(figures, text, *part) for part in text.parts(self.config.ranges)],
            "timing": {"seconds": round(cost["seconds"], 3)},
        }


def _about(figures: Figures, text: Text, begin: int, end: int, copies: bool) -> dict[str, Any]:
    first, last = begin - text.scored.prompt, end - text.scored.prompt
    found = figures.summary(first, last)
    if copies:
        groups = figures.right[first:last].double().split(GROUP)
        found["copied"] = [group.mean().item() for group in groups]
    return {"begin": begin, "end": end, **found}


def _first_tokens(encoder: PromptEncoder, text: str, count: int) -> list[int]:
    """Return a text's first tokens, of its beginning alone if that has more: the rest takes GB."""
    ids = encoder.text(text[: _BEGINNING_CHARACTERS + _TOKEN_CHARACTERS * count])
    return (ids if len(ids) > count else encoder.text(text))[:count]


def _text_of(file: Path) -> str:
    """Return a document's text; a file of an unknown kind is plain text."""
    kind = kind_of(file)
    if kind in (None, "jsonl"):
        kind = "text"
    try:
        gz = file.suffix.lower() == ".gz"
        # Named, so that no flag is advised that this command does not have.
        return read_document(file.read_bytes(), kind, gz=gz, encoding="utf-8").text
    except OSError as error:
        raise ConfigError(f"cannot read the text {file}: {error.strerror}") from None
    except DocumentError as error:
        raise ConfigError(f"{file} {error}") from None
