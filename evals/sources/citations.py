"""Citations by Anthropic's client: are they the passage, exactly, and is there none without it?

A server is asked over ``/v1/messages`` for the needle at the places of ``eval grid``, and again
without it in the documents of ``absent_lengths``. The document is sent in each of ``kinds``:

- ``text``: as plain text;
- ``pdf``: as a PDF file of several pages;
- ``mixed``: behind a document in Chinese, by turns as plain text with emoji and CRLF and as
  ``content`` blocks, so that the needle's characters are neither bytes nor UTF-16 units.

Each request is answered whole and as a stream. Needs the packages of the extra ``dev``.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razor_dist.config.errors import ConfigError
from razor_dist.config.extras import install_command
from razor_dist.config.schema import EngineConfig
from razor_dist.evals.grid import PRESET, ROOM
from razor_dist.evals.methods import check_lengths, shape_of
from razor_dist.evals.needle.config import Place
from razor_dist.evals.report import grouped, join, markdown
from razor_dist.evals.serving import connect, serve
from razor_dist.evals.sources.config import CitationsConfig
from razor_dist.evals.sources.task import document_at, fact_at
from razor_dist.evals.texts import Corpus, Prompter, same_haystack
from razor_dist.jobs.task import ExternalEngineConfig, Item
from razor_dist.models.registry import display_name

try:
    import anthropic
    import pypdfium2  # type: ignore[import-untyped]
    from fpdf import FPDF
except ImportError as error:
    raise ConfigError(f"eval citations needs {error.name}: {install_command('dev')}") from None

Json = dict[str, Any]

logging.getLogger("fontTools").setLevel(logging.WARNING)

_ANSWER_SECONDS = 1800.0
_CHINESE = (
    "\U0001f3ef 山上有一座老城，城里的人每天早上去市场买菜。",  # noqa: RUF001
    "冬天很冷，孩子们在河边玩雪。\U0001f468\u200d\U0001f469\u200d\U0001f467 晚上大家讲故事！",  # noqa: RUF001
)
_EMOJI = "\U0001f409 "  # begins paragraphs
# Of matplotlib, which has the letters and the punctuation of the essays.
_FONT = "fonts/ttf/DejaVuSans.ttf"


@dataclass(frozen=True)
class Sent:
    """A document as it is sent, and how to read what a citation of it names."""

    kind: str  # of its citations
    source: Json
    read: Callable[[Any], str]  # from a citation to the characters or pages that it names


def _text(text: str) -> Sent:
    source = {"type": "text", "media_type": "text/plain", "data": text}

    def read(cited: Any) -> str:
        return text[cited.start_char_index : cited.end_char_index]

    return Sent("char_location", source, read)


def _blocks(text: str) -> Sent:
    parts = text.split("\n\n")
    blocks = [{"type": "text", "text": part} for part in parts]

    def read(cited: Any) -> str:
        return "\n\n".join(parts[cited.start_block_index : cited.end_block_index])

    return Sent("content_block_location", {"type": "content", "content": blocks}, read)


def _pdf(text: str) -> Sent:
    from matplotlib import get_data_path

    file = FPDF()
    file.add_page()
    file.add_font("body", fname=str(Path(get_data_path(), _FONT)))
    file.set_font("body", size=11)
    file.multi_cell(0, 6, text)
    data = bytes(file.output())
    pages = [page.get_textpage().get_text_bounded() for page in pypdfium2.PdfDocument(data)]

    def read(cited: Any) -> str:
        return " ".join(pages[cited.start_page_number - 1 : cited.end_page_number - 1])

    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
    return Sent("page_location", source, read)


def sent(kind: str, place: Place, text: str) -> list[Sent]:
    """Return the documents of a request; the one with the needle is the last."""
    if kind == "text":
        return [_text(text)]
    if kind == "pdf":
        return [_pdf(text)]
    first = _text("\r\n\r\n".join(_CHINESE))
    if place[2] % 2:
        return [first, _blocks(_EMOJI + text.replace("\n\n", f"\n\n{_EMOJI}"))]
    return [first, _text(_EMOJI + text.replace("\n\n", f"\r\n\r\n{_EMOJI}"))]


class CitingServer:
    """``razor-dist serve`` with these settings, and a client of it."""

    def __init__(self, config: EngineConfig) -> None:
        self.prompter = Prompter.of(config)
        given = config.model_dump(mode="json", exclude_defaults=True)
        with ExitStack() as stack:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
            file.write(json.dumps({"model": config.model} | given))
            file.flush()
            self._server = stack.enter_context(serve(f"--config={file.name}"))
            url = self._server.url()
            http = stack.enter_context(connect(url))
            self._model = http.get("/v1/models").json()["data"][0]["id"]
            self._client = stack.enter_context(
                anthropic.Anthropic(
                    base_url=url,
                    api_key="none",
                    timeout=_ANSWER_SECONDS,
                    max_retries=0,
                    # As `connect`: the environment's proxy may not reach this host.
                    http_client=anthropic.DefaultHttpxClient(trust_env=False),
                )
            )
            self.close = stack.pop_all().close

    def ask(self, documents: Sequence[Sent], question: str) -> tuple[Any, Any]:
        """Return an answer's content as a whole, and again as a stream."""
        blocks: list[Any] = [
            {"type": "document", "source": one.source, "citations": {"enabled": True}}
            for one in documents
        ]
        blocks.append({"type": "text", "text": question})
        asked: Json = {
            "model": self._model,
            "max_tokens": PRESET.answer_tokens,
            "messages": [{"role": "user", "content": blocks}],
            "extra_body": {"temperature": 0},  # of which the client's later versions know nothing
        }
        whole = self._client.messages.create(**asked)
        with self._client.messages.stream(**asked) as stream:
            return whole.content, stream.get_final_message().content


