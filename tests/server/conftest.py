"""Fixtures of the server's tests."""

from collections.abc import Iterator

import pytest

from tests.server.process import fake_server


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A ready server with small limits, shared by all tests that leave it as it was."""
    with fake_server("--max-queue", "4", "--max-body-mb", "1") as server:
        yield server.url()
