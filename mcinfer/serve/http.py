"""The protocol over HTTP: addresses, bodies, and answers.

Sources: inference_rest.md of https://github.com/kserve/open-inference-protocol, and docs/protocol of
https://github.com/triton-inference-server/server for the extensions.
"""

import asyncio
import gc
import re
import struct
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from inspect import isawaitable
from time import perf_counter
from typing import Any, TypeVar

import orjson
from msgspec.structs import asdict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.serve.documents import (
    MAX_JSON_BYTES,
    InferAnswer,
    InferDocument,
    InputDocument,
    Live,
    Nothing,
    Ready,
    RegionStatus,
    TensorParameters,
    read_json,
)
from mcinfer.serve.inference import Inference, checked, status_of
from mcinfer.serve.models import Instance, RefusedError
from mcinfer.serve.openapi import Operation, description
from mcinfer.serve.service import ServeOptions, Service
from mcinfer.serve.tensors import DATATYPES, TensorHead, bytes_of, from_bytes, json_of, raw_shape
from mcinfer.specs import STRING

_T = TypeVar("_T")

_LENGTH = b"inference-header-content-length"
_REQUEST_ID = b"x-request-id"
_WINDOWS = {b"gzip": 31, b"deflate": 15}
"""By coding, the size of its window for zlib: both have a header."""

_PORT = re.compile(r":\d*$")

_SMALL_BYTES = 1 << 18
"""Below, an answer is one message: to send several takes longer than a copy. Above, threads read and write
JSON and strings."""

_SMALL_VALUES = 1 << 16
"""Of an output, values that are written at once in JSON."""

_GATHER_SECONDS = 0.1
"""For lines of the access log, to be written together."""

_MAX_PLAIN_BYTES = 1 << 20
"""Of JSON that has no tensors."""

_GONE = (499, "the client has hung up")
"""The status is that of nginx's log; no client gets it."""


CONNECTION = "connection"
"""The key of a request's `Connection` in the state of its scope; without one, no hang-up ends a run."""

ABOUT = "about"
"""The key in the same state of what is known of a request, by name: the fields of its records in the log."""

WHOLE = "whole"
"""The key in the same state that says that all of the body is there, so nothing waits for it."""


class Connection:
    """Ends what runs for a client when the client hangs up.

    Args:
        user: Finds the user of the client, or None.

    Attributes:
        user: As given.
        is_lost: Whether the client has hung up.
        joins: Whether what is written waits for what is written next; `_Infer` has all of an answer at once.
    """

    def __init__(self, user: Callable[[], int | None] = lambda: None) -> None:
        self.user = user
        self.joins = False
        self.is_lost = False
        self._running: asyncio.Task[Any] | None = None

    def lose(self) -> None:
        """The client has hung up."""
        self.is_lost = True
        if self._running is not None:
            self._running.cancel()

    async def unless_lost(self, answer: Coroutine[Any, Any, _T]) -> _T:
        """What a coroutine gives; if the client hangs up, cancel it and raise `RefusedError`."""
        self._running = asyncio.current_task()
        try:
            if not self.is_lost:
                return await answer
        except asyncio.CancelledError:
            if not self.is_lost:
                raise
        finally:
            self._running = None
            answer.close()  # nothing, if it is done
        raise RefusedError(*_GONE)


Headers = Mapping[bytes, bytes]
"""Of a request, by their names in small letters; of two of a name, the last."""


def _text(value: bytes) -> str:
    """What a client has sent in a header, for an error."""
    return repr(value[:99].decode("latin-1"))


