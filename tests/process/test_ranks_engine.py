"""Ranks that are processes run slices of a model, and get an error when one dies."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from tests.process.scripts import Program
from tests.sliced_models import Sliced, pipeline

RANK = """
import sys
import numpy as np
from mcinfer.ranks.collectives import join
from mcinfer.config import Device, EngineOptions
from mcinfer.ranks import open_slice
from mcinfer.engines.base import Buffer, EngineRequest

key, model, rank, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def say(*values):
    print(*values, flush=True)

def tensor(name, array):
    address, size = array.ctypes.data, array.nbytes
    return Buffer(name=name, element_type="float32", shape=array.shape, address=address, size=size)

group = join(key, rank, size, timeout=50)
request = EngineRequest(model=model, device=Device.parse("cpu:0"), options=EngineOptions(threads=1))
engine = open_slice("onnxruntime", request, group)
outputs = {spec.name: np.empty((4, 16), np.float32) for spec in engine.spec.outputs}
x = np.empty((4, 16), np.float32)
run = engine.bind([tensor("x", x)], [tensor(*item) for item in outputs.items()])

def execute(number):
    x[...] = np.random.default_rng(number).normal(size=x.shape)
    run.execute()

def attempt(number):
    try:
        execute(number)
    except Exception as exc:
        say(f"{type(exc).__name__}: {exc}")
    else:
        say("no error")

for number in range(5):
    execute(number)
say("ran")
"""


def start(stack: ExitStack, model: Sliced, text: str) -> list[Program]:
    """A program for each rank, once all have run the model a few times."""
    size = len(model.slices)
    programs = [
        stack.enter_context(Program(RANK + text, f"{os.getpid()} {path.parent}", path, rank, size))
        for rank, path in enumerate(model.slices)
    ]
    for program in programs:
        assert program.line() == "ran"
    return programs


WAITING = """
import signal
if rank == 1:
    signal.pause()
attempt(1)
attempt(2)
"""


def test_killed_rank_is_an_error_in_all_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, killed, last = start(stack, pipeline(tmp_path, 3), WAITING)
        killed.send_signal(signal.SIGKILL)
        cause = f"rank 1 (pid {killed.pid}) was killed"
        for program in (first, last):
            assert program.line().startswith(f"RankDiedError: {cause}")
            assert program.line().startswith(f"ClosedError: the group is closed: {cause}")
            assert program.wait().status == 0
