"""An offline API on ranks that compute nothing, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from razor_dist import LLM
from tests.fake_llm import FakeLLM


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with FakeLLM(world_size=2) as llm:
        yield llm
