"""Models that do harm, or are no models at all: written to a folder, for tests."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, numpy_helper

from tests.text_models import text_model

SECRET = 7.5
"""The content of a file outside the model's folder, which would show in an answer."""

_FLOAT = TensorProto.FLOAT
_DATA = "w.bin"


@dataclass(frozen=True)
class Hostile:
    """A hostile model.

    Attributes:
        name: For the name of the test.
        write: Writes the model to an empty folder, beside which lies a file `secret`; returns its path.
        error: A regular expression that the error matches.
    """

    name: str
    write: Callable[[Path], Path]
    error: str


def tensor(
    *, dims: Sequence[int] = (4,), data: bytes = bytes(16), data_type: int = _FLOAT
) -> TensorProto:
    """The weight "w" with this data, which may not fit."""
    return TensorProto(name="w", data_type=data_type, dims=dims, raw_data=data)


def outside(location: str, dims: Sequence[int] = (4,), **entries: object) -> TensorProto:
    """The weight "w" with its data in another file."""
    made = TensorProto(name="w", data_type=_FLOAT, dims=dims)
    made.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def model(body: str, *weights: TensorProto) -> bytes:
    """A model of float[batch, 4] x that gives float[batch, 4] y, by nodes as text."""
    made = text_model(f"(float[batch,4] x) => (float[batch,4] y) {{ {body} }}")
    made.graph.initializer.extend(weights)
    return bytes(made.SerializeToString())


def adding(weight: TensorProto) -> bytes:
    """y = x + w."""
    return model("y = Add(x, w)", weight)


def _file(content: bytes | Callable[[], bytes]) -> Callable[[Path], Path]:
    """Content that is large is given by a function, which is called when the file is written."""

    def write(folder: Path) -> Path:
        path = folder / "model.onnx"
        path.write_bytes(content if isinstance(content, bytes) else content())
        return path

    return write


def _beside(
    weight: TensorProto, data: bytes | Callable[[Path], object] = bytes(16)
) -> Callable[[Path], Path]:
    """A model with one file of weights: with this data, or made by this function."""

    def write(folder: Path) -> Path:
        if isinstance(data, bytes):
            (folder / _DATA).write_bytes(data)
        else:
            data(folder / _DATA)
        return _file(adding(weight))(folder)

    return write


def _made(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Something else in place of the model."""

    def write(folder: Path) -> Path:
        make(folder / "model.onnx")
        return folder / "model.onnx"

    return write


def _linked_folder(folder: Path) -> Path:
    (folder / "sub").symlink_to(folder.parent)
    return _file(adding(outside("sub/secret")))(folder)


def _absolute(folder: Path) -> Path:
    return _file(adding(outside(str(folder.parent / "secret"))))(folder)


def _device_beside(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _secret_beside(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


_ELSEWHERE = r"Absolute path|escapes model dir|stays within"
_NO_FILE = r"got a (pipe|folder|device)|regular file|cannot get file size"
_BOUNDS = (
    r"out of bounds|external data with (offset|length)|size mismatch|Failed to parse|can ?not be read|"
    r"does not match"
)

OUTSIDE = [
    Hostile("an absolute path", _absolute, _ELSEWHERE),
    Hostile("a path with dots", _file(adding(outside("../secret"))), _ELSEWHERE),
    Hostile("a link", _beside(outside(_DATA), _secret_beside), _ELSEWHERE),
    Hostile("a folder that is a link", _linked_folder, _ELSEWHERE),
]
"""External data that leads out of the model's folder."""

UNREADABLE = [
    Hostile("a pipe", _beside(outside(_DATA), os.mkfifo), _NO_FILE),
    Hostile("a folder", _beside(outside(_DATA), Path.mkdir), _NO_FILE),
    Hostile("a zero in its path", _file(adding(outside("w\0.bin"))), "does not exist|null"),
    Hostile(
        "the runtime's mark of memory",
        _file(adding(outside("*/_ORT_MEM_ADDR_/*"))),
        "in-memory address marker|No such file",
    ),
    Hostile("too little", _beside(outside(_DATA), bytes(3)), _BOUNDS),
    Hostile("a negative offset", _beside(outside(_DATA, offset=-1, length=16)), _BOUNDS),
    Hostile("a negative length", _beside(outside(_DATA, offset=0, length=-16)), _BOUNDS),
]
"""External data that is not there, is none, or does not fit."""


def _summing(weight: TensorProto) -> bytes:
    """y = x + the sum of a weight of any shape, so that only its data can be wrong."""
    return model("sum = ReduceSum<keepdims=0>(w)  y = Add(x, sum)", weight)


def _named(operator: str, output: str = "y", domain: str = "") -> bytes:
    """A model of one node with these names."""
    made = text_model("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }")
    if domain:
        made.opset_import.add(domain=domain, version=1)
    [node] = made.graph.node
    node.op_type, node.domain = operator, domain
    node.output[0] = made.graph.output[0].name = output
    return bytes(made.SerializeToString())


MALFORMED = [
    Hostile("data too short", _file(_summing(tensor(dims=[8]))), "size mismatch|does not match"),
    Hostile(
        "sizes that overflow",
        _file(_summing(tensor(dims=[1 << 32, 1 << 32, 4], data=b""))),
        "[Oo]verflow",
    ),
    Hostile("an empty file", _file(b""), "No graph|empty"),
    Hostile("an operator of a library", _file(_named("Evil", domain="evil.so")), "evil"),
    Hostile("a giant operator", _file(lambda: _named("Frob" * (5 << 20))), "characters left out"),
    Hostile(
        "a giant name", _file(lambda: _named("Relu", "y" * (20 << 20))), "characters in the names"
    ),
    Hostile("a pipe", _made(os.mkfifo), "got a pipe, expected a regular file"),
    Hostile("a device", _made(_device_beside), "got a device, expected a regular file"),
]
"""Models whose own file is wrong."""


def bomb() -> bytes:
    """y = x + a sum of 2**32 ones, by doubling one of them 32 times; constants are computed on loading."""
    body = " ".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(32))
    one = numpy_helper.from_array(np.ones(1, np.float32), "c0")
    return model(f"{body} sum = ReduceSum(c32) y = Add(x, sum)", one)


def run_bomb() -> bytes:
    """y = x + a sum of as many zeros as the largest x says."""
    one = numpy_helper.from_array(np.array([1]), "one")
    return model(
        """most = ReduceMax<keepdims=0>(x)  count = Cast<to=7>(most)  shape = Reshape(count, one)
        zeros = ConstantOfShape(shape)  sum = ReduceSum<keepdims=0>(zeros)  y = Add(x, sum)""",
        one,
    )


def growing(megabytes: int) -> bytes:
    """A model of a few bytes whose optimised form has so many megabytes."""
    shape = numpy_helper.from_array(np.array([4, megabytes << 16]), "shape")
    one = numpy_helper.from_array(np.array(1, np.float32), "one")
    return model(
        """zeros = ConstantOfShape(shape)  ones = Add(zeros, one)  wide = MatMul(x, ones)
        most = ReduceMax<axes=[1]>(wide)  y = Add(x, most)""",
        shape,
        one,
    )
