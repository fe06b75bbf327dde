"""Where the elements of a value are: whole in every rank, cut along an axis, or a sum that is not made yet.

An axis is cut in *blocks*: each block is cut into equal consecutive parts, one for each rank, and a rank
holds its part of every block, joined. One block is the plain cut. Three blocks are what packed weights of
queries, keys and values need, so that each rank has some heads of all three::

    blocks (4, 4, 4), two ranks      q q q q k k k k v v v v
                            rank 0   q q     k k     v v
                            rank 1       q q     k k     v v
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, takewhile
from math import prod

Dim = int | str | None
"""A fixed size, a symbol, or unknown."""

Dims = tuple[Dim, ...]
Range = tuple[int, int]


class Whole(Enum):
    """A value that is not cut."""

    REPLICATED = "every rank has it, bit-identical"
    PARTIAL = "every rank has a term of the whole shape, and the value is the sum of the terms"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Every rank has some of the positions along one axis.

    Attributes:
        axis: Not negative.
        blocks: Sizes of the blocks in the whole value; the number of ranks divides each.
    """

    axis: int
    blocks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Of the axis, in the whole value."""
        return sum(self.blocks)

    def at(self, axis: int) -> "Sharded":
        return Sharded(axis, self.blocks)

    def between(self, start: int, stop: int) -> "Sharded | None":
        """What is left of a cut from one position to another; None unless these are blocks' ends."""
        ends = [0, *accumulate(self.blocks)]
        if start not in ends or stop not in ends:
            return None
        return Sharded(self.axis, self.blocks[ends.index(start) : ends.index(stop)])


Placement = Whole | Sharded

REPLICATED = Whole.REPLICATED
PARTIAL = Whole.PARTIAL


def divides(ranks: int, blocks: Sequence[int]) -> bool:
    """Whether every block can be cut into equal parts that are not empty."""
    return all(block > 0 and block % ranks == 0 for block in blocks)


def ranges(blocks: Sequence[int], ranks: int, rank: int) -> tuple[Range, ...]:
    """The positions that a rank holds, in its order; ranges that touch are joined."""
    found: list[Range] = []
    for end, block in zip(accumulate(blocks), blocks, strict=True):
        start = end - block + rank * (block // ranks)
        stop = start + block // ranks
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def gathered_order(blocks: Sequence[int], ranks: int) -> list[int]:
    """For each position of the whole axis, where it is when the parts of all ranks are joined in order."""
    spans = (span for rank in range(ranks) for span in ranges(blocks, ranks, rank))
    held = [position for span in spans for position in range(*span)]
    return sorted(range(len(held)), key=held.__getitem__)


def local_dims(dims: Dims, placement: Placement, ranks: int) -> Dims:
    """The shape of what one rank holds."""
    if not isinstance(placement, Sharded):
        return dims
    axis = placement.axis
    return (*dims[:axis], placement.size // ranks, *dims[axis + 1 :])


def reshaped(source: Dims, target: Dims, cut: Sharded, ranks: int) -> Sharded | None:
    """How the result of a reshape is cut, if each rank reshapes its own part; None if it is no cut.

    Axes are matched in groups of equal products, from the left and from the right. In a group, a cut moves if
    the same elements are a cut along one axis of the target.
    """
    left = _matched_prefix(source, target)
    if cut.axis < left:
        return cut
    inside, outside = source[left:], target[left:]
    axis = cut.axis - left
    # Whole groups are taken off on the right.
    while inside and outside and (group := _last_group(inside, outside)):
        begin, begin_target = len(inside) - group[0], len(outside) - group[1]
        if axis >= begin:
            own, others = _numbers(inside[begin:]), _numbers(outside[begin_target:])
            moved = _moved_in_group(own, others, cut.at(axis - begin), ranks)
            return moved and moved.at(moved.axis + left + begin_target)
        inside, outside = inside[:begin], outside[:begin_target]
    # What is left has the same product on both sides, whatever the unknown sizes are: the first axes have
    # the same share of it for each rank.
    first = outside[0] if outside else None
    if axis != 0 or not isinstance(first, int):
        return None
    scaled = [block * first for block in cut.blocks]
    if any(block % cut.size for block in scaled):
        return None
    blocks = tuple(block // cut.size for block in scaled)
    return Sharded(left, blocks) if divides(ranks, blocks) else None


def _matched_prefix(source: Dims, target: Dims) -> int:
    """How many leading axes are the same; those of size 1 may shift a cut to a later axis, and end it."""
    pairs = zip(source, target, strict=False)
    return len([*takewhile(lambda pair: pair[0] is not None and pair[0] == pair[1], pairs)])


def _numbers(dims: Dims) -> list[int]:
    return [dim for dim in dims if isinstance(dim, int)]


def _last_group(source: Dims, target: Dims) -> tuple[int, int] | None:
    """How many trailing axes of each have the same product, at least one; None with unknown sizes."""
    if source[-1] == target[-1] and isinstance(source[-1], str):
        return None  # no numbers: neither is cut
    count = count_target = 1
    while True:
        some, other = source[-count:], target[-count_target:]
        if not all(isinstance(dim, int) and dim > 0 for dim in (*some, *other)):
            return None
        product, product_target = prod(_numbers(some)), prod(_numbers(other))
        if product == product_target:
            return count, count_target
        if product < product_target:
            count += 1
        else:
            count_target += 1
        if count > len(source) or count_target > len(target):
            return None


def _moved_in_group(
    source: list[int], target: list[int], cut: Sharded, ranks: int
) -> Sharded | None:
    outer, inner = prod(source[: cut.axis]), prod(source[cut.axis + 1 :])
    flat = tuple(block * inner for block in cut.blocks) * outer
    for axis in range(len(target)):
        outer, inner = prod(target[:axis]), prod(target[axis + 1 :])
        if len(flat) % outer:
            continue
        period = flat[: len(flat) // outer]
        if period * outer != flat or any(block % inner for block in period):
            continue
        blocks = tuple(block // inner for block in period)
        if sum(blocks) == target[axis] and divides(ranks, blocks):
            return Sharded(axis, blocks)
    return None
