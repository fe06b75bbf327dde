"""The protocol over HTTP: addresses, bodies, and answers.

Sources: inference_rest.md of https://github.com/kserve/open-inference-protocol, and docs/protocol of
https://github.com/triton-inference-server/server for the extensions.
"""

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.serve.inference import Inference, status_of
from mcinfer.serve.models import Instance, RefusedError
from mcinfer.serve.service import ServeOptions, Service
from mcinfer.serve.tensors import DATATYPES, bytes_of, from_bytes, json_of, raw_shape
from mcinfer.specs import STRING

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LENGTH = "inference-header-content-length"
_WINDOWS = {"gzip": 31, "deflate": 15}
"""By coding, the size of its window for zlib: both have a header."""

_PIECE = 1 << 18
"""Bytes that are decompressed before others get their turn."""

_MAX_JSON_BYTES = 32 << 20
"""Nothing else happens while JSON is read."""


class _GoneError(Exception):
    """The client has hung up."""


class _Body:
    """The body of a request, decompressed, as it comes. Each method raises `RefusedError` at a limit."""

    def __init__(self, receive: Receive, headers: Mapping[str, str], options: ServeOptions) -> None:
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *_WINDOWS):
            raise RefusedError(
                415, f"Content-Encoding: got {coding[:100]!r}, expected gzip or deflate"
            )
        self._receive, self._limit = receive, options.max_request_bytes
        self._left = self._limit
        self._end = asyncio.get_running_loop().time() + options.timeout
        self._inflate = zlib.decompressobj(_WINDOWS[coding]) if coding in _WINDOWS else None
        self._packed, self._more = b"", True
        self.part = memoryview(b"")  # what came and was not taken
        if not self._inflate:
            self._check(int(headers.get("content-length", 0)))

    def _check(self, size: int) -> None:
        if size > self._left + len(self.part):
            raise RefusedError(413, f"the body has more than {self._limit} bytes, the limit")

    async def _next(self) -> memoryview:
        """What came and was not taken, or comes now; empty at the end."""
        while not self.part:
            part = b""
            if self._packed and self._inflate:
                try:
                    part = self._inflate.decompress(self._packed, _PIECE)
                except zlib.error as exc:
                    raise InvalidInputError(f"the body cannot be decompressed: {exc}") from exc
                self._packed = self._inflate.unconsumed_tail
                await asyncio.sleep(0)
            elif self._more:
                try:
                    async with asyncio.timeout_at(self._end):
                        message = await self._receive()
                except TimeoutError as exc:
                    raise RefusedError(408, "the request did not come in time") from exc
                if message["type"] != "http.request":
                    raise _GoneError
                part, self._more = message["body"], message.get("more_body", False)
                if self._inflate:
                    part, self._packed = b"", part
            elif self._inflate and not self._inflate.eof:
                raise InvalidInputError("the compressed body is cut short")
            else:
                break
            self._left -= len(part)
            self._check(0)
            self.part = memoryview(part)
        return self.part

    async def read_into(self, memory: memoryview) -> None:
        """Fill memory; `InvalidInputError` if the body ends before."""
        while memory:
            part = (await self._next())[: len(memory)]
            if not part:
                raise InvalidInputError(f"the body ends {len(memory)} bytes before its tensors do")
            memory[: len(part)] = part
            memory, self.part = memory[len(part) :], self.part[len(part) :]

    async def read(self, size: int) -> bytes:
        """The next bytes, exactly so many."""
        self._check(size)
        memory = bytearray(size)
        await self.read_into(memoryview(memory))
        return bytes(memory)

    async def rest(self, limit: int = _MAX_JSON_BYTES) -> bytes:
        """All that is left."""
        parts, size = [], 0
        while part := await self._next():
            parts.append(part)
            self.part, size = memoryview(b""), size + len(part)
            if size > limit:
                raise RefusedError(
                    413, f"the body has more than {limit} bytes that are no binary tensors"
                )
        return b"".join(parts)


