"""The offline API on ranks that compute nothing."""

from __future__ import annotations

from functools import partial

from razor_dist import LLM, AsyncLLM
from razor_dist.frontend.ranks import RankGroup
from razor_dist.jobs.host_engine import HostLLM


class FakeLLM(LLM):
    start_ranks = partial(RankGroup.start, module="tests.fake_engine")


class FakeHostLLM(HostLLM):
    start_ranks = FakeLLM.start_ranks


class FakeAsyncLLM(AsyncLLM):
    def __init__(self) -> None:
        self.llm = FakeLLM()
