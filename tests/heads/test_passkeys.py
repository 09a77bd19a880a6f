"""The synthetic passkeys: what is hidden is recalled, and everything follows from a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from razor_dist.config.errors import ConfigError
from razor_dist.identify.criterion import Sample
from razor_dist.identify.passkeys import Passkeys, open_passkeys
from razor_dist.identify.prose import Prose
from razor_dist.identify.settings import PasskeySettings
from tests.heads.planted import encode, passkeys
from tests.tokenizer import smollm2_tokenizer


def _runs(mask: torch.Tensor) -> list[tuple[int, int]]:
    """Return the bounds of the stretches of True."""
    edges = torch.diff(mask.int(), prepend=torch.tensor([0]), append=torch.tensor([0]))
    starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _found(sample: Sample, start: int, end: int) -> list[int]:
    """Return the other places of the tokens from ``start`` to ``end``."""
    windows = sample.ids.unfold(0, end - start, 1)
    same = (windows == sample.ids[start:end]).all(1).nonzero()[:, 0].tolist()
    return [place for place in same if place != start]


def test_ten_passkeys_of_32_words_are_hidden_and_recalled() -> None:
    tokenizer = smollm2_tokenizer()
    samples = open_passkeys(tokenizer, PasskeySettings(max_tokens=4000, seed=5))
    lengths, places = set(), []
    for index in range(8):
        sample = samples.sample(index)
        lengths.add(len(sample.ids))
        runs = _runs(sample.mask)
        assert len(runs) == 10
        for start, end in runs:
            words = tokenizer.decode(sample.ids[start:end])
            assert len(words.split()) == 32
            [hidden] = _found(sample, start, end)
            assert hidden < runs[0][0]
            places.append(hidden / runs[0][0])
        text = tokenizer.decode(sample.ids)
        assert "the first passkey is" in text and "the tenth passkey is" in text
    assert len(lengths) > 4 and max(lengths) <= 4000
    # At random places: all quarters of the text have some.
    assert {int(4 * place) for place in places} == {0, 1, 2, 3}


def test_a_sample_follows_from_seed_and_index() -> None:
    first, again, other = passkeys(1), passkeys(1), passkeys(2)
    last = first.sample(3)  # in another order than below
    for index in range(4):
        assert torch.equal(first.sample(index).ids, again.sample(index).ids)
        assert not torch.equal(first.sample(index).ids, other.sample(index).ids)
    assert torch.equal(last.ids, again.sample(3).ids)


def test_lengths_reach_from_what_fits_to_the_longest() -> None:
    samples = passkeys(max_tokens=700)
    lengths = sorted({len(samples.sample(index).ids) for index in range(60)})
    assert lengths == [300, 400, 500, 600, 700]


def test_short_text_begins_again() -> None:
    settings = PasskeySettings(passkeys=1, words=2, min_tokens=1, max_tokens=200, lengths=1)
    sample = Passkeys(Prose(encode, ["One two three. Four five six."]), settings).sample(0)
    assert len(sample.ids) == 200 and sample.mask.sum() == 2


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_tokens is 300, but 10 passkeys of 32 words"):
        Passkeys(Prose(encode, ["Some text."]), PasskeySettings(max_tokens=300))
    with pytest.raises(ConfigError, match="there is no text"):
        Prose(encode, [])
    with pytest.raises(ConfigError, match=r"haystack: .* holds no \.txt files"):
        open_passkeys(smollm2_tokenizer(), PasskeySettings(), tmp_path)
