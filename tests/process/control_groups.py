"""Control groups that tests make, where they may."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.process.waiting import wait_until


def own_groups(controller: str) -> Iterator[Path]:
    """Where this process's control groups of a controller may be, of either version."""
    top = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield top / path.lstrip("/")
        elif controller in controllers.split(","):
            yield top / controller / path.lstrip("/")


def is_removed(group: Path) -> bool:
    with suppress(OSError):  # busy while a process of it is not quite gone
        group.rmdir()
    return not group.exists()


@contextmanager
def limited_group(controller: str, limit: Callable[[Path], None]) -> Iterator[Path]:
    """A control group that `limit` has set up; the test is skipped if none can be made here."""
    reasons = []
    for parent in own_groups(controller):
        path = parent / f"mcinfer-test-{os.getpid()}"
        with suppress(FileNotFoundError):
            path.rmdir()  # of a process that had this id before
        try:
            path.mkdir()
        except OSError as exc:
            reasons.append(str(exc))
            continue
        try:
            limit(path)
        except OSError as exc:
            path.rmdir()
            reasons.append(str(exc))
            continue
        yield path
        wait_until(partial(is_removed, path))
        return
    pytest.skip(f"no control group for {controller} can be made: {'; '.join(reasons)}")