class _Body:
    """The body of a request, as it comes. `RefusedError` at a limit, in time and in size.

    A compressed one is decompressed when all of it is there, in a thread.
    """

    def __init__(
        self, receive: Receive, headers: Headers, options: ServeOptions, *, is_whole: bool = False
    ) -> None:
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (*_WINDOWS, b"identity"):
            text = f"Content-Encoding: got {_text(coding)}, expected gzip or deflate"
            raise RefusedError(415, text)
        self._receive, self._limit = receive, options.max_request_bytes
        self._end = None if is_whole else asyncio.get_running_loop().time() + options.timeout
        self._window = _WINDOWS.get(coding)
        self._came, self._more = 0, True
        self.part = memoryview(b"")  # what came and was not taken
        self.check(int(headers.get(b"content-length", 0)))

    def check(self, size: int) -> None:
        """Raise `RefusedError` if no body may have so many bytes."""
        if size > self._limit:
            raise RefusedError(413, f"the body has more than {self._limit} bytes, the limit")

    async def _next(self) -> memoryview:
        """What came and was not taken, or comes now; empty at the end."""
        while self._more and not self.part:
            part = await self._received()
            if self._window:
                packed = bytearray(part)
                while self._more:
                    packed += await self._received()
                part = await asyncio.to_thread(self._unpacked, packed, self._window)
            self.part = memoryview(part)
        return self.part

    def _unpacked(self, packed: bytearray, window: int) -> bytes:
        inflate = zlib.decompressobj(window)
        try:
            data = inflate.decompress(packed, self._limit + 1)
        except zlib.error as exc:
            raise InvalidInputError(f"the body cannot be decompressed: {exc}") from exc
        self.check(len(data))
        if not inflate.eof or inflate.unused_data:
            raise InvalidInputError("the body is cut short, or longer than its compressed data")
        return data

    async def _received(self) -> bytes:
        if self._end is None:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout_at(self._end):
                    message = await self._receive()
            except TimeoutError as exc:
                raise RefusedError(408, "the request did not come in time") from exc
        if message["type"] != "http.request":
            raise RefusedError(*_GONE)
        self._more = message.get("more_body", False)
        body: bytes = message["body"]
        self._came += len(body)
        self.check(self._came)
        return body

    async def _some(self, most: int) -> memoryview:
        """At most so many of the next bytes; `InvalidInputError` if there are none."""
        part = self.part[:most] or (await self._next())[:most]
        if not part:
            raise InvalidInputError(f"the body ends {most} bytes before its tensors do")
        self.part = self.part[len(part) :]
        return part

    async def read_into(self, memory: memoryview) -> None:
        """Fill memory."""
        while memory:
            part = await self._some(len(memory))
            memory[: len(part)] = part
            memory = memory[len(part) :]

    async def read(self, size: int) -> bytes | memoryview:
        """The next bytes, exactly so many. They take memory as they come, not as a client promises them."""
        if len(self.part or await self._next()) >= size:
            whole, self.part = self.part[:size], self.part[size:]
            return whole
        found = bytearray()
        while len(found) < size:
            found += await self._some(size - len(found))
        return bytes(found)

    async def rest(self, limit: int) -> bytes:
        """All that is left."""
        found = bytearray()
        while part := await self._next():
            found += part
            self.part = memoryview(b"")
            if len(found) > limit:
                text = (
                    f"the body has more than {limit} bytes of JSON, expected tensors as binary data"
                )
                raise RefusedError(413, text)
        return bytes(found)

    async def end(self) -> None:
        """Raise `InvalidInputError` if there is more."""
        if await self._next():
            raise InvalidInputError("the body has more bytes than its tensors")


