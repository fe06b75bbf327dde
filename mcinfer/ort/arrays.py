"""Arrays that ONNX Runtime (1.32) misreads, and the copies of them that it reads as they are.

The runtime takes the bytes of an array in another byte order as if they were in the machine's. It reads an
element of NumPy's type S until a zero, and a text that fills its element has none. Sessions give it copies of
such arrays. Importing mcinfer.ort replaces the methods of ``IOBinding``, ``OrtValue`` and ``SparseTensor``
that take arrays by methods that do the same. The copy is made when the array is given, as the runtime's own
copy of an array that is not contiguous is.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from onnxruntime.capi.onnxruntime_inference_collection import IOBinding, OrtValue, SparseTensor


def readable(value: Any) -> Any:
    """A value as the runtime reads it right: itself, or a copy. A list of arrays begins with an array."""
    if isinstance(value, np.ndarray):
        if not value.dtype.isnative:
            return value.astype(value.dtype.newbyteorder("="))
        if value.dtype.char == "S":
            return value.astype(f"S{value.dtype.itemsize + 1}")
    elif type(value) is list and value and isinstance(value[0], np.ndarray):
        return [readable(item) for item in value]
    return value


def readable_feed(feed: Mapping[str, Any]) -> Mapping[str, Any]:
    __tracebackhide__ = True  # for what is no mapping
    for value in feed.values():  # which are right in nearly all runs
        if type(value) is not np.ndarray or not value.dtype.isnative or value.dtype.char == "S":
            return {name: readable(value) for name, value in feed.items()}
    return feed


_TAKING_ARRAYS = {
    IOBinding: ("bind_cpu_input",),
    OrtValue: ("ortvalue_from_numpy", "ortvalue_from_numpy_with_onnx_type", "update_inplace"),
    SparseTensor: ("sparse_coo_from_numpy", "sparse_csr_from_numpy"),
}
"""The methods of ONNX Runtime's classes that take arrays, beside those of sessions."""


def copy_misread_arrays() -> None:
    """Have those methods take arrays by `readable`."""
    for kind, names in _TAKING_ARRAYS.items():
        for name in names:
            method: Any = vars(kind)[name]
            if isinstance(method, classmethod):
                setattr(kind, name, classmethod(_reading(method.__func__)))
            else:
                setattr(kind, name, _reading(method))


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def reading(*arguments: Any, **named: Any) -> Any:
        return method(*map(readable, arguments), **readable_feed(named))

    return reading
