"""Other systems, as ways to measure mcinfer beside.

    mcinfer bench MODEL --against session,benchmarks/peers.py:RayActors,benchmarks/peers.py:LokyPool

Each is used as its own documentation would have it for requests that run whole, side by side. What they need
is not among mcinfer's extras: ``pip install ray loky openvino``.
"""

import importlib
import logging
import os
import queue
import sys
import tempfile
import threading
from concurrent.futures import Future
from time import monotonic
from typing import Any

import peer_sessions
from peer_sessions import Answer

from mcinfer.bench.way import Arrays, RunningWay, Setup
from mcinfer.config import Device
from mcinfer.errors import EngineError, InvalidInputError, MissingDependencyError

_START_SECONDS = 300.0
_RUN_SECONDS = 600.0
"""After which something hangs."""
_INTERVAL = 0.05
"""Seconds between two looks at whether processes that start have failed."""


def _package(name: str) -> Any:
    """A package that ships no types, or need not be installed.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            f"this way needs the package {name} ({exc}): pip install {name}"
        ) from exc


def _check_devices(setup: Setup) -> None:
    if any(Device.parse(device).kind != "cpu" for device in setup.devices):
        raise InvalidInputError(f"devices: got {list(setup.devices)}, expected cpu alone")


class _Timed(RunningWay):
    """Adds up what the runs take."""

    def __init__(self, setup: Setup) -> None:
        """Nothing was run yet."""
        self.workers = len(setup.devices)
        self._lock = threading.Lock()
        self._runs = 0
        self._seconds = 0.0

    def _note(self, seconds: float) -> None:
        with self._lock:
            self._runs += 1
            self._seconds += seconds

    def run_seconds(self) -> tuple[int, float]:
        """As the workers tell."""
        with self._lock:
            return self._runs, self._seconds


def _arguments(setup: Setup, device: str) -> tuple[Any, ...]:
    """Those of `LoadedModel`."""
    return setup.model, setup.worker_threads, device, setup.outputs


class RayActors(_Timed):
    """Ray (https://docs.ray.io): an actor per worker, each request whole on one that is free.

    Arrays go as the arguments of the call: from 100 KiB on Ray then puts them into its object store, where
    the actor reads them in place, and sends smaller ones along with the call, which is faster than `ray.put`.
    Answers come likewise.
    """

    text = "Ray: an actor per worker, arrays through its object store"

    def __init__(self, setup: Setup) -> None:
        """Start Ray on this machine, and the actors.

        Raises:
            MissingDependencyError: Ray is not installed.
        """
        super().__init__(setup)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send them
        self._ray = _package("ray")
        # Its processes do not have this file's folder on their path.
        self._ray.cloudpickle.register_pickle_by_value(peer_sessions)
        # Ray puts sockets there: a long path would be too long for them.
        self._folder = tempfile.TemporaryDirectory(
            prefix="mcinfer-ray-", ignore_cleanup_errors=True
        )
        try:
            self._ray.init(
                address="local",
                num_cpus=self.workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._folder.name,
            )
            kind = self._ray.remote(num_cpus=1)(peer_sessions.LoadedModel)
            actors = [kind.remote(*_arguments(setup, device)) for device in setup.devices]
            self._ray.get([a.__ray_ready__.remote() for a in actors], timeout=_START_SECONDS)
        except BaseException:
            self.close()
            raise
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for actor in actors:
            self._free.put(actor)

    def run(self, inputs: Arrays) -> Answer:
        """On an actor that is free; the answer lies in Ray's object store if it is large."""
        actor = self._free.get(timeout=_RUN_SECONDS)
        try:
            answer, seconds = self._ray.get(actor.run.remote(dict(inputs)), timeout=_RUN_SECONDS)
        finally:
            self._free.put(actor)
        self._note(seconds)
        outputs: Answer = answer
        return outputs

    def close(self) -> None:
        """End Ray and all its processes."""
        self._ray.shutdown(wait_for_processes=True)
        self._folder.cleanup()


class LokyPool(_Timed):
    """loky (https://loky.readthedocs.io): a pool of processes, arrays pickled through its queues."""

    text = "loky: ProcessPoolExecutor, a session per process"

    def __init__(self, setup: Setup) -> None:
        """Start the processes.

        Raises:
            InvalidInputError: A device is not a CPU.
            MissingDependencyError: loky is not installed.
            EngineError: The processes were not ready in time.
        """
        super().__init__(setup)
        loky = _package("loky")
        _check_devices(setup)  # its processes are all alike
        self._arguments = _arguments(setup, setup.devices[0])
        ready = loky.backend.get_context("loky").Semaphore(0)
        self._pool = loky.ProcessPoolExecutor(
            self.workers,
            initializer=peer_sessions.load,
            initargs=(os.getpid(), self._arguments, ready),
        )
        try:
            self._wait_ready(ready)
        except BaseException:
            self.close()
            raise

    def _wait_ready(self, ready: Any) -> None:
        """Return when all processes have loaded the model."""
        self._pool.submit(os.getpid)  # it starts them with the first task
        deadline = monotonic() + _START_SECONDS
        for _ in range(self.workers):
            while not ready.acquire(timeout=_INTERVAL):
                self._pool.submit(os.getpid)  # raises if a process has failed
                if monotonic() > deadline:
                    raise EngineError(f"loky's processes were not ready in {_START_SECONDS:g} s")

    def run(self, inputs: Arrays) -> Answer:
        """On a process that is free."""
        future = self._pool.submit(peer_sessions.run, self._arguments, dict(inputs))
        answer, seconds = future.result(timeout=_RUN_SECONDS)
        self._note(seconds)
        outputs: Answer = answer
        return outputs

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, kill_workers=True)


