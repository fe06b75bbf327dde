"""The protocol over gRPC: ``inference.GRPCInferenceService``, with the same core as over HTTP.

Shared memory of clients is registered over HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import json_format

from mcinfer.errors import InvalidInputError
from mcinfer.serve.inference import Inference, status_of
from mcinfer.serve.messages import PACKAGE, message
from mcinfer.serve.service import Service
from mcinfer.serve.tensors import DATATYPES, bytes_of, from_bytes

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By HTTP's status; INTERNAL for others."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}

_AHEAD = 16
"""Most requests of one stream that are answered at once."""

_ANSWERS: dict[str, Callable[[Service, Any], Any]] = {
    "ServerLive": lambda _, asked: {"live": True},
    "ServerReady": lambda service, asked: {"ready": service.ready},
    "ServerMetadata": lambda service, asked: service.metadata(),
    "ModelReady": lambda service, asked: {"ready": service.model_ready(asked.name, asked.version)},
    "ModelMetadata": lambda service, asked: service.model_metadata(asked.name, asked.version),
    "ModelConfig": lambda service, asked: {
        "config": service.model_config(asked.name, asked.version)
    },
    "ModelStatistics": lambda service, asked: service.statistics(asked.name, asked.version),
    "RepositoryIndex": lambda service, asked: {"models": service.index({"ready": asked.ready})},
    "RepositoryModelLoad": lambda service, asked: service.load(
        asked.model_name, _plain(asked.parameters)
    ),
    "RepositoryModelUnload": lambda service, asked: service.models.unload(asked.model_name),
}


def add_service(server: grpc.aio.Server, service: Service) -> None:
    """Have a server of gRPC answer for the service."""

    def unary(name: str) -> grpc.RpcMethodHandler:
        async def answer(asked: Any, context: Any) -> Any:
            await _admit(service, name, context)
            try:
                if name == "ModelInfer":
                    return await _infer(service, asked)
                content = _ANSWERS[name](service, asked)
                content = await content if asyncio.iscoroutine(content) else content
                return json_format.ParseDict(content or {}, message(f"{name}Response")())
            except Exception as exc:
                status, text = status_of(exc)
                await context.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), text)

        return grpc.unary_unary_rpc_method_handler(
            answer,
            message(f"{name}Request").FromString,
            message(f"{name}Response").SerializeToString,
        )

    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests, a few of which run at once."""
        await _admit(service, "ModelStreamInfer", context)
        under_way: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(_AHEAD)

        async def read() -> None:
            async for asked in requests:
                await under_way.put(asyncio.create_task(_infer(service, asked)))
            await under_way.put(None)

        reading = asyncio.create_task(read())
        try:
            while task := await under_way.get():
                answer = message("ModelStreamInferResponse")()
                try:
                    answer.infer_response.CopyFrom(await task)
                except Exception as exc:
                    answer.error_message = status_of(exc)[1]
                yield answer
        finally:
            reading.cancel()
            while not under_way.empty():
                if task := under_way.get_nowait():
                    task.cancel()

    handlers = {name: unary(name) for name in (*_ANSWERS, "ModelInfer")}
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        stream,
        message("ModelInferRequest").FromString,
        message("ModelStreamInferResponse").SerializeToString,
    )
    server.add_registered_method_handlers(f"{PACKAGE}.GRPCInferenceService", handlers)


async def _admit(service: Service, name: str, context: Any) -> None:
    """Refuse who shows no key; probes of the server's health need none."""
    shown = dict(context.invocation_metadata() or ()).get("authorization", "")
    if name not in ("ServerLive", "ServerReady") and not service.admits(str(shown)):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed")


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON has them."""
    kinds = ((name, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(parameters[name], kind) for name, kind in kinds if kind}


async def _infer(service: Service, asked: Any) -> Any:
    """Answer one request; raises what `Inference` does."""
    instance = service.models.instance(asked.model_name, asked.model_version)
    inputs, raw = [], list(asked.raw_input_contents)
    bytes_by_name = {}
    for tensor in asked.inputs:
        given = {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]}
        given["parameters"] = parameters = _plain(tensor.parameters)
        if tensor.HasField("contents"):
            if asked.raw_input_contents:
                text = "contents field must not be specified when using raw_input_contents for"
                raise InvalidInputError(f"{text} '{tensor.name}' for model '{asked.model_name}'")
            given["data"] = [
                *getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "fp32_contents"))
            ]
        elif raw and "shared_memory_region" not in parameters:
            bytes_by_name[tensor.name] = raw.pop(0)
            parameters["binary_data_size"] = len(bytes_by_name[tensor.name])
        inputs.append(given)
    if raw:
        raise InvalidInputError(f"raw_input_contents: got {len(raw)} more than inputs for them")
    outputs = [{"name": t.name, "parameters": _plain(t.parameters)} for t in asked.outputs]
    document = {
        "id": asked.id,
        "parameters": _plain(asked.parameters),
        "inputs": inputs,
        "outputs": outputs,
    }
    with instance.used():
        request = Inference(document, instance, service.regions, binary=True)
        for head, _ in request.read():
            request.arrays[head.spec.name] = from_bytes(head, bytes_by_name[head.spec.name])
        arrays = await request.run()
    answer = message("ModelInferResponse")(
        model_name=asked.model_name, model_version=instance.version, id=asked.id
    )
    for wish, array in zip(request.wishes, arrays, strict=True):
        kind = DATATYPES[wish.spec.element_type]
        answer.outputs.add(name=wish.spec.name, datatype=kind, shape=array.shape)
        answer.raw_output_contents.append(b"" if wish.region else bytes(bytes_of(array)))
    return answer
