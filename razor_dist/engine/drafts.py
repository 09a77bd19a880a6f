"""Drafts: tokens that may follow an answer's last one, read with it in one step and verified.

An answer about a document repeats parts of it. Where the last tokens stand in the sequence already,
what followed them there is a draft that costs nothing (prompt lookup). A step reads a *run*, an
answer's last token and its draft, in little more time than one token: weights, and the collectives
between ranks, are needed once. Rank 0 draws a token after each, and keeps the draft as far as it is
what was drawn (`EngineCore`), so an answer has the same tokens with drafts and without.

Whether a draft is worth its time is known before it is read: `Lookup` compares every token that is
drawn with the one it would have proposed, drafted or not, and `Drafts` takes the run by which a
step gives the most tokens per second. So a text in which nothing repeats has no drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.engine.request import Answer, Request
from razor_dist.engine.step_cost import StepCost
from razor_dist.protocol.messages import Tokens

# Earlier places of the last tokens that are compared, the latest ones.
_CANDIDATES = 16
# Multiplier of the hash of tokens: the fraction of the golden ratio, as Knuth proposes.
_KNUTH = 2654435761
# Matches are sorted by length: 0, 1, 2 to 3, 4 to 7, 8 to 15, and more.
_KINDS = 6
# How often the next token was the proposed one, for each kind of match, in the embedded model's
# answers about documents; and in how many tokens that is believed to have been seen.
_USUAL_HITS = np.array([0.3, 0.3, 0.4, 0.6, 0.8, 0.9])
_BELIEVED_TOKENS = 8.0
# Weight that a token keeps in an answer's rates when the next one of its kind comes, and in those
# of all answers, from which a new one's begin.
_FORGET, _FORGET_OF_ALL = 0.95, 0.995
# Steps between two looks at what a step costs: the fit takes as long as a hundred drafts.
_REFIT = 16
# Least share of a step that one more token is believed to cost: on a CPU eight rows of a product
# take a sixth longer than one. Estimates of so small a difference may come out as nothing.
_LEAST_ROW = 0.025
# Least seconds that a step of answers is believed to take: while every step has read a prompt too,
# the estimate may be 0.
_LEAST_STEP = 1e-4
# A draft must promise this many times the tokens per second of a step without one: estimates err.
_GAIN = 1.05


class NgramIndex:
    """Earlier places of a sequence's last tokens: hash chains, as in LZ77 compressors.

    ``_last[h]`` is the end of the last ``n`` tokens with hash h, and ``_before[i]`` the end before
    position i in its chain; both are −1 where there is none. A token is added in constant time.

    Parameters
    ----------
    tokens : int32 ``[N]``
        The sequence so far.
    n : int
        Tokens that must be alike.
    """

    def __init__(self, tokens: Tokens, n: int) -> None:
        self._n, self._count = n, len(tokens)
        room = max(1024, len(tokens) + len(tokens) // 4)
        self._tokens, self._before = np.empty(room, np.int32), np.full(room, -1, np.int32)
        self._tokens[: len(tokens)] = tokens
        self._mask = (1 << room.bit_length()) - 1
        self._last = np.full(self._mask + 1, -1, np.int32)
        ends = np.arange(n - 1, len(tokens))
        if not len(ends):
            return
        hashed = np.zeros(len(ends), np.uint64)
        for offset in range(n):
            hashed = hashed * np.uint64(_KNUTH) + tokens[offset : offset + len(ends)].astype("u8")
        hashed = self._slot(hashed)
        order = np.argsort(hashed, kind="stable")
        of, at = hashed[order], ends[order]
        same = of[1:] == of[:-1]
        self._before[at[1:][same]] = at[:-1][same]
        newest = np.append(~same, True)
        self._last[of[newest]] = at[newest]

    def __len__(self) -> int:
        return self._count

    def copy(self) -> NgramIndex:
        """Return an index that goes on by itself; sorting the tokens takes ten times as long."""
        own = copy.copy(self)
        own._tokens, own._before, own._last = (
            a.copy() for a in (self._tokens, self._before, self._last)
        )
        return own

    def _slot(self, hashed: np.ndarray) -> np.ndarray:
        return ((hashed * np.uint64(_KNUTH)) >> np.uint64(20)) & np.uint64(self._mask)

    def add(self, token: int) -> None:
        """Append a token."""
        end = self._count
        if end == len(self._tokens):
            # The chains stay as they are, though the table is smaller than a new one would be.
            self._tokens = np.resize(self._tokens, 2 * end)
            self._before = np.append(self._before, np.full(end, -1, np.int32))
        self._tokens[end] = token
        self._count += 1
        if self._count < self._n:
            return
        hashed = 0
        for last in self._tokens[self._count - self._n : self._count].tolist():
            hashed = (hashed * _KNUTH + last) & 0xFFFFFFFFFFFFFFFF
        slot = (hashed * _KNUTH & 0xFFFFFFFFFFFFFFFF) >> 20 & self._mask
        self._before[end] = self._last[slot]
        self._last[slot] = end

    def find(self, longest: int) -> tuple[int, int]:
        """Return the position after the best earlier match of the last tokens, and its length.

        The longest match is best, and the latest of those. It has ``longest`` tokens at most, and
        0 if fewer than ``n`` are alike anywhere.
        """
        end = self._count - 1
        ends: list[int] = []
        at = int(self._before[end]) if self._count > self._n else -1
        while at >= 0 and len(ends) < _CANDIDATES:
            ends.append(at)
            at = int(self._before[at])
        if not ends:
            return -1, 0
        span = np.arange(min(longest, self._count))
        # What stands before the beginning is position -1, ..., and equals nothing.
        places = np.array(ends)[:, None] - span
        alike = (self._tokens[places] == self._tokens[end - span]) & (places >= 0)
        lengths = np.logical_and.accumulate(alike, axis=1).sum(1)
        best = int(lengths.argmax())
        if lengths[best] < self._n:  # others with the same hash
            return -1, 0
        return ends[best] + 1, int(lengths[best])

    def token(self, at: int) -> int:
        return int(self._tokens[at])

    def following(self, at: int, count: int) -> list[int]:
        """Return ``count`` tokens from a position on; behind the end comes a copy of these."""
        found: list[int] = self._tokens[at : min(at + count, self._count)].tolist()
        while len(found) < count:
            found += found[: count - len(found)]
        return found


class HitRates:
    """Shares of proposed tokens that were right, by the length of the match that proposed them.

    The last tokens count most. ``of_all`` are the rates from which these begin.
    """

    def __init__(self, of_all: HitRates | None = None) -> None:
        self._of_all = of_all
        usual = _USUAL_HITS if of_all is None else of_all.rates
        self._seen = np.full(_KINDS, _BELIEVED_TOKENS)
        self._right = usual * self._seen
        self._forget = _FORGET_OF_ALL if of_all is None else _FORGET

    @property
    def rates(self) -> np.ndarray:
        return self._right / self._seen

    def note(self, matched: int, right: bool) -> None:
        """Note if the token after a match of ``matched`` tokens was the proposed one."""
        kind = _kind(matched)
        self._right[kind] = self._forget * self._right[kind] + right
        self._seen[kind] = self._forget * self._seen[kind] + 1
        if self._of_all is not None:
            self._of_all.note(matched, right)

    def hits(self, matched: int, count: int) -> float:
        """Return the expected number of right tokens among ``count`` after a match."""
        rates, likely, hits = self.rates.tolist(), 1.0, 0.0
        for length in range(matched, matched + count):
            likely *= rates[_kind(length)]
            hits += likely
        return hits


def _kind(matched: int) -> int:
    return min(matched.bit_length(), _KINDS - 1)


class Lookup:
    """Proposes what followed the last tokens where they stood before, and goes on there.

    The place is looked for once: as long as its tokens are those of the answer, the next ones are
    proposed. After one that is not, the place goes on behind it, as where a word was replaced,
    unless the last tokens stand elsewhere.
    """

    def __init__(self, index: NgramIndex, config: SpeculativeConfig, of_all: HitRates) -> None:
        self._index = index
        self._longest = config.lookup_max
        self._rates = HitRates(of_all)
        self._at, self._matched = self._index.find(self._longest)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the sequence's next tokens."""
        for token in tokens:
            before, matched = self._at, self._matched
            right = before >= 0 and self._index.token(before) == token
            if before >= 0:
                self._rates.note(matched, right)
            self._index.add(token)
            if right:
                self._at, self._matched = before + 1, matched + 1
                continue
            self._at, self._matched = self._index.find(self._longest)
            if self._at < 0 and matched:
                self._at = before + 1

    def draft(self, count: int) -> list[int]:
        """Return up to ``count`` tokens that may follow, the likelier the earlier."""
        return [] if self._at < 0 else self._index.following(self._at, count)

    def hits(self, count: int) -> float:
        """Return the expected number of right tokens among a draft's first ``count``."""
        return 0.0 if self._at < 0 else self._rates.hits(self._matched, count)


