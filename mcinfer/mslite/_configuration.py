"""Configuration files and dictionaries: sections of entries, text to text.

Files are INI files, as MindSpore Lite has them: ``[section]``, then ``key=value`` in lines, ``#`` begins a
comment. Values may be quoted.
"""

import configparser
import os
import warnings

from mcinfer.errors import InvalidInputError

Sections = dict[str, dict[str, str]]

Entries = frozenset[tuple[str, str]]
"""Section and key of each."""


def load_sections(path: str, more: Sections | None) -> Sections:
    """Read a configuration file, and put further entries over its own.

    Args:
        path: Of the file; ``""`` for none.
        more: Entries that override the file's.

    Raises:
        InvalidInputError: It is no such file.
    """
    sections: Sections = {}
    if path:
        parser = configparser.ConfigParser(
            interpolation=None, strict=False, inline_comment_prefixes=("#",)
        )
        parser.optionxform = str  # type: ignore[assignment,method-assign] # keys keep their case
        try:
            with open(path, encoding="utf-8") as file:
                parser.read_file(file)
        except (OSError, UnicodeDecodeError, configparser.Error) as exc:
            raise InvalidInputError(f"config_path: {path} does not load: {exc}") from exc
        for name in parser.sections():
            sections[name] = {key: _plain(value) for key, value in parser.items(name)}
    return override(sections, more or {})


def override(sections: Sections, more: Sections) -> Sections:
    """Put further entries over those that there are; both stay as they are."""
    merged = {name: dict(entries) for name, entries in sections.items()}
    for name, entries in more.items():
        merged.setdefault(name, {}).update({key: _plain(value) for key, value in entries.items()})
    return merged


def warn_of_unused(sections: Sections, used: Entries, *, stacklevel: int) -> None:
    """Say once which entries have no effect, but for those that are used."""
    unused = [
        f"[{name}] {key}"
        for name, entries in sections.items()
        for key in entries
        if (name, key) not in used
    ]
    if unused:
        warnings.warn(
            f"configuration entries without an effect in mcinfer: {', '.join(unused)}",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def weights_folder(sections: Sections) -> str | None:
    """Where the weights of a model from a buffer lie: the folder of ``[model_file] mindir_path``.

    Raises:
        InvalidInputError: There is no such folder.
    """
    path = sections.get("model_file", {}).get("mindir_path")
    if path is None:
        return None
    folder = os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path))
    if not os.path.isdir(folder):
        raise InvalidInputError(f"[model_file] mindir_path: {path} does not exist")
    return folder


def _plain(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
