"""Memory of one rank, and the longest context that fits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from razor_dist.plan.deployment import Deployment
from razor_dist.plan.devices import Device
from razor_dist.plan.dry_run import DryRun
from razor_dist.plan.traffic import window_tokens_between_chunks

# Contexts beyond this are not asked about.
LONGEST = 2**28
_ROUNDS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes
    ----------
    weights : int
        Parameters and buffers.
    retrieval_kv, streaming_cache, scratch : int
        Reserved at start: the page pool, the slots of streaming heads, exact prefill's pool.
    window_between_chunks : int
        The streaming heads' window while a prompt is being prefilled; taken when it is needed.
    activations : dict of str to int
        At a chunk's peak: ``ring`` (blocks in flight, partial results), ``halo`` (with sinks and
        sums), ``chunk`` (hidden states, projections, streaming attention, MLP).
    logits : int
        Of a decode step of ``max_num_seqs`` sequences, in the model's dtype and in float32.
    sequence_retrieval_kv, sequence_streaming_cache : int
        What one sequence of the planned length takes of the first two.
    """

    weights: int
    retrieval_kv: int
    streaming_cache: int
    scratch: int
    window_between_chunks: int
    activations: dict[str, int]
    logits: int
    sequence_retrieval_kv: int
    sequence_streaming_cache: int

    @property
    def reserved(self) -> int:
        """All that is allocated at start for keys and values."""
        return self.retrieval_kv + self.streaming_cache + self.scratch

    @property
    def working(self) -> int:
        """The larger of a chunk's activations and a decode step's logits."""
        return max(sum(self.activations.values()), self.logits)

    @property
    def total(self) -> int:
        """Everything."""
        return self.weights + self.reserved + self.window_between_chunks + self.working


class MemoryPlanner:
    """Memory of a deployment on a device, at any context length."""

    def __init__(self, deployment: Deployment, device: Device) -> None:
        self._d, self._device = deployment, device
        self._dry_run = DryRun(deployment)
        self._activations: dict[int, Counter[str]] = {}

    @property
    def budget(self) -> float:
        """Bytes that a rank may use."""
        return self._device.memory(self._d.world_size)

    @property
    def weights(self) -> int:
        """Bytes of weights on a rank; ranks of one host map the same pages of their files."""
        nbytes = self._d.weights.nbytes
        return nbytes // self._d.world_size if self._device.shared else nbytes

    def at(self, max_model_len: int, context: int) -> Memory:
        """Return it with room for sequences of ``max_model_len`` tokens, and a prompt in it."""
        caches = self._dry_run.caches(max_model_len, context)
        return Memory(
            weights=self.weights,
            window_between_chunks=self._window(context),
            activations=dict(self._peak(context)),
            logits=self._logits,
            **caches,
        )

    def _window(self, context: int) -> int:
        return self._d.kv_bytes * sum(
            heads.rows * window_tokens_between_chunks(self._d, heads.policy, context)
            for heads in self._d.streaming
        )

    @property
    def _logits(self) -> int:
        rows = self._d.config.max_num_seqs * self._d.shape.vocab_size
        return rows * (self._d.dtype.itemsize + 4)

    def _peak(self, context: int) -> Counter[str]:
        if context not in self._activations:
            self._activations[context] = self._dry_run.activations(context)
        return self._activations[context]

    def longest_context(self, guess: int) -> int:
        """The longest ``max_model_len`` for which everything fits, at most `LONGEST`; 0 if none.

        The caches are bisected with the activations of ``guess``, and these are looked up again at
        what was found; they are bounded, so that they hardly change.
        """
        found = guess
        for _ in range(_ROUNDS):
            working = max(sum(self._peak(found).values()), self._logits)
            found = self._bisect(working)
            if found == 0 or max(sum(self._peak(found).values()), self._logits) <= working:
                return found
        while found and self.at(found, found).total > self.budget:
            found = found * 63 // 64
        return found

    def _bisect(self, working: int) -> int:
        room = self._d.config.kv_tokens

        def fits(context: int) -> bool:
            if room is not None and context > room:
                return False
            kept = sum(self._dry_run.reserved(context).values())
            return self.weights + kept + self._window(context) + working <= self.budget

        low, high = 0, 1
        while high <= LONGEST and fits(high):
            low, high = high, high * 2
        high = min(high, LONGEST + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
