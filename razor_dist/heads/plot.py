"""A picture of a head map: where the scores are, and which groups were chosen."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from razor_dist.errors import HeadMapError
from razor_dist.heads.head_map import HeadMap

_CHOSEN = "#d62728"
# What scores less than this fraction of the best is drawn like nothing.
_FAINTEST = 1e-4


def plot_head_map(head_map: HeadMap, path: str | Path) -> None:
    """Draw layers by query heads, one panel for each kind of score, as a PNG.

    Groups that keep the whole context are outlined in every panel; a dot marks the query heads
    that were selected for the panel's own score.

    Parameters
    ----------
    head_map : HeadMap
        With scores.
    path : str or Path
        Of the PNG.

    Raises
    ------
    HeadMapError
        If the map has no scores, or the file cannot be written.
    """
    if not head_map.scores:
        raise HeadMapError(f"a head map of method {head_map.method!r} has no scores to draw")
    layers, heads = len(head_map.retrieval), head_map.query_heads
    panels = len(head_map.scores)
    # A cell is at least as wide as tall, and small models do not get a tiny picture.
    width = max(3.6, 0.24 * heads)
    figure = Figure(figsize=(panels * (width + 0.9), max(4.0, 0.2 * layers) + 1.6), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, head_map.scores, strict=True):
        _panel(figure, axis, head_map, kind)
    axes[0].set_ylabel("layer")
    figure.suptitle(
        f"{head_map.model}: {head_map.selected_fraction:.1%} of query heads selected, "
        f"{head_map.kv_fraction:.1%} of KV heads keep the whole context",
        fontsize=10,
    )
    figure.legend(
        handles=[
            Patch(fill=False, edgecolor=_CHOSEN, linewidth=1.2, label="retrieval KV group"),
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                color=_CHOSEN,
                markeredgecolor="white",
                markersize=6,
                label="query head selected by this score",
            ),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    try:
        # Fixed metadata: equal maps give equal files.
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise HeadMapError(f"cannot write the picture {path}: {error.strerror}") from error


def _panel(figure: Figure, axis: Axes, head_map: HeadMap, kind: str) -> None:
    heads = head_map.query_heads
    group = heads // len(head_map.retrieval[0])
    # Logarithmic: the best heads score a thousand times what the weakest chosen ones do.
    top = max(max(row) for row in head_map.scores[kind])
    norm = LogNorm(vmin=top * _FAINTEST, vmax=top, clip=True) if top > 0 else None
    image = axis.imshow(
        head_map.scores[kind], cmap="Blues", norm=norm, aspect="auto", interpolation="nearest"
    )
    bar = figure.colorbar(image, ax=axis, aspect=45, pad=0.02, extend="min")
    bar.ax.tick_params(labelsize=8)
    for edge in range(group, heads, group):
        axis.axvline(edge - 0.5, color="0.75", linewidth=0.6)
    for layer, row in enumerate(head_map.retrieval):
        for kv_head, chosen in enumerate(row):
            if chosen:
                corner = (kv_head * group - 0.44, layer - 0.44)
                axis.add_patch(
                    Rectangle(corner, group - 0.12, 0.88, fill=False, color=_CHOSEN, linewidth=1.2)
                )
    selected = head_map.selected.get(kind, ())
    axis.scatter(
        [head for _, head in selected],
        [layer for layer, _ in selected],
        s=18,
        color=_CHOSEN,
        edgecolors="white",
        linewidths=0.7,
        zorder=3,
    )
    axis.set_title(f"{kind} score", fontsize=10)
    axis.set_xlabel(f"query head (groups of {group})")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
