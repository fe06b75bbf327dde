"""The descriptors that this process has open, for tests that must not leave any."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def descriptors() -> dict[int, str]:
    """By number, what each open descriptor refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    gc.collect()  # garbage of earlier tests must not end in between
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() == before
