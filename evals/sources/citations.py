"""Citations of a running server's ``/v1/messages``: are they the passage, and none without it?

``python -m razor_dist.evals.sources.citations --url URL`` asks for the needle at the places of
``eval grid``, and again without it in the documents of ``absent_lengths``, as a text document with
citations. The server serves the embedded model, or ``--model`` as it names it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from razor_dist.evals.grid import PRESET
from razor_dist.evals.needle.config import Place
from razor_dist.evals.sources.config import SourcesConfig
from razor_dist.evals.sources.task import Document, SourcesTask, document_at
from razor_dist.evals.texts import Prompter, same_haystack

_PATIENCE = 1800.0  # seconds for an answer


def asked(client: httpx.Client, model: str, document: Document) -> dict[str, Any]:
    """Return a document's answer, its citations, and what is right of them."""
    text, _, question = document.content.rpartition("\n\n")
    source = {"type": "text", "media_type": "text/plain", "data": text}
    blocks = [
        {"type": "document", "source": source, "citations": {"enabled": True}},
        {"type": "text", "text": question},
    ]
    body = {"model": model, "max_tokens": PRESET.answer_tokens, "temperature": 0}
    message = [{"role": "user", "content": blocks}]
    answered = client.post("/v1/messages", json=body | {"messages": message})
    content = answered.raise_for_status().json()["content"]
    answer = "".join(block["text"] for block in content)
    citations = [cited for block in content for cited in block["citations"] or ()]
    exact = all(
        text[cited["start_char_index"] : cited["end_char_index"]] == cited["cited_text"]
        for cited in citations
    )
    [expected] = document.answers
    return {
        "answer": answer,
        "right": PRESET.score(answer, expected) == 1,
        "cited": [cited["cited_text"] for cited in citations],
        "exact": exact,
        "expected": expected,
    }


def figures(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the shares that ``docs/sources.md`` has."""
    there = [one for one in results if not one["absent"]]
    right = [one for one in there if one["right"]]
    cited = [one for one in right if one["cited"]]
    passage = [one for one in cited if all(one["expected"] in text for text in one["cited"])]
    absent = [one for one in results if one["absent"]]
    return {
        "right answers": f"{len(right)} of {len(there)}",
        "of these, with citations": f"{len(cited)} of {len(right)}",
        "of these, every cited_text is the passage": f"{len(passage)} of {len(cited)}",
        "without the needle, no citation": (
            f"{sum(not one['cited'] for one in absent)} of {len(absent)}"
        ),
        "offsets exact": f"{sum(one['exact'] for one in results)} of {len(results)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--every", type=int, default=1, help="ask every N-th place alone")
    parser.add_argument("--out", type=Path, help="a JSON file of all answers")
    arguments = parser.parse_args()
    config = SourcesConfig()
    task = SourcesTask.plan(config)
    prompter = Prompter.of(config)
    haystack = same_haystack(*task.haystack, prompter.tokenizer)
    places: list[tuple[Place, bool]] = [(place, False) for place in config.places]
    places += [(place, True) for place in config.places if place[0] in config.absent_lengths]
    results = []
    with httpx.Client(base_url=arguments.url, timeout=_PATIENCE) as client:
        for place, absent in places[:: arguments.every]:
            document = document_at(prompter, haystack, place, config.seed, absent=absent)
            result = asked(client, arguments.model, document)
            results.append({"place": place, "absent": absent, **result})
            print(json.dumps(results[-1]), flush=True)
    found = figures(results)
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"figures": found, "answers": results}, indent=1))


if __name__ == "__main__":
    main()
