"""Baselines: ONNX Runtime by itself, in one process, as one would use it without mcinfer."""

import threading
from typing import Any, ClassVar

import onnxruntime as ort

from mcinfer.bench.pieces import cut, join
from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.config import Device
from mcinfer.errors import InvalidInputError

Providers = list[str | tuple[str, dict[str, int]]]
"""As ``onnxruntime.InferenceSession`` takes them."""

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "rocm": "ROCMExecutionProvider"}


def providers_of(device: str) -> Providers:
    """What runs a model on a device such as ``"cpu:0"`` or ``"cuda:1"``.

    Raises:
        InvalidInputError: The baselines know no provider for it.
    """
    parsed = Device.parse(device)
    if parsed.kind == "cpu":
        return ["CPUExecutionProvider"]
    if parsed.kind not in _PROVIDERS:
        raise InvalidInputError(
            f"devices: got {device!r}, expected for the baselines one of "
            f"{['cpu', *_PROVIDERS]} (--against none measures without them)"
        )
    return [(_PROVIDERS[parsed.kind], {"device_id": parsed.index}), "CPUExecutionProvider"]


def open_session(model: str, threads: int, providers: Providers) -> ort.InferenceSession:
    """A session whose runs have so many threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options, providers=providers)


class _SessionWay(RunningWay):
    """One session in this process."""

    all_cores: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        """Load the model."""
        threads = setup.cores if self.all_cores else 1
        self._session = open_session(setup.model, threads, providers_of(setup.devices[0]))
        self._outputs = list(setup.outputs)
        self._setup = setup

    def run(self, inputs: Arrays) -> object:
        """One run, or as many as a fixed batch takes."""
        if self._setup.fixed_batch is None:
            outputs: list[Any] = self._session.run(self._outputs, inputs)
            return outputs
        pieces = cut(inputs, self._setup, 1)
        return join([self._session.run(self._outputs, piece) for piece in pieces], self._setup)

    def close(self) -> None:
        """The session ends with its process."""


class Session(_SessionWay):
    """All cores for each run, one run at a time."""

    text = "one ONNX Runtime session with all cores, one request at a time"

    def __init__(self, setup: Setup) -> None:
        """Load the model."""
        super().__init__(setup)
        self._turn = threading.Lock()

    def run(self, inputs: Arrays) -> object:
        """One run, when the ones before have ended."""
        with self._turn:
            return super().run(inputs)


class Threads(_SessionWay):
    """All cores for each run, and runs side by side."""

    text = "one session with all cores, called from all clients' threads"


class SingleThreads(_SessionWay):
    """One core for each run, and runs side by side."""

    text = "one session with one thread a run, called from all clients' threads"
    all_cores = False
