"""Heat maps of the needle test: depth by length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage


class Panel(NamedTuple):
    """One map."""

    title: str
    lengths: Sequence[int]
    depths: Sequence[float]
    values: Sequence[Sequence[float | None]]  # [depths][lengths]; None where nothing was asked
    # Rows and columns of the cells of which some questions have no answer yet.
    unfinished: frozenset[tuple[int, int]] = frozenset()


def draw(panels: Sequence[Panel], path: Path, *, label: str, difference: bool = False) -> None:
    """Draw panels side by side, with one scale of colours that colour-blind eyes can read.

    A cell holds its number, or a question mark where not everything was asked yet; the last row
    and column are the means of what was asked.

    The picture is a PNG file. The scale, which ``label`` names, goes from 0 to 1, or for a
    difference from −1 to 1.
    """
    columns = min(2 if max(len(panel.lengths) for panel in panels) > 6 else 3, len(panels))
    rows = -(-len(panels) // columns)
    width = 2.2 + 0.5 * max(len(panel.lengths) for panel in panels)
    height = 1.6 + 0.32 * max(len(panel.depths) for panel in panels)
    figure = Figure((width * columns + 1, height * rows + 0.4), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    colours, low = ("PuOr", -1.0) if difference else ("cividis", 0.0)
    images = [_draw_panel(*pair, colours, low) for pair in zip(axes, panels, strict=False)]
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.colorbar(images[0], ax=list(axes), label=label)
    # Fixed metadata: equal results give equal files.
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_panel(axis: Axes, panel: Panel, colours: str, low: float) -> AxesImage:
    cells = np.ma.masked_invalid(np.array(panel.values, dtype=float))
    down, across = cells.shape
    values = np.full((down + 1, across + 1), np.nan)
    values[:down, :across] = cells.filled(np.nan)
    values[down, :across] = cells.mean(axis=0).filled(np.nan)
    values[:down, across] = cells.mean(axis=1).filled(np.nan)
    values[down, across] = np.ma.filled(cells.mean(), np.nan)
    image = axis.imshow(values, cmap=colours, vmin=low, vmax=1.0, aspect="auto")
    axis.set_facecolor("0.85")  # where nothing was asked
    for (row, column), value in np.ndenumerate(values):
        unasked = np.isnan(value)
        missing = unasked or (row, column) in panel.unfinished
        text = "" if unasked else f"{value:.2f}"
        colour = "w" if not unasked and sum(image.cmap(image.norm(value))[:3]) < 1.5 else "k"
        shown = f"{text}?" if missing and row < down and column < across else text
        axis.text(column, row, shown, ha="center", va="center", fontsize=7, color=colour)
    # Borders between cells, and a wider one before the means.
    axis.set_xticks(np.arange(across) + 0.5, minor=True)
    axis.set_yticks(np.arange(down) + 0.5, minor=True)
    axis.grid(which="minor", color="w", linewidth=0.8)
    axis.tick_params(which="minor", length=0)
    axis.axvline(across - 0.5, color="w", linewidth=3)
    axis.axhline(down - 0.5, color="w", linewidth=3)
    lengths = [*map(short_length, panel.lengths), "mean"]
    axis.set_xticks(range(across + 1), lengths, rotation=45, fontsize=8)
    axis.set_yticks(range(down + 1), [*(f"{d:g}" for d in panel.depths), "mean"], fontsize=8)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel("tokens", fontsize=9)
    axis.set_ylabel("depth of the needle, %", fontsize=9)
    return image


def short_length(tokens: int) -> str:
    """Return ``8K`` for 8192, ``1000`` for 1000."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
