"""Lengths of samples without a model's tokenizer."""

from __future__ import annotations

import re

from razor_dist.evals.suites.sample import Sample


def words(sample: Sample) -> int:
    """Tokens of the longest prompt, a word or a mark being one."""
    texts = (f"{sample.message(q)} {q.cue}" for q in sample.questions)
    return max(len(re.findall(r"\w+|[^\w\s]", text)) for text in texts)
