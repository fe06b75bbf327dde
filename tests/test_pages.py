"""Links of the pages, as the repository's Markdown has them; `make docs` checks those of the site."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for folder, pattern in ((".", "*.md"), ("docs", "**/*.md"), ("examples", "**/*.md"))
    for page in sorted((ROOT / folder).glob(pattern))
]

_CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(
    r"\]\(\s*(?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)|\b(?:src|href)=\"(?![a-z]+:)([^\"#]+)\""
)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_OBJECT = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links, and the anchors in them, or ""."""
    for path, anchor, source in _LINK.findall(_CODE.sub("``", page.read_text("utf-8"))):
        yield (page.parent / (path or source) if path or source else page).resolve(), anchor


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings, as GitHub names them, and the API's names."""
    text = page.read_text("utf-8")
    found: set[str] = {*_OBJECT.findall(text)}
    fences = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in _HEADING.findall(fences):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while (one := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(one)
    return found


@pytest.mark.thorough
def test_links_lead_to_files_and_headings_that_are_there() -> None:
    broken = []
    count = 0
    for page in PAGES:
        for target, anchor in links(page):
            count += 1
            there = target.exists() and (not anchor or anchor in anchors(target))
            if not there or not target.is_relative_to(ROOT):
                broken.append(f"{page.relative_to(ROOT)}: {target}{anchor and '#'}{anchor}")
    assert broken == []
    assert count > 250