class _Infer:
    """``POST v2/models/{model}/infer``, without what Starlette puts around a handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, instance, status = scope["path_params"], None, 200
        try:
            if scope["method"] != "POST":
                raise RefusedError(405, "Method Not Allowed")
            instance = self._service.models.instance(place["model"], place.get("version", ""))
            with instance.used():
                given = {n.decode(): v.decode("latin-1") for n, v in scope["headers"]}
                parts, headers = await self._answer(place["model"], instance, given, receive)
                encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": encoded})
                for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body"})
        except _GoneError:
            status = 499  # as nginx counts it; no client gets it
        except Exception as exc:
            response = _failure(exc, instance)
            status = response.status_code
            await response(scope, receive, send)
        self._service.count(place["model"], status)

    async def _answer(
        self, name: str, instance: Instance, headers: Mapping[str, str], receive: Receive
    ) -> tuple[Sequence[Any], dict[str, str]]:
        """The parts of the answer's body, and its headers."""
        request = await self._read(instance, headers, receive)
        running = asyncio.ensure_future(request.run())
        gone = asyncio.ensure_future(receive())  # comes when the client hangs up
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise _GoneError
            head, parts = _encoded(name, instance, request, running.result())
        finally:
            running.cancel()  # nothing, if it is done
            gone.cancel()
            # The traceback of its error has this frame, which would hold it, and with it the tensors.
            del running
        answer = {"content-type": "application/json"}
        if parts:
            answer = {"content-type": "application/octet-stream", _LENGTH: f"{len(head)}"}
        parts = [head, *filter(len, parts)]
        # One coding alone is asked for. Several are what a library sends by itself; tensors shrink little.
        coding = headers.get("accept-encoding", "").strip().lower()
        if coding in _WINDOWS:
            parts = [await asyncio.to_thread(_packed, parts, _WINDOWS[coding])]
            answer["content-encoding"] = coding
        answer["content-length"] = f"{sum(map(len, parts))}"
        return parts, answer

    async def _read(
        self, instance: Instance, headers: Mapping[str, str], receive: Receive
    ) -> Inference:
        """The request, with its inputs as arrays."""
        length = headers.get(_LENGTH)
        if length is not None and not (length.isdecimal() and int(length) <= _MAX_JSON_BYTES):
            raise InvalidInputError(
                f"Inference-Header-Content-Length: got {length[:100]!r}, expected {_MAX_JSON_BYTES} at most"
            )
        body = _Body(receive, headers, self._service.options)
        is_raw = length is not None and int(length) == 0
        if is_raw:
            document, raw = _raw_document(
                instance, await body.rest(self._service.options.max_request_bytes)
            )
            body.part = memoryview(raw)
        else:
            document = _loads(await (body.read(int(length)) if length else body.rest()))
        request = Inference(document, instance, self._service.regions, binary=is_raw)
        others = request.read()
        request.allocate([head for head, _ in others])
        for head, size in others:
            if head.shareable:
                await body.read_into(bytes_of(request.arrays[head.spec.name]))
            else:
                request.arrays[head.spec.name] = from_bytes(head, await body.read(size))
        if await body._next():
            raise InvalidInputError("the body has more bytes than its tensors")
        return request


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise InvalidInputError(f"the request is no JSON: {exc}") from exc


