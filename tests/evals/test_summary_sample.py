"""The sample of documents holds what its summaries are to show."""

from __future__ import annotations

from pathlib import Path

import pytest

from razor_dist.config.errors import ConfigError, DocumentError
from razor_dist.documents.collect import collect
from razor_dist.evals import summary_sample
from tests.tokenizer import smollm2_tokenizer


def test_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not summary_sample._GPL.exists():
        monkeypatch.setattr(summary_sample, "_GPL", summary_sample._LICENCE)
    summary_sample.write_sample(tmp_path)
    sources = {Path(s.path).name: s for s in collect([str(tmp_path)]).sources}
    sizes = {
        name: len(smollm2_tokenizer()(sources[name].read().text)["input_ids"])
        for name in ("gpl-3.txt", "special-names.txt", "python-licence.pdf")
    }
    assert sizes["special-names.txt"] > 8192 and min(sizes.values()) > 2000
    text = sources["python-licence.pdf"].read().text
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text
    with pytest.raises(DocumentError, match="cannot be read as pdf"):
        sources["broken.pdf"].read()
    monkeypatch.setattr(summary_sample, "_GPL", tmp_path / "no")
    with pytest.raises(ConfigError, match="the sample needs"):
        summary_sample.write_sample(tmp_path)