@dataclass(frozen=True)
class CitationsTask:
    config: CitationsConfig
    haystack: Corpus

    @classmethod
    def plan(cls, config: CitationsConfig) -> CitationsTask:
        check_lengths(config, shape_of(config), max(config.lengths), ROOM)
        return cls(config, Corpus.of(config.haystack))

    @property
    def settings(self) -> Mapping[str, Any]:
        about = {**self.haystack._asdict(), "seed": self.config.seed}
        model = display_name(self.config.model)
        return {"kind": "citations", "model": model, **about, "version": PRESET.version}

    @property
    def engines(self) -> Mapping[str, EngineConfig]:
        own = self.config.model_dump(include=set(EngineConfig.model_fields), exclude_defaults=True)
        opens = "razor_dist.evals.sources.citations:CitingServer"
        return {"server": ExternalEngineConfig(opens=opens, **own)}

    def items(self) -> Sequence[Item]:
        """Return the requests of all kinds at each place, first with its needle."""
        config = self.config
        return [
            Item("/".join(map(str, (kind, *at, what))), at[0], "server", {"at": (kind, at, what)})
            for at, kind in itertools.product(config.places, config.kinds)
            if kind != "mixed" or at[0] == min(config.lengths)
            for what in ("needle", "absent")[: 1 + (at[0] in (config.absent_lengths or ()))]
        ]

    def run(self, llm: Any, item: Item) -> Mapping[str, Any]:
        server: CitingServer = llm
        kind, place, what = item.data["at"]
        haystack = same_haystack(*self.haystack, server.prompter.tokenizer)
        absent, seed = what == "absent", self.config.seed
        made = document_at(server.prompter, haystack, place, seed, absent=absent)
        text, _, question = made.content.rpartition("\n\n")
        documents = sent(kind, place, text)
        content, streamed = server.ask(documents, question)
        answer = "".join(block.text for block in content)
        fact = fact_at(place, seed)
        citations = [cited for block in content for cited in block.citations or ()]
        return {
            "kind": kind,
            "place": place,
            "absent": absent,
            "expected": fact.answer,
            "answer": answer,
            "right": PRESET.score(answer, fact.answer) == 1,
            "cited": [cited.to_dict() for cited in citations],
            "passage": [
                cited.document_index == len(documents) - 1
                # Lines may be broken elsewhere.
                and cited.cited_text.removeprefix(_EMOJI).split() == fact.sentence.split()
                for cited in citations
            ],
            "exact": [exact(cited, documents) for cited in citations],
            "streamed": [b.to_dict() for b in content] == [b.to_dict() for b in streamed],
        }


def exact(cited: Any, documents: Sequence[Sent]) -> bool:
    """Tell if what a citation names in the document that was sent is what it says."""
    document = documents[cited.document_index]
    if cited.type != document.kind:
        return False
    found = document.read(cited)
    if cited.type == "char_location":
        return found == cited.cited_text
    return " ".join(cited.cited_text.split()) in " ".join(found.split())


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, by kind, lists of what is true of its documents: see `page`."""
    found: dict[str, Any] = {}
    for kind, own in grouped(results, lambda one: one["kind"]).items():
        there = [one for one in own if not one["absent"]]
        right = [one for one in there if one["right"]]
        found[kind] = {
            "right": [one["right"] for one in there],
            "cited": [bool(one["cited"]) for one in right],
            "passage": [all(one["passage"]) for one in right if one["cited"]],
            "wrong, cited": [bool(one["cited"]) for one in there if not one["right"]],
            "absent, not cited": [not one["cited"] for one in own if one["absent"]],
            "exact": [exact for one in own for exact in one["exact"]],
            "streamed": [one["streamed"] for one in own],
        }
    return found


_COLUMNS = {
    "right": "right answers",
    "cited": "of these, with citations",
    "passage": "of these, every `cited_text` is the needle's sentence",
    "wrong, cited": "wrong answers with citations",
    "absent, not cited": "no needle: no citation",
    "exact": "citations with exact places",
    "streamed": "the stream says the same",
}


def page(found: Mapping[str, Mapping[str, Sequence[bool]]]) -> str:
    rows = [
        [kind, *(_share(lists[name]) if lists[name] else "" for name in _COLUMNS)]
        for kind, lists in found.items()
    ]
    return join(
        "# Citations",
        "Counts, and the percent's 95 % interval (Wilson).",
        markdown([["documents", *_COLUMNS.values()], *rows], "numbers"),
    )


def _share(yes: Sequence[bool]) -> str:
    """Return a count and Wilson's 95 % interval of the share, which resampling puts at 1 of 1s."""
    n, k, z = len(yes), sum(yes), 1.96
    centre = (k + z * z / 2) / (n + z * z)
    half = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return f"{k} of {n} ({100 * (centre - half):.0f} to {100 * (centre + half):.0f} %)"
