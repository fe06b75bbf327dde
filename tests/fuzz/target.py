"""What the fuzzer's targets have in common: the model that they serve."""

from mcinfer.config import EngineOptions
from mcinfer.protocol import VERSION, Build, Hello
from mcinfer.runtime.worker_process import WorkerProcess
from mcinfer.specs import STRING
from tests.planned_requests import model

BLOCK_BYTES = 1 << 14
ROWS = 4
OUTPUTS = (
    ("y", "float32", ("batch", 4)),
    ("u", "float32", ("found", 4)),
    ("q", "int8", ("found",)),
    ("s", STRING, ("found",)),
)
KNOWN_OUTPUTS = OUTPUTS[:1]
"""Outputs of another model: all have a place before the run."""

INPUTS = (("x", "float32", ("batch", 4)),)
SPEC, KNOWN_SPEC = (
    model(*({name: (kind, shape) for name, kind, shape in specs} for specs in (INPUTS, outputs)))
    for outputs in (OUTPUTS, KNOWN_OUTPUTS)
)


def build(path: str, variable_weights: tuple[str, ...] = ()) -> Build:
    return Build(
        model=path,
        engine="fake",
        device="cpu:0",
        cores=(),
        shared=False,
        options=EngineOptions(threads=1, prepare="never", variable_weights=variable_weights),
    )


def hello(process: WorkerProcess) -> Hello:
    return Hello(version=VERSION, pid=process.pid, token=process.token)


class Violation(Exception):  # noqa: N818 what it is called
    """A promise was broken."""
