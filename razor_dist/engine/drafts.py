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

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from razor_dist.config.speculative import SpeculativeConfig
from razor_dist.engine.ngram_index import NgramIndex, PromptIndexes
from razor_dist.engine.request import Answer
from razor_dist.engine.step_cost import StepCost
from razor_dist.protocol.counters import DraftCounters
from razor_dist.protocol.messages import Tokens

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
    """Chooses the drafts of a step; a `razor_dist.engine.batch.Drafter`.

    ``cost`` estimates a step's seconds. A step has up to ``most_tokens`` tokens of answers and of
    short prompts because of drafts: in larger steps products may be rounded otherwise. Runs have 1,
    2, 4, 8, … tokens, since each number of tokens in a step takes a recording of its own.
    """

    def __init__(self, config: SpeculativeConfig, cost: StepCost, most_tokens: int) -> None:
        self._config, self._cost, self._most_tokens = config, cost, most_tokens
        self._of_all = HitRates()
        self._terms, self._steps = cost.decode_terms(), 0
        # Of each answer, and how many of its tokens it knows.
        self._proposers: WeakKeyDictionary[Answer, tuple[Lookup | Ngram, int]] = WeakKeyDictionary()
        self._indexes = PromptIndexes(config.lookup_min)
        self.counts = DraftCounters(num_accepted_tokens_per_pos=[0] * config.longest_draft)

    def __call__(
        self, answers: Sequence[tuple[Answer, int]], beside: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return each answer's draft, shorter than the run that it may have; mostly none.

        ``beside`` are the tokens of prompts that each rank computes in the same step.
        """
        room = self._most_tokens - len(answers)
        # Where a rank's prompts alone are more, its step is long with or without drafts.
        room -= max((tokens for tokens in beside if tokens <= room), default=0)
        found: list[list[int]] = [[] for _ in answers]
        if room < 1:
            return found
        lengths = [answer.length for answer, _ in answers]
        if not self._steps % _REFIT:
            self._terms = self._cost.decode_terms()
        self._steps += 1
        step, token, before = self._terms
        base = max(_LEAST_STEP, step + len(answers) * token + sum(lengths) * before)
        for (answer, most), length, draft in zip(answers, lengths, found, strict=True):
            row = max(token + length * before, _LEAST_ROW * base)
            most = min(most, self._config.longest_draft + 1, room + 1)
            if most < 2:  # nor is a long prompt indexed, for tenths of a second
                continue
            proposer = self._proposer(answer)
            count = self._count(proposer, most, len(answers), base, row)
            draft += proposer.draft(count) if count else []
            room -= len(draft)
        return found

    def _proposer(self, answer: Answer) -> Lookup | Ngram:
        known = self._proposers.get(answer)
        if known is None:
            if self._config.method == "ngram":
                proposer: Lookup | Ngram = Ngram(answer.request.tokens, self._config)
            else:
                proposer = Lookup(self._indexes.of(answer.request), self._config, self._of_all)
            known = proposer, 0
        proposer, count = known
        proposer.extend(answer.generated[count:])
        self._proposers[answer] = proposer, len(answer.generated)
        return proposer

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
        self.counts.num_drafts += 1
        self.counts.num_draft_tokens += tokens
        self.counts.num_accepted_tokens += accepted
        for at in range(accepted):
            self.counts.num_accepted_tokens_per_pos[at] += 1