class Ngram:
    """Proposes as vLLM's method of that name does, to compare with: a search at every step.

    What followed the first place of the longest n-gram, of ``prompt_lookup_max`` tokens down to
    ``prompt_lookup_min``, at which the sequence ends; always as many tokens as are wanted.
    """

    def __init__(self, tokens: Tokens, config: SpeculativeConfig) -> None:
        self._tokens = tokens
        self._sizes = range(config.lookup_max, config.lookup_min - 1, -1)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens = np.concatenate([self._tokens, np.asarray(tokens, np.int32)])

    def draft(self, count: int) -> list[int]:
        for n in self._sizes:
            if len(self._tokens) <= n:
                continue
            last = self._tokens[-n:]
            windows = np.lib.stride_tricks.sliding_window_view(self._tokens[:-1], n)
            places = (windows == last).all(1).nonzero()[0]
            if len(places):
                begin = int(places[0]) + n
                found: list[int] = self._tokens[begin : begin + count].tolist()
                return found
        return []

    def hits(self, count: int) -> float:
        return float(count)


class Drafts:
    """Chooses the drafts of a step; a `razor_dist.engine.scheduler.Drafter`.

    ``cost`` estimates a step's seconds. A step has up to ``most_tokens`` tokens of answers because
    of drafts. Runs have 1, 2, 4, 8, … tokens, since each number of tokens in a step takes a
    recording of its own.
    """

    def __init__(self, config: SpeculativeConfig, cost: StepCost, most_tokens: int) -> None:
        self._config, self._cost, self._most_tokens = config, cost, most_tokens
        self._of_all = HitRates()
        self._terms, self._steps = cost.decode_terms(), 0
        # Of each answer, and how many of its tokens it knows.
        self._proposers: WeakKeyDictionary[Answer, tuple[Lookup | Ngram, int]] = WeakKeyDictionary()
        # Of prompts with several answers; each answer's own begins as a copy.
        self._indexes: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()
        self._drafts = self._draft_tokens = 0
        self._accepted_at = [0] * config.longest_draft

    def __call__(self, answers: Sequence[tuple[Answer, int]]) -> list[list[int]]:
        """Return each answer's draft, shorter than the run that it may have; mostly none."""
        room = self._most_tokens - len(answers)
        if room < 1:  # nor does it pay now to index long prompts, tenths of a second each
            return [[] for _ in answers]
        proposers = [self._proposer(answer) for answer, _ in answers]
        lengths = [answer.length for answer, _ in answers]
        found = []
        if not self._steps % _REFIT:
            self._terms = self._cost.decode_terms()
        self._steps += 1
        step, token, before = self._terms
        base = max(_LEAST_STEP, step + len(answers) * token + sum(lengths) * before)
        for (_, most), proposer, length in zip(answers, proposers, lengths, strict=True):
            row = max(token + length * before, _LEAST_ROW * base)
            most = min(most, self._config.longest_draft + 1, room + 1)
            count = self._count(proposer, most, len(answers), base, row)
            found.append(proposer.draft(count) if count else [])
            room -= len(found[-1])
        return found

    def _proposer(self, answer: Answer) -> Lookup | Ngram:
        known = self._proposers.get(answer)
        if known is None:
            if self._config.method == "ngram":
                proposer: Lookup | Ngram = Ngram(answer.request.tokens, self._config)
            else:
                proposer = Lookup(self._index(answer.request), self._config, self._of_all)
            known = proposer, 0
        proposer, count = known
        proposer.extend(answer.generated[count:])
        self._proposers[answer] = proposer, len(answer.generated)
        return proposer

    def _index(self, request: Request) -> NgramIndex:
        """Return an index of a prompt for one of its answers."""
        known = self._indexes.get(request)
        if known is None:
            known = NgramIndex(request.tokens, self._config.lookup_min)
            if len(request.answers) == 1:
                return known
            self._indexes[request] = known
        return known.copy()

    def _count(
        self, proposer: Lookup | Ngram, most: int, answers: int, base: float, row: float
    ) -> int:
        """Tokens of the draft by which a step gives the most tokens per second.

        A step of all answers takes ``base`` seconds without drafts, and ``row`` more for each
        token.
        """
        best, count, run = _GAIN * answers / base, 0, 2
        while run <= most:
            speed = (answers + proposer.hits(run - 1)) / (base + (run - 1) * row)
            if speed > best:
                best, count = speed, run - 1
            run *= 2
        return count

    def verified(self, tokens: int, accepted: int) -> None:
        """Note that of a draft of ``tokens`` the first ``accepted`` were right."""
        self._drafts += 1
        self._draft_tokens += tokens
        for at in range(accepted):
            self._accepted_at[at] += 1

    @property
    def counts(self) -> dict[str, int | list[int]]:
        """Counters since the start, under vLLM's names."""
        return {
            "num_drafts": self._drafts,
            "num_draft_tokens": self._draft_tokens,
            "num_accepted_tokens": sum(self._accepted_at),
            "num_accepted_tokens_per_pos": list(self._accepted_at),
        }
