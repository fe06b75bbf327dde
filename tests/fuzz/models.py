"""The model that the targets serve, and what its worker says first."""

from mcinfer.protocol import VERSION, Hello
from mcinfer.runtime.worker_process import WorkerProcess
from mcinfer.specs import STRING, ModelSpec, TensorSpec, numpy_dtype

BLOCK_BYTES = 1 << 14
ROWS = 4
OUTPUTS = (
    ("y", "float32", ("batch", 4)),
    ("u", "float32", ("found", 4)),
    ("q", "int4", ("found",)),
    ("s", STRING, ("found",)),
)
KNOWN_OUTPUTS = OUTPUTS[:1]
"""Of another model: all of its outputs have a place before the run."""

INPUTS = (("x", "float32", ("batch", 4)),)
SPEC, KNOWN_SPEC = (
    ModelSpec(
        inputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in INPUTS),
        outputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in outputs),
    )
    for outputs in (OUTPUTS, KNOWN_OUTPUTS)
)


def hello(process: WorkerProcess) -> Hello:
    """What this process is to say."""
    return Hello(version=VERSION, pid=process.pid, token=process.hello_token)
