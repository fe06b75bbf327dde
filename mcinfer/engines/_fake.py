"""A real engine without a runtime: arithmetic that can be slow, fail or crash on demand.

With it, tests cover everything but the adapters with real processes and no model. Its model is a JSON
file::

    {"inputs": [["x", "float32", ["batch", 4]]],
     "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
     "build": "sleep:0.1",
     "run": "sleep:0.01",
     "when": {"-1": "fail", "-2": "segfault"}}

An output is its input times `scale` plus `add`, in its own type; if `add` names one of the model's
``"weights": [["w", "float32", [4], 1.0]]``, whose values all equal that number, the weight is added.
`build` and `run` are acts of each build and run; `when` adds acts for runs whose first input has a row that
begins with that number (see `_act`).
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines.base import (
    LACKS,
    ArrayEngine,
    BoundRun,
    Buffer,
    EngineRequest,
    Produced,
    RunCancelledError,
    Strings,
    array_of,
)
from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    PredictError,
    refused_by_runtime,
)
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype

DEVICES = ("cpu",)
OPTIONS = LACKS.keys() - {"precision", "streams"}

_MAX_SECONDS = 3600.0


def load(request: EngineRequest) -> "FakeEngine":
    try:
        content = json.loads(Path(request.model).read_text(encoding="utf-8"))
        return FakeEngine(content, request)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BuildError(f"fake: {request.model}: {type(exc).__name__}: {exc}") from exc


class FakeEngine(ArrayEngine):
    name = "fake"

    def __init__(self, content: dict[str, Any], request: EngineRequest) -> None:
        super().__init__()
        self._device_index = request.device.index
        self.concurrent = request.options.concurrent_runs
        self.spec = ModelSpec(
            inputs=tuple(_spec(item) for item in content["inputs"]),
            outputs=tuple(_spec(item[:3]) for item in content["outputs"]),
        )
        self._rules = {item[0]: item[3] for item in content["outputs"]}
        self.providers = ("fake",)
        self._own_weights: dict[str, NDArray[Any]] = {
            name: np.full(shape, value, numpy_dtype(element_type))
            for name, element_type, shape, value in content.get("weights", [])
        }
        specs = {item[0]: _spec(item[:3]) for item in content.get("weights", [])}
        unknown = [name for name in request.options.variable_weights if name not in specs]
        if unknown:
            raise BuildError(f"variable_weights: unknown {unknown}, expected some of {[*specs]}")
        self.weights = tuple(specs[name] for name in request.options.variable_weights)
        self._run_act = content.get("run", "")
        self._when = content.get("when", {})
        self._act(content.get("build", ""), BuildError)

    def twin(self) -> "FakeEngine":
        other = copy(self)
        other._stop = threading.Event()
        return other

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        return _FakeRun(self, inputs, outputs)

    def run(
        self, inputs: Sequence[NDArray[Any]], weights: Mapping[str, NDArray[Any]] = {}
    ) -> list[NDArray[Any]]:
        self._act_on(inputs[0])
        given = {spec.name: array for spec, array in zip(self.spec.inputs, inputs, strict=True)}
        values = []
        for spec in self.spec.outputs:
            rule = self._rules[spec.name]
            value = given[rule["from"]]
            if value.dtype != object:
                scale, add = rule.get("scale", 1), rule.get("add", 0)
                added = weights.get(add, self._own_weights.get(add, add))
                value = (value * scale + added).astype(spec.dtype)
            values.append(value)
        return values

    def _act_on(self, first: NDArray[Any]) -> None:
        """Do the acts of every run, and those of a run with these rows."""
        self._act(self._run_act, PredictError)
        if self._when and first.size and first.dtype != object:
            rows = first.reshape(len(first) if first.ndim else 1, -1)
            for number in dict.fromkeys(rows[:, 0].tolist()):
                self._act(self._when.get(f"{float(number):g}", ""), PredictError)

    def _act(self, act: str, error: type[EngineError]) -> None:
        """Do one act.

        ``fail``, ``invalid``, ``refuse``: raise. ``exit``, ``abort``, ``segfault``, ``kill``, ``stop``: end
        or stop the process. ``quit``: call `sys.exit`. ``sleep:SECONDS`` can be cancelled, ``hang:SECONDS``
        cannot. ``print:TEXT`` writes a line. ``allocate:BYTES`` allocates memory, writes to all of it and
        frees it.
        ``once:PATH:ACT``: create the file and do the act, unless the file exists.
        ``told:PATH``: read acts, one per line, from the named pipe PATH followed by the device's index; the
        run hangs until a test writes them. No pipe, no act.
        """
        name, _, rest = act.partition(":")
        match name:
            case "fail":
                raise error("fake: asked to fail")
            case "invalid":
                raise InvalidInputError("fake: asked for an invalid input")
            case "refuse":
                raise refused_by_runtime("fake: asked to refuse, in /its/file")
            case "exit":
                os._exit(3)
            case "quit":
                sys.exit(3)
            case "abort":
                os.abort()
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                if self._stop.wait(min(float(rest), _MAX_SECONDS)):
                    raise RunCancelledError("fake: the run was cancelled")
            case "hang":
                # Like a native call, which does not see the event that `cancel` sets.
                time.sleep(min(float(rest), _MAX_SECONDS))
            case "print":
                print(rest, flush=True)
            case "allocate":
                np.ones(int(rest), np.uint8)
            case "told":
                pipe = Path(f"{rest}{self._device_index}")
                # `exists` takes no descriptor, which a tested worker may have none of.
                for line in pipe.read_text().splitlines() if pipe.exists() else ():
                    self._act(line, error)
            case "once":
                path, _, inner = rest.partition(":")
                # Of workers that come here at the same time, one makes the file.
                try:
                    Path(path).touch(exist_ok=False)
                except FileExistsError:
                    return
                self._act(inner, error)


class _FakeRun(BoundRun):
    def __init__(
        self, engine: FakeEngine, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]
    ) -> None:
        self._engine = engine
        count = len(engine.spec.inputs)
        self._inputs = [*map(array_of, inputs[:count])]
        self._weights = {item.name: array_of(item) for item in inputs[count:]}
        self._outputs = {item.name: item for item in outputs}

    def execute(self) -> Sequence[Produced | Strings]:
        arrays = self._engine.run(self._inputs, self._weights)
        return self._engine.deliver(arrays, self._outputs)


def _spec(item: Sequence[Any]) -> TensorSpec:
    name, element_type, shape = item
    return TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))
