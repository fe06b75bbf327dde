"""Ranks: processes that each hold a slice of a model, and join to run it together.

::

    Ascend: context.ascend.rank_id, [ascend_context] rank_table_file ──┐
    GPU:    the launcher (mpirun, …) ──────────────────────────────────┴─► place_of ──► join_ranks ──► Group

A group belongs to one model. The models of a process have the same place, as in MindSpore Lite, and every
rank builds its models in the same order: the groups of a job have one key, one after another.
"""

import os
from typing import ClassVar

from mcinfer.errors import InvalidInputError
from mcinfer.locks import Turn
from mcinfer.model_cache.onnx_files import scan
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._configuration import RANK_TABLE, entries_of
from mcinfer.mslite.context import Context
from mcinfer.ranks.collectives import join
from mcinfer.ranks.collectives.base import DEFAULT_TIMEOUT, Group
from mcinfer.ranks.collectives.launch import Ranks, find_ranks, from_launcher
from mcinfer.ranks.slicing.plans import METADATA_KEY

_COLLECTIVES = frozenset({"AllReduce", "AllGather"})


def place_of(context: Context, sections: Sections) -> Ranks | None:
    """The place of this process among ranks that run a model together; None if it runs it alone.

    On the target `gpu` the launcher says it, on others the rank table of the configuration. What they say
    wrongly is an InvalidInputError.
    """
    if context.device_infos[0] == "gpu":
        launched = from_launcher()
        return None if launched is None or launched.size == 1 else find_ranks()
    table = entries_of(sections).get(RANK_TABLE)
    return find_ranks(rank=context.ascend.rank_id, rank_table=table) if table else None


def is_slice(path: str) -> bool:
    """Whether an ONNX file is a rank's slice of a model: it says so, or has a collective node."""
    found = scan(path)
    return METADATA_KEY in found.metadata or any(
        name == "DistCollective" or (domain == "com.microsoft" and name in _COLLECTIVES)
        for domain, name in found.operators
    )


class Membership:
    """The part of this process in the group of one model: joined when it is needed."""

    _lock: ClassVar[Turn] = Turn()
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
