"""ONNX Runtime's errors, which are mcinfer's too.

A program that catches what a plain session raises catches the same here: each class below is a subclass of
ONNX Runtime's class of that name, and of the `mcinfer.McinferError` that fits. Errors that only mcinfer has,
such as `mcinfer.WorkerDiedError`, come as they are.
"""

import re

from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer.errors import (
    BuildError,
    EngineError,
    InvalidInputError,
    McinferError,
    ModelNotFoundError,
    PredictError,
)


class InvalidArgument(native.InvalidArgument, InvalidInputError):  # type: ignore[misc] # no types
    """An argument, a feed or a model does not fit."""


class InvalidValue(InvalidInputError, RuntimeError):
    """A value of a feed is nothing that a tensor can be made of; a plain session raises RuntimeError."""


class InvalidBinding(InvalidArgument, RuntimeError):
    """What is bound does not fit; a plain session raises RuntimeError."""


class Unsupported(native.NotImplemented, McinferError, NotImplementedError):  # type: ignore[misc]
    """An option or a call that cannot act in other processes; the text begins with its name."""


class NoSuchFile(native.NoSuchFile, ModelNotFoundError):  # type: ignore[misc]
    """The model's file does not exist."""


class Fail(native.Fail, EngineError):  # type: ignore[misc]
    """The runtime failed, and has no better word for it."""


class RuntimeException(native.RuntimeException, EngineError):  # type: ignore[misc]
    """The runtime raised an exception."""


class InvalidProtobuf(native.InvalidProtobuf, BuildError):  # type: ignore[misc]
    """The model's file is no model."""


class InvalidGraph(native.InvalidGraph, BuildError):  # type: ignore[misc]
    """The model's graph is not valid."""


class NotImplemented(native.NotImplemented, EngineError):  # type: ignore[misc] # noqa: A001 their name
    """The runtime has no implementation of an operator for these types."""


class RunFailed(native.Fail, native.RuntimeException, native.InvalidArgument, PredictError):  # type: ignore[misc]
    """A node of the model failed.

    Workers run models with bound tensors, and then the runtime does not say which of its errors it was.
    """


_CLASSES = {
    "FAIL": Fail,
    "INVALID_ARGUMENT": InvalidArgument,
    "NO_SUCHFILE": NoSuchFile,
    "RUNTIME_EXCEPTION": RuntimeException,
    "INVALID_PROTOBUF": InvalidProtobuf,
    "INVALID_GRAPH": InvalidGraph,
    "NOT_IMPLEMENTED": NotImplemented,
}
"""By the word that the runtime's messages have after the number of the error."""

_NO_TENSOR = re.compile(
    r"(input|output|initializer) '.*?' is of type .*?, expected a tensor.*?(?=; workers? \d|$)"
)
"""What an engine says of a model whose inputs, outputs or initialisers are sequences, maps or others."""

_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : ([A-Z_]+) : ")


def words(exc: Exception) -> str:
    """What an error says, as the runtime says it where no exception carries its number and name."""
    return _CODE.sub("", str(exc), 1)


def invalid_argument(text: str) -> InvalidArgument:
    """The error that a plain session raises for an argument, with the runtime's words."""
    return InvalidArgument(f"[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : {text}")


def terminated() -> Fail:
    """The error of a run whose options say that it is to end."""
    return Fail("[ONNXRuntimeError] : 1 : FAIL : Exiting due to terminate flag being set to true.")


def native_error(exc: McinferError) -> McinferError:
    """The error of a master as one that is ONNX Runtime's too, where there is one that fits."""
    text = str(exc)
    if isinstance(exc, ModelNotFoundError):
        return NoSuchFile(f"[ONNXRuntimeError] : 3 : NO_SUCHFILE : {text}")
    if isinstance(exc, InvalidInputError):
        return exc if isinstance(exc, native.InvalidArgument) else InvalidArgument(text)
    if not isinstance(exc, (BuildError, PredictError)):
        return exc
    found = _NO_TENSOR.search(text)
    if found is not None:
        return Unsupported(found[0])
    code = _CODE.search(text)
    if code is not None:
        return _CLASSES.get(code[1], Fail)(text)
    return RunFailed(text) if isinstance(exc, PredictError) else Fail(text)
