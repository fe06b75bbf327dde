"""The process of ``mcinfer serve``: sockets, uvicorn and gRPC, and an end that loses no request."""

import asyncio
import ctypes
import logging
import os
import select
import signal
import socket
import ssl
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import uvicorn
from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mcinfer.errors import InvalidInputError
from mcinfer.extras import requires
from mcinfer.logs import write_json
from mcinfer.serve.figures import Figures
from mcinfer.serve.http import CONNECTION, WHOLE, AccessLog, Connection, make_app
from mcinfer.serve.live import page_routes
from mcinfer.serve.models import Models, settle
from mcinfer.serve.regions import user_of
from mcinfer.serve.service import ServeOptions, Service

_log = logging.getLogger("mcinfer.serve")

ENDING = "ending"
"""The key of `Service.ending` in the state of uvicorn's lifespan."""

LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")

_HEAD_BYTES, _HEAD_SECONDS = 64 << 10, 20.0
"""Of a request's line and headers: most bytes, and seconds for them to come, with what is left of an answered
request's body."""

_LOOK_SECONDS = 1.0
"""How often a connection looks whether its client is late."""

_SENT_SECONDS = 0.25
"""After the end of what a client sends, until the server first asks whether it is still there."""

_SO_ATTACH_FILTER = 26

_BEGIN_SECONDS = 0.3
"""For a connection to begin whose client has asked for it."""

_LAST_SECONDS = 1.0
"""How long an idle connection stays when the server ends: its client may be about to ask."""

_SMALL_BYTES = 1 << 16
"""A part of an answer below is copied, to be written together with the head: that is one system call less."""

_MOST_TEXTS = 10_000
"""Records of the log that wait to be written."""

