"""Prompts to be read in chunks, and how long steps take on machines that are simulated."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from razor_dist.engine.prefill_policy import PrefillPolicy
from razor_dist.engine.request import Answer, Prefill, Request
from razor_dist.engine.step_cost import StepCost, StepWork
from razor_dist.kernels import torch_cuda
from razor_dist.protocol.sampling_params import SamplingParams

STEP = 0.25
CHUNK = 2048


def request(key: int, tokens: int, arrived: float, priority: int = 0, **changed: Any) -> Request:
    given: dict[str, Any] = {
        "params": SamplingParams(priority=priority),
        "max_tokens": 1,
        "chunked_prefill_size": CHUNK,
    }
    prompt = np.zeros(tokens, np.int32)
    return Request(id=str(key), key=key, prompt=prompt, arrived=arrived, **(given | changed))


def prefill(
    key: int, tokens: int, arrived: float, *, short: bool = False, **changed: Any
) -> Prefill:
    return Prefill(request(key, tokens, arrived, **changed), 0, short)


def observe(cost: StepCost, tokens: int, context: int, seconds: float, chunk: int = 0) -> None:
    """Learn from a step that read tokens of one prompt."""
    pairs = tokens * (context + tokens / 2)
    cost.learn(StepWork(1, chunk, 1 - chunk, 0, context, tokens, pairs), seconds)


def learned(ranks: int = 1, *, shared: bool = False) -> PrefillPolicy:
    """A policy that knows: 0.05 s a step, on several ranks 0.05 s a chunk, 2 ms a token."""
    policy, chunk = PrefillPolicy(STEP, ranks, shared=shared), int(ranks > 1)
    for tokens in (100, 200, 400) * 20:
        policy.cost.learn(StepWork(answers=0), 0.05)
        observe(policy.cost, tokens, 0, 0.05 + 0.002 * tokens)
        if chunk:
            observe(policy.cost, tokens, 0, 0.1 + 0.002 * tokens, chunk)
    return policy


class SimulatedStep(NamedTuple):
    """A step's tokens of a prompt, whether they are a chunk, and its seconds."""

    begin: int
    end: int
    sharded: bool
    seconds: float


def on_eight_h200(
    tokens: int, answers: int = 0, eager: float = 0.05, max_step: float = STEP
) -> list[SimulatedStep]:
    """Steps of a prompt beside running sequences, with the cost of GLM-4-9B on eight H200.

    Of a million tokens a GPU has 13.5 PFLOP of retrieval heads' attention, at 60 % of the peak by
    cuDNN's blocks, filled or not, and 35 % by flash attention, and 5.9 s of products, streaming
    heads, merges and elementwise kernels. A step reads the weights in 3 ms and a chunk adds 30 ms.
    Decoding is replayed in 5 ms; beside a part of a prompt that is no chunk it is not, and takes
    ``eager`` seconds.
    """
    policy = PrefillPolicy(max_step, 8, shared=True, replayed=True)
    prompt = prefill(0, tokens, 0.0, chunked_prefill_size=1 << 20)
    running, steps = [mock.Mock(spec=Answer, length=1000)] * answers, list[SimulatedStep]()
    for _ in range(20):
        policy.learn(
            [(answer, 1, False) for answer in running or [mock.Mock(Answer, length=9)]], 0.005
        )
    rows, operations = 4 * torch_cuda.PLAN_TILE, 13.5e15 / 2**39
    while not prompt.done:
        at = prompt.position
        n, sharded = policy.take(prompt, [], answering=[1000] * answers)
        n = min(max(2, int(n)), prompt.end - at)
        blocks = (n // 8 + rows // 2) // rows if sharded else 0
        keys = at // 8 // torch_cuda.PLAN_KEYS * torch_cuda.PLAN_KEYS * 8
        by_cudnn = blocks * rows * 8 * keys
        by_flash = n * (at + n / 2) - min(n, blocks * rows * 8) * keys
        seconds = operations * (by_cudnn / 0.6 + by_flash / 0.35) / 989e12
        seconds += 0.003 + 5.6e-6 * n + (0.03 if sharded else 0.003)
        if answers:
            seconds += 0.006 if sharded else eager
        policy.learn([(prompt, n, sharded), *((answer, 1, False) for answer in running)], seconds)
        policy.took([prompt], prompt, seconds)
        steps.append(SimulatedStep(at, at + n, sharded, seconds))
        prompt.position = at + n
    return steps
