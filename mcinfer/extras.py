"""Packages that mcinfer uses where they are installed: the extras of setup.cfg."""

import contextlib
import re
from collections.abc import Iterator

from mcinfer.errors import MissingDependencyError

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[(.*?)\])?([^;]*); extra == ["'](.+)["']""")
_ALL_THERE = " (with --force-reinstall if pip says that all of it is there)"


def install(extra: str, *, anew: bool = False) -> str:
    """The command that installs what an extra needs and this environment lacks, by the packages' own names.

    It names packages, since ``mcinfer[extra]`` would mean another mcinfer than the one that runs here: a
    checkout's, a wheel's, an index's. If all are there (and one is broken, or too old), it names all, as it
    does with `anew`, for what is uninstalled before.
    """
    found = _packages(extra)
    lacking = [text for text, there in found if not there]
    if not found:  # a frozen program, for one
        return f"install the packages of the extra {extra!r} in mcinfer's setup.cfg"
    named = lacking if lacking and not anew else [text for text, _ in found]
    quoted = (f"'{text}'" if re.search(r"[^\w.-]", text) else text for text in named)
    return f"pip install {' '.join(quoted)}{'' if lacking or anew else _ALL_THERE}"


def _packages(extra: str) -> list[tuple[str, bool]]:
    """What an extra names, each with whether it is installed; empty if mcinfer has no metadata."""
    from importlib import metadata

    packages = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("mcinfer") or ():
            match = _REQUIREMENT.fullmatch(requirement)
            if match is None or match[4] != extra:
                continue
            if match[1] == "mcinfer":
                packages += [each for name in match[2].split(",") for each in _packages(name)]
            else:
                text = requirement.partition(";")[0].strip()
                packages.append((text, version_of(match[1]) is not None))
    return packages


def version_of(package: str) -> str | None:
    """The version of an installed package; None if there is none. Of two on the path, the first one's."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@contextlib.contextmanager
def requires(needs: str, *modules: str, extra: str | None = None) -> Iterator[None]:
    """Raise `MissingDependencyError` if an import within finds one of these modules missing.

    Its text is `needs`, and the command that installs the extra if one is named. Other errors pass as they
    are: a package that is there and broken, one that lacks another package, or a file of the program's with
    the name of a module that the package imports.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in modules:
            raise
        text = needs if len(modules) == 1 else f"{needs} ({exc})"
        raise MissingDependencyError(f"{text}: {install(extra)}" if extra else text) from exc
