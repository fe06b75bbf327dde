"""A session of ONNX Runtime behind granian: the least that answers over HTTP, for `benchmarks/serve.py`.

    python benchmarks/serve_granian.py MODEL PORT

It has as many processes as there are cores, each with a session of one thread, which runs in the event loop.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from granian import Granian
from granian.constants import Interfaces, Loops
from serve_threads import CORES, session_of_one_thread


class Served:
    """An application of ASGI: requests and answers are the values of float32 tensors."""

    def __init__(self, model: str) -> None:
        self._session = session_of_one_thread(model)
        (self._input,) = self._session.get_inputs()

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        row = np.frombuffer(body, np.float32).reshape(1, *self._input.shape[1:])
        answer = self._session.run(None, {self._input.name: row})[0].tobytes()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


def load() -> Served:
    """The application of one process, which has the model's path in its environment."""
    return Served(os.environ["SERVED_MODEL"])


if __name__ == "__main__":
    os.environ["SERVED_MODEL"] = sys.argv[1]
    Granian(
        f"{Path(__file__).stem}:load",
        port=int(sys.argv[2]),
        interface=Interfaces.ASGINL,
        loop=Loops.uvloop,
        workers=CORES,
        websockets=False,
        factory=True,
        working_dir=Path(__file__).resolve().parent,
    ).serve()
