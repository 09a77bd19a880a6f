"""Drafts beside none: tokens per second of answers about a document, and of free chat.

All engines read the same conversations about real text (Python's reference) with the embedded
model, past end-of-sequence tokens; they take turns. An answer's tokens must be the same from all.
Both methods draft up to 7 tokens, the default of ``num_speculative_tokens``.

So small a model does not copy because it is asked to: left alone it falls into loops, in which any
draft is right. So an answer to be copied begins with the first words of what it copies, as a
larger model's would, and how much of it stands in the prompt is reported beside its speed. What is
not copied is drawn at random, with a seed, for the same reason.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from razor_dist.documents.corpus import reference_prose, sentences_of
from razor_dist.evals.bench.measure import BenchRecord, Table
from razor_dist.evals.bench.settings import DraftsBenchSettings
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

log = logging.getLogger(__name__)

# Least tokens of the passage that is copied: more than an answer has by default.
_PASSAGE_TOKENS = 300
# Tokens that must stand in a row in the prompt to count as copied.
_COPIED = 4


@dataclass(frozen=True)
class Task:
    """A question after the document, and how its answer begins.

    In ``question`` and ``begin``, the answer's first words, stand fields of `_fields`. ``bars`` are
    the least speeds with drafts, relative to that without, on one rank and on several.
    """

    question: str
    begin: str = ""
    temperature: float = 0.0
    bars: tuple[float | None, float | None] = (None, None)


TASKS = {
    "repeat a passage": Task(
        "Repeat this passage word for word:\n\n{passage}", "{opening}", bars=(2.0, 3.0)
    ),
    "correct a word": Task(
        "Write this passage again, with '{upper}' in the place of '{word}':\n\n{passage}",
        "{corrected}",
        bars=(2.0, 3.0),
    ),
    "extract a list": Task(
        "Write the sentences of this passage as a list:\n\n{passage}",
        "- {sentence}\n-",
        bars=(2.0, 3.0),
    ),
    "answer with quotes": Task(
        "Which statements are explained? Quote a sentence for each.", '1. "{sentence}"\n2. "'
    ),
    "summary": Task("Summarise the text above in ten sentences.", temperature=0.7),
    "free chat": Task(
        "Forget the text. Tell me a story about a fox who learns to swim.",
        temperature=1.0,
        bars=(0.97, 0.97),
    ),
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
    accepted: int = 0  # drafted tokens that were accepted
    steps: int = 0


def prompts(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Yield each task's name and prompt: a document of about ``tokens`` tokens, and the task."""

    @cache  # of a paragraph that is asked for again below, or repeated in a long document
    def size(paragraph: str) -> int:
        return len(tokenizer.encode(f"{paragraph}\n\n", add_special_tokens=False))

    paragraphs = reference_prose(tokens, size)
    *starts, count = itertools.accumulate(map(size, paragraphs), initial=0)
    document, fields = "\n\n".join(paragraphs), _fields(paragraphs, starts, count)
    for name, task in TASKS.items():
        content = f"{document}\n\n{task.question.format(**fields)}"
        message = [{"role": "user", "content": content}]
        text = str(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        )
        text += task.begin.format(**fields)
        yield name, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _fields(paragraphs: Sequence[str], starts: Sequence[int], count: int) -> dict[str, str]:
    """Return the fields of the tasks' texts, from a passage in the document's middle.

    ``starts`` are the tokens before each paragraph, ``count`` the document's.
    """
    behind = (i for i, start in enumerate(starts) if start >= count // 2)
    first = next(behind, len(starts) - 1)  # the last one may be half of a short document
    ends = [*starts[1:], count]
    last = next((i for i, end in enumerate(ends) if end >= starts[first] + _PASSAGE_TOKENS), -1)
    passage = " ".join(" ".join(paragraphs[first : last + 1 or None]).split())
    words = passage.split()
    long_words = Counter(word for word in words if word.isalpha() and len(word) > 4)
    [(word, _)] = long_words.most_common(1)
    corrected = passage.replace(word, word.upper())
    return {
        "passage": passage,
        "opening": " ".join(words[:8]),
        "sentence": sentences_of(passage)[0],
        "word": word,
        "upper": word.upper(),
        # Up to the first replaced word, and five more.
        "corrected": " ".join(corrected.split()[: words.index(word) + 6]),
    }


def copied(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of an answer's tokens that stand in the prompt, `_COPIED` in a row."""
    there = {tuple(prompt[i : i + _COPIED]) for i in range(len(prompt) - _COPIED + 1)}
    found: set[int] = set()
    for i in range(len(answer) - _COPIED + 1):
        if tuple(answer[i : i + _COPIED]) in there:
            found.update(range(i, i + _COPIED))
    return len(found) / len(answer)


def ask(llm: LLM, prompt: list[int], params: SamplingParams, timed: Timed) -> None:
    """Have one prompt answered, and add its time."""
    before = llm.stats()
    [output] = llm.generate(prompt, params)
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
    rows = [["", "copied", "tokens/s", "lookup", "ngram", "accepted/step", "of ngram", "bar", ""]]
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
                params = SamplingParams(
                    max_tokens=settings.new_tokens,
                    temperature=TASKS[task].temperature,
                    seed=0,
                    ignore_eos=True,
                )
                for _ in range(settings.repeats + 1):  # the first records steps
                    for name, llm in llms.items():
                        ask(llm, prompt, params, timed[name])
                        log.info("P=%d, %s, %s: %.2f s", size, task, name, timed[name].seconds[-1])
                figure, row = compared(task, size, prompt, timed)
                figures.append(figure)
                rows.append(row)
    return BenchRecord("drafts", settings, {"tasks": figures}, [Table("", rows)])


def compared(
    task: str, size: int, prompt: Sequence[int], timed: dict[str, Timed]
) -> tuple[dict[str, Any], list[str]]:
    speed = {
        name: (len(of.tokens) - 1) / statistics.median(of.seconds[1:]) for name, of in timed.items()
    }
    accepted = {name: of.accepted / max(1, of.steps) for name, of in timed.items()}
    ratios = {name: value / speed["none"] for name, value in speed.items()}
    same = all(of.same and of.tokens == timed["none"].tokens for of in timed.values())
    bar = TASKS[task].bars[size > 1]
    from_prompt = copied(prompt, timed["none"].tokens)
    verdict = "" if bar is None else "met" if ratios["lookup"] >= bar else "missed"
    row = [
        f"P={size}, {task}",
        f"{from_prompt:.0%}",
        f"{speed['none']:.1f}",
        *(f"{ratios[name]:.2f} x" for name in ("lookup", "ngram")),
        *(f"{accepted[name]:.2f}" for name in ("lookup", "ngram")),
        "" if bar is None else f"≥ {bar:g}",
        verdict if same else "other tokens",
    ]
    figure = {
        "task": task,
        "world_size": size,
        "prompt_tokens": len(prompt),
        "copied": from_prompt,
        "tokens_per_second": speed,
        "accepted_per_step": accepted,
        "seconds": {name: of.seconds for name, of in timed.items()},
        "same_tokens": same,
    }
    return figure, row
