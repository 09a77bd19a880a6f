"""Answers with drafts are those without, by the thousand; the embedded model."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from razor_dist.documents.corpus import reference_paragraphs
from razor_dist.llm.llm import LLM
from razor_dist.protocol.sampling_params import SamplingParams

_PROMPTS = 500
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 1.0, "top_k": 50, "frequency_penalty": 0.2},
)


def prompts() -> list[str]:
    """Passages of Python's reference; after every second one its copy begins."""
    passages = [text for text in reference_paragraphs() if 300 < len(text) < 1200]
    found = []
    for number in range(_PROMPTS):
        passage = passages[number % len(passages)]
        question = "Repeat the text." if number % 2 else f"What is {passage.split()[number % 9]}?"
        begin = " ".join(passage.split()[:6]) if number % 2 else ""
        turns = f"user\n{passage}\n\n{question}<|im_end|>\n<|im_start|>assistant\n{begin}"
        found.append(f"<|im_start|>{turns}")
    return found


def answers(world_size: int, drafts: dict[str, str] | None) -> tuple[list[list[int]], int]:
    """Return the tokens of two answers to each prompt, and the number of accepted drafts."""
    asked = prompts() * 2
    params = [
        SamplingParams(max_tokens=32, seed=seed, ignore_eos=True, **of)
        for seed, of in zip(range(len(asked)), cycle(_SAMPLING), strict=False)
    ]
    params[_PROMPTS:] = params[_PROMPTS + 1 :] + params[:1]  # another sampling for each prompt
    with LLM(
        "smollm2",
        world_size=world_size,
        decode="tensor" if world_size > 1 else "replicated",
        threads=max(1, 2 // world_size),
        max_num_seqs=8,
        max_model_len=1024,
        speculative_config=drafts,
    ) as llm:
        outputs = llm.generate(asked, params)
        accepted = llm.stats().get("spec_decode", {}).get("num_accepted_tokens", 0)
    return [list(output.outputs[0].token_ids) for output in outputs], accepted


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_thousand_answers_are_the_same_with_drafts(world_size: int) -> None:
    plain, none = answers(world_size, None)
    drafted, accepted = answers(world_size, {"method": "lookup"})
    assert len(plain) == 2 * _PROMPTS and none == 0 and accepted > _PROMPTS
    assert [n for n, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b] == []
