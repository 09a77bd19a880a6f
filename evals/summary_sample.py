"""Long real texts to summarise, of those that Debian and Python ship.

``python -m razor_dist.evals.summary_sample FOLDER`` writes the GPL, a chapter of Python's language
reference that is longer than a context of 8K tokens, and Python's licence as a PDF file, once whole
and once broken.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from razor_dist.config.errors import ConfigError

_GPL = Path("/usr/share/common-licenses/GPL-3")
_LICENCE = Path(os.__file__).with_name("LICENSE.txt")


def write_sample(folder: Path) -> list[Path]:
    """Write the documents into a folder, which is made if missing."""
    from pydoc_data.topics import topics

    page = _pdf(_read(_LICENCE))
    files = {
        "gpl-3.txt": _read(_GPL).encode(),
        "special-names.txt": topics["specialnames"].encode(),
        "python-licence.pdf": page,
        "broken.pdf": page[: len(page) // 2],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the sample needs {path}: {error.strerror}") from None


def _pdf(text: str) -> bytes:
    try:
        from fpdf import FPDF
    except ImportError:
        raise ConfigError("the PDF file is written with fpdf2: pip install fpdf2") from None
    file = FPDF()
    file.add_page()
    file.set_font("courier", size=9)
    file.multi_cell(0, 4, text)
    return bytes(file.output())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(*write_sample(parser.parse_args().folder), sep="\n")