_UNREAD_SECONDS, _LEAST_READ = 60.0, 1 << 20
"""A client that reads fewer bytes of an answer in so many seconds is let go; the answer holds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to listen, and how.

    Attributes:
        uds: Path of a Unix socket that only this user can open, in place of host and port.
        grpc_port: None for no gRPC; 0 is any free one.
        certificate: Files of a certificate and of its key, for TLS.
        max_connections: Most connections over HTTP at once.
        drain: Seconds for requests to be answered when the server ends.
        drain_delay: Seconds after SIGTERM in which it is not ready and takes connections all the same.
        access_log: Whether to log each request over HTTP.
        json_log: Whether the log has lines of JSON.
        reuse_port: Whether other processes of this user may listen at the same port, and have a part of the
            connections.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    grpc_port: int | None = None
    certificate: tuple[Path, Path] | None = None
    max_connections: int = 1000
    drain: float = 30.0
    drain_delay: float = 1.0
    access_log: bool = False
    json_log: bool = False
    reuse_port: bool = False

    def address(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def place(self, listening: socket.socket) -> str:
        """Where clients find the server."""
        if self.uds:
            return str(self.uds)
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{self.address(listening.getsockname()[1])}"

    @contextmanager
    def shared(self, count: int) -> Iterator["Listening"]:
        """A socket for each of so many processes; raises as `listening`.

        The system deals out connections over sockets at one port evenly. From one socket, the process that
        comes first takes all that wait. A Unix socket cannot be had twice, so all have the same one.
        """
        with ExitStack() as opened:
            listening = opened.enter_context(self.listening())
            (first,) = listening.sockets
            if self.uds:
                yield replace(listening, sockets=[first] * count)
                return
            sockets, port = [first], first.getsockname()[1]
            if not self.reuse_port:
                first.close()  # it has shown that no other server has the port
                sockets = []
            own = replace(self, port=port, reuse_port=True)
            for _ in range(len(sockets), count):
                sockets += opened.enter_context(own.listening()).sockets
            yield replace(listening, sockets=sockets)

    @contextmanager
    def logging(self, access: AccessLog) -> Iterator[None]:
        """Write the records of the log, and the lines of the access log, without waiting."""
        if self.json_log:
            write_json()  # this may be another process than that of the command
        with _Errors().taking_logs() as access.write:
            try:
                yield
            finally:
                access.flush()

    @contextmanager
    def listening(self) -> Iterator["Listening"]:
        """Listen for HTTP; `InvalidInputError` if that cannot be had."""
        try:
            listening = self._bound()
        except OSError as exc:
            place = self.uds or self.address(self.port)
            raise InvalidInputError(f"cannot listen at {place}: {exc.strerror or exc}") from exc
        # Keeps the file's number from another file: the next server may have put its own there.
        own = os.open(self.uds, os.O_PATH) if self.uds else None

        def remove() -> None:
            if self.uds and own is not None:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(own), self.uds.lstat()):
                        self.uds.unlink()

        try:
            with listening:
                yield Listening([listening], remove)
        finally:
            remove()
            if own is not None:
                os.close(own)

    def _bound(self) -> socket.socket:
        if self.uds is None:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server(
                (self.host, self.port), family=family, backlog=2048, reuse_port=self.reuse_port
            )
        if self.uds.exists() and stat.S_ISSOCK(self.uds.stat().st_mode):
            with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
                probe.connect(str(self.uds))
                raise FileExistsError(None, "another server does")
            self.uds.unlink()
        listening = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listening.bind(str(self.uds))
            listening.listen(2048)
        except OSError:
            listening.close()
            raise
        finally:
            os.umask(before)
        return listening


_NO_SYN = struct.pack(
    "HBBI" * 4, *(0x30, 0, 0, 13), *(0x45, 0, 1, 2), *(6, 0, 0, 0), *(6, 0, 0, ~0 % (1 << 32))
)
"""A filter of BPF: of TCP's segments, let pass those that begin no connection (linux/filter.h)."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Sockets that listen at one address; `remove` takes a Unix socket's file away, if it is still theirs."""

    sockets: Sequence[socket.socket]
    remove: Callable[[], None]

    async def accept_last(self) -> None:
        """Have no connection begin any more, and all that began accepted: to close would reset what waits.

        Clients that come now find that nothing listens when they ask again, after a second.
        """
        self.remove()
        if self.sockets[0].family != socket.AF_UNIX:
            program = ctypes.create_string_buffer(_NO_SYN)
            filter_ = struct.pack("HP", 4, ctypes.addressof(program))
            with suppress(OSError):  # not every kernel can
                for each in self.sockets:
                    each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
                await asyncio.sleep(_BEGIN_SECONDS)
        waiting = select.poll()
        for each in self.sockets:
            waiting.register(each, select.POLLIN)
        end = asyncio.get_running_loop().time() + _LAST_SECONDS
        while waiting.poll(0) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)


class _Errors:
    """Standard error as a stream that never waits: a thread writes, and what is too much is dropped.

    The event loop logs, too. A pipe that is full, since its reader stands still, would stop the server. So
    much is written at once that no other process's lines come in between: `PIPE_BUF` of pipe(7).
    """

    def __init__(self) -> None:
        self._texts: SimpleQueue[bytes | None] = SimpleQueue()
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="mcinfer-log", daemon=True)

    @contextmanager
    def taking_logs(self) -> Iterator[Callable[[str], None]]:
        """Have the records of the log that no other handler takes; gives what takes other lines."""
        last = logging.lastResort
        self._writer.start()
        before = last.setStream(self) if type(last) is logging.StreamHandler else None
        try:
            yield self.write
        finally:
            if type(last) is logging.StreamHandler:
                last.setStream(before or sys.stderr)
            self._texts.put(None)
            self._writer.join(_LAST_SECONDS)

    def write(self, text: str) -> None:
        if self._texts.qsize() < _MOST_TEXTS:
            self._texts.put(text.encode(errors="backslashreplace"))
        else:
            self._dropped += 1

    def flush(self) -> None:
        """Nothing: the thread does."""

    def _write(self) -> None:
        data = b""
        text: bytes | None = b""
        while text is not None:
            try:
                text = self._texts.get(block=not data)
            except Empty:
                text = b""
            if text and len(data) + len(text) <= select.PIPE_BUF:
                data += text
                continue
            self._put(data)
            if dropped := self._dropped:
                self._dropped = 0
                self._put(_note(f"{dropped} records were dropped, since nothing read this"))
            data = text or b""

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # its reader is gone
            while data:
                # Not by `sys.stderr`: its lock, in a thread that waits, would stop the end of Python.
                file = sys.stderr.fileno()
                ready = select.poll()  # its file may be set to never block, by any program
                ready.register(file, select.POLLOUT)
                ready.poll()
                with suppress(BlockingIOError):
                    data = data[os.write(file, data) :]


def _note(text: str) -> bytes:
    """A warning as a line of the log."""
    record = {"name": _log.name, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
    line = (logging.lastResort or logging.Handler()).format(logging.makeLogRecord(record))
    return f"{line}\n".encode()


class _Writer(asyncio.Transport):
    """Where uvicorn writes answers: what waits is written together with what comes next.

    An answer to a client that has hung up is dropped. uvicorn itself drops that to the last request alone.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._connection, self._waiting = connection, b""
        self._write, self._write_all = transport.write, transport.writelines
        self.close, self.is_closing = transport.close, transport.is_closing  # type: ignore[method-assign]

    def write(self, data: Any) -> None:
        if self._connection.is_lost:
            return
        if self._connection.joins:
            self._waiting += data
        elif self._waiting:
            waiting, self._waiting = self._waiting, b""
            if len(data) < _SMALL_BYTES:
                self._write(waiting + data)
            else:
                self._write_all((waiting, data))
        else:
            self._write(data)


