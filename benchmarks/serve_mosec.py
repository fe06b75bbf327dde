"""mosec, a server with its front in Rust, which `benchmarks/serve.py` sets beside `mcinfer serve`.

    python benchmarks/serve_mosec.py MODEL PORT ROWS

It has as many processes as there are cores, each with a session of ONNX Runtime with one thread, and joins
requests of one row to so many, for which the first of them waits up to a millisecond.
"""

import os
import sys
from typing import Any

import numpy as np
from mosec import Server, Worker
from numpy.typing import NDArray
from serve_threads import CORES, session_of_one_thread


class Served(Worker):  # type: ignore[misc] # nothing is known of its types
    """The model: requests and answers are the values of float32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._session = session_of_one_thread(os.environ["SERVED_MODEL"])
        (self._input,) = self._session.get_inputs()

    def deserialize(self, data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, np.float32).reshape(1, *self._input.shape[1:])

    def serialize(self, data: NDArray[Any]) -> bytes:
        return data.tobytes()

    def forward(self, data: Any) -> Any:
        joined = isinstance(data, list)  # there may be several
        rows = np.concatenate(data) if joined else data
        output = self._session.run(None, {self._input.name: rows})[0]
        return np.split(output, len(output)) if joined else output


if __name__ == "__main__":
    os.environ["SERVED_MODEL"], port, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.argv[1:] = ["--port", port, "--address", "127.0.0.1"]  # mosec reads them
    server = Server()
    server.append_worker(Served, num=CORES, max_batch_size=rows, max_wait_time=int(rows > 1))
    server.run()
