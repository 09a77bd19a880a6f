"""What a head map was found to lose: its part of the file."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Verification:
    """Needles found with full attention and with a head map (`razor_dist.evals.needle.verify`).

    Attributes
    ----------
    documents : int
        Asked for one needle each.
    tokens : int
        Of a document.
    haystack, haystack_fingerprint : str
        The text around the needles.
    seed : int
    dtype : str
    settings : dict
        The engine's: prefill and what a streaming head sees; its window is the map's own if the map
        has windows.
    found_full, found : int
        Needles found with full attention, and with the map.
    lost, gained : int
        Needles that only full attention finds, and those that only the map finds.
    kv_bytes_full, kv_bytes : int
        Keys and values of a document, measured, the median over the documents.
    """

    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    haystack: str
    haystack_fingerprint: str
    seed: int
    dtype: str
    settings: dict[str, Any]
    found_full: int = Field(ge=0)
    found: int = Field(ge=0)
    lost: int = Field(ge=0)
    gained: int = Field(ge=0)
    kv_bytes_full: int = Field(ge=1)
    kv_bytes: int = Field(ge=1)

    def __str__(self) -> str:
        """Two lines for people."""
        least = self.settings.get("window_min")
        window = "" if least is None else f", window of at least {least}"
        return (
            f"{self.documents} documents of {self.tokens} tokens ({self.haystack}), "
            f"{self.settings.get('prefill')} prefill{window}: full attention finds "
            f"{self.found_full}, this map {self.found}; {self.lost} lost, {self.gained} gained\n"
            f"KV of a document: {self.kv_bytes / 2**20:.1f} MiB instead of "
            f"{self.kv_bytes_full / 2**20:.1f} ({self.kv_bytes / self.kv_bytes_full:.0%})"
        )
