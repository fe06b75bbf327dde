"""What every backend of collectives does, as functions that all ranks of a group of two or more call.

They leave the group as they found it, so that one group can go through all of them.
"""

from collections.abc import Callable
from inspect import isfunction

import ml_dtypes
import numpy as np
import pytest

from mcinfer.errors import ClosedError, InvalidInputError
from mcinfer.ranks.collectives.base import Group

LARGE = 100_003
"""Elements, so many that backends share the work, and a number that no group divides."""


def part(rank: int, shape: tuple[int, ...] = (2, 6), dtype: str = "float32") -> "np.ndarray":
    """A rank's array, which the others can make too."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 + rank * 3) % 101).reshape(shape).astype(dtype)


def parts(group: Group, shape: tuple[int, ...] = (2, 6)) -> "np.ndarray":
    return np.stack([part(rank, shape) for rank in range(group.size)])


def reductions_are_those_of_numpy(group: Group) -> None:
    for shape in ((2, 6), (LARGE,), (0, 3), ()):
        own, every = part(group.rank, shape), parts(group, shape)
        np.testing.assert_array_equal(group.all_reduce(own), every.sum(0))
        np.testing.assert_array_equal(group.all_reduce(own, "max"), every.max(0))
        np.testing.assert_allclose(group.all_reduce(own, "mean"), every.mean(0), rtol=1e-6)


def gathered_parts_are_in_the_order_of_the_ranks(group: Group) -> None:
    for axis, shape in ((0, (2, 6)), (1, (2, 6)), (-1, (3, 2, 5)), (0, (LARGE,)), (1, (3, LARGE))):
        expected = np.concatenate([*parts(group, shape)], axis)
        np.testing.assert_array_equal(group.all_gather(part(group.rank, shape), axis), expected)


def scattered_parts_are_those_of_the_whole_reduction(group: Group) -> None:
    for axis, shape in ((0, (12, 5)), (1, (2, 12)), (-1, (2, 3, 12 * 2048))):
        own, every = part(group.rank, shape), parts(group, shape)
        expected = np.split(every.sum(0), group.size, axis)[group.rank]
        np.testing.assert_array_equal(group.reduce_scatter(own, axis), expected)
        expected = np.split(every.max(0), group.size, axis)[group.rank]
        np.testing.assert_array_equal(group.reduce_scatter(own, axis, "max"), expected)


def each_rank_can_be_the_root_of_a_broadcast(group: Group) -> None:
    for root in range(group.size):
        for shape in ((2, 6), (LARGE,)):
            own = part(group.rank, shape)
            result = group.broadcast(own, root)
            np.testing.assert_array_equal(result, part(root, shape))
            assert not np.shares_memory(result, own)


def types_are_exchanged_as_they_are(group: Group) -> None:
    for name in ("float64", "int8", "uint16", "int64", "float16", "bfloat16", "complex64"):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        every = (parts(group) % 11).astype(dtype)  # sums of which all types can hold
        own, total = every[group.rank], every.astype("complex64").sum(0).real.astype(dtype)
        received = [
            (group.all_reduce(own), total),
            (group.all_gather(own, 0), np.concatenate([*every])),
            (group.broadcast(own, 1), every[1]),
            (group.reduce_scatter(np.concatenate([own] * group.size), 0), total),
        ]
        if name != "complex64":
            received.append((group.all_reduce(own, "max"), np.maximum.reduce([*every])))
        for found, expected in received:
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, expected)


def half_precision_is_added_in_single(group: Group) -> None:
    # 2048 + 1 is 2048 in float16, but 2048 + 1 + 1 is 2050.
    own = np.full(5, 2048 if group.rank == 0 else 1, np.float16)
    expected = np.float16(np.float32(2048 + group.size - 1))
    assert (group.all_reduce(own) == expected).all()
    assert np.isinf(group.all_reduce(np.full(5, 60000, np.float16))).all()  # without a warning


def sent_arrays_come_in_order_whatever_the_sender_does_next(group: Group) -> None:
    if group.rank == 0:
        array = np.empty(LARGE, np.float32)
        for number in range(5):
            array[:] = number
            group.send(array, 1)
            array[:] = -1
    elif group.rank == 1:
        for number in range(5):
            assert (group.recv((LARGE,), np.float32, 0) == number).all()
    group.barrier()


def two_ranks_can_send_to_each_other_at_once(group: Group) -> None:
    if group.rank < 2:
        other = 1 - group.rank
        group.send(part(group.rank), other)
        np.testing.assert_array_equal(group.recv((2, 6), np.float32, other), part(other))
    group.barrier()


def fixed_memory_serves_many_runs_whose_input_is_free_and_whose_output_stays(group: Group) -> None:
    root, total = group.size - 1, sum(range(group.size))
    for count in (7, LARGE):
        reduce = group.prepare_all_reduce((count,), np.float32)
        gather = group.prepare_all_gather((count,), np.float32)
        scatter = group.prepare_reduce_scatter((count * group.size,), np.float32)
        broadcast = group.prepare_broadcast((count,), np.float32, root)
        before = [reduce.input.ctypes.data, reduce.output.ctypes.data]
        for run in range(20):
            for collective in (reduce, gather, scatter):
                collective.input[:] = group.rank + run
                collective.run()
                collective.input[:] = -1
            if group.rank == root:
                broadcast.input[:] = run
            broadcast.run()
            assert (reduce.output == total + run * group.size).all()
            assert (gather.output[:count] == run).all()
            assert (gather.output[-count:] == group.size - 1 + run).all()
            assert (scatter.output == total + run * group.size).all()
            assert (broadcast.output == run).all()
        assert before == [reduce.input.ctypes.data, reduce.output.ctypes.data]
        assert reduce.output.flags.c_contiguous


def transfers_keep_their_order(group: Group) -> None:
    if group.rank < 2:
        transfers = [group.prepare_transfer((count,), np.float32, 0, 1) for count in (3, LARGE, 0)]
    for run in range(4):
        if group.rank < 2:
            for number, transfer in enumerate(transfers):
                if group.rank == 0:
                    transfer.input[:] = run * 10 + number
                transfer.run()
                if group.rank == 1:
                    assert (transfer.output == run * 10 + number).all()
        group.barrier()  # from here on the source knows that its memory is free


def subgroups_are_numbered_anew(group: Group) -> None:
    ranks = [*range(group.size)][::-1][:2]
    sub = group.subgroup(ranks)
    if group.rank not in ranks:
        assert sub is None
    else:
        assert sub is not None
        assert (sub.rank, sub.size) == (ranks.index(group.rank), 2)
        gathered = sub.all_gather(np.array([group.rank]))
        assert gathered.tolist() == ranks
        sub.close()
        with pytest.raises(ClosedError, match="the group is closed"):
            sub.barrier()
    alone = group.subgroup([1])
    if alone is not None:
        np.testing.assert_array_equal(alone.all_reduce(part(1)), part(1))
        alone.close()
    group.barrier()


def memory_of_forgotten_operations_is_used_again(group: Group) -> None:
    for run in range(3):
        reduce = group.prepare_all_reduce((LARGE,), np.float32)
        if group.rank < 2:
            source = group.prepare_transfer((LARGE,), np.float32, 0, 1)
            if group.rank == 0:
                for _ in range(run):  # the other rank does not run these
                    source.run()
        group.forget()
        reduce = group.prepare_all_reduce((LARGE,), np.float32)
        reduce.input[:] = group.rank + run
        reduce.run()
        assert (reduce.output == sum(rank + run for rank in range(group.size))).all()
        if group.rank < 2:
            source = group.prepare_transfer((LARGE,), np.float32, 0, 1)
            if group.rank == 0:
                source.input[:] = run
            source.run()
            assert group.rank == 0 or (source.output == run).all()
        group.barrier()


def wrong_arguments_are_refused_by_name(group: Group) -> None:
    own = part(group.rank)
    for expected, call in (
        ("operation: got 'min'", lambda: group.all_reduce(own, "min")),  # type: ignore[arg-type]
        ("axis: got 2", lambda: group.all_gather(own, 2)),
        ("axis: got 0 of shape", lambda: group.reduce_scatter(np.ones(group.size + 1), 0)),
        ("root: got rank 9", lambda: group.broadcast(own, 9)),
        ("to: got rank", lambda: group.send(own, group.rank)),
        ("dtype: got int32 for a mean", lambda: group.all_reduce(own.astype("int32"), "mean")),
        ("dtype: got", lambda: group.all_reduce(np.array(["text"]))),
        ("ranks: got", lambda: group.subgroup([0, 0])),
    ):
        with pytest.raises(InvalidInputError, match=expected):
            call()
    group.barrier()


CONTRACT: list[Callable[[Group], None]] = [
    check
    for check in [*globals().values()]
    if isfunction(check) and check.__module__ == __name__ and check not in (part, parts)
    if check.__name__ != "__annotate__"  # the module's own, from Python 3.14 on
]
