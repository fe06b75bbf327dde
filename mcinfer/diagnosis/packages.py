"""The packages that mcinfer and its extras need, as its own metadata names them, and those that are there."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from mcinfer.diagnosis.judging import Finding

_REQUIREMENT = re.compile(
    r"([\w.-]+)\s*(?:>=\s*([\w.]+))?\s*(?:;\s*extra\s*==\s*[\"']([\w-]+)[\"'])?"
)

_OWN = "mcinfer"

_FOR_DEVELOPERS = ("test", "check", "examples")
"""Extras that only work on mcinfer itself asks for."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that mcinfer needs, or one of its extras does.

    Attributes:
        package: Its name.
        least: The oldest version that does; empty for any.
        extra: Whose it is; empty for mcinfer itself.
    """

    package: str
    least: str
    extra: str


def parse_requirements(texts: Sequence[str]) -> list[Requirement]:
    """Read what a package's metadata says it needs (PEP 508); what has another form is left out."""
    matches = [_REQUIREMENT.fullmatch(text.strip()) for text in texts]
    return [Requirement(m[1], m[2] or "", m[3] or "") for m in matches if m]


def look_at_packages() -> Iterator[Finding]:
    """Find out which packages there are, of those that mcinfer and its extras need."""
    try:
        requirements = parse_requirements(metadata.requires(_OWN) or [])
    except metadata.PackageNotFoundError:
        requirements = []
    names = sorted({requirement.package for requirement in requirements})
    versions = {name: version for name in names if (version := _version(name))}
    if len(versions) < len(names):
        # The same modules may be there by another package's name: onnxruntime is in onnxruntime-gpu.
        others = metadata.packages_distributions()
        for name in set(names) - set(versions):
            for other in others.get(name, ()):
                versions[name] = f"{metadata.version(other)} ({other})"
    yield judge_packages(_version(_OWN) or "", requirements, versions)
    yield judge_extras(requirements, versions)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def judge_packages(
    own: str, requirements: Sequence[Requirement], versions: Mapping[str, str]
) -> Finding:
    """The packages that nothing works without.

    Args:
        own: The version of mcinfer; empty if it is not installed.
        requirements: Of mcinfer and its extras; none likewise.
        versions: By name, those that are there.
    """
    needed = [requirement for requirement in requirements if not requirement.extra]
    if not own or not needed:
        found = "mcinfer is not installed, so which packages it needs is not known"
        return Finding(
            "packages",
            "warning",
            found,
            "pip install mcinfer, or pip install --editable its folder",
        )
    known = [f"{item.package} {versions.get(item.package, 'is missing')}" for item in needed]
    found = ", ".join([f"mcinfer {own}", *known])
    amiss = [item for item in needed if not _is_met(item, versions)]
    if amiss:
        return Finding("packages", "problem", found, _installation(amiss))
    return Finding("packages", "ok", found)


def judge_extras(requirements: Sequence[Requirement], versions: Mapping[str, str]) -> Finding:
    """What is there beside, and what of it is too old; what is missing nobody may want."""
    extras: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        if requirement.extra and requirement.extra not in _FOR_DEVELOPERS:
            extras.setdefault(requirement.extra, []).append(requirement)
    there = [name for name, items in extras.items() if all(_is_met(i, versions) for i in items)]
    absent = [name for name in extras if name not in there]
    found = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    old = {
        item.package: item
        for items in extras.values()
        for item in items
        if item.package in versions and not _is_met(item, versions)
    }
    if old:
        names = ", ".join(f"{name} {versions[name]}" for name in old)
        return Finding(
            "extras", "warning", f"{found}; too old: {names}", _installation(old.values())
        )
    return Finding("extras", "ok", found)


def _installation(items: Iterable[Requirement]) -> str:
    wanted = [f"'{item.package}>={item.least}'" if item.least else item.package for item in items]
    return f"pip install {' '.join(wanted)}"


def _is_met(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(requirement.package)
    return version is not None and _release(version) >= _release(requirement.least)


def _release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, without zeros at the end: 2.0 is 2."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
