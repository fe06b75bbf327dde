"""What a target of the fuzzer is, and the model that targets serve."""

import random
from abc import ABC, abstractmethod

from mcinfer.config import EngineOptions
from mcinfer.protocol import VERSION, Build, Hello
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
"""Outputs of another model: all have a place before the run."""

INPUTS = (("x", "float32", ("batch", 4)),)
SPEC, KNOWN_SPEC = (
    ModelSpec(
        inputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in INPUTS),
        outputs=tuple(TensorSpec(name=n, dtype=numpy_dtype(t), shape=s) for n, t, s in outputs),
    )
    for outputs in (OUTPUTS, KNOWN_OUTPUTS)
)


def build(model: str, variable_weights: tuple[str, ...] = ()) -> Build:
    return Build(
        model=model,
        engine="fake",
        device="cpu:0",
        cores=(),
        shared=False,
        options=EngineOptions(threads=1, prepare="never", variable_weights=variable_weights),
    )


def hello(process: WorkerProcess) -> Hello:
    return Hello(version=VERSION, pid=process.pid, token=process.hello_token)


class Violation(Exception):  # noqa: N818 what it is called
    """A promise was broken."""


class Target(ABC):
    """Takes messages. Any error but those that handling may raise is a finding."""

    @abstractmethod
    def prepare(self, rng: random.Random) -> list[bytes]:
        """Come to some state; messages that are right in it."""

    @abstractmethod
    def take(self, data: bytes) -> str:
        """Take a message; in a word, what came of it.

        Raises:
            Violation: A promise was broken.
        """

    @abstractmethod
    def close(self) -> None: ...
