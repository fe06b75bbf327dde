"""Triton's clients over HTTP and over gRPC, asked alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.serve.models import Arrays
from tests.serve.servers import Server

Protocol = Literal["http", "grpc"]

PROTOCOLS: Sequence[Protocol] = ("http", "grpc")

GRPC_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""What stands for a status of HTTP."""


class Client:
    """A client of `tritonclient`.

    Attributes:
        own: Itself, for what is done alike over both protocols.
    """

    def __init__(self, protocol: Protocol, server: Server, **options: Any) -> None:
        self.protocol = protocol
        self._module = tritonclient.http if protocol == "http" else tritonclient.grpc
        address = server.url if protocol == "http" else server.grpc
        self.own: Any = self._module.InferenceServerClient(address, **options)

    def inputs(self, arrays: Arrays, **how: Any) -> list[Any]:
        """The arrays as inputs of a request, by name."""
        return inputs(self._module, arrays, **how)

    def output(self, name: str, **how: Any) -> Any:
        return self._module.InferRequestedOutput(name, **how)

    def infer(self, model: str, arrays: Arrays, **options: Any) -> dict[str, NDArray[Any]]:
        """The outputs of a model."""
        return arrays_of(self.own.infer(model, self.inputs(arrays), **options))

    def shown(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What the server says of something, as from JSON."""
        form = {} if self.protocol == "http" else {"as_json": True}
        return getattr(self.own, method)(*arguments, **form, **options)

    @contextmanager
    def refused(self, status: int) -> Iterator[list[str]]:
        """Expect an error of this status of HTTP; its message is the one element of the list."""
        message: list[str] = []
        with pytest.raises(InferenceServerException) as caught:
            yield message
        expected = f"StatusCode.{GRPC_STATUSES[status]}" if self.protocol == "grpc" else str(status)
        assert caught.value.status() == expected, caught.value
        message.append(caught.value.message())

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.own.close()


def inputs(module: Any, arrays: Arrays, **how: Any) -> list[Any]:
    """Arrays as inputs of a request of `tritonclient.http` or `tritonclient.grpc`."""
    found = []
    for name, array in arrays.items():
        given = module.InferInput(name, [*array.shape], np_to_triton_dtype(array.dtype))
        found.append(given.set_data_from_numpy(array, **how))
    return found


def arrays_of(result: Any) -> dict[str, NDArray[Any]]:
    """All outputs of an answer, by name."""
    response = result.get_response()
    outputs: Any = response["outputs"] if isinstance(response, Mapping) else response.outputs
    names = [each["name"] if isinstance(each, Mapping) else each.name for each in outputs]
    return {name: result.as_numpy(name) for name in names}
