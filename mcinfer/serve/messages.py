"""The messages of ``inference.proto``: for gRPC, and for Triton's model configurations.

``inference.binpb`` beside it is what ``make proto`` compiles it to. Code that is generated from it would be
tied to versions of protobuf's runtime, and would register names that the code of clients registers, too: here
they have a pool of their own.
"""

from functools import cache
from importlib.resources import files
from threading import Lock
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"

_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files("mcinfer.serve").joinpath("inference.binpb").read_bytes()
).file:
    _pool.Add(_file)


_making = Lock()
"""Threads load models, and protobuf in Python alone, without upb, makes classes for one thread at a time."""


@cache
def message(name: str) -> Any:
    """The class of a message."""
    with _making:
        return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
