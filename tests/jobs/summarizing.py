"""The command summarize on the folder of its tests, and what it has written."""

from __future__ import annotations

from typing import Any

from razor_dist import cli
from razor_dist.jobs.results import read_job

FLAGS = ("--no-ray", "--attention", "full")


def summarize(*flags: str, out: str = "out") -> int:
    """Summarise the folder ``in``."""
    return cli.main(["summarize", "in", "--out", out, "--max-tokens", "40", *flags, *FLAGS])


def results(folder: str = "out") -> dict[str, Any]:
    """The records by their documents' ids."""
    return {record["id"].rpartition("#")[0]: record for record in read_job(folder).records}