class _Protocol(HttpToolsProtocol):
    """A connection with limits on heads, and an end for a client that is late; bodies have `ServeOptions`.

    It is the client's turn until a head is complete, after an answer, and while an answer waits to be read.
    """

    _head, _ending, _goes_on = 0, False, False
    _data = _again = b""
    _left, _read_by = 0, inf
    _running: Any = None  # uvicorn's cycle of the request that is answered
    _has_sent_all = False

    def __init__(self, most: int, **given: Any) -> None:
        super().__init__(**given)
        self._most = most

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._connection = Connection(partial(user_of, transport.get_extra_info("socket")))
        self._writer = _Writer(transport, self._connection)
        self.app_state = {**self.app_state, CONNECTION: self._connection}
        self._due = self.loop.time() + _HEAD_SECONDS
        self._look()
        if len(self.connections) > self._most:
            transport.write(_refusal(f"there are {self._most} connections, the limit"))
            transport.close()

    def _look(self) -> None:
        """End the connection if its client is late: there is no timer that a byte puts off."""
        if self._has_sent_all:
            self._ask_if_there()
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        if left:
            if not self._left or left <= self._left - _LEAST_READ:
                self._left, self._read_by = left, now + _UNREAD_SECONDS
            self._due = max(self._due, now + _HEAD_SECONDS)
        else:
            self._left, self._read_by = 0, inf
        if now > min(self._due, self._read_by):
            self.transport.abort()
        self._timer = self.loop.call_later(_LOOK_SECONDS, self._look)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays, as a client that has sent its requests may wait for the answers.

        TCP does not say whether it waits or has hung up; TLS has no such end of one side.
        """
        last = self.cycle
        if self.scheme == "https" or not last or last.more_body or last.response_complete:
            return False
        last.keep_alive, self._has_sent_all = False, True
        self._timer.cancel()
        self._timer = self.loop.call_later(_SENT_SECONDS, self._look)
        return not self._is_reset()

    def _is_reset(self) -> bool:
        waiting = select.poll()
        waiting.register(self.transport.get_extra_info("socket"), 0)
        return bool(waiting.poll(0))

    def _ask_if_there(self) -> None:
        """Write what clients pass over by RFC 9110, 15.2.1: the system of one that has hung up resets it."""
        if self._is_reset():
            self.transport.abort()
        elif not self._running.response_started and self._running.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        # Not in the context of the request before, which may have named its caller's span.
        Context().run(super()._start_asgi_task, cycle, app)

    def data_received(self, data: bytes) -> None:
        self._goes_on, self._again = False, data
        while self._again:
            self._data, self._again = self._again, b""
            super().data_received(self._data)
        self._head = 0 if self._goes_on else self._head + len(data)
        if self._head > _HEAD_BYTES:  # the lines after a body in chunks are kept, too
            self.transport.abort()

    @property
    def _would_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Have a request read again without its wish for another protocol, which ends HTTP for the parser."""
        if self._would_upgrade and isinstance(exc := sys.exc_info()[1], HttpParserUpgrade):
            version = self.parser.get_http_version().encode()
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
            lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
            self._again = b"\r\n".join([*lines, b"", self._data[exc.args[0] :]])
            self.parser = HttpRequestParser(self)

    def on_body(self, body: bytes) -> None:
        self._goes_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._goes_on = True
        if self._would_upgrade:
            return
        super().on_message_complete()
        self.scope["state"][WHOLE] = True
        if not self.pipeline:
            # A large body may have stopped it, and only what reads sees that the client hangs up.
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        if self._would_upgrade:
            return
        self._due = inf
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = self._writer
            if self._ending:
                self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # there is no further one
            self._due = self.loop.time() + _HEAD_SECONDS

    def shutdown(self) -> None:
        self._ending = True
        if ENDING in self.app_state:
            self.app_state[ENDING].set()
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(_LAST_SECONDS, super().shutdown)
        else:
            super().shutdown()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._left = 0  # more may follow at once

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
        self._connection.lose()


