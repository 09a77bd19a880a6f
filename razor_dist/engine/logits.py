"""Changes to logits that requests ask for: penalties, biases, masks.

All rows of a step that ask for something are computed together; the others are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from razor_dist.engine.request import Answer
from razor_dist.engine.sampler import Adjusted
from razor_dist.protocol.messages import Tokens
from razor_dist.protocol.sampling_params import SamplingParams
from razor_dist.protocol.structured_outputs import Grammar

# Added to the count of a token that the prompt has.
_IN_PROMPT = 1 << 30


@dataclass
class _Entry:
    params: SamplingParams
    counts: int | None  # its row of the table of counts
    biased: Tensor  # int64 [b], tokens
    bias: Tensor  # float32 [b]
    grammar: Grammar | None
    ends: Tensor  # int64 [e], tokens that would end the answer, forbidden below min_tokens
    length: int = 0  # tokens of the answer, so far


class LogitsProcessors:
    """Adjust logits by the parameters of sequences, which are added when they first ask.

    The tokens that a sequence has are counted on the device, int32 ``[V]`` each.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._entries: dict[int, _Entry] = {}
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free: list[int] = []  # rows of it

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def add(
        self,
        key: int,
        params: SamplingParams,
        prompts: Iterable[Tokens],
        grammar: Grammar | None = None,
    ) -> None:
        """Begin a sequence whose prompt is ``prompts``, and whose answer must match ``grammar``."""
        device = self._counts.device
        bias = params.logit_bias or {}
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._eos_token_ids)]
        row = None
        if params.penalizes:
            row = self._free_row()
            self._counts[row] = 0
            if params.repetition_penalty != 1.0:
                for prompt in prompts:
                    tokens = torch.from_numpy(prompt.astype("int64")).to(device)
                    self._counts[row].index_fill_(0, tokens, _IN_PROMPT)
        self._entries[key] = _Entry(
            params,
            row,
            torch.tensor(list(bias), dtype=torch.int64, device=device),
            torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
            grammar and grammar.fresh(),
            torch.tensor(ends, dtype=torch.int64, device=device),
        )

    def begin(self, answers: Iterable[Answer]) -> None:
        """Add new answers whose parameters change logits; their grammars are compiled."""
        for answer in answers:
            if answer.params.adjusts_logits and answer.key not in self:
                request = answer.request
                prompts = [one.prompt for one in (request, *request.prefixes)]
                grammar = request.grammar.result() if request.grammar else None
                self.add(answer.key, answer.params, prompts, grammar)

    def adjusted(self, keys: Sequence[int], rows: Sequence[int], logits: Tensor) -> Adjusted | None:
        """Return changed logits of the sequences here; ``rows`` are all sequences' rows."""
        asking = [index for index, key in enumerate(keys) if key in self]
        if not asking:
            return None
        own = logits[[rows[index] for index in asking]]
        return Adjusted(asking, self.apply([keys[index] for index in asking], own))

    def remove(self, key: int) -> None:
        """Forget a sequence, if it is here."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.counts is not None:
            self._free.append(entry.counts)

    def apply(self, keys: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits ``[n, V]`` by which these sequences' tokens are to be chosen.

        ``logits``, a copy of the model's, is overwritten.
        """
        entries = [self._entries[key] for key in keys]
        grammars = {row: e.grammar for row, e in enumerate(entries) if e.grammar is not None}
        if grammars:
            at = list(grammars)
            logits[at] = _masked(logits[at], list(grammars.values()))
        rows = [torch.full_like(e.biased, row) for row, e in enumerate(entries)]
        places = torch.cat(rows), torch.cat([e.biased for e in entries])
        logits.index_put_(places, torch.cat([e.bias for e in entries]), accumulate=True)
        counted = {row: e.counts for row, e in enumerate(entries) if e.counts is not None}
        if counted:
            at = list(counted)
            counts = self._counts[list(counted.values())]
            logits[at] = _penalized(logits[at], counts, [entries[row].params for row in at])
        for row, entry in enumerate(entries):
            if entry.length < entry.params.min_tokens:
                logits[row, entry.ends] = -torch.inf
        return logits

    def accept(self, chosen: Mapping[int, int]) -> None:
        """Note the tokens that were chosen, by sequence; sequences not here are skipped."""
        pairs = []
        for key, token in chosen.items():
            entry = self._entries.get(key)
            if entry is None:
                continue
            entry.length += 1
            if entry.counts is not None:
                pairs.append((entry.counts, token))
            if entry.grammar is not None:
                entry.grammar.accept(token)
        if pairs:
            rows, tokens = torch.tensor(pairs, device=self._counts.device).T
            self._counts[rows, tokens] += 1

    def grammar(self, key: int) -> Grammar | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.grammar

    def _free_row(self) -> int:
        if not self._free:
            old = self._counts
            self._counts = old.new_zeros((max(1, 2 * len(old)), old.shape[1]))
            self._counts[: len(old)] = old
            self._free = list(range(len(old), len(self._counts)))
        return self._free.pop()


def _masked(logits: Tensor, grammars: Sequence[Grammar]) -> Tensor:
    """Logits ``[n, V]``, minus infinity for tokens that the grammar of their row forbids."""
    vocabulary = logits.shape[-1]
    masks = torch.zeros((len(grammars), -(-vocabulary // 32)), dtype=torch.int32)
    for grammar, mask in zip(grammars, masks, strict=True):
        grammar.fill(mask)
    # Only the bits are copied to the device.
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = masks.view(torch.uint8).to(logits.device).unsqueeze(-1) >> bits & 1
    return logits.masked_fill(allowed.flatten(1)[:, :vocabulary] == 0, -torch.inf)


def _penalized(logits: Tensor, counts: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits ``[n, V]`` less the penalties, by each token's ``counts``, int32 ``[n, V]``."""

    def column(name: str) -> Tensor:
        values = [getattr(p, name) for p in params]
        return torch.tensor(values, dtype=logits.dtype, device=logits.device).unsqueeze(-1)

    repetition = column("repetition_penalty")
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    answered = counts % _IN_PROMPT
    logits = logits - column("frequency_penalty") * answered
    return logits - column("presence_penalty") * (answered > 0)