class _Infer:
    """``POST v2/models/{model}/infer``, without what Starlette puts around a handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place, instance, status = scope["path_params"], None, 200
        state = scope["state"]
        connection, about = state.get(CONNECTION) or Connection(), state[ABOUT]
        if join_trace := self._service.join_trace:
            given = scope["headers"]
            join_trace((n.decode("latin-1"), value.decode("latin-1")) for n, value in given)
        try:
            if scope["method"] != "POST":
                raise RefusedError(405, "Method Not Allowed")
            instance = self._service.models.instance(*place.values())
            about["model"], about["version"] = place["model"], instance.version
            with instance:
                given = dict(scope["headers"])
                body = _Body(receive, given, self._service.options, is_whole=WHOLE in state)
                answer = self._answer(instance, given, body, connection, about)
                parts, said = await answer
            headers = [*said.items()]
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError):
                if not self._service.ending.is_set():
                    raise
                exc = RefusedError(503, "the server ends, and had no time left for the answer")
            failure = _failure(exc, about, instance)
            status, headers, parts = failure.status_code, failure.raw_headers, [failure.body]
        try:
            connection.joins = status == 200  # nothing is written after the head that HEAD gets
            await send({"type": "http.response.start", "status": status, "headers": headers})
        finally:
            connection.joins = False
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": parts[-1]})
        self._service.figures.count(place["model"] if instance else "", status)

    async def _answer(
        self,
        instance: Instance,
        headers: Headers,
        body: _Body,
        connection: Connection,
        about: dict[str, Any],
    ) -> tuple[list[Any], dict[bytes, bytes]]:
        """The parts of the answer's body, and its headers."""
        request = await self._read(instance, headers, body)
        try:
            outputs = await connection.unless_lost(request.run())
        finally:
            about["rows"] = request.rows
        encode = partial(_encoded, about["model"], instance, request, outputs)
        whole = zip(request.wishes, outputs, strict=True)
        is_large = sum(array.nbytes for wish, array in whole if not wish.binary) > _SMALL_BYTES
        head, tensors = await asyncio.to_thread(encode) if is_large else encode()
        answer = {b"content-type": b"application/json"}
        if tensors:
            answer = {b"content-type": b"application/octet-stream", _LENGTH: b"%d" % len(head)}
        parts: list[Any] = [head, *filter(len, tensors)]
        # One coding alone is asked for. Several are what a library sends by itself; tensors shrink little.
        coding = headers.get(b"accept-encoding", b"").strip().lower()
        if coding in _WINDOWS:
            parts = [await asyncio.to_thread(_packed, parts, _WINDOWS[coding])]
            answer[b"content-encoding"] = coding
        size = sum(map(len, parts))
        answer[b"content-length"] = b"%d" % size
        if size < _SMALL_BYTES:
            parts = [b"".join(parts)]
        return parts, answer

    async def _read(self, instance: Instance, headers: Headers, body: _Body) -> Inference:
        """The request, with its inputs as arrays."""
        said = headers.get(_LENGTH, b"-")
        length = int(said) if said.isdigit() and len(said) < 10 else -1
        if length > MAX_JSON_BYTES or (length < 0 and _LENGTH in headers):
            raise InvalidInputError(f"Inference-Header-Content-Length: got {_text(said)}")
        regions = self._service.regions
        if length == 0:
            asked, raw = _raw(instance, await body.rest(self._service.options.max_request_bytes))
            body.part = memoryview(raw)
            request = Inference(asked, instance, regions, binary=True)
            others = request.read()
        else:
            text = await (body.read(length) if length > 0 else body.rest(MAX_JSON_BYTES))
            if len(text) < _SMALL_BYTES:
                request, others = checked(bytes(text), instance, regions)
            else:
                request, others = await self._read_large(bytes(text), instance)
        body.check(sum(size for _, size in others))
        request.allocate(others)
        for head, size in others:
            if head.spec.name in request.arrays:
                await body.read_into(bytes_of(request.arrays[head.spec.name]))
            else:
                read = partial(from_bytes, head, await body.read(size))
                is_long = size > _SMALL_BYTES and not head.shareable
                request.arrays[head.spec.name] = (
                    await asyncio.to_thread(read) if is_long else read()
                )
        await body.end()
        return request

    async def _read_large(
        self, text: bytes, instance: Instance
    ) -> tuple[Inference, list[tuple[TensorHead, int]]]:
        """As `checked`: one at a time, as each takes much memory, while others are answered."""

        def read() -> tuple[Inference, list[tuple[TensorHead, int]]]:
            gc.disable()  # it would look again and again at what comes, which has no cycles
            try:
                return checked(text, instance, self._service.regions)
            finally:
                gc.enable()

        try:
            async with asyncio.timeout(self._service.options.timeout):
                await self._reading.acquire()
        except TimeoutError as exc:
            refused = RefusedError(503, "the JSON of others is read")
            raise refused.refusing("queue_full") from exc
        try:
            return await asyncio.to_thread(read)
        finally:
            self._reading.release()