class OpenVinoAsync(_Timed):
    """OpenVINO (https://docs.openvino.ai): one process, a stream per worker, its queue of requests.

    In float32, which on processors with bfloat16 is not its default, so that it does the same work.
    """

    text = "OpenVINO: AsyncInferQueue, a stream per worker"

    def __init__(self, setup: Setup) -> None:
        """Compile the model.

        Raises:
            InvalidInputError: A device is not a CPU.
            MissingDependencyError: OpenVINO is not installed.
        """
        super().__init__(setup)
        _check_devices(setup)
        # Importing it would send that it was; without this package it does not.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        openvino = _package("openvino")
        core = openvino.Core()
        compiled = core.compile_model(
            core.read_model(setup.model),
            "CPU",
            {
                "PERFORMANCE_HINT": "THROUGHPUT",
                "INFERENCE_PRECISION_HINT": "f32",
                "INFERENCE_NUM_THREADS": self.workers * setup.worker_threads,
                "NUM_STREAMS": self.workers,
            },
        )
        self._outputs = setup.outputs
        self._queue = openvino.AsyncInferQueue(compiled, self.workers)
        self._queue.set_callback(self._answered)
        # Which request is free, and that it is taken, are two steps of the queue's.
        self._starting = threading.Lock()

    def run(self, inputs: Arrays) -> Answer:
        """On the next request of the queue that is free."""
        future: Future[Answer] = Future()
        with self._starting:
            # Shared: the arrays are borrowed until this returns.
            self._queue.start_async(dict(inputs), future, share_inputs=True)
        return future.result(timeout=_RUN_SECONDS)

    def _answered(self, request: Any, future: "Future[Answer]") -> None:
        """Called by OpenVINO's thread; the request is another client's when this returns."""
        try:
            answer = {name: request.get_tensor(name).data.copy() for name in self._outputs}
        except Exception as exc:  # the client is to hear of it, whatever it is
            future.set_exception(exc)
            return
        self._note(request.latency / 1000)
        future.set_result(answer)

    def close(self) -> None:
        """Wait for what is going on; the rest ends with the process."""
        self._queue.wait_all()
