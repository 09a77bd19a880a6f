"""Penalties and biases: as their definitions say, and for each sequence as if it were alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from razor_dist.engine.logits import LogitsProcessors
from razor_dist.protocol.sampling_params import SamplingParams

VOCABULARY, EOS = 7, 5
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


def literally(
    logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """vLLM's definitions, a token at a time."""
    found = []
    for token, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in answer:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        logit -= params.frequency_penalty * answer.count(token)
        logit -= params.presence_penalty * (token in answer)
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if ends and len(answer) < params.min_tokens:
            logit = -math.inf
        found.append(logit)
    return found


@st.composite
def sequences(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int], list[float]]:
    params = SamplingParams(
        min_tokens=draw(st.integers(0, 9)),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, 3), max_size=2))),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(
            st.none() | st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100))
        ),
    )
    logits = st.lists(st.floats(-9, 9), min_size=VOCABULARY, max_size=VOCABULARY)
    return params, draw(TOKENS), draw(TOKENS), draw(logits)


@hypothesis_settings(deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=5))
def test_adjusted_logits_are_those_of_the_definitions(batch: list[Any]) -> None:
    processors = LogitsProcessors(VOCABULARY, torch.device("cpu"), [EOS])
    for key in (90, 91, 92):  # rows of the table that are used again
        processors.add(key, SamplingParams(presence_penalty=1.0), [])
        processors.accept({key: 3})
        processors.remove(key)
    for key, (params, prompt, _, _) in enumerate(batch):
        parts = np.array(prompt[:3], np.int32), np.array(prompt[3:], np.int32)
        processors.add(key, params, parts)
    for step in range(8):
        answers = enumerate(answer for _, _, answer, _ in batch)
        processors.accept({key: answer[step] for key, answer in answers if step < len(answer)})
    keys = range(len(batch))
    found = processors.apply(keys, torch.tensor([logits for *_, logits in batch]))
    for (params, prompt, answer, logits), row in zip(batch, found.tolist(), strict=True):
        np.testing.assert_allclose(row, literally(logits, params, prompt, answer), atol=1e-4)
    for key, (*_, logits) in enumerate(batch):  # to the last bit, whoever shares the step
        assert torch.equal(processors.apply([key], torch.tensor([logits]))[0], found[key])
