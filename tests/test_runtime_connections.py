"""Tests of mcinfer/runtime/connections.py: a worker that does not take what it is sent."""

import errno
import os
from types import SimpleNamespace
from typing import Any, cast

from mcinfer.config import Limits
from mcinfer.requests.request import NO_WEIGHTS
from mcinfer.runtime.connections import Connections
from mcinfer.runtime.worker_process import Gang
from mcinfer.shm.block import Block


def test_no_run_goes_to_a_worker_that_did_not_take_the_block_of_its_tensors() -> None:
    block = Block.create(5, 8)
    sent: list[bytes] = []
    lost: list[str] = []

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    connections = Connections([], lambda _: block, Limits(), lambda *_: [], "m.onnx")
    connections.transport = cast("Any", SimpleNamespace(send=lambda _, data: sent.append(data)))
    connections.lost = lambda _, why: lost.append(why)
    rank = SimpleNamespace(lifeline=SimpleNamespace(send_block=refuse))
    connections.processes[0] = Gang(0, [cast("Any", rank)])
    request: Any = SimpleNamespace(
        blocks=frozenset([block.number]), weights=NO_WEIGHTS, message=lambda *_, **__: b"PREDICT"
    )
    for _ in range(2):  # in one turn of the loop, which ends the worker in the next one
        connections.send_run(0, [(request, 0)], wide=False)
    assert lost
    assert not sent
    block.close()
