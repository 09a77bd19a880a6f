"""Bodies of requests with prompts of many words or tokens."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from razor_dist.frontend.prompts import PromptEncoder
from tests.tokenizer import smollm2_tokenizer

MILLION = 2**20
ENCODER = PromptEncoder(smollm2_tokenizer())


def words(count: int) -> str:
    return " ".join(
        random.Random(0).choices(["the", "quick", "brown", "fox", "17", "jumps,", "over;"], k=count)
    )


@cache
def ids(count: int) -> list[int]:
    return random.Random(0).choices(range(100, 49000), k=count)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2", "max_tokens": 1, **fields}).encode()
