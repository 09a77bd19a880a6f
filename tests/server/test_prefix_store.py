"""Servers that are killed while they write prefixes, and those that come after them."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from razor_dist import LLM, SamplingParams
from razor_dist.cli import main
from razor_dist.commands.prefill import page_text
from razor_dist.evals.needle.documents import hide_words
from razor_dist.evals.needle.model import HEAD_MAP, build_needle_model
from razor_dist.prefix.store import WriterLock, check_node, folders, node_folders
from tests.prefix.engines import ids
from tests.server.process import ServerProcess, alive, wait_until


def serve(model: Path, store: Path) -> ServerProcess:
    flags = {
        **{"--model": model, "--served-model-name": "tiny", "--prefix-store": store},
        **{"--world-size": 2, "--attention": "streaming", "--max-model-len": 3000},
        **{"--window-min": 100, "--block": 8, "--page-size": 16, "--max-num-seqs": 4},
    }
    arguments = [str(part) for pair in flags.items() for part in pair]
    return ServerProcess(sys.executable, "-m", "razor_dist", "serve", *arguments)


def ask(url: str, document: int, **fields: Any) -> tuple[list[float], int]:
    """Log-probabilities of an answer's tokens, and how many of the prompt's were cached."""
    prompt = ids((document, 2000), (50 + document, 10))
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "logprobs": 1}
    body |= fields
    answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["logprobs"]["token_logprobs"], cached


def counters(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/stats").json()["prefix_cache"])


@pytest.mark.long
def test_a_kill_while_prefixes_are_written_costs_at_most_what_was_being_written(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, store = tiny("llama"), tmp_path / "store"
    fresh: dict[int, list[float]] = {}
    with serve(model, store) as server:
        url = server.url(timeout=120)
        for document in range(4):
            fresh[document], cached = ask(url, document)
            assert cached < 16
        # The last answer has come, and its prefix is being written.
        family = server.family()
        for process in family:
            process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not alive(family), 10)
    [folder] = folders(store)
    whole = {check_node(path).end for path in node_folders(folder)}
    assert whole and len(node_folders(folder)) >= 2
    for path in folder.glob("*.new/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])  # as if the kill had come in the midst of it
    (folder / f"{0:032x}.0000dead.new").mkdir()
    with serve(model, store) as server:
        url = server.url(timeout=120)
        cached = []
        for document, logprobs in fresh.items():
            again, found = ask(url, document)
            np.testing.assert_allclose(again, logprobs, atol=1e-4)
            cached.append(found)
        assert cached[:2] == [2009, 2009]
        disk = counters(url)["disk"]
        assert disk["hits"] >= 2 and disk["failures"] == 0
        ask(url, 9)
        assert wait_until(lambda: not counters(url)["saving"], 10)
        before = counters(url)
        assert ask(url, 10, cache_prompt=False)[1] == 0
        assert wait_until(lambda: not counters(url)["saving"], 10)
        after = counters(url)
        assert after["entries"] <= before["entries"] and after["disk"] == before["disk"]
        assert main(["store", "prune", str(store)]) == 2  # while a server writes there
        assert "a server writes to" in capsys.readouterr().err
    assert not list(folder.glob("*.new"))
    assert main(["store", "verify", str(store)]) == 0
    [part, *_] = folder.glob("*/state-*")
    assert load_file(part)["k"].shape[0] > 0
    part.write_bytes(part.read_bytes()[:-8])
    assert main(["store", "verify", str(store)]) == 1
    assert main(["store", "list", str(store)]) == 0
    assert main(["store", "prune", str(store), "--max-gb", "0"]) == 0
    assert "0 prefixes are left" in capsys.readouterr().out
    assert main(["store", "list", str(store)]) == 0
    assert capsys.readouterr().out.endswith(": no prefixes\n") and not list(folder.glob("*.title"))
    assert not node_folders(folder)


@pytest.mark.long
def test_documents_that_are_read_ahead_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_needle_model(tmp_path / "needle")
    settings = {"max_model_len": 1200, "head_map": str(model / HEAD_MAP), "threads": 1}
    flags = [part for name, value in settings.items() for part in (_flag(name), str(value))]
    flags += ["--model", str(model), "--store", str(tmp_path / "store")]
    text, [fact] = hide_words(900, [50])
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "long.txt").write_text(hide_words(1300, [50])[0])
    files = [str(tmp_path / name) for name in ("one.txt", "long.txt")]
    assert main(["prefill", *files, *flags]) == 3
    told = capsys.readouterr()
    assert "one.txt: " in told.out and "1 of 2 documents read" in told.out
    assert main(["store", "list", str(tmp_path / "store")]) == 0
    listed = "".join(capsys.readouterr().out.split())
    assert "one.txt" in listed and "long.txt" not in listed and "(arequest)" not in listed
    short = {"id": "half \ud83d", "text": hide_words(100, [50])[0]}
    (tmp_path / "short.jsonl").write_text(json.dumps(short))
    assert main(["prefill", str(tmp_path / "short.jsonl"), *flags]) == 0
    said = capsys.readouterr().out
    assert r"half \ud83d: " in said
    assert "not kept: prefixes are kept from 256 tokens on, shorter ones are read anew" in said
    assert "skipped" in told.err and "maximum context length is 1200" in told.err
    bounded = ["--prefix-store-gb", "1e-6", "--store", str(tmp_path / "small")]
    assert main(["prefill", files[0], *flags, *bounded]) == 3
    assert "not kept: it did not fit in prefix_store_gb" in capsys.readouterr().out
    (tmp_path / "taken").mkdir()
    with monkeypatch.context() as patched:
        # A server takes it after that look, and before the first document is read.
        patched.setattr(WriterLock, "require", lambda _: None)
        lock = WriterLock(tmp_path / "taken")
        assert lock.acquire()
        assert main(["prefill", files[0], *flags, "--store", str(tmp_path / "taken")]) == 3
        lock.release()
    assert "or could not be written" in capsys.readouterr().out
    assert main(["prefill", files[0], *flags]) == 0
    [total, there] = re.findall(r"(\d+) tokens, (\d+) of them", capsys.readouterr().out)[0]
    assert int(there) == int(total) - 1
    asked = [{"role": "user", "content": page_text("one.txt", text) + fact.question}]
    with LLM(str(model), **settings, prefix_store=str(tmp_path / "store")) as llm:
        [output] = llm.chat(asked, SamplingParams(max_tokens=8, temperature=0))
    assert fact.answer in output.outputs[0].text
    assert output.num_cached_tokens >= 900


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
