"""The least that a prompt and a token take, by rates that the same run measures.

A prompt's floor is its linear layers' operations at the rate of a matrix product, and its
attention's at the rate of the attention op; a token's is what it reads, weights, keys and values,
at the rate at which a matrix is read for its product with a vector. What an engine takes beyond is
its own, so that ``time / floor`` compares across machines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from razor_dist import kernels
from razor_dist.evals.bench.measure import SIZES, Rates, Timing, fastest, measure_ceilings
from razor_dist.kernels.linear import use_int8_linear
from razor_dist.models.shape import ModelShape
from razor_dist.plan.compute import decode_reads, operations
from razor_dist.plan.deployment import Deployment

# Queries, and as many keys, of the attention that is timed.
_TOKENS = 2048


class Floor(NamedTuple):
    prefill: float  # seconds of a prompt
    decode: float  # seconds of a token

    def under(self, timing: Timing) -> tuple[float, float]:
        """Return an engine's time over the floor, for prefill and for decode."""
        return timing.prefill / self.prefill, timing.decode / self.decode

    def as_json(self, timing: Timing) -> dict[str, float]:
        prefill, decode = self.under(timing)
        return {
            "prefill_seconds": self.prefill,
            "decode_seconds_per_token": self.decode,
            "prefill_over_floor": prefill,
            "decode_over_floor": decode,
        }


@torch.inference_mode()
def measure_rates(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, *, int8: bool = False
) -> Rates:
    """Measure a device with torch's present number of threads, attention with a model's heads."""
    _, side, seconds = SIZES[device.type]
    ceilings = measure_ceilings(device, dtype)
    tokens = min(_TOKENS, side)
    q, k, v = (
        torch.randn(shape.kv_heads, *heads, tokens, shape.head_dim, device=device).to(dtype)
        for heads in ([shape.group], [], [])
    )

    def attend() -> object:
        return kernels.attend(q, k, v, scale=shape.head_dim**-0.5)

    attention = 4 * q.numel() * tokens / fastest(attend, device, seconds)
    eight = 0.0
    if int8:
        layers = nn.Sequential(nn.Linear(side, side, bias=False))
        use_int8_linear(layers)
        x = torch.randn(side, side)
        eight = 2 * side**3 / fastest(lambda: layers(x), device, seconds)
    return ceilings._replace(attention=attention, int8_products=eight)


def floor(d: Deployment, rates: Rates, prompt: int, new_tokens: int) -> Floor:
    """Return the floor of an engine on one rank: decode's of the token in the middle."""
    work = operations(d, prompt)
    int8 = d.config.weight_dtype == "int8"
    products = rates.int8_products if int8 else rates.products
    attention = (work.retrieval + work.streaming) / rates.attention
    reads = decode_reads(d, prompt + new_tokens // 2)
    return Floor(work.linear / products + attention, reads / rates.bandwidth)
