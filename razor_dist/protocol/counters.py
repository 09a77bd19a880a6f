"""Counters of the ranks, under their names in ``/stats`` (docs/serving.md has a table)."""

from __future__ import annotations

import bisect

import msgspec
from msgspec import UNSET, UnsetType

# Upper bounds of the buckets of `StepSeconds`, in seconds.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class TierCounters(msgspec.Struct):
    """Counters of host memory or of the disk as a tier of the prefix cache."""

    hits: int = 0  # prompts that began with an entry
    hit_tokens: int = 0
    evictions: int = 0
    failures: int = 0  # to read or to write
    no_room: int = 0  # saves for which eviction makes no room
    entries: int = 0  # now
    bytes: int = 0  # now, of all ranks


class PrefixCounters(msgspec.Struct):
    """Counters of the prefix cache: of all tiers, and of each tier below the device in use."""

    queries: int = 0  # prompts
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0  # from the device
    entries: int = 0  # on the device now
    bytes_per_rank: list[int] = []  # on the device now, which may be evicted
    host: TierCounters | UnsetType = UNSET
    disk: TierCounters | UnsetType = UNSET
    saving: int | UnsetType = UNSET  # sequences still to be saved

    @property
    def lower(self) -> dict[str, TierCounters]:
        """The tiers in use below the device, by name."""
        tiers = {"host": self.host, "disk": self.disk}
        return {name: of for name, of in tiers.items() if isinstance(of, TierCounters)}


class DraftCounters(msgspec.Struct):
    """Counters of drafts, under vLLM's names."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class StepSeconds(msgspec.Struct, array_like=True):
    """A histogram of the seconds that steps of one kind took."""

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = []  # steps up to each bound, and above the last
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def note(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class Counters(msgspec.Struct):
    """Counters of all ranks; lists have an element for each rank."""

    kv_bytes_per_rank: list[int] = []  # keys and values of sequences in use now
    retrieval_kv_bytes_per_rank: list[int] = []  # of retrieval heads among them
    peak_kv_bytes_per_rank: list[int] = []
    rss_per_rank: list[int] = []  # resident bytes
    peak_rss_per_rank: list[int] = []
    cpu_us_per_rank: list[int] = []  # microseconds of processor time
    bytes_sent: dict[str, int] = {}  # by purpose, of all ranks
    bytes_sent_per_rank: list[int] = []
    prefix_cache: PrefixCounters = msgspec.field(default_factory=PrefixCounters)
    running: int = 0  # sequences that are being prefilled or answered
    waiting: int = 0  # requests
    pinned: dict[str, dict[str, int]] = {}  # by request id and tier, bytes beyond the device
    prompt_tokens: int = 0  # prefilled
    generated_tokens: int = 0
    step_seconds: dict[str, StepSeconds] = {}  # of "prefill" and "decode"
    decode: str = ""  # as `EngineInfo.decode`
    spec_decode: DraftCounters | UnsetType = UNSET  # with drafts
