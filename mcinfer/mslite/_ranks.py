"""Ranks: processes that each hold a slice of a model, and join to run it together.

::

    Ascend: context.ascend.rank_id, [ascend_context] rank_table_file ──┐
    GPU:    the launcher (mpirun, …) ──────────────────────────────────┴─► place_of ──► join_ranks ──► Group

A group belongs to one model. The models of a process have the same place, as in MindSpore Lite, and every
rank builds its models in the same order: the groups of a job have one key, one after another.
"""

import os
import threading
from typing import ClassVar

from mcinfer.errors import InvalidInputError
from mcinfer.model_cache.onnx_files import read_small, scan
from mcinfer.model_cache.protobuf import MalformedError, ProtoMessage
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._configuration import RANK_TABLE, entries_of
from mcinfer.mslite.context import Context
from mcinfer.ranks.collectives import join
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Group
from mcinfer.ranks.collectives.launch import Ranks, find_ranks, from_launcher
from mcinfer.ranks.slicing.plans import METADATA_KEY

_COLLECTIVES = frozenset({"AllReduce", "AllGather"})
_MAX_GROUPS_BYTES = 1 << 20


def place_of(context: Context, sections: Sections) -> Ranks | None:
    """The place of this process among ranks that run a model together; None if it runs it alone.

    On the target `gpu` the launcher says it, on others the rank table of the configuration. What they or the
    file of groups say wrongly is an InvalidInputError.
    """
    if context.device_infos[0] == "gpu":
        launched = from_launcher()
        ranks = None if launched is None or launched.size == 1 else find_ranks()
    else:
        table = entries_of(sections).get(RANK_TABLE)
        rank = context.ascend.rank_id
        ranks = find_ranks(rank=rank, rank_table=table) if table else None
    if ranks is not None and context.group_info_file:
        _check_groups(context.group_info_file, ranks)
    return ranks


def is_slice(path: str) -> bool:
    """Whether an ONNX file is a rank's slice of a model: it says so, or has a collective node."""
    found = scan(path)
    return METADATA_KEY in found.metadata or any(
        name == "DistCollective" or (domain == "com.microsoft" and name in _COLLECTIVES)
        for domain, name in found.operators
    )


class Membership:
    """The part of this process in the group of one model: joined when it is needed."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _process: ClassVar[Ranks | None] = None  # the place of all models of this process

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._group: Group | None = None

    def group(self) -> Group:
        """The group, which this object closes; a new one if it is closed, as by a slice that did not load.

        Raises as `join`, and an InvalidInputError if another model of this process has another place.
        """
        ranks = self._ranks
        if self._group is not None and not self._group.is_closed:
            return self._group
        with self._lock:
            known = self._process or ranks
            if (known.rank, known.size, known.key) != (ranks.rank, ranks.size, ranks.key):
                raise InvalidInputError(
                    f"{ranks.source}: got rank {ranks.rank} of {ranks.size}, expected rank {known.rank} of "
                    f"{known.size} by the {known.source}: a process has one place for all its models"
                )
            key, timeout = ranks.key or ranks.source, _seconds("HCCL_CONNECT_TIMEOUT")
            self._group = join(key, ranks.rank, ranks.size, backend=ranks.backend, timeout=timeout)
            self._group.timeout = _seconds("HCCL_EXEC_TIMEOUT")
            Membership._process = ranks
            return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


def _seconds(variable: str) -> float:
    """A time-out by a variable of HCCL's."""
    text = os.environ.get(variable, "")
    if not text:
        return DEFAULT_TIMEOUT
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) > 0):
        raise InvalidInputError(
            f"environment variable {variable}: got {text!r}, expected a number of seconds"
        )
    return float(text)


def _check_groups(path: str, ranks: Ranks) -> None:
    """Check a file of groups against the ranks that there are; it does not change which of them join."""
    for name, members in read_groups(path).items():
        if not members or len({*members}) < len(members) or max(members) >= ranks.size:
            raise InvalidInputError(
                f"group_info_file {path}: group {name!r}: got the ranks {[*members]}, expected different "
                f"ones of 0 to {ranks.size - 1}, as by the {ranks.source}"
            )


def read_groups(path: str) -> dict[str, tuple[int, ...]]:
    """The ranks of each group in a file that MindSpore writes (`GROUP_INFO_FILE`).

    It is the message ``ParallelGroupMap`` of MindSpore's ``ccsrc/utils/node_strategy.proto``::

        repeated ParallelGroupItem parallel_group_item = 1
            string group_name = 1
            ParallelGroupRanks parallel_group_ranks = 2
                repeated uint32 dim = 1

    Raises:
        InvalidInputError: The file cannot be read, or is not such a message.
    """
    where = f"group_info_file {path}"
    data = read_small(where, path, _MAX_GROUPS_BYTES)
    groups: dict[str, tuple[int, ...]] = {}
    try:
        for item in ProtoMessage(data, 0, len(data)).messages(1):
            name = item.text(1)
            if not name or name in groups:
                raise MalformedError(f"the name {name!r} of a group, missing or not the only one,")
            groups[name] = tuple(rank for part in item.messages(2) for rank in part.all_numbers(1))
    except MalformedError as exc:
        raise InvalidInputError(f"{where}: got {exc}, expected a map of groups to ranks") from None
    if not groups:
        raise InvalidInputError(f"{where}: got no group, expected a map of groups to ranks")
    return groups
