"""Seconds from ``razor-dist serve`` to ready, and from a prompt to its answer's first token.

The embedded model. At each number of ranks the server is started twice: with an empty folder of
compiled kernels, as on a new machine, and with what the first start has left there.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.prefix import Asker, prose, words_of
from razor_dist.evals.bench.settings import RanksBenchSettings
from razor_dist.evals.serving import connect, serve

_PROMPTS = 3  # of each length; for the first of them nothing is prepared
_SHORT_WORDS = 12


def run(settings: RanksBenchSettings) -> BenchRecord:
    """Start servers, one after the other, and ask each for short and long prompts."""
    starts = []
    for size in settings.ranks:
        with tempfile.TemporaryDirectory() as kernels:
            for compiled in (False, True):
                starts.append(_start(settings, size, kernels) | {"compiled": compiled})
    rows = [["", "ready, s", "CPU s", "short prompts, s", "long prompts, s", "tokens/s"]]
    for of in starts:
        kernels = "compiled before" if of["compiled"] else "nothing compiled"
        cells = [", ".join(f"{second:.2f}" for second in of[kind]) for kind in ("short", "long")]
        speeds = ", ".join(f"{speed:.0f}" for speed in of["tokens_per_second"])
        name = f"P={of['world_size']}, {kernels}"
        rows.append([name, f"{of['ready']:.1f}", f"{of['cpu']:.1f}", *cells, speeds])
    return BenchRecord("start", settings, {"starts": starts}, [Table("", rows)])


def _start(settings: RanksBenchSettings, size: int, kernels: str) -> dict[str, Any]:
    """Time one server: its start, the first tokens of prompts, and the answers to long ones."""
    begun = time.perf_counter()
    with (
        serve(f"--world-size={size}", env=os.environ | {"XDG_CACHE_HOME": kernels}) as process,
        connect(process.url()) as client,
    ):
        ready = time.perf_counter() - begun
        # Of all processes and of those that they have ended: the compiler is one.
        cpu = sum(sum(one.cpu_times()[:4]) for one in process.family())
        server = Asker(client, process, settings.new_tokens)
        answers = [server.ask(text) for text in prompts(settings.prompt_tokens)]
    seconds = [answer.first_token_seconds for answer in answers]
    return {
        "world_size": size,
        "ready": ready,
        "cpu": cpu,
        "short": seconds[:_PROMPTS],
        "long": seconds[_PROMPTS:],
        "prompt_tokens": [answer.prompt_tokens for answer in answers],
        "tokens_per_second": [answer.tokens_per_second for answer in answers[_PROMPTS:]],
    }


def prompts(tokens: int) -> list[str]:
    """Return short prompts and those of about ``tokens`` tokens; no two begin alike."""
    long = words_of(tokens)
    lengths = [_SHORT_WORDS] * _PROMPTS + [long] * _PROMPTS
    texts = (prose(length, number * long) for number, length in enumerate(lengths))
    return [f"Text {number}: {text}" for number, text in enumerate(texts, 1)]
