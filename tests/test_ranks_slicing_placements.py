from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.ranks.slicing.placements import (
    Dims,
    Sharded,
    divides,
    local_dims,
    ranges,
    reshaped,
)


def part(array: np.ndarray, cut: Sharded, ranks: int, rank: int) -> np.ndarray:
    positions = [at for span in ranges(cut.blocks, ranks, rank) for at in range(*span)]
    return np.asarray(array.take(positions, cut.axis))


def test_blocks_are_cut_each_unless_one_cannot_be() -> None:
    assert ranges((4, 4, 4), 2, 1) == ((2, 4), (6, 8), (10, 12))
    assert ranges((4,), 1, 0) == ranges((2, 2), 1, 0) == ((0, 4),)
    assert [divides(2, blocks) for blocks in ((0, 4), (3,), (2, 4))] == [False, False, True]


@given(data=st.data())
def test_cut_that_a_reshape_keeps_has_the_same_elements(data: st.DataObject) -> None:
    source = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    factors = data.draw(st.permutations([2, 3, *source]))[: data.draw(st.integers(0, 3))]
    rest = prod(source) // prod(factors) if prod(source) % prod(factors) == 0 else 0
    target = [*factors, rest] if rest else [prod(source)]
    axis = data.draw(st.integers(0, len(source) - 1))
    size = source[axis]
    blocks = data.draw(st.sampled_from([(size,), (size // 2, size - size // 2), (2, size - 2)]))
    if not divides(2, blocks):
        return
    cut = Sharded(axis, blocks)
    unknown = data.draw(st.sets(st.integers(0, 3)))
    before: Dims = tuple(
        None if at in unknown and at != axis else dim for at, dim in enumerate(source)
    )
    after: Dims = tuple(None if at in unknown and at > 0 else dim for at, dim in enumerate(target))
    moved = reshaped(before, after, cut, 2)
    if moved is None:
        return
    assert moved.size == target[moved.axis]
    whole = np.arange(prod(source))
    for rank in range(2):
        own = part(whole.reshape(source), cut, 2, rank)
        expected = part(whole.reshape(target), moved, 2, rank)
        assert expected.shape == local_dims(tuple(target), moved, 2)
        assert np.array_equal(own.reshape(expected.shape), expected)