def _refusal(text: str) -> bytes:
    body = b'{"error":"%s"}' % text.encode()
    lines = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n" % len(body)
    return head + lines + b"\r\n" + body


class Config(uvicorn.Config):
    """What uvicorn goes by, with all that is served; its supervisor sends it to other processes.

    Args:
        models: Not loaded yet.
        options: What the server allows.
        endpoint: Where it listens.
        folder: Where the processes of one server have their figures, or None if there is one process.

    Attributes:
        service: There once it is loaded.
        access: The access log; `Endpoint.logging` opens it.
    """

    service: Service

    def __init__(
        self, models: Models, options: ServeOptions, endpoint: Endpoint, folder: Path | None = None
    ) -> None:
        certificate, key = endpoint.certificate or (None, None)
        super().__init__(
            "",
            http=partial(_Protocol, endpoint.max_connections),  # type: ignore[arg-type]
            ws="none",
            loop="uvloop",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=ceil(endpoint.drain),
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self.models, self.options, self.endpoint, self.folder = models, options, endpoint, folder
        self.access = AccessLog(as_json=endpoint.json_log)

    def load_app(self) -> Any:
        """The application, for this process."""
        self.service = Service(self.models, self.options, Figures(self.models, self.folder))
        is_open = self.endpoint.uds or self.options.key_file or self.endpoint.host not in LOOPBACK
        hosts = () if is_open else LOOPBACK
        log = self.access if self.endpoint.access_log else None
        return make_app(self.service, page_routes(self.service), hosts, access_log=log)

    def load(self) -> None:
        """Load it; `InvalidInputError` if there is no such certificate."""
        try:
            super().load()
        except OSError as exc:  # ssl.SSLError is one
            raise InvalidInputError(f"--ssl-certfile, --ssl-keyfile: {exc}") from exc


class _Server(uvicorn.Server):
    """Answers what was accepted, over HTTP and gRPC, before it ends."""

    def __init__(self, config: Config, listening: Listening, grpc_server: Any) -> None:
        super().__init__(config)
        self._service, self._delay = config.service, config.endpoint.drain_delay
        self._listening, self._grpc = listening, grpc_server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        clock, patience = (
            asyncio.get_running_loop().time,
            self.config.timeout_graceful_shutdown or 0,
        )
        self._service.ending.set()
        end = clock() + (self._delay if signal.SIGTERM in self._captured_signals else 0)
        while clock() < end and not self.force_exit:
            await asyncio.sleep(0.05)
        await self._listening.accept_last()
        end = clock() + patience
        if self._grpc is not None:
            stopping = asyncio.ensure_future(self._grpc.stop(patience))
        await super().shutdown(sockets)

        async def drain() -> None:
            if self._grpc is not None:
                await stopping
            await self._service.models.drain()

        draining = asyncio.ensure_future(drain())
        while not (draining.done() or self.force_exit or clock() > end):
            await asyncio.wait((draining,), timeout=0.1)


async def run(
    models: Models, options: ServeOptions, endpoint: Endpoint, say: Callable[[str], None]
) -> None:
    """Load the models, say so, and serve until SIGINT or SIGTERM, which is raised again afterwards.

    Raises:
        InvalidInputError: An address is taken, or a certificate cannot be read.
        RefusedError: A model cannot be loaded.
        MissingDependencyError: gRPC is asked for, and not installed.
    """
    config = Config(models, options, endpoint)
    with (
        endpoint.listening() as listening,
        endpoint.logging(config.access),
        tracing(models, options),
    ):
        async with models:
            config.load()
            grpc_server, grpc_port = await _grpc_server(config.service, endpoint)
            too = f", gRPC at {endpoint.address(grpc_port)}" if grpc_server else ""
            settle()
            if endpoint.certificate or options.key_file:
                renew, loop = partial(_renew, config), asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, None, renew)
            names = ", ".join(dict(models.loaded())) or "no model"
            say(f"serving {names} at {endpoint.place(listening.sockets[0])}{too}")
            await _Server(config, listening, grpc_server).serve([*listening.sockets])


