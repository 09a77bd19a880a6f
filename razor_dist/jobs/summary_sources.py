"""Sources of a summary's sentences: passages of the document, also through summaries of its parts.

A sentence has ``start`` and ``end``, in characters of its summary; ``grounded``, as in
`CompletionOutput`; and ``sources``, the heaviest first, passages of the document with ``start`` and
``end`` in characters of its text, ``weight``, ``text``, and ``page`` or ``headings`` where they are
known.

A summary of summaries was not written from the document. Its sentences have ``parts`` as well: the
sentences of the parts' summaries that the model looked at, each with the number of its ``part``,
from 1, its own number there (``sentence``), from 0, and a ``weight``; ``grounded`` is about these.
Their ``sources`` are the sources of those sentences, weighted by the product of both weights. They
show where to look and prove nothing: an error in a part's summary is one in the summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from razor_dist.documents.read import Document
from razor_dist.documents.structure import Outline
from razor_dist.frontend.outputs import AnswerSentence, Source
from razor_dist.frontend.passages import Part
from razor_dist.jobs.style import SOURCES

Json = dict[str, Any]


class Material(NamedTuple):
    """A text that is summarised: a document, the summaries of its parts, or a piece of either.

    ``begin`` is the character at which a piece begins in the whole text. ``spans`` are begin and
    end, in characters of the whole text, of what may be a source.
    """

    text: str
    spans: Sequence[tuple[int, int]]
    begin: int = 0

    def stripped(self) -> Material:
        lead = len(self.text) - len(self.text.lstrip())
        return Material(self.text.strip(), self.spans, self.begin + lead)

    def cut(self, texts: Iterable[str]) -> list[Material]:
        """Return a piece for each of ``texts``, which follow each other in this text."""
        pieces, begin = [], self.begin
        for text in texts:
            pieces.append(Material(text, self.spans, begin))
            begin += len(text)
        return pieces

    def parts_at(self, place: int) -> list[Part]:
        """Return the spans as parts of a prompt in which this text begins at ``place``.

        `Part.message` is the number of the span.
        """
        found = []
        for number, span in enumerate(self.spans):
            begin, end = (min(max(at - self.begin, 0), len(self.text)) for at in span)
            if begin < end:
                found.append(Part(self.text[begin:end], place + begin, end - begin, number))
        return found


def merged(summaries: Sequence[str]) -> Material:
    """Put the summaries of parts together, as one text, which can be cut between them."""
    text, spans = "", []
    for number, summary in enumerate(summaries, start=1):
        text += f"\n\n# Part {number}\n\n" if text else f"# Part {number}\n\n"
        spans.append((len(text), len(text) + len(summary)))
        text += summary
    return Material(text, spans)


def as_told(sentences: Iterable[AnswerSentence], material: Material, lead: int) -> list[Json]:
    """Return an answer's sentences, with sources as places in the spans; see `traced`.

    ``of`` is a span's number. The answer's first ``lead`` characters are no part of the summary.
    """

    def place(source: Source) -> Json:
        assert source.message is not None
        begin, _ = material.spans[source.message]
        cut = max(0, material.begin - begin)  # of the span, before the material
        at = {"start": source.start + cut, "end": source.end + cut}
        return {"of": source.message, **at, "weight": source.weight}

    return [
        {
            "start": sentence.start - lead,
            "end": sentence.end - lead,
            "grounded": sentence.grounded,
            "sources": list(map(place, sentence.sources)),
        }
        for sentence in sentences
    ]


def traced(answer: Json, document: Document, outline: Outline, summaries: Sequence[Json]) -> Json:
    """Finish an answer's sources; it was made of ``summaries`` or, without any, the text."""
    if "sentences" not in answer:
        return answer

    def placed(source: Json) -> Json:
        start, end = source["start"], source["end"]
        text = document.text[start:end]
        about = {"start": start, "end": end, "weight": source["weight"], "text": text}
        return about | outline.at(start)

    return {
        **answer,
        "sentences": [
            {**one, **_through(one["sources"], summaries)}
            if summaries
            else {**one, "sources": list(map(placed, one["sources"]))}
            for one in answer["sentences"]
        ],
    }


def _through(looked_up: Sequence[Json], summaries: Sequence[Json]) -> Json:
    parts: Counter[tuple[int, int]] = Counter()
    weights: Counter[tuple[int, int]] = Counter()
    sources: dict[tuple[int, int], Json] = {}
    for place in looked_up:
        number, weight = place["of"], place["weight"]
        sentences = summaries[number]["sentences"]
        index = max(range(len(sentences)), key=lambda n: _common(sentences[n], place))
        one = sentences[index]
        own = [{"part": number + 1, "sentence": index, "weight": 1.0}]
        for part in one.get("parts", own):
            parts[part["part"], part["sentence"]] += weight * part["weight"]
        for source in one["sources"]:
            at = source["start"], source["end"]
            sources[at] = source
            weights[at] += weight * source["weight"]
    return {
        "parts": [
            {"part": part, "sentence": index, "weight": weight}
            for (part, index), weight in parts.most_common(SOURCES)
        ],
        "sources": [
            {**sources[at], "weight": weight} for at, weight in weights.most_common(SOURCES)
        ],
    }


def _common(sentence: Json, place: Json) -> int:
    """Return how many characters of a sentence are in a place."""
    return min(sentence["end"], place["end"]) - max(sentence["start"], place["start"])