def _raw(instance: Instance, raw: bytes) -> tuple[InferDocument, bytes]:
    """What a request means that is nothing but the values of the model's only input, and its bytes."""
    specs = instance.inputs
    if len(specs) != 1:
        text = "Raw request must only have 1 input (found 1) to be deduced but got"
        raise InvalidInputError(f"{text} {len(specs)} inputs in the model")
    (spec,), shape = specs, raw_shape(specs[0], len(raw))
    if spec.element_type == STRING:
        raw = struct.pack("<I", len(raw)) + raw
    size = TensorParameters(binary_data_size=len(raw))
    kind = DATATYPES[spec.element_type]
    return InferDocument((InputDocument(spec.name, kind, tuple(shape), size),)), raw


def _encoded(
    name: str, instance: Instance, request: Inference, outputs: Sequence[Any]
) -> tuple[bytes, list[memoryview]]:
    """The JSON of an answer, and the outputs that come after it as bytes."""
    entries, tensors = [], []
    for wish, array in zip(request.wishes, outputs, strict=True):
        spec = wish.spec
        entry = {"name": spec.name, "datatype": DATATYPES[spec.element_type], "shape": array.shape}
        if wish.region is not None:
            entry["parameters"] = {"shared_memory_byte_size": len(bytes_of(array))}
        elif wish.binary:
            tensors.append(bytes_of(array))
            entry["parameters"] = {"binary_data_size": len(tensors[-1])}
        else:
            entry["data"] = _in_parts(json_of(spec.name, array))
        entries.append(entry)
    about = {"model_name": name, "model_version": instance.version, "outputs": entries}
    if request.asked.id:
        about["id"] = request.asked.id
    return orjson.dumps(about, option=orjson.OPT_SERIALIZE_NUMPY), tensors


def _in_parts(values: Any) -> Any:
    """The values for JSON. Many are written part by part, as nothing else happens meanwhile."""
    if len(values) < _SMALL_VALUES:
        return values
    parts = (values[i : i + _SMALL_VALUES] for i in range(0, len(values), _SMALL_VALUES))
    texts = (orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for part in parts)
    return orjson.Fragment(b"[" + b",".join(texts) + b"]")


def _packed(parts: Sequence[Any], window: int) -> bytes:
    deflate = zlib.compressobj(1, wbits=window)
    return b"".join([*map(deflate.compress, parts), deflate.flush()])


