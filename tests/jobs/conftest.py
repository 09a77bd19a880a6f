"""Fixtures of the tests of summarize: a folder of documents, and engines without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from razor_dist.config.schema import EngineConfig
from tests.jobs.quoter import Quoter, document


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Quoter]:
    """The engines that jobs of this process open."""
    engines: list[Quoter] = []

    def open_engine(config: EngineConfig, *_: Any) -> Quoter:
        engines.append(Quoter(config.max_model_len or 512))
        return engines[-1]

    monkeypatch.setattr("razor_dist.jobs.host_engine.HostLLM", open_engine)
    return engines


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/long.md").write_text(document(6))
    Path("in/short.txt").write_text("This is fact7 and fact8.")
    Path("in/lines.jsonl").write_text(json.dumps({"id": "line", "text": "fact9"}) + "\n")
    return tmp_path
