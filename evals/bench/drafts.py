"""Drafts beside none: tokens per second of answers about a document, and of free chat.

All engines read the same conversations of real text (Python's reference) with the embedded model
and answer greedily, past end-of-sequence tokens; they take turns. An answer's tokens must be the
same from all.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.documents.corpus import reference_paragraphs
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.settings import DraftsBenchSettings
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_PASSAGE = "{passage}"
# By the task's name: what is asked after the document, and the least speed with drafts, relative to
# that without, on one rank and on several.
TASKS: dict[str, tuple[str, float | None, float | None]] = {
    "repeat a passage": (f"Repeat this passage word for word:\n\n{_PASSAGE}", 2.0, 3.0),
    "correct a word": (
        f"Write this passage again, with 'item' in the place of 'object':\n\n{_PASSAGE}",
        2.0,
        3.0,
    ),
    "extract a list": ("Copy the first ten lines of the text above as they are.", 2.0, 3.0),
    "answer with quotes": (
        "Which statements are explained? Quote a line for each.",
        None,
        None,
    ),
    "summary": ("Summarise the text above in ten sentences.", None, None),
    "free chat": ("Forget the text. Tell me a story about a fox who learns to swim.", 0.97, 0.97),
}
_METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "lookup": {"method": "lookup"},
    "ngram": {"method": "ngram"},
}


@dataclass
class Timed:
    """One engine's answers to one task."""

    seconds: list[float] = field(default_factory=list)  # between an answer's first and last token
    tokens: tuple[int, ...] = ()
    same: bool = True  # in every repeat
    accepted: int = 0  # drafted tokens that came true
    steps: int = 0


def prompts(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each task's name and prompt: a document of ``tokens`` tokens, and what is asked."""
    ids = tokenizer("\n\n".join(reference_paragraphs()))["input_ids"][:tokens]
    document = str(tokenizer.decode(ids))
    passage = str(tokenizer.decode(ids[tokens // 2 : tokens // 2 + 200]))
    for name, (question, *_) in TASKS.items():
        content = f"{document}\n\n{question.replace(_PASSAGE, passage)}"
        message = [{"role": "user", "content": content}]
        text = str(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        )
        yield name, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ask(llm: LLM, prompt: list[int], new_tokens: int, timed: Timed) -> None:
    """Have one prompt answered, and add its time."""
    before = llm.stats()
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    [output] = llm.generate(prompt, greedy)
    after, metrics = llm.stats(), output.metrics
    assert metrics.time_to_first_token is not None and metrics.total_seconds is not None
    timed.seconds.append(metrics.total_seconds - metrics.time_to_first_token)
    tokens = tuple(output.outputs[0].token_ids)
    timed.same &= not timed.tokens or tokens == timed.tokens
    timed.tokens = tokens
    decode = [sum(of["step_seconds"]["decode"][1]) for of in (before, after)]
    timed.steps = decode[1] - decode[0]
    counts = [of.get("spec_decode", {}).get("num_accepted_tokens", 0) for of in (before, after)]
    timed.accepted = counts[1] - counts[0]


def run(settings: DraftsBenchSettings) -> BenchRecord:
    """Time all methods at every number of ranks."""
    rows = [["", "tokens/s", "lookup", "ngram", "accepted/step", "of ngram", "bar", ""]]
    figures: list[dict[str, Any]] = []
    for size in settings.ranks:
        with ExitStack() as stack:
            llms = {
                name: stack.enter_context(
                    LLM(
                        "smollm2",
                        world_size=size,
                        decode="auto" if size == 1 else "tensor",
                        threads=max(1, settings.threads // size),
                        max_num_seqs=1,
                        speculative_config=method,
                    )
                )
                for name, method in _METHODS.items()
            }
            tokenizer = llms["none"].get_tokenizer()
            assert tokenizer is not None
            for task, prompt in prompts(tokenizer, settings.prompt_tokens):
                timed = {name: Timed() for name in llms}
                for _ in range(settings.repeats + 1):  # the first records steps
                    for name, llm in llms.items():
                        ask(llm, prompt, settings.new_tokens, timed[name])
                        log.info("P=%d, %s, %s: %.2f s", size, task, name, timed[name].seconds[-1])
                figure, row = compared(task, size, len(prompt), timed)
                figures.append(figure)
                rows.append(row)
    return BenchRecord("drafts", settings, {"tasks": figures}, [Table("", rows)])


def compared(
    task: str, size: int, prompt_tokens: int, timed: dict[str, Timed]
) -> tuple[dict[str, Any], list[str]]:
    """Return a task's figures and its row of the table."""
    speed = {
        name: (len(of.tokens) - 1) / statistics.median(of.seconds[1:]) for name, of in timed.items()
    }
    accepted = {name: of.accepted / max(1, of.steps) for name, of in timed.items()}
    ratios = {name: value / speed["none"] for name, value in speed.items()}
    same = all(of.same and of.tokens == timed["none"].tokens for of in timed.values())
    _, alone, several = TASKS[task]
    bar = alone if size == 1 else several
    verdict = "" if bar is None else "met" if ratios["lookup"] >= bar else "missed"
    row = [
        f"P={size}, {task}",
        f"{speed['none']:.1f}",
        *(f"{ratios[name]:.2f} x" for name in ("lookup", "ngram")),
        *(f"{accepted[name]:.2f}" for name in ("lookup", "ngram")),
        "" if bar is None else f"≥ {bar:g}",
        verdict if same else "other tokens",
    ]
    figure = {
        "task": task,
        "world_size": size,
        "prompt_tokens": prompt_tokens,
        "tokens_per_second": speed,
        "accepted_per_step": accepted,
        "seconds": {name: of.seconds for name, of in timed.items()},
        "same_tokens": same,
    }
    return figure, row
