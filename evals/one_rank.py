"""An engine of one rank in this process, for evaluations that look at each of its steps."""

from __future__ import annotations

from collections.abc import Iterator

from razor_dist.config.schema import EngineConfig
from razor_dist.engine.build import RankEngine, build_engine
from razor_dist.engine.core import EngineCore
from razor_dist.engine.device import torch_device
from razor_dist.parallel.comm import Communicator
from razor_dist.protocol.messages import AboutRequest


def one_rank_engine(config: EngineConfig) -> RankEngine:
    return build_engine(config, Communicator(None), torch_device(config, 0))


def messages(core: EngineCore) -> Iterator[AboutRequest]:
    """Step until nothing is left to do; yield what each step says."""
    while core.has_work:
        yield from core.step()
