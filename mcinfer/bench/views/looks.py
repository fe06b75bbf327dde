"""How ways look in every panel: colour, marker and line, and the legend that says so. By matplotlib."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcinfer.bench.report import Report
from mcinfer.bench.views.texts import printable
from mcinfer.errors import MissingDependencyError

try:
    from matplotlib.figure import FigureBase
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font
    from matplotlib.lines import Line2D
except ImportError as exc:
    raise MissingDependencyError(
        "plots need the package matplotlib: pip install 'mcinfer[bench]'"
    ) from exc

_LEGEND_CHARACTERS = 62
_KEY_CHARACTERS = 5
_NAME_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Look:
    """How a way is drawn everywhere."""

    colour: str
    marker: str
    dashed: bool = False


# Each stands out on white and on near-black, and no two differ by hue alone (after Okabe and Ito,
# https://jfly.uni-koeln.de/color/, the light ones darkened).
_INTERVAL = {
    "session": Look("#777777", "o", dashed=True),
    "threads": Look("#3a9bdc", "s", dashed=True),
    "threads-1": Look("#0072b2", "D", dashed=True),
    "pipe": Look("#c47f00", "^", dashed=True),
    "pipe-each": Look("#cc79a7", "v", dashed=True),
    "sharded": Look("#009e73", "P"),
    "concurrent": Look("#d55e00", "X"),
    "batched": Look("#aa4499", "*"),
}
_OTHER_INTERVAL = (
    Look("#7a8b00", "<", dashed=True),
    Look("#8a63d2", ">", dashed=True),
    Look("#a0522d", "h", dashed=True),
    Look("#3b8686", "p", dashed=True),
)
POOL_LOOK = Look("#3b8686", "o")

Looks = dict[str, Look]
"""By way."""


def looks_of(report: Report) -> Looks:
    """How the ways of a report are drawn."""
    others = [w.name for w in report.ways if w.role != "scaling" and w.name not in _INTERVAL]
    more = {name: _OTHER_INTERVAL[i % len(_OTHER_INTERVAL)] for i, name in enumerate(others)}
    return {**_INTERVAL, **more}


def line(look: Look) -> dict[str, Any]:
    """What matplotlib takes for it, but the colour."""
    return {
        "marker": look.marker,
        "markersize": 7 if look.marker == "*" else 5,
        "linestyle": "--" if look.dashed else "-",
        "linewidth": 1.0 if look.dashed else 1.6,
    }


def key(way: str, look: Look) -> Line2D:
    """A way's entry in a legend."""
    return Line2D([], [], color=look.colour, label=drawable(way), **line(look))


def legend(place: FigureBase, keys: Sequence[Line2D]) -> None:
    """Below the panel, in as many columns as there is room for."""
    names = [name for entry in keys for name in str(entry.get_label()).split("\n")]
    longest = max(map(len, names)) + _KEY_CHARACTERS
    columns = max(1, min(len(keys), _LEGEND_CHARACTERS // longest))
    place.legend(handles=list(keys), loc="outside lower center", ncols=columns)


def drawable(text: str, width: int = _NAME_CHARACTERS) -> str:
    """Text in characters that the font has, in lines that are no longer than this."""
    known = FT2Font(findfont("DejaVu Sans")).get_charmap()
    return textwrap.fill("".join(c if ord(c) in known else "?" for c in printable(text)), width)
