"""mcinfer's server over one session of ONNX Runtime in the place of a master, for `benchmarks/serve.py`.

    python benchmarks/serve_threads.py MODEL PORT

The session has one thread for a run, and as many runs at once as there are cores.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import uvloop
from numpy.typing import NDArray

CORES = len(os.sched_getaffinity(0))


def session_of_one_thread(model: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main(model: str, port: int) -> None:
    from mcinfer.cli.endpoint import Endpoint, run
    from mcinfer.serve.configuration import Configuration
    from mcinfer.serve.models import Instance, Models
    from mcinfer.serve.service import ServeOptions
    from mcinfer.specs import TensorSpec
    from mcinfer.statistics import Health

    class Session:
        """What the server asks of a master while requests run."""

        def __init__(self) -> None:
            self._session = session_of_one_thread(model)
            self._threads = ThreadPoolExecutor(CORES)
            self.inputs, self.outputs = (
                tuple(
                    TensorSpec(name=t.name, dtype=np.dtype(np.float32), shape=tuple(t.shape))
                    for t in tensors
                )
                for tensors in (self._session.get_inputs(), self._session.get_outputs())
            )

        async def predict_async(
            self, inputs: Mapping[str, NDArray[Any]], *, outputs: list[str], **_: object
        ) -> dict[str, NDArray[Any]]:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self._session.run, outputs, inputs)
            return dict(zip(outputs, answer, strict=True))

        def allocate(self, shapes: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
            return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}

        def health(self) -> Health:
            return Health(state="ready", reasons=(), serving=1, workers=1)

        def close(self, **_: object) -> None:
            self._threads.shutdown()

    class Sessions(Models):
        async def _open(self, name: str, place: Path, *_: object) -> dict[str, Instance]:
            master: Any = Session()
            instance = Instance(master, "1", 1, Configuration(place, name))
            instance.config = {"platform": "onnxruntime_onnx"}
            return {"1": instance}

    models = Sessions({"model": Path(model)}, None, lambda _: {})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(models, ServeOptions(), Endpoint(port=port), print))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