def _raw_document(instance: Instance, raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The document and the bytes of a request that has only the values of the model's only input."""
    specs = instance.master.inputs
    if len(specs) != 1:
        raise InvalidInputError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(specs)} inputs in the model"
        )
    (spec,), shape = specs, raw_shape(specs[0], len(raw))
    if spec.element_type == STRING:
        raw = struct.pack("<I", len(raw)) + raw
    tensor = {"name": spec.name, "datatype": DATATYPES[spec.element_type], "shape": shape}
    return {"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}, raw


def _encoded(
    name: str, instance: Instance, request: Inference, outputs: Sequence[Any]
) -> tuple[bytes, list[memoryview]]:
    """The JSON of an answer, and the outputs that come after it as bytes."""
    entries, parts = [], []
    for wish, array in zip(request.wishes, outputs, strict=True):
        spec = wish.spec
        entry = {"name": spec.name, "datatype": DATATYPES[spec.element_type], "shape": array.shape}
        if wish.region is not None:
            entry["parameters"] = {"shared_memory_byte_size": len(bytes_of(array))}
        elif wish.binary:
            parts.append(bytes_of(array))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = json_of(spec.name, array)
        entries.append(entry)
    about = {"model_name": name, "model_version": instance.version, "id": request.id}
    if not request.id:
        del about["id"]
    option = orjson.OPT_SERIALIZE_NUMPY
    return orjson.dumps({**about, "outputs": entries}, option=option), parts


def _packed(parts: Sequence[Any], window: int) -> bytes:
    deflate = zlib.compressobj(1, wbits=window)
    return b"".join([*map(deflate.compress, parts), deflate.flush()])


def _reply(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def _failure(exc: Exception, instance: Instance | None = None) -> Response:
    if isinstance(exc, HTTPException):
        exc = RefusedError(exc.status_code, exc.detail)
    status, text = status_of(exc, instance)
    headers = {"Retry-After": "1"} if status == 503 else {}
    if status in (408, 413):  # else the server would read what is left of the body
        headers["Connection"] = "close"
    return _reply({"error": text}, status, headers)


class _Gate:
    """Lets in who shows a key, and no page of another site that a user's browser has open.

    A browser sends ``Origin`` with what a page asks for. Probes of the server's health need no key.
    """

    def __init__(self, app: App, service: Service, hosts: Sequence[str]) -> None:
        self._app, self._service, self._hosts = app, service, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = None
        if scope["type"] == "http":
            headers = {n: v.decode("latin-1") for n, v in scope["headers"]}
            origin, host = headers.get(b"origin"), headers.get(b"host", "")
            named = not self._hosts or urlsplit(f"//{host}").hostname in self._hosts
            if origin is not None and not (named and urlsplit(origin).netloc == host):
                response = _reply({"error": "a page of another site may not ask here"}, 403)
            elif not scope["path"].startswith("/v2/health/"):
                if not self._service.admits(headers.get(b"authorization", "")):
                    challenge = {"WWW-Authenticate": 'Basic realm="mcinfer"'}
                    response = _reply({"error": "a key is needed"}, 401, challenge)
        await (response or self._app)(scope, receive, send)


def make_app(service: Service, page: Sequence[BaseRoute] = (), hosts: Sequence[str] = ()) -> App:
    """The server as an application of ASGI.

    Args:
        service: What it serves; its models are loaded.
        page: Routes beside the protocol's.
        hosts: The names by which browsers may reach it; any if there is none.
    """

    async def body_of(request: Request) -> dict[str, Any]:
        text = await _Body(request.receive, request.headers, service.options).rest()
        found = _loads(text) if text.strip() else {}
        if not isinstance(found, dict):
            raise InvalidInputError("the request: expected a JSON object")
        return found

    def shows(content: Callable[..., Any]) -> Callable[[Request], Awaitable[Response]]:
        """A handler that gives what a function says of the model that the address names, if any."""

        async def show(request: Request) -> Response:
            return _reply(content(*request.path_params.values()))

        return show

    async def health(request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in ("live", "ready"):
            raise RefusedError(404, "Not Found")
        good = kind == "live" or service.ready
        return _reply({kind: good}, 200 if good else 503)

    async def model_ready(request: Request) -> Response:
        good = service.model_ready(*request.path_params.values())
        return _reply({"name": request.path_params["model"], "ready": good}, 200 if good else 503)

    async def index(request: Request) -> Response:
        return _reply(service.index(await body_of(request)))

    async def control(request: Request) -> Response:
        name, action = request.path_params.values()
        asked = await body_of(request)
        if action == "load":
            await service.load(name, asked.get("parameters", {}))
        elif action == "unload":
            await service.models.unload(name)
        else:
            raise RefusedError(404, "Not Found")
        return _reply({})

    async def regions(request: Request) -> Response:
        given, client = request.path_params, request.client
        kind, action, name = given["kind"], given["action"], given.get("region", "")
        if (action == "status") != (request.method == "GET"):
            raise RefusedError(405, "Method Not Allowed")
        if kind == "cuda" and action == "register":
            raise RefusedError(501, "shared memory of CUDA is not taken")
        if action == "status":
            return _reply(service.regions.status(name) if kind == "system" else [])
        if action == "register":
            service.regions.register(name, client and tuple(client), await body_of(request))
        elif kind == "system":
            service.regions.unregister(name)
        return _reply({})

    async def log(request: Request) -> Response:
        return _reply(service.log_settings(await body_of(request)))

    async def trace(request: Request) -> Response:
        if (await body_of(request)).get("trace_level", ["OFF"]) != ["OFF"]:
            raise RefusedError(
                501, "no traces are written; mcinfer.exporters.opentelemetry makes spans"
            )
        off = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}
        return _reply({**off, "log_frequency": "0", "trace_file": "", "trace_mode": "triton"})

    async def metrics(_: Request) -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def failed(_: Request, exc: Exception) -> Response:
        return _failure(exc)

    both, shm = ["GET", "POST"], "/v2/{kind}sharedmemory"
    routes: list[BaseRoute] = []
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(f"{model}/infer", _Infer(service)),
            Route(f"{model}/ready", model_ready),
            Route(f"{model}/config", shows(service.model_config)),
            Route(f"{model}/stats", shows(service.statistics)),
        ]
    routes += [
        Route("/v2/health/{kind}", health),
        Route("/v2", shows(service.metadata)),
        Route("/v2/models/stats", shows(service.statistics)),
        Route("/v2/models/{model}", shows(service.model_metadata)),
        Route("/v2/models/{model}/versions/{version}", shows(service.model_metadata)),
        Route("/v2/repository/index", index, methods=["POST"]),
        Route("/v2/repository/models/{model}/{action}", control, methods=["POST"]),
        Route(f"{shm}/{{action}}", regions, methods=both),
        Route(f"{shm}/region/{{region}}/{{action}}", regions, methods=both),
        Route("/v2/logging", log, methods=both),
        Route("/v2/trace/setting", trace, methods=both),
        Route("/v2/models/{model}/trace/setting", trace, methods=both),
        Route("/metrics", metrics),
        *page,
    ]
    kinds = (McinferError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, failed))
    return _Gate(app, service, hosts)
