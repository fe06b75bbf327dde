"""The picture: holders of a model against the memory that all take. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from worker_memory import MEGABYTE, MemoryCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How one way is drawn.

    Attributes:
        label: Its words in the legend.
        colour: Of line, markers and numbers.
        marker: matplotlib's letter of it.
        place: Of a number: points to the right of its marker and above it; None leaves the numbers out.
        align: Which side of a number is there: `left`, `center` or `right`.
    """

    label: str
    colour: str
    marker: str
    place: tuple[int, int] | None
    align: str = "center"


def missing() -> str | None:
    """Why nothing can be drawn, and what to do about it; None where it can."""
    if find_spec("matplotlib") is None:
        return "no plot: it needs matplotlib: pip install matplotlib"
    return None


def draw(
    curves: Sequence[MemoryCurve], lines: Mapping[str, Line], across: str, up: str, path: Path
) -> None:
    """Draw one panel for each model, in the format that the file's suffix names.

    Args:
        curves: What to draw.
        lines: By way.
        across: What the numbers of workers count.
        up: What takes the memory.
        path: The file.
    """
    matplotlib = import_module("matplotlib")
    # The same numbers make the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mcinfer"
    # Not pyplot: that would look for a screen, and keep the figure.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(5 * len(curves), 4.2), layout="constrained"
    )
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        _draw_panel(axes, curve, lines)
        axes.set_xlabel(across)
        axes.set_ylabel(f"summed PSS of {up} (MB)")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)


def _draw_panel(axes: Any, curve: MemoryCurve, lines: Mapping[str, Line]) -> None:
    first = next(iter(curve.pss))
    for way, sizes in curve.pss.items():
        line, megabytes = lines[way], [size / MEGABYTE for size in sizes]
        axes.plot(curve.workers, megabytes, marker=line.marker, color=line.colour, label=line.label)
        if line.place is None:
            continue
        for workers, value in zip(curve.workers, megabytes, strict=True):
            if way != first and workers == 1:
                continue  # the points lie upon each other
            axes.annotate(
                f"{value:,.0f}",
                (workers, value),
                xytext=line.place,
                textcoords="offset points",
                ha=line.align,
                fontsize=8,
                color=line.colour,
            )
    axes.axhline(
        curve.weight_bytes / MEGABYTE, color="#777777", linestyle=":", label="the weights, once"
    )
    axes.set_title(f"{curve.model}, {curve.weight_bytes / MEGABYTE:.0f} MB of weights")
    axes.set_xticks(range(max(curve.workers) + 1))
    axes.set_xlim(0, max(curve.workers) + 0.5)
    axes.set_ylim(0, 1.12 * max(max(sizes) for sizes in curve.pss.values()) / MEGABYTE)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
