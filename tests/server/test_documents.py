"""Files that are sent to be read to text."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import httpx
import pytest

from razor_dist.config.schema import ServerConfig
from razor_dist.documents.read import Document, ReadLimits
from razor_dist.frontend.client import EngineClient
from razor_dist.server.access import load_keys
from razor_dist.server.app import build_app
from razor_dist.server.documents import DocumentReader
from razor_dist.server.service import Service
from tests.documents import files
from tests.documents.files import FIRST, TITLE
from tests.server.process import fake_server, wait_until

OCTETS = {"Content-Type": "application/octet-stream"}


def send(url: str, name: str, data: bytes) -> httpx.Response:
    path = f"{url}/documents/text"
    return httpx.post(path, params={"name": name}, content=data, headers=OCTETS, timeout=60)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.md", "# Été\r\nun".encode(), "# Été\nun"),
        ("a.txt", files.html(), TITLE),
        ("a.htm", b"<b>bold</b> piece", "bold piece"),
        ("anything", files.pdf(FIRST), FIRST),
        ("a.docx", files.epub(), FIRST),
        ("a.epub", files.docx(), "left\tright"),
    ],
)
def test_the_content_tells_the_kind(url: str, name: str, data: bytes, text: str) -> None:
    answer = send(url, name, data)
    assert answer.status_code == 200, answer.text
    assert text in answer.text
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.pdf", b"text", "the file is no pdf file, whatever its name says"),
        ("a.txt", b"caf\xe9", "is not UTF-8 text (byte 3); save it as UTF-8"),
        ("a.txt", b"\x7fELF\0\0", "is neither text nor HTML, PDF, EPUB or docx"),
        ("a.doc", bytes.fromhex("d0cf11e0a1b11ae1"), "is encrypted, or of an old Office"),
        ("a.epub", b"PK\x03\x04" + bytes(50), "is a broken archive"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0), "is n"),
        ("a.pdf", files.pdf(FIRST, password="secret"), "is encrypted"),
        ("empty.txt", b"", "holds no text"),
        ("long.epub", files.epub(page="word " * 300_000), "more than 1,048,576 characters"),
    ],
)
def test_what_cannot_be_read_is_told(url: str, name: str, data: bytes, problem: str) -> None:
    answer = send(url, name, data)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "unreadable_document"
    assert problem in answer.json()["error"]["message"]


def test_a_page_that_takes_too_much_is_refused_before_it_is_read() -> None:
    with fake_server("--max-body-mb", "8") as server:
        answer = send(server.url(), "a.html", b"<p>" * 2_000_000)
    assert answer.status_code == 422
    assert "has more than 1,500,000 tags; split it" in answer.json()["error"]["message"]


def test_a_reader_that_is_killed_is_not_the_files_fault() -> None:
    slow = files.epub(page="<p/>" * 10**6)  # half a minute or more
    answers: list[httpx.Response] = []
    with fake_server() as server:
        url = server.url()
        others = len(server.family())
        sent = threading.Thread(target=lambda: answers.append(send(url, "a.epub", slow)))
        sent.start()
        assert wait_until(lambda: len(server.family()) > others, 20)
        server.family()[-1].kill()
        sent.join(20)
        [answer] = answers
        assert send(url, "a.txt", b"text").status_code == 200
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "process_killed"
    assert "its reader was ended by SIGKILL; try again" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_large_files_of_one_key_hold_up_nobody_else() -> None:
    begun: list[bytes] = []
    end = asyncio.Event()

    async def read(data: bytes | bytearray, named: str | None, limits: ReadLimits) -> Document:
        begun.append(bytes(data[:1]))
        await end.wait()
        return Document("")

    reader = DocumentReader(100, read)
    large, small = 2**20, 1
    asked = [(b"a" * large, "A"), (b"b" * large, "A"), (b"c" * large, "B"), (b"d" * large, "C")]
    asked += [(b"e" * small, "A"), (b"f" * small, "B")]
    tasks = []
    for data, key in asked:
        tasks.append(asyncio.create_task(reader.read(data + b".", "a.txt", key)))
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    # One of each key, of two at once, and a small one beside them.
    assert begun == [b"a", b"c", b"e"]
    end.set()
    await asyncio.gather(*tasks)
    assert sorted(begun) == [b"a", b"b", b"c", b"d", b"e", b"f"]


@pytest.mark.parametrize("keys", [(), ("k" * 32, "l" * 32)])
@pytest.mark.anyio
async def test_files_take_turns_by_key_or_by_address(keys: Sequence[str], tmp_path: Path) -> None:
    turns: list[str | None] = []

    class Reader:
        async def read(self, data: bytes, name: str, key: str | None = None) -> Document:
            turns.append(key)
            return Document("text")

    config = ServerConfig(api_key=list(keys))
    service = Service(config, EngineClient(tmp_path / "engine"))
    service.documents = cast(DocumentReader, Reader())
    app = build_app(service, load_keys(config))
    for number in (0, 1, 0):
        transport = httpx.ASGITransport(app, client=(f"10.0.0.{number}", 1))
        headers = {**OCTETS, "Authorization": f"Bearer {keys[number] if keys else 0}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            sent = await http.post("/documents/text", content=b"a", headers=headers)
            assert sent.status_code == 200
    assert turns[0] == turns[2] != turns[1] and None not in turns
    assert keys or turns == ["10.0.0.0", "10.0.0.1", "10.0.0.0"]


@pytest.mark.anyio
async def test_a_file_is_read_within_the_time_of_a_request(tmp_path: Path) -> None:
    class Reader:
        async def read(self, data: bytes, name: str, key: str | None = None) -> Document:
            await asyncio.sleep(60)
            return Document("text")

    config = ServerConfig(request_timeout=0.1)
    service = Service(config, EngineClient(tmp_path / "engine"))
    service.documents = cast(DocumentReader, Reader())
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        late = await http.post("/documents/text", content=b"a", headers=OCTETS)
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"


def test_a_file_has_bounds(url: str) -> None:
    assert send(url, "a.txt", b"x" * (2**20 + 1)).status_code == 413
    refused = httpx.post(
        f"{url}/documents/text", content=b"x", headers={"Content-Type": "text/plain"}
    )
    assert refused.status_code == 415
    assert "must be a file" in refused.json()["error"]["message"]


def test_who_hangs_up_ends_the_reader() -> None:
    with fake_server() as server:
        url = server.url()
        before = len(server.family())

        with pytest.raises(httpx.ReadTimeout):
            path = f"{url}/documents/text"
            slow = files.epub(page="<p/>" * 10**6)  # half a minute or more
            httpx.post(path, content=slow, headers=OCTETS, timeout=httpx.Timeout(30, read=1.0))
        assert wait_until(lambda: len(server.family()) == before, 15)
