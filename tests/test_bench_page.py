"""Tests of mcinfer/bench/views/page.py, plots.py and panels.py."""

import base64
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest

from mcinfer.bench.report import Load, Report, dump
from mcinfer.bench.views.page import render
from mcinfer.bench.views.panels import panels
from mcinfer.bench.views.plots import figure, svgs
from tests.bench_reports import large, report, small, turn, way

HOSTILE = "</script><script>alert('1')</script>\"><img src=x onerror=y>$x_$ 模型"
REQUESTING = {"src", "srcset", "action", "formaction", "poster", "background"}
CLOSED, OPEN = Load(batch=1, clients=2), Load(batch=1, clients=8, rate=50.0)


class Page(HTMLParser):
    """What tags, attributes and text a page comes to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data

    def all_of(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def hostile() -> Report:
    """Two ways, one by that name, that failed and did not keep up, and pools; few requests in places."""
    pools = [way(f"pool-{n}", role="scaling", workers=n) for n in (1, 2)]
    ways = [way("session"), way(HOSTILE), replace(way("pipe"), error=HOSTILE), *pools]
    made = report(
        ways,
        {
            ("session", CLOSED): [turn(), turn(120.0)],
            (HOSTILE, CLOSED): [turn(failed=3, error=HOSTILE), turn()],
            ("session", OPEN): [turn(50.0)],
            (HOSTILE, OPEN): [turn(0.0, unfinished=100)],
            ("pool-1", CLOSED): [turn()],
            ("pool-2", CLOSED): [turn(180.0)],
        },
        name=HOSTILE,
    )
    return replace(made, machine={"cpu": HOSTILE}, made_at=HOSTILE, mcinfer=HOSTILE)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render(hostile()))


def test_hostile_names_are_text(page: Page) -> None:
    assert not {"script", "img", "iframe", "object", "link", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>alert('1')</script>") >= 8


def test_page_requests_nothing(page: Page) -> None:
    assert not REQUESTING & {name for name, _ in page.attributes}
    (download,) = (href for href in page.all_of("href") if not href.startswith("#"))
    assert download.startswith("data:application/json;base64,")
    assert all(link.startswith("#") for link in page.all_of("xlink:href"))
    assert "@import" not in page.text
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", page.text))


def test_page_brings_the_report_along(page: Page) -> None:
    (download,) = (href for href in page.all_of("href") if href.startswith("data:"))
    data = base64.b64decode(download.partition(",")[2])
    assert data == dump(hostile())
    assert json.loads(data)["model"]["name"] == HOSTILE


def test_ids_are_unique_and_what_refers_to_them_finds_them(page: Page) -> None:
    ids = page.all_of("id")
    assert page.tags.count("svg") == 6
    assert len(set(ids)) == len(ids) > 100
    assert {link[1:] for link in page.all_of("xlink:href")} <= set(ids)
    assert {place[5:-1] for place in page.all_of("clip-path")} <= set(ids)


def test_page_tells_what_was_not_answered(page: Page) -> None:
    assert "session, batch" not in page.text
    assert "(3 of 403 failed)" in page.text
    assert "did not keep up: 0 of 50 requests/s answered, 100 of 100 never begun" in page.text
    assert f" failed: {HOSTILE}" in page.text
    assert "pipe could not be measured: " in page.text
    assert "∞" in page.text


def test_same_report_makes_the_same_pictures_without_a_date() -> None:
    made = small(session=[100.0, 90.0], sharded=[110.0, 120.0])
    drawn = svgs(made)
    assert drawn == svgs(made)
    assert list(drawn) == ["throughput-2", "latency-0", "memory-ways"]
    for text in drawn.values():
        assert text.startswith('<svg role="img" aria-label=')
        assert not re.search(r"<dc:date|<\?xml|matplotlib\.org|#010203", text)


def test_panels_without_data_are_left_out() -> None:
    def names(made: Report) -> list[str]:
        return [panel.name for panel in panels(made)]

    bare = replace(way("session"), memory=())
    assert names(report([bare], {("session", OPEN): [turn()]})) == ["latency-0"]
    assert names(report([bare], {("session", CLOSED): [turn(0.0)]})) == ["throughput-1"]
    assert names(report([bare], {})) == []
    assert len(names(large())) == 3 + 11 + 1 + 2


def test_report_of_nothing_is_still_a_page_and_a_picture() -> None:
    nothing = report([], {})
    assert "svg" not in Page(render(nothing)).tags
    figure(nothing).savefig(BytesIO(), format="png")


def test_every_panel_is_in_the_picture_and_begins_at_zero() -> None:
    made = hostile()
    drawn = figure(made)
    axes = drawn.get_axes()
    assert [one.get_title() for one in axes] == [panel.title for panel in panels(made)]
    for one in axes:
        limits = one.get_xlim() if one.get_title() == "memory of ways" else one.get_ylim()
        assert limits[0] == 0
    assert all(one.get_ylabel().endswith(("(ms)", "(MB)", "rows/s", "")) for one in axes)


def test_axis_that_does_not_begin_at_zero_says_that_it_is_logarithmic() -> None:
    ways = [way("session"), way("sharded")]
    turns = {("session", CLOSED): [turn(slowest=5.0)], ("sharded", CLOSED): [turn(slowest=0.01)]}
    one = next(a for a in figure(report(ways, turns)).get_axes() if "latency" in a.get_title())
    assert one.get_yscale() == "log"
    assert one.get_ylabel() == "latency (ms, logarithmic)"


def test_line_ends_before_percentiles_of_too_few_requests_and_the_slowest_stands_alone() -> None:
    turns = {("session", OPEN): [turn(25.0)], ("sharded", OPEN): [turn(25.0, kept_up=False)]}
    drawn = figure(report([way("session"), way("sharded")], turns))
    axes = next(a for a in drawn.get_axes() if "latency" in a.get_title())
    line = axes.get_lines()[0]
    there = [x for x, y in line.get_xydata().tolist() if not math.isnan(y)]  # type: ignore[union-attr]
    # Of 50 requests, 98 in 100 are the last percentile; the greatest of all has the place at the right.
    assert there[-2] == pytest.approx(-math.log10(0.02))
    assert there[-1] == max(axes.get_xticks())
    legends = [legend for place in drawn.subfigs for legend in place.legends]
    labels = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    assert ["session", "sharded !"] in labels


@pytest.mark.parametrize("quickest", [0.01, 1.0])
def test_way_up_to_what_was_never_answered_is_to_be_seen(quickest: float) -> None:
    ways = [way("session"), way("sharded")]
    # Of the repeats one answers less, so there are percentiles known of the others alone.
    lossy = [turn(slowest=2.0, unfinished=lost) for lost in (20, 20, 80)]
    turns = {("session", OPEN): lossy, ("sharded", OPEN): [turn(slowest=quickest)]}
    one = next(a for a in figure(report(ways, turns)).get_axes() if "latency" in a.get_title())
    (up,) = (line for line in one.get_lines() if line.get_linestyle() == ":")
    low, high = one.get_ylim()
    place = one.transData.transform([(0, y) for y in np.asarray(up.get_ydata())])[:, 1]
    bottom, top = one.transData.transform([(0, low), (0, high)])[:, 1]
    assert place.max() <= top + 1
    assert place.max() - place.min() > 0.03 * (top - bottom)


def test_way_looks_the_same_in_every_panel() -> None:
    made = large()
    legends = [place.legends[0] for place in figure(made).subfigs if place.legends]
    looks: dict[str, set[object]] = {}
    for legend in legends:
        for key in legend.get_lines():
            look = (key.get_color(), key.get_marker(), key.get_linestyle())
            looks.setdefault(str(key.get_label()), set()).add(look)
    ways = [one.name for one in made.ways if one.role != "scaling" and not one.error]
    assert all(len(looks[name]) == 1 for name in ways)
    assert len({look for name in ways for look in looks[name]}) == len(ways) == 8
