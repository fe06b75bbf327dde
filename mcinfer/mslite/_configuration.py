"""The configuration of a build: sections of entries, from a file and from a dictionary that overrides it.

Files are INI files, as in MindSpore Lite: ``[section]``, then lines ``key=value``; ``#`` begins a comment.
Values may be quoted. The keys for weights are in section ``[ascend_context]``, whatever the device.
"""

import configparser
import os
import re
import reprlib
import warnings
from collections.abc import Mapping, Set

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.mslite._checks import Sections, check_path, check_sections, failures

VARIABLE_WEIGHTS = "variable_weights_file"
PIDS = "shareable_weight_pid_list"
HANDLE = "shareable_weight_mem_handle"
RANK_TABLE = "rank_table_file"
_MAX_DIGITS = 10


def read_configuration(what: str, path: str, entries: object) -> Sections:
    """The entries of a file (``""`` for none), and further ones (or None) that override them."""
    if path:
        check_path(what, "config_path", path)
    with failures(what):
        sections = load_sections(path)
    return override(sections, {} if entries is None else check_sections("config_dict", entries))


def load_sections(path: str) -> Sections:
    """The entries of a file, none for ``""``; InvalidInputError if the file does not load."""
    parser = configparser.ConfigParser(
        interpolation=None, strict=False, inline_comment_prefixes=("#",)
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # keys keep their case
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                parser.read_file(file)
        except (OSError, UnicodeDecodeError, configparser.Error) as exc:
            raise InvalidInputError(f"config_path: {path} does not load: {exc}") from exc
    return override({}, {name: dict(parser.items(name)) for name in parser.sections()})


def override(sections: Sections, more: Sections) -> Sections:
    """A copy of the sections with further entries, whose quotes are removed."""
    merged = {name: dict(entries) for name, entries in sections.items()}
    for name, entries in more.items():
        section = merged.setdefault(name, {})
        for key, value in entries.items():
            text = value.strip()
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            section[key] = text[1:-1] if quoted else text
    return merged


def warn_of_unused(sections: Sections, used: Set[tuple[str, str]], *, stacklevel: int) -> None:
    """List in one warning all entries but the used ones, which are pairs of section and key."""
    named = [(name, key) for name, entries in sections.items() for key in entries]
    unused = ", ".join(f"[{name}] {key}" for name, key in named if (name, key) not in used)
    if unused:
        warnings.warn(
            f"configuration entries without an effect in mcinfer: {unused}",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def entries_of(sections: Sections) -> Mapping[str, str]:
    """The section for weights, ranks and Ascend devices."""
    return sections.get("ascend_context", {})


def weights_folder(sections: Sections) -> str | None:
    """The folder of ``[model_file] mindir_path``, with the weights of a model from a buffer."""
    path = sections.get("model_file", {}).get("mindir_path")
    if path is None:
        return None
    folder = os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path))
    if not os.path.isdir(folder):
        raise InvalidInputError(f"[model_file] mindir_path: {path} does not exist")
    return folder


def variable_weights(sections: Sections) -> tuple[str, ...]:
    """Names of the weights that may be replaced: the lines of the file that the configuration names."""
    path = entries_of(sections).get(VARIABLE_WEIGHTS)
    if path is None:
        return ()
    try:
        with open(path, encoding="utf-8") as file:
            names = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"{VARIABLE_WEIGHTS}: {path} does not load: {exc}") from exc
    if not names or len({*names}) < len(names):
        raise InvalidInputError(
            f"{VARIABLE_WEIGHTS}: {path} has {len(names)} names, {len({*names})} different ones; expected "
            "different names of weights, one in a line"
        )
    return tuple(names)


def weight_sharing(sections: Sections) -> tuple[tuple[int, ...] | None, int | None]:
    """The processes that may have the model's weights, and the handle of their owner; None if not given."""
    pids, handle = map(entries_of(sections).get, (PIDS, HANDLE))
    if pids is not None and handle is not None:
        raise BuildError(f"{PIDS} and {HANDLE}: got both, expected one of them")
    if handle is not None and not re.fullmatch(r"\d{1,19}", handle.strip(), re.ASCII):
        raise InvalidInputError(
            f"{HANDLE}: got {handle!r}, expected the number that the owner's get_model_info returned"
        )
    if pids is None:
        return None, None if handle is None else int(handle)
    listed = re.findall(r"\d+", pids, re.ASCII)
    well_formed = re.fullmatch(r"[\d\s,]*", pids, re.ASCII)
    if not well_formed or max(map(len, listed), default=0) > _MAX_DIGITS:
        raise InvalidInputError(
            f"{PIDS}: got {reprlib.repr(pids)}, expected process ids, '123, 456'"
        )
    return tuple(map(int, listed)), None