def _reply(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def _failure(
    exc: Exception, about: Mapping[str, Any], instance: Instance | None = None
) -> Response:
    if isinstance(exc, HTTPException):
        exc = RefusedError(exc.status_code, exc.detail)
    status, text = status_of(exc, about, instance)
    headers = {"Retry-After": "1"} if status == 503 else {}
    if status == 408:
        headers["Connection"] = "close"
    return _reply({"error": text}, status, headers)


class _Gate:
    """Lets in who shows a key, and no page of another site that a user's browser has open.

    A browser sends ``Origin`` with what a page asks for, unless it reads from the page's own name, which may
    be pointed here (DNS rebinding). Probes of the server's health need no key.

    Requests for a model's outputs go from here to their handler: Starlette's way there takes as long as it.
    Each request has a name, which the answer and the log have, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        hosts: Sequence[str],
        infer: Sequence[Route],
        *,
        log: "AccessLog | None",
    ) -> None:
        self._app, self._service, self._infer, self._log = app, service, infer, log
        self._hosts = ("", *hosts) if hosts else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path, app = dict(scope["headers"]), scope["path"], self._app
        if path.endswith("/infer"):
            for route in self._infer:
                if match := route.path_regex.match(path):
                    scope["path_params"], app = match.groupdict(), route.app
                    break
        origin, host = headers.get(b"origin"), headers.get(b"host", b"").decode("latin-1").lower()
        is_named = not self._hosts or _PORT.sub("", host) in self._hosts
        own = (f"http://{host}", f"https://{host}")
        is_own = origin is None or origin.decode("latin-1").lower() in own
        is_probe = path.startswith("/v2/health/")
        shown = headers.get(b"authorization", b"").decode("latin-1")
        if len(headers) < len(scope["headers"]) and _is_twice(b"host", scope["headers"]):
            app = _reply({"error": "Host: got several, expected one"}, 400)
        elif not (is_own and is_named):
            text = "a page of another site may not ask here, nor one by the name"
            app = _reply({"error": f"{text} {host[:99]!r}"}, 403)
        elif not is_probe and not self._service.admits(shown):
            challenge = {"WWW-Authenticate": 'Basic realm="mcinfer"'}
            app = _reply({"error": "a key is needed"}, 401, challenge)
        name = self._service.request_id(headers.get(_REQUEST_ID, b"").decode("latin-1"))
        about = scope.setdefault("state", {})[ABOUT] = {"request_id": name}
        status, began = _GONE[0], perf_counter()

        def answer(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_REQUEST_ID, name.encode())]
            return send(message)

        try:
            await app(scope, receive, answer)
        finally:
            if self._log is not None:
                self._log.add(scope, about, status, perf_counter() - began)


class AccessLog:
    """A line for each request over HTTP, in text or in JSON.

    Records of `logging` would take a tenth of a small request's time. Lines are written together, each a
    moment after its answer.

    Attributes:
        write: Takes lines; set while the log is open.
    """

    write: Callable[[str], object]

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lines: list[str] = []

    def add(self, scope: Scope, about: Mapping[str, Any], status: int, seconds: float) -> None:
        """Note an answer, after so many seconds; in the event loop."""
        host = scope["client"]
        client = f"{host[0]}:{host[1]}" if host else "-"
        method, ms, rows = scope["method"], seconds * 1e3, about.get("rows", 0)
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        path = path.decode("ascii", "backslashreplace").replace('"', "%22")
        served = f"{about['model']}/{about['version']}" if "model" in about else "-"
        line = f'{client} - "{method} {path} HTTP/{scope["http_version"]}" {status} '
        line += f"{ms:.1f} ms {served} {rows} rows {about['request_id']}"
        if self._as_json:
            own = {"level": "INFO", "logger": "mcinfer.access", "message": line, **about}
            seen = {"client": client, "method": method, "path": path, "status": status}
            record = {"time": datetime.now(UTC), **own, **seen, "ms": round(ms, 3)}
            line = orjson.dumps(record, option=orjson.OPT_UTC_Z).decode()
        if not self._lines:
            asyncio.get_running_loop().call_later(_GATHER_SECONDS, self.flush)
        self._lines.append(line)

    def flush(self) -> None:
        """Write the lines that are there."""
        lines, self._lines = self._lines, []
        for line in lines:
            self.write(f"{line}\n")


def _is_twice(name: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return sum(each == name for each, _ in headers) > 1


def make_app(
    service: Service,
    page: Sequence[BaseRoute] = (),
    hosts: Sequence[str] = (),
    *,
    access_log: AccessLog | None = None,
) -> ASGIApp:
    """The server as an application of ASGI.

    Args:
        service: What it serves; its models are loaded.
        page: Routes beside the protocol's.
        hosts: The names by which browsers may reach it; any if there is none.
        access_log: Gets a line for each request.
    """

    def answers(operation: Operation) -> Any:
        """A handler of Starlette's for an operation."""
        function, kind = operation.function, operation.takes

        async def answer(request: Request) -> Response:
            said = {}
            connection = request.scope.get("state", {}).get(CONNECTION) or Connection()
            before = (connection.user(),) if operation.by_user else ()
            if kind is not None:
                headers = dict(request.scope["headers"])
                body = _Body(request.receive, headers, service.options)
                said = asdict(read_json(kind, await body.rest(_MAX_PLAIN_BYTES)))
            content = function(*before, *request.path_params.values(), **said)
            if isawaitable(content):
                content = await content
            if isinstance(content, Response):
                return content
            return _reply({} if content is None else content)

        return answer

    def probe(what: str, good: bool, **about: str) -> Response:
        return _reply({**about, what: good}, 200 if good else 503)

    def model_ready(model: str, version: str = "") -> Response:
        return probe("ready", service.model_ready(model, version), name=model)

    def refuse_card(*_: str) -> None:
        raise RefusedError(501, "shared memory of CUDA is not taken")

    def trace(*_: str, trace_level: tuple[str, ...] | None = None) -> dict[str, Any]:
        if trace_level not in (None, ("OFF",)):
            text = "no traces are written; --trace makes spans of OpenTelemetry"
            raise RefusedError(501, text)
        off = {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1"}
        return {**off, "log_frequency": "0", "trace_file": "", "trace_mode": "triton"}

    def metrics() -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def failed(request: Request, exc: Exception) -> Response:
        return _failure(exc, request.scope["state"][ABOUT])

    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    system, card = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    get = {
        "/v2/health/live": Operation("Does it run?", lambda: probe("live", True), Live),
        "/v2/health/ready": Operation(
            "Should requests come?", lambda: probe("ready", service.ready), Ready
        ),
        "/v2": Operation("The server, and its extensions.", service.metadata),
        "/v2/models/stats": Operation("What all models have done.", service.statistics),
        "/v2/logging": Operation(
            "What the log shows.", lambda: service.log_settings(), dict[str, Any]
        ),
        "/metrics": Operation("All figures, for Prometheus.", metrics, "text/plain"),
        "/openapi.json": Operation("This document.", lambda: described, dict[str, Any]),
    }
    one, repository = f"{system}/region/{{name}}", "/v2/repository/models/{model}"
    post = {
        "/v2/repository/index": Operation("All models, or the ready ones.", service.index),
        f"{repository}/load": Operation("Load a model, or load it anew.", service.load, Nothing),
        f"{repository}/unload": Operation("Serve a model no more.", service.unload, Nothing),
        f"{one}/register": Operation(
            "Name a part of an object in POSIX shared memory, for tensors.",
            service.regions.register,
            Nothing,
            by_user=True,
        ),
        f"{card}/region/{{name}}/register": Operation("Refused.", refuse_card, Nothing),
        "/v2/logging": Operation("Change what the log shows.", service.log_settings),
    }
    for end in ("status", "region/{name}/status"):
        get[f"{system}/{end}"] = Operation("Parts that are registered.", service.regions.status)
        get[f"{card}/{end}"] = Operation("None.", lambda *_: [], list[RegionStatus])
    for end in ("unregister", "region/{name}/unregister"):
        post[f"{system}/{end}"] = Operation(
            "Forget one part, or all.", service.regions.unregister, Nothing
        )
        post[f"{card}/{end}"] = Operation("Nothing.", lambda *_: None, Nothing)
    for place in (model, version):
        get[place] = Operation("A model's tensors and versions.", service.model_metadata)
        get[f"{place}/ready"] = Operation("Can it answer?", model_ready, Ready)
        get[f"{place}/config"] = Operation("Triton's ModelConfig.", service.model_config)
        get[f"{place}/stats"] = Operation("What it has done.", service.statistics)
    for place in ("/v2/trace/setting", f"{model}/trace/setting"):
        get[place] = post[place] = Operation("Triton's traces, always off.", trace)
    asked = _Infer(service)  # one for both, as one large JSON is read at a time
    infer = [Route(f"{place}/infer", asked) for place in (model, version)]
    operations = {("GET", place): each for place, each in get.items()}
    operations |= {("POST", place): each for place, each in post.items()}
    routes = [Route(at, answers(each), methods=[how]) for (how, at), each in operations.items()]
    operations |= {
        ("POST", route.path): Operation("The outputs of a model.", asked, InferAnswer)
        for route in infer
    }
    described = description(operations, keys=service.options.key_file is not None)
    caught: Any = dict.fromkeys((McinferError, HTTPException, Exception), failed)
    app = Starlette(routes=[*infer, *routes, *page], exception_handlers=caught)
    return _Gate(app, service, hosts, infer, log=access_log)
