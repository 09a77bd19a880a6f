"""A picture of a head map's scores and of the groups that were chosen."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from razor_dist.config.errors import HeadMapError
from razor_dist.heads.decision import Scores
from razor_dist.heads.head_map import HeadMap

_CHOSEN = "#d62728"
_FAINTEST = 1e-4  # of the best score: smaller scores are drawn as 0


def plot_head_map(head_map: HeadMap, path: str | Path) -> None:
    """Draw layers by heads, one panel for each kind of score, as a PNG.

    Groups that keep the whole context are outlined in every panel; a dot marks the query heads that
    were selected for the panel's own score. Raise `HeadMapError` if the map has no scores.
    """
    kinds = {**head_map.scores, **head_map.kv_scores}
    if not kinds:
        raise HeadMapError(f"a head map of method {head_map.method!r} has no scores to draw")
    # A cell is at least as wide as tall, and small models do not get a tiny picture.
    widths = [max(3.6, 0.24 * len(rows[0])) + 0.9 for rows in kinds.values()]
    height = max(4.0, 0.2 * len(head_map.retrieval)) + 1.6
    figure = Figure(figsize=(sum(widths), height), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axis, (kind, rows) in zip(axes, kinds.items(), strict=True):
        _panel(figure, axis, head_map, kind, rows)
    axes[0].set_ylabel("layer")
    handles: list[Patch | Line2D] = [
        Patch(fill=False, edgecolor=_CHOSEN, linewidth=1.2, label="retrieval KV group")
    ]
    title = f"{head_map.kv_fraction:.1%} of KV heads keep the whole context"
    if any(head_map.selected.values()):
        title = f"{head_map.selected_fraction:.1%} of query heads selected, {title}"
        line = Line2D([], [], linestyle="", label="query head selected by this score")
        line.set(marker="o", color=_CHOSEN, markeredgecolor="white", markersize=6)
        handles.append(line)
    figure.suptitle(f"{head_map.model}: {title}", fontsize=10, wrap=True)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    try:
        # Fixed metadata: equal maps give equal files.
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise HeadMapError(f"cannot write the picture {path}: {error.strerror}") from error


def _panel(figure: Figure, axis: Axes, head_map: HeadMap, kind: str, rows: Scores) -> None:
    heads = len(rows[0])
    group = heads // len(head_map.retrieval[0])  # columns per KV head
    of_query_heads = kind in head_map.scores
    lowest, top = min(map(min, rows)), max(map(max, rows))
    # Linear from 0 to 1, as gates are, so that equal gates look equal in all pictures.
    norm: Normalize | None = Normalize(vmin=min(0.0, lowest), vmax=max(1.0, top))
    if of_query_heads:
        # Logarithmic: the best heads score a thousand times more than the weakest chosen ones.
        norm = LogNorm(vmin=top * _FAINTEST, vmax=top, clip=True) if top > 0 else None
    image = axis.imshow(rows, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(
        image, ax=axis, aspect=45, pad=0.02, extend="min" if of_query_heads else None
    )
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
    layers, columns = ([pair[i] for pair in selected] for i in (0, 1))
    axis.scatter(columns, layers, s=18, color=_CHOSEN, edgecolors="white", linewidths=0.7, zorder=3)
    axis.set_title(f"{kind} score", fontsize=10)
    axis.set_xlabel(f"query head (groups of {group})" if of_query_heads else "KV head")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
