"""``razor-dist identify`` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from razor_dist.commands.identify import identify


def identify_heads(*words: object) -> str:
    """Run the command, which ends well, and return what it prints."""
    result = CliRunner().invoke(identify, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout
