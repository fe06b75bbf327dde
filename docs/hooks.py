"""Hooks of mkdocs: pages whose files lie elsewhere in the repository, and a check of public docstrings."""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    **{
        f"examples/{name}/README.md": f"examples/{name}.md"
        for name in (
            "digits",
            "distributed",
            "quick_start",
            "quick_start_parallel",
            "ray_cluster",
            "sd_dual_core",
            "weight_sharing",
        )
    },
}
"""Files of the repository by path, and the pages that they become."""

_ORIGINS = {page: path for path, page in PAGES.items()}
_REFERENCE = re.compile(r"^::: mcinfer\.([\w.]+)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COMMENT = re.compile(r"^(<!--.*-->)\n(?=\S)", re.MULTILINE)

_log = logging.getLogger("mkdocs.hooks")  # with --strict, a warning of it fails


def on_pre_build(config: Any) -> None:
    """Warn of public names that have no docstring, or are not in the reference."""
    root = Path(config.config_file_path).parent
    package = griffe.load("mcinfer", search_paths=[root])
    paths = _REFERENCE.findall((root / "docs" / "reference.md").read_text("utf-8"))
    for name in {*(package.exports or ())} - {*paths}:
        _log.warning("mcinfer.%s is not in reference.md", name)
    for path in paths:
        value = package[path]
        for undocumented in _undocumented(value.final_target if value.is_alias else value):
            _log.warning("%s has no docstring", undocumented)


def _undocumented(value: Any) -> list[str]:
    """The paths of a class or function, of its public methods, and of its attributes, without a docstring."""
    public = [m for name, m in value.members.items() if not name.startswith("_") and not m.is_alias]
    sections = value.docstring.parse("google") if value.docstring else []
    described = {
        item.name
        for section in sections
        if section.kind is griffe.DocstringSectionKind.attributes
        for item in section.value
    }
    return [m.path for m in (value, *public) if not m.has_docstring and m.name not in described]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose files lie elsewhere."""
    root = Path(config.config_file_path).parent
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links, which are written for the repository, to the site's pages."""
    here = page.file.src_uri
    folder = posixpath.dirname(_ORIGINS.get(here, f"docs/{here}"))

    def to_page(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        target = "index.md" if path == "README.md" else PAGES.get(path, path.removeprefix("docs/"))
        link = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"]({link}{match[2] or ''})"

    # A block that follows a comment at once would be part of the comment's HTML.
    return _COMMENT.sub(r"\1\n\n", _LINK.sub(to_page, markdown))
