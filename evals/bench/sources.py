"""Cost of asking for sources: ``python -m razor_dist.evals.bench.sources [--world-size P]``.

One engine of the embedded model answers the same question about the same text, read once, with and
without ``return_sources`` by turns. A line of JSON has the medians of the milliseconds between two
tokens, and of whole answers behind their first token, per token (docs/benchmarks/sources).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from statistics import median

from razor_dist.documents.corpus import reference_paragraphs
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

QUESTION = "\n\nWhat is this text about? Give its main points."


def prompt_of(llm: LLM, tokens: int) -> str:
    """Return Python's language reference, cut to ``tokens``, and a question."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer("\n\n".join(reference_paragraphs()))["input_ids"]
    return str(tokenizer.decode(ids[:tokens])) + QUESTION


def answer(llm: LLM, prompt: str, sources: int, tokens: int) -> tuple[list[float], float]:
    """Return the seconds between an answer's tokens, and of all behind the first, to its end."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, return_sources=sources
    )
    seen = [(time.perf_counter(), output) for output in llm.stream(prompt, params)]
    times, [found] = [at for at, _ in seen], seen[-1][1].outputs
    assert len(found.token_ids) == tokens
    assert (found.sources is not None) == (sources > 0)
    return [b - a for a, b in itertools.pairwise(times)], times[-1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--rounds", type=int, default=8, help="answers with, and as many without")
    arguments = parser.parse_args()
    gaps: dict[int, list[float]] = {0: [], 3: []}
    wholes: dict[int, list[float]] = {0: [], 3: []}
    with LLM("smollm2", world_size=arguments.world_size) as llm:
        prompt = prompt_of(llm, arguments.prompt_tokens)
        answer(llm, prompt, 0, 4)
        for number in range(arguments.rounds):
            for sources in (0, 3) if number % 2 else (3, 0):
                own, whole = answer(llm, prompt, sources, arguments.tokens)
                gaps[sources] += own
                wholes[sources].append(whole / (arguments.tokens - 1))
    figures: dict[str, float] = dict(vars(arguments))
    for name, found in (("token", gaps), ("answer", wholes)):
        without, asked = (1000 * median(found[key]) for key in (0, 3))
        figures |= {f"{name}_ms": without, f"{name}_ms_sources": asked}
        figures[f"{name}_cost"] = asked / without - 1
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
