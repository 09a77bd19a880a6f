"""Fixtures of the server's tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from playwright.sync_api import Browser

from tests.server.browser import chromium
from tests.server.page_rank import HOLD
from tests.server.page_reader import KEY, Reader
from tests.server.process import ServerProcess, fake_server, server_on


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A ready server with small limits, shared by all tests that leave it as it was."""
    with fake_server("--max-queue", "4", "--max-body-mb", "1") as server:
        yield server.url()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=razor", "-out", files[0], "-keyout", files[1]]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate")
    return files


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "hold"


@pytest.fixture(scope="module")
def page_server(page_hold: Path) -> Iterator[ServerProcess]:
    """A server that wants a key, has room for two requests, and answers at a pace."""
    limits = ("--max-queue", "2", "--max-model-len", "2M")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOLD, str(page_hold))
        with server_on("tests.server.page_rank", *limits, "--api-key", KEY) as started:
            started.url()
            yield started


@pytest.fixture
def unread(page_hold: Path) -> Iterator[Path]:
    """A file: no long prompt is read to its end before the test has unlinked it."""
    page_hold.touch()
    yield page_hold
    page_hold.unlink(missing_ok=True)


@pytest.fixture
def reader(browser: Browser, page_server: ServerProcess) -> Iterator[Reader]:
    context = browser.new_context(accept_downloads=True)
    found = Reader(context, page_server.url())
    yield found
    assert found.problems == [], "the page's own errors, or what its policy has forbidden"
    assert found.foreign == []
    context.close()


@pytest.fixture(scope="module")
def tight() -> Iterator[ServerProcess]:
    """A server that soon loses patience, with room for 12 connections and 3 MiB of bodies."""
    with fake_server(
        *("--header-timeout", "1.5", "--body-timeout", "2", "--max-connections", "12"),
        *("--max-body-mb", "2", "--max-total-body-mb", "3"),
    ) as server:
        server.url()
        yield server
