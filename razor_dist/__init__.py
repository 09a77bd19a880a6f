"""Distributed inference for long contexts: full caches for retrieval heads, small for the rest."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from razor_dist.config.schema import EngineConfig
    from razor_dist.frontend.outputs import CompletionOutput, RequestOutput
    from razor_dist.llm.async_llm import AsyncLLM
    from razor_dist.llm.llm import LLM
    from razor_dist.llm.prefix import Prefix
    from razor_dist.protocol.sampling_params import SamplingParams
    from razor_dist.protocol.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Prefix",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "razor_dist.llm.llm",
    "AsyncLLM": "razor_dist.llm.async_llm",
    "CompletionOutput": "razor_dist.frontend.outputs",
    "EngineConfig": "razor_dist.config.schema",
    "Prefix": "razor_dist.llm.prefix",
    "RequestOutput": "razor_dist.frontend.outputs",
    "SamplingParams": "razor_dist.protocol.sampling_params",
    "StructuredOutputsParams": "razor_dist.protocol.structured_outputs",
}


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): the command line must not wait for torch to print its help.
    if name not in _HOMES:
        raise AttributeError(f"module 'razor_dist' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
