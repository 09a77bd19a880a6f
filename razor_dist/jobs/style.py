"""Style of summaries: the prompt and the settings that fill it in."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from typer import Option

from razor_dist.config.errors import ConfigError
from razor_dist.config.validation import check_least
from razor_dist.protocol.repetition import LOOPS
from razor_dist.protocol.sampling_params import SamplingParams

# The question comes last, so that every head that keeps recent tokens has it when it is answered.
TEMPLATE = """Below is {kind}.

{document}

That was {kind}. Summarize it in about {words} words, in {language}. Write only the summary."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NAMES = ("document", "kind", "words", "language")
# Tokens for each word asked for: some languages take three, and a sentence wants to be ended.
_TOKENS_PER_WORD = 3
# A summary has no lists of equal lines, so a loop is found earlier than in other answers.
_LOOPS = replace(LOOPS, min_length=48)
# Passages reported for a sentence.
SOURCES = 3


@dataclass(frozen=True)
class Style:
    """Settings that decide the summaries; wrong values raise `ConfigError`.

    The template has ``{document}`` and, where wanted, ``{kind}`` (a document, a part, summaries),
    ``{words}`` and ``{language}``.
    """

    words: Annotated[int, Option(help="Length asked for.")] = 200
    language: Annotated[str, Option(help="Such as French.")] = "the language of the text"
    template: str = TEMPLATE
    max_tokens: Annotated[
        int | None, Option(help="Where a summary is cut off. [default: 3 for each word]")
    ] = None
    temperature: Annotated[float, Option(help="Of the draws; 0 is greedy.")] = 0.0
    seed: int = 0
    sources: Annotated[
        bool, Option("--sources", help="Also tell where each sentence of a summary came from.")
    ] = False

    def __post_init__(self) -> None:
        check_least(self, words=1, max_tokens=1)
        if not self.language.strip():
            raise ConfigError("language must not be empty")
        names = set(_PLACEHOLDER.findall(self.template))
        if unknown := sorted(names - set(_NAMES)):
            raise ConfigError(
                f"the template has the unknown placeholder {{{unknown[0]}}}; "
                f"there are {', '.join('{' + name + '}' for name in _NAMES)}"
            )
        if "document" not in names:
            raise ConfigError("the template has no {document}, where the text is to stand")
        if self.template.count("{document}") > 1:
            raise ConfigError(
                "the template has {document} twice; a document that is cut stands in one place"
            )
        _ = self.sampling  # the temperature's range is SamplingParams' to refuse

    @property
    def sampling(self) -> SamplingParams:
        limit = self.max_tokens or _TOKENS_PER_WORD * self.words
        return SamplingParams(
            max_tokens=limit,
            temperature=self.temperature,
            seed=self.seed,
            repetition_detection=_LOOPS,
            return_sources=SOURCES if self.sources else 0,
        )

    def prompt(self, document: str, kind: str) -> str:
        return self._fill(self.template, document, kind)

    def document_begin(self, kind: str) -> int:
        """Return the character of the prompt at which the document begins."""
        return len(self._fill(self.template.partition("{document}")[0], "", kind))

    def _fill(self, template: str, document: str, kind: str) -> str:
        values = {**asdict(self), "document": document, "kind": kind}
        return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)
