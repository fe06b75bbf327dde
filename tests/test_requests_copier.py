"""Copies by one thread and by several are the same; what is closed copies alone."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer.requests.tensors import Copier

LARGE = 18 << 20


@pytest.fixture(params=[1, 2, 3, 16])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    made = Copier(request.param)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("mcinfer-copy")]


def numbers(count: int) -> NDArray[np.uint32]:
    return np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE // 4, LARGE // 4 + 1])
def test_copy_is_whole_at_every_size(copier: Copier, count: int) -> None:
    source, target = numbers(count), np.zeros(count, np.uint32)
    copier.copy(target, source)
    assert np.array_equal(target, source)


@pytest.mark.parametrize("shape", [(1, LARGE // 4), (3, 5, LARGE // 60), (LARGE // 4, 1)])
def test_parts_do_not_follow_the_shape(copier: Copier, shape: tuple[int, ...]) -> None:
    source = numbers(int(np.prod(shape))).reshape(shape)
    target = np.zeros(shape, np.uint32)
    copier.copy(target, source)
    assert np.array_equal(target, source)


def test_other_byte_order_and_layout_are_turned(copier: Copier) -> None:
    source = numbers(LARGE // 4).reshape(2, -1)
    swapped, turned = np.zeros_like(source), np.zeros_like(source)
    copier.copy(swapped, source.astype(">u4"))
    copier.copy(turned, np.asfortranarray(source))
    assert np.array_equal(swapped, source)
    assert np.array_equal(turned, source)


def test_closed_copier_copies_alone(copier: Copier) -> None:
    copier.close()
    source, target = numbers(LARGE // 4), np.zeros(LARGE // 4, np.uint32)
    copier.copy(target, source)
    assert np.array_equal(target, source)
