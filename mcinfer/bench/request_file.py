"""One request's arrays in a file, on their way to the processes that run it.

MessagePack, since .npy files hold neither bfloat16 nor strings of any length without pickling.
"""

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from mcinfer.bench.way import Arrays
from mcinfer.specs import STRING, element_type_name, numpy_dtype


def write_request(path: Path, arrays: Arrays) -> None:
    """Write the arrays, by name."""
    with path.open("wb") as file:
        for name, array in arrays.items():
            kind = element_type_name(array.dtype)
            data = array.ravel().tolist() if kind == STRING else array.tobytes()
            file.write(msgpack.packb([name, kind, array.shape, data]))


def read_request(path: Path) -> dict[str, NDArray[Any]]:
    """Read what `write_request` wrote; the arrays are the caller's."""
    arrays = {}
    with path.open("rb") as file:
        limit = max(1, path.stat().st_size)
        for name, kind, shape, data in msgpack.Unpacker(file, max_buffer_size=limit):
            dtype = numpy_dtype(kind)
            flat = np.array(data, dtype) if kind == STRING else np.frombuffer(data, dtype).copy()
            arrays[name] = flat.reshape(shape)
    return arrays
