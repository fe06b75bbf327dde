"""The picture: workers against the memory that they take together. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from worker_memory import MEGABYTE, PLAIN, SHARED, MemoryCurve

_LABELS = {PLAIN: "each worker its own weights", SHARED: "one prepared copy, shared"}
_COLOURS = {PLAIN: "#b2182b", SHARED: "#2166ac"}
_MARKERS = {PLAIN: "s", SHARED: "o"}
_LABEL_PLACES = {PLAIN: (-6, 4), SHARED: (0, 7)}
"""Points from a marker: beside the steep line, above the flat one."""


def missing() -> str | None:
    """Why nothing can be drawn, and what to do about it; None where it can."""
    if find_spec("matplotlib") is None:
        return "no plot: it needs matplotlib: pip install 'mcinfer[bench]'"
    return None


def draw(curves: Sequence[MemoryCurve], path: Path) -> None:
    """Draw one panel for each model, in the format that the file's suffix names."""
    matplotlib = import_module("matplotlib")
    # The same numbers make the same file.
    matplotlib.rcParams["svg.hashsalt"] = "mcinfer"
    # Not pyplot: that would look for a screen, and keep the figure.
    figure = import_module("matplotlib.figure").Figure(
        figsize=(5 * len(curves), 4.2), layout="constrained"
    )
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        _draw_panel(axes, curve)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata)


def _draw_panel(axes: Any, curve: MemoryCurve) -> None:
    for way, sizes in curve.pss.items():
        megabytes = [size / MEGABYTE for size in sizes]
        axes.plot(
            curve.workers,
            megabytes,
            marker=_MARKERS[way],
            color=_COLOURS[way],
            label=_LABELS[way],
        )
        for workers, value in zip(curve.workers, megabytes, strict=True):
            if way == SHARED and workers == 1:
                continue  # the two points lie upon each other
            axes.annotate(
                f"{value:.0f}",
                (workers, value),
                xytext=_LABEL_PLACES[way],
                textcoords="offset points",
                ha="right" if way == PLAIN else "center",
                fontsize=8,
                color=_COLOURS[way],
            )
    axes.axhline(
        curve.weight_bytes / MEGABYTE, color="#777777", linestyle=":", label="the weights, once"
    )
    axes.set_title(f"{curve.model}, {curve.weight_bytes / MEGABYTE:.0f} MB of weights")
    axes.set_xlabel("workers, one thread each")
    axes.set_ylabel("summed PSS of all workers (MB)")
    axes.set_xticks(range(max(curve.workers) + 1))
    axes.set_xlim(0, max(curve.workers) + 0.5)
    axes.set_ylim(0, 1.12 * max(max(sizes) for sizes in curve.pss.values()) / MEGABYTE)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
