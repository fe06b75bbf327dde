"""The protocol over gRPC, ``inference.GRPCInferenceService``, with the same core as over HTTP.

Clients register shared memory over HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from mcinfer.errors import InvalidInputError
from mcinfer.serve.documents import MAX_JSON_BYTES, MAX_TENSORS, InferDocument, read_document
from mcinfer.serve.inference import Inference, status_of
from mcinfer.serve.messages import PACKAGE, message
from mcinfer.serve.models import Instance
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
    **{
        kind: f"{kind.lower()}_contents"
        for kind in ("BOOL", "INT64", "UINT64", "FP32", "FP64", "BYTES")
    },
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}
"""By datatype, the field that has values one by one."""

_SMALL_BYTES = 1 << 18
"""Strings of more bytes are read in a thread."""

_AHEAD = 16
"""Most requests of one stream that are answered at once."""


def _answers(service: Service) -> dict[str, Callable[[Any], Any]]:
    """By call, what answers it, as JSON; some are coroutines."""

    def load(asked: Any) -> Any:
        return service.load(asked.model_name, parameters=_plain(asked.parameters))

    return {
        "ServerLive": lambda _: {"live": True},
        "ServerReady": lambda _: {"ready": service.ready},
        "ServerMetadata": lambda _: service.metadata(),
        "ModelReady": lambda a: {"ready": service.model_ready(a.name, a.version)},
        "ModelMetadata": lambda a: service.model_metadata(a.name, a.version),
        "ModelConfig": lambda a: {"config": service.model_config(a.name, a.version)},
        "ModelStatistics": lambda a: service.statistics(a.name, a.version),
        "RepositoryIndex": lambda a: {"models": service.index(ready=a.ready)},
        "RepositoryModelLoad": load,
        "RepositoryModelUnload": lambda a: service.unload(a.model_name),
    }


def add_service(server: grpc.aio.Server, service: Service) -> None:
    """Have a server of gRPC answer for the service."""
    answers = _answers(service)

    async def admit(context: Any, *, is_probe: bool = False) -> dict[str, Any]:
        """What is known of the call, for the log."""
        given = dict(context.invocation_metadata() or ())
        name = service.request_id(str(given.get("x-request-id", "")))
        context.set_trailing_metadata((("x-request-id", name),))
        if not is_probe and not service.admits(str(given.get("authorization", ""))):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a key is needed")
        if service.join_trace:
            service.join_trace(context.invocation_metadata() or ())
        return {"request_id": name}

    def unary(name: str) -> Any:
        async def answer(asked: Any, context: Any) -> Any:
            about = await admit(context, is_probe=name in ("ServerLive", "ServerReady"))
            try:
                if name == "ModelInfer":
                    return await _infer(service, asked, about)
                content = answers[name](_read(f"{name}Request", asked))
                content = await content if asyncio.iscoroutine(content) else content
                return json_format.ParseDict(content or {}, message(f"{name}Response")())
            except Exception as exc:
                status, text = status_of(exc, about)
                await context.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), text)

        # Requests come as bytes: who shows no key has none of them read.
        write = message(f"{name}Response").SerializeToString
        return grpc.unary_unary_rpc_method_handler(answer, None, write)

    async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers in the order of the requests, a few of which run at once."""
        about = await admit(context)
        under_way: asyncio.Queue[tuple[asyncio.Task[Any], dict[str, Any]] | None]
        under_way = asyncio.Queue(_AHEAD)

        async def read() -> None:
            async for asked in requests:
                own = {**about}
                task = asyncio.create_task(_infer(service, asked, own))
                try:
                    await under_way.put((task, own))
                except asyncio.CancelledError:
                    task.cancel()
                    raise
            await under_way.put(None)

        async def end() -> None:
            await service.ending.wait()
            await under_way.put(None)

        reading, ending = asyncio.create_task(read()), asyncio.create_task(end())
        try:
            while found := await under_way.get():
                task, own = found
                answer = message("ModelStreamInferResponse")()
                try:
                    answer.infer_response.CopyFrom(await task)
                except Exception as exc:
                    answer.error_message = status_of(exc, own)[1]
                yield answer
        finally:
            reading.cancel()
            ending.cancel()
            while not under_way.empty():
                if found := under_way.get_nowait():
                    found[0].cancel()

    handlers = {name: unary(name) for name in (*answers, "ModelInfer")}
    write = message("ModelStreamInferResponse").SerializeToString
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream, None, write)
    server.add_registered_method_handlers(f"{PACKAGE}.GRPCInferenceService", handlers)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as JSON has them."""
    kinds = ((name, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(parameters[name], kind) for name, kind in kinds if kind}


def _read(name: str, data: bytes) -> Any:
    try:
        return message(name).FromString(data)
    except DecodeError as exc:
        raise InvalidInputError(f"the request: {exc}") from exc


async def _infer(service: Service, data: bytes, about: dict[str, Any]) -> Any:
    """Answer one request; raises what `Inference` does, and says what it is `about`."""
    asked = _read("ModelInferRequest", data)
    instance = service.models.instance(asked.model_name, asked.model_version)
    about["model"], about["version"] = asked.model_name, instance.version
    with instance:
        return await _answer(service, instance, asked, len(data))


async def _answer(service: Service, instance: Instance, asked: Any, size: int) -> Any:
    if len(asked.inputs) > MAX_TENSORS or len(asked.outputs) > MAX_TENSORS:
        raise InvalidInputError(f"expected at most {MAX_TENSORS} inputs, and outputs")
    if size - sum(map(len, asked.raw_input_contents)) > MAX_JSON_BYTES:
        text = f"the request has more than {MAX_JSON_BYTES} bytes beside raw_input_contents"
        raise InvalidInputError(text)
    raw, inputs, values = [*asked.raw_input_contents], [], {}
    for tensor in asked.inputs:
        parameters = _plain(tensor.parameters)
        parameters.pop("binary_data_size", None)  # HTTP's alone
        given = {"name": tensor.name, "datatype": tensor.datatype, "shape": [*tensor.shape]}
        if tensor.HasField("contents"):
            if asked.raw_input_contents:
                text = "contents field must not be specified when using raw_input_contents for"
                raise InvalidInputError(f"{text} '{tensor.name}' for model '{asked.model_name}'")
            field = _CONTENTS.get(tensor.datatype, "fp32_contents")
            given["data"] = [*getattr(tensor.contents, field)]
        elif raw and "shared_memory_region" not in parameters:
            values[tensor.name] = raw.pop(0)
            parameters["binary_data_size"] = len(values[tensor.name])
        inputs.append({**given, "parameters": parameters})
    if raw:
        raise InvalidInputError(f"raw_input_contents: got {len(raw)} more than inputs for them")
    outputs = [{"name": t.name, "parameters": _plain(t.parameters)} for t in asked.outputs]
    said = {"id": asked.id, "parameters": _plain(asked.parameters), "inputs": inputs}
    document = read_document(InferDocument, {**said, "outputs": outputs})
    request = Inference(document, instance, service.regions, binary=True)
    for head, size in request.read():
        read = partial(from_bytes, head, values[head.spec.name])
        is_long = size > _SMALL_BYTES and not head.shareable
        request.arrays[head.spec.name] = await asyncio.to_thread(read) if is_long else read()
    arrays = await request.run()
    answer = message("ModelInferResponse")(
        model_name=asked.model_name, model_version=instance.version, id=asked.id
    )
    for wish, array in zip(request.wishes, arrays, strict=True):
        kind = DATATYPES[wish.spec.element_type]
        answer.outputs.add(name=wish.spec.name, datatype=kind, shape=array.shape)
        answer.raw_output_contents.append(b"" if wish.region else bytes(bytes_of(array)))
    return answer
