"""A worker of `owned.py`: one process on one core, which runs what it is sent and answers with the same head.

    python owned_worker.py '{"index": 0, "core": 0, "model": "m.onnx", "memory": 5, "size": 4096, "address": "ipc://…"}'

It maps the master's memory once. A *layout* says where the inputs and outputs of one piece lie in it; the
first message with a layout describes it, later ones only name it. It ends at EXIT, or with its parent.
This file imports nothing of its folder: it is started by its path.
"""

import json
import mmap
import os
import signal
import struct
import sys
from typing import Any

import msgpack
import numpy as np
import zmq

HEAD = struct.Struct("<cQHQ")
"""Kind, request, piece, layout."""
RUN, RUN_NEW, ANSWER, READY, EXIT = b"P", b"L", b"A", b"R", b"X"
_LOOKS_MS = 1000
"""How often a worker looks whether its parent is still there."""


class _Dealer:
    """ZeroMQ's side of a worker."""

    def __init__(self, address: str, index: int) -> None:
        self._parent = os.getppid()
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.RCVTIMEO, _LOOKS_MS)
        self._socket.setsockopt(zmq.IDENTITY, identity(index))
        self._socket.connect(address)
        self.send = self._socket.send

    def receive(self) -> bytes:
        """The next message; empty when the parent is gone."""
        while True:
            try:
                return self._socket.recv()
            except zmq.Again:
                if os.getppid() != self._parent:
                    return b""


def identity(index: int) -> bytes:
    """A worker's name for ZeroMQ, where none may begin with a zero."""
    return bytes([index + 1])


def _bind(session: Any, described: bytes, base: int) -> Any:
    """Bind the tensors of a layout, each (name, dtype, shape, offset), to the memory at `base`."""
    layout, binding = msgpack.unpackb(described), session.io_binding()
    for name, dtype, shape, offset in layout["in"]:
        binding.bind_input(name, "cpu", 0, np.dtype(dtype), shape, base + offset)
    for name, dtype, shape, offset in layout["out"]:
        binding.bind_output(name, "cpu", 0, np.dtype(dtype), shape, base + offset)
    return binding


def main(start: dict[str, Any]) -> None:
    """Load the model, then answer until the end."""
    import onnxruntime as ort  # here: the master imports this file, and no runtime with it

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the master ends its workers
    os.sched_setaffinity(0, {start["core"]})
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(start["model"], options, providers=["CPUExecutionProvider"])
    run_options = ort.RunOptions()
    # Where it is not set, ONNX Runtime finds that out by an exception in each run.
    run_options.add_run_config_entry("gpu_graph_id", "-1")
    memory = np.frombuffer(mmap.mmap(start["memory"], start["size"]), np.uint8)
    bindings: dict[int, Any] = {}
    channel = _Dealer(start["address"], start["index"])
    channel.send(HEAD.pack(READY, 0, 0, 0))
    while message := channel.receive():
        kind, request, piece, layout = HEAD.unpack_from(message)
        if kind == EXIT:
            return
        if kind == RUN_NEW:
            bindings[layout] = _bind(session, message[HEAD.size :], memory.ctypes.data)
        session.run_with_iobinding(bindings[layout], run_options)
        channel.send(HEAD.pack(ANSWER, request, piece, layout))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