@contextmanager
def tracing(models: Models, options: ServeOptions) -> Iterator[None]:
    """Have models that are opened make spans, which are exported meanwhile; nothing unless that is wanted."""
    if not options.traces:
        yield
        return
    from mcinfer.exporters.opentelemetry import exporting, request_spans

    with exporting():
        models.trace = request_spans()
        yield


def _renew(config: Config) -> None:
    """Read keys and certificate again; what was there stays if they cannot be read."""
    try:
        config.service.read_keys()
        if config.ssl and (certificate := config.endpoint.certificate):
            ssl.create_default_context().load_cert_chain(*certificate)  # do they fit?
            config.ssl.load_cert_chain(*certificate)
    except (InvalidInputError, OSError) as exc:
        _log.error("SIGHUP: %s", exc)
    else:
        _log.warning("SIGHUP: keys and certificate were read again")


async def _grpc_server(service: Service, endpoint: Endpoint) -> tuple[Any, int]:
    """A server of gRPC that has begun, and its port; None and 0 if none is asked for."""
    if endpoint.grpc_port is None:
        return None, 0
    with requires("--grpc-port needs the package grpcio", "grpc", extra="grpc"):
        import grpc

        from mcinfer.serve.grpc import add_service
    most = service.options.max_request_bytes
    sizes = [("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*sizes, ("grpc.so_reuseport", 0)])
    add_service(server, service)
    address = endpoint.address(endpoint.grpc_port)
    try:
        if endpoint.certificate is None:
            port = server.add_insecure_port(address)
        else:
            certificate, key = (file.read_bytes() for file in endpoint.certificate)
            credentials = grpc.ssl_server_credentials([(key, certificate)])
            port = server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise InvalidInputError(f"--grpc-port: cannot listen at {address}") from exc
    await server.start()
    return server, port
