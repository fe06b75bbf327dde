"""Packages that mcinfer uses where they are installed: the extras of setup.cfg."""

import contextlib
import re
from collections.abc import Iterator

from mcinfer.errors import MissingDependencyError

_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[(.*?)\])?([^;]*); extra == ["'](.+)["']""")


def install(extra: str) -> str:
    """The command that installs what an extra needs and this environment lacks, by the packages' own names.

    It names packages, since ``mcinfer[extra]`` would mean another mcinfer than the one that runs here: a
    checkout's, a wheel's, an index's. If all are there (and one is broken, or too old), it names all.
    """
    found = _packages(extra)
    named = [text for text, there in found if not there] or [text for text, _ in found]
    if not named:  # a frozen program, for one
        return f"install the packages of the extra {extra!r} in mcinfer's setup.cfg"
    quoted = (f"'{text}'" if re.search(r"[^\w.-]", text) else text for text in named)
    return f"pip install {' '.join(quoted)}"


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
                packages.append((text, any(metadata.distributions(name=match[1]))))
    return packages


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
