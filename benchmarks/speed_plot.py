"""The picture of speed: some tables of docs/benchmarks.md as bars, those where mcinfer loses as well.

python benchmarks/speed_plot.py docs/benchmarks.md docs/speed.svg
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_SESSION = "one session, all cores"
_EACH = "processes, pickled arrays"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One table.

    Attributes:
        run: The mark of the page that the table is below.
        load: The table's first words.
        title: Above the bars.
        bars: What each bar is called, by the name of its way; the last one is mcinfer's.
    """

    run: str
    load: str
    title: str
    bars: dict[str, str]


PANELS = (
    Panel(
        run="unet",
        load="batch 2, 1 client",
        title="UNet: one batch of two at a time",
        bars={"session": _SESSION, "pipe": _EACH, "sharded": "mcinfer, 2 workers: predict"},
    ),
    Panel(
        run="unet",
        load="batch 2, 4 clients",
        title="UNet: four clients",
        bars={"session": _SESSION, "pipe-each": _EACH, "concurrent": "mcinfer, 2 workers: submit"},
    ),
    Panel(
        run="mobilenet",
        load="batch 1, 1 client",
        title="Classifier: one image at a time",
        bars={"session": _SESSION, "pipe-each": _EACH, "concurrent": "mcinfer, 2 workers: submit"},
    ),
)

_WIDTH, _HEIGHT, _LEFT, _TOP, _STEP, _LONGEST = 300, 200, 15, 40, 48, 220


def rates(page: str, run: str, load: str) -> dict[str, tuple[float, float]]:
    """Rows a second of each way under a load, and their spread, as the page has them."""
    part = page.partition(f"<!-- {run} -->")[2].partition("<!-- end -->")[0]
    table = part.partition(f"\n{load} (")[2].partition("\n\n")[0]
    row = re.compile(r"^(\S+) +\d+ +([\d.]+) .*\n +±([\d.]+)", re.MULTILINE)
    return {way: (float(rate), float(spread)) for way, rate, spread in row.findall(table)}


def drawn(page: str) -> str:
    """The picture, as SVG.

    Raises:
        KeyError: The page has no such way.
    """
    texts = []
    for column, panel in enumerate(PANELS):
        measured = rates(page, panel.run, panel.load)
        scale = _LONGEST / max(sum(measured[way]) for way in panel.bars)
        left = column * _WIDTH + _LEFT
        texts.append(f'<text x="{left}" y="22" font-weight="bold">{panel.title}</text>')
        for line, (way, name) in enumerate(panel.bars.items()):
            (rate, spread), top = measured[way], _TOP + line * _STEP
            colour = "#009e73" if name.startswith("mcinfer") else "#999999"
            low, high = (left + (rate + by) * scale for by in (-spread, spread))
            texts += (
                f'<text x="{left}" y="{top + 10}">{name}</text>',
                f'<rect x="{left}" y="{top + 16}" width="{rate * scale:.1f}" height="18" '
                f'fill="{colour}"/>',
                f'<path d="M{low:.1f} {top + 25}H{high:.1f}" stroke="#333333"/>',
                f'<text x="{high + 6:.1f}" y="{top + 30}">{rate:g}</text>',
            )
    last = "rows a second (more is better); lines: the spread of the repeats"
    texts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}" fill="#666666">{last}</text>')
    size = f'width="{_WIDTH * len(PANELS)}" height="{_HEIGHT}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
            f'font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *texts,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(drawn(source.read_text("utf-8")), encoding="utf-8")
