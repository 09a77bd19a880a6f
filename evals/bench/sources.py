"""Cost of asking for sources: the same question with and without ``return_sources``, by turns.

One engine of the embedded model answers about one text, read once. Figures are medians of the
milliseconds between two tokens, and of whole answers behind their first token, per token.
"""

from __future__ import annotations

import itertools
import time
from statistics import median

from razor_dist.documents.corpus import reference_prose
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.settings import SourcesBenchSettings
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

QUESTION = "\n\nWhat is this text about? Give its main points."
_SOURCES = 3  # asked for


def run(settings: SourcesBenchSettings) -> BenchRecord:
    gaps: dict[int, list[float]] = {0: [], _SOURCES: []}
    wholes: dict[int, list[float]] = {0: [], _SOURCES: []}
    with LLM("smollm2", world_size=settings.world_size) as llm:
        prompt = _prompt(llm, settings.prompt_tokens)
        _answer(llm, prompt, 0, 4)
        for number in range(settings.repeats):
            for sources in (0, _SOURCES) if number % 2 else (_SOURCES, 0):
                own, whole = _answer(llm, prompt, sources, settings.new_tokens)
                gaps[sources] += own
                wholes[sources].append(whole / (settings.new_tokens - 1))
    figures: dict[str, float] = {}
    rows = [["ms", "without", "with sources", "more"]]
    for name, found in (("token", gaps), ("answer", wholes)):
        without, asked = (1000 * median(found[key]) for key in (0, _SOURCES))
        cost = asked / without - 1
        figures |= {f"{name}_ms": without, f"{name}_ms_sources": asked, f"{name}_cost": cost}
        rows.append([name, f"{without:.2f}", f"{asked:.2f}", f"{cost:.1%}"])
    return BenchRecord("sources", settings, dict(figures), [Table("", rows)])


def _prompt(llm: LLM, tokens: int) -> str:
    """Return prose, cut to ``tokens``, and a question."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prose = reference_prose(tokens, lambda text: len(tokenizer(text)["input_ids"]))
    ids = tokenizer("\n\n".join(prose))["input_ids"]
    return str(tokenizer.decode(ids[:tokens])) + QUESTION


def _answer(llm: LLM, prompt: str, sources: int, tokens: int) -> tuple[list[float], float]:
    """Return the seconds between an answer's tokens, and of all behind the first, to its end."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, return_sources=sources
    )
    seen = [(time.perf_counter(), output) for output in llm.stream(prompt, params)]
    times, [found] = [at for at, _ in seen], seen[-1][1].outputs
    assert len(found.token_ids) == tokens
    assert (found.sources is not None) == (sources > 0)
    return [b - a for a, b in itertools.pairwise(times)], times[-1] - times[0]
