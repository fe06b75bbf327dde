"""KServe's Python server, which `benchmarks/serve.py` sets beside `mcinfer serve`.

    python benchmarks/serve_kserve.py MODEL PORT

It has as many processes as there are cores, each with a session of ONNX Runtime with one thread.
"""

import os
import sys
from typing import Any

import kserve
import onnxruntime as ort


class Served(kserve.Model):  # type: ignore[misc] # nothing is known of its types
    """The model at a path, opened in each process that answers."""

    def __init__(self, path: str) -> None:
        super().__init__("model")
        self._path = path
        self._session: Any = None
        self.ready = True

    def load(self) -> bool:
        return True

    async def predict(self, payload: Any, *_: object, **__: object) -> Any:
        if self._session is None:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            self._session = ort.InferenceSession(
                self._path, options, providers=["CPUExecutionProvider"]
            )
        arrays = self._session.run(None, {t.name: t.as_numpy() for t in payload.inputs})
        outputs = []
        for about, array in zip(self._session.get_outputs(), arrays, strict=True):
            output = kserve.InferOutput(name=about.name, shape=[*array.shape], datatype="FP32")
            output.set_data_from_numpy(array, binary_data=True)
            outputs.append(output)
        return kserve.InferResponse(
            response_id=payload.id or "",
            model_name="model",
            infer_outputs=outputs,
            use_binary_outputs=True,
        )


if __name__ == "__main__":
    model, port = sys.argv[1:]
    count = len(os.sched_getaffinity(0))
    kserve.ModelServer(http_port=int(port), workers=count, enable_grpc=False).start([Served(model)])
