"""Heat maps of the needle test: depth by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Scores = Sequence[Sequence[float | None]]
"""``[depths][lengths]``; None where nothing was asked."""


class Panel(NamedTuple):
    """One map."""

    title: str
    lengths: Sequence[int]
    depths: Sequence[float]
    values: Scores


def draw(panels: Sequence[Panel], path: Path, *, label: str, difference: bool = False) -> None:
    """Draw panels side by side, with one scale of colours.

    Parameters
    ----------
    panels : sequence of Panel
        At least one.
    path : Path
        A PNG file.
    label : str
        Of the scale.
    difference : bool
        The scale goes from −1 to 1 instead of from 0 to 1.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns + 1, 3.4 * rows + 0.4), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    colours, low = ("RdBu_r", -1.0) if difference else ("RdYlGn", 0.0)
    image = None
    for axis, panel in zip(axes, panels, strict=False):
        values = [[float("nan") if v is None else v for v in row] for row in panel.values]
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=1.0, aspect="auto")
        axis.set_facecolor("0.85")  # where nothing was asked
        axis.set_title(panel.title, fontsize=10)
        _ticks(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    assert image is not None
    figure.colorbar(image, ax=list(axes), label=label)
    # Fixed metadata: equal results give equal files.
    figure.savefig(path, format="png", metadata={"Software": None})


def _ticks(axis: Axes, panel: Panel) -> None:
    across = _some(len(panel.lengths), 8)
    down = _some(len(panel.depths), 11)
    lengths = [short_length(panel.lengths[index]) for index in across]
    axis.set_xticks(across, lengths, rotation=45, fontsize=8)
    depths = [f"{panel.depths[index]:g}" for index in down]
    axis.set_yticks(down, depths, fontsize=8)
    axis.set_xlabel("tokens", fontsize=9)
    axis.set_ylabel("depth of the needle, %", fontsize=9)


def _some(count: int, most: int) -> list[int]:
    """Indices to label, the last among them."""
    step = -(-count // most)
    return list(range(count - 1, -1, -step))[::-1]


def short_length(tokens: int) -> str:
    """``8K`` for 8192, ``1000`` for 1000."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
