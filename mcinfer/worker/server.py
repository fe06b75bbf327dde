"""A worker's loop: receive, run, reply.

::

    main thread     wait ──► PREDICT ──► bind (cached by the body's bytes) ──► engine run ──► REPLY ──► wait
    canceller thread         waits on its own socket: CANCEL ──► engine.cancel

Ownership: the blocks belong to the master and are mapped until DETACH. Bound runs hold addresses in the
blocks, so they are dropped before the blocks. The main thread owns everything except the cancellations,
which a lock guards.
"""

import ctypes
import hmac
import logging
import os
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mcinfer.config import Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import (
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Run,
    RunCancelledError,
    Strings,
)
from mcinfer.errors import (
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictError,
    ProtocolError,
)
from mcinfer.model_cache.keys import model_identity
from mcinfer.process import ORPHANED
from mcinfer.protocol import (
    MAX_STRINGS,
    PREDICT,
    PREDICT_HEAD,
    REPLY,
    REPLY_HEAD,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Conversation,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    PredictJoined,
    Preparing,
    Reply,
    UpdateWeights,
    decode,
    decode_body,
    encode,
)
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.arena import align
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import STRING, TensorSpec, tensor_bytes
from mcinfer.validators import TensorFields, TensorRef
from mcinfer.worker.joined_runs import JoinedRuns

STRANGER = 77
"""Exit status of a worker that got BUILD from another process than its master: EX_NOPERM of sysexits.h."""

_MAX_LAYOUTS = 1024
_MAX_LAYOUT_BYTES = 4 << 20
"""Most bound layouts that are kept, and bytes of their keys; the least recently used go first."""

_MAX_CANCELLED = 4096
"""Most cancellations that are kept: one that came after its answer is never used."""

_MAX_TEXT = 1 << 20
"""Most characters of an error, whose text may come from a runtime."""

_BLOCK_TIMEOUT = 10.0

_Layout = tuple[int, int, bytes]
"""The version of the weights, bytes of the inputs' references, and the body of PREDICT."""

_log = logging.getLogger("mcinfer.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The secrets by which a worker (hello) and its master (build) know each other, from the lifeline."""

    hello: str
    build: str


class _StrangerError(ProtocolError):
    """The sender of BUILD is not the master that started this worker."""


def serve(
    connection: WorkerTransport,
    tokens: Tokens,
    lifeline: Lifeline,
    cancels: Cancels,
    log_level: int,
) -> int:
    """Serve the master until EXIT; return the exit status."""
    logging.basicConfig(level=log_level, format="%(levelname)s %(name)s: %(message)s")
    server = Server(connection, tokens, lifeline, cancels)
    try:
        server.send(Hello(version=VERSION, pid=os.getpid(), token=tokens.hello))
        server.loop()
    except _StrangerError as exc:
        _log.error("%s; this worker does nothing for it, and ends", exc)
        return STRANGER
    except ConnectionError:
        return ORPHANED
    except ProtocolError:
        _log.exception("the master's message does not fit")
        return 1
    finally:
        server.close()
    return 0


class Server:
    """A worker's side of its conversation with the master. It owns the dealer."""

    def __init__(
        self, dealer: WorkerTransport, tokens: Tokens, lifeline: Lifeline, cancels: Cancels
    ) -> None:
        self._dealer = dealer
        self._tokens = tokens
        self._cancels = cancels
        self._lifeline = lifeline
        self._conversation = Conversation()
        self._engine: Engine  # from BUILD on, before which the conversation allows no other message
        self._blocks: dict[int, Block] = {}
        self._own_blocks = 0
        self._runs: OrderedDict[_Layout, tuple[Run, frozenset[int | None], tuple[TensorRef, ...]]]
        self._runs = OrderedDict()
        self._layout_bytes = 0
        self._joined: JoinedRuns | None = None
        self._weights: dict[int, tuple[Buffer, ...]] = {0: ()}
        self._lock = threading.Lock()
        self._running: tuple[int, int] | None = None
        self._cancelled: OrderedDict[tuple[int, int], None] = OrderedDict()
        canceller = threading.Thread(target=self._cancel_runs, name="mcinfer-cancel", daemon=True)
        canceller.start()

    def send(self, message: Message) -> None:
        """Send a message, or raise `ProtocolError` if it may not come now."""
        self._conversation.advance(message)
        self._dealer.send(encode(message))

    def loop(self) -> None:
        """Serve until EXIT; raise `ProtocolError` for a message that does not fit."""
        wait = self._dealer.wait
        while True:
            data = wait()
            if data and data[0] == PREDICT:
                self.predict(data)
            elif not self.handle(decode(data)):
                return

    def handle(self, message: Message) -> bool:
        """Follow a message and answer it; return whether more may come. Raises as `loop` does."""
        self._conversation.advance(message)
        match message:
            case Predict():
                raise ProtocolError("a PREDICT is to be taken as bytes")
            case PredictJoined():
                answer = self._run_or_fail(message.request, message.shard, message, b"")
                if isinstance(answer, Message):
                    self._answer(answer)
            case Attach():
                self._attach(message)
            case Detach():
                self._detach(message.block)
            case UpdateWeights():
                self._take_weights(message)
            case Build():
                self._check_master(message)
                self._answer(self._build(message))
        return not isinstance(message, Exit)

    def _answer(self, message: Message) -> None:
        """Send the answer of a build or a run; an error if the answer is too large for a message."""
        try:
            data = encode(message)
        except ProtocolError as exc:
            build = isinstance(message, BuildFinish)
            message = Error(
                request=getattr(message, "request", None),
                shard=getattr(message, "shard", None),
                kind="build" if build else "predict",
                text=f"the answer does not fit a message to the master: {exc}",
            )
            data = encode(message)
        self._conversation.advance(message)
        self._dealer.send(data)

    def close(self) -> None:
        self._runs.clear()
        if self._joined is not None:
            self._joined.close()
        self._dealer.close()

    # Building.

    def _check_master(self, message: Build) -> None:
        """Raise `_StrangerError` unless BUILD comes from this worker's master."""
        shown, expected = (
            token.encode(errors="surrogatepass") for token in (message.token, self._tokens.build)
        )
        if not hmac.compare_digest(shown, expected):
            raise _StrangerError("BUILD does not show the token of the master that started this")

    def _build(self, message: Build) -> Message:
        start = time.perf_counter()
        try:
            if message.cores:
                os.sched_setaffinity(0, message.cores)
            threads = message.threads or len(message.cores) or len(os.sched_getaffinity(0))
            identity = model_identity(message.model)
            self._engine = open_engine(
                message.engine,
                EngineRequest(
                    model=message.model,
                    device=Device.parse(message.device),
                    threads=threads,
                    inter_op_threads=message.inter_op_threads,
                    shared_cores=message.shared,
                    allow_fallback=message.allow_fallback,
                    prepare=message.prepare,
                    variable_weights=message.variable_weights,
                    session_config=message.session_config,
                    provider_options=message.provider_options,
                ),
                self._tell_progress,
            )
            self._joined = JoinedRuns(self._engine)
        except Exception as exc:  # the master gets whatever the runtime raises
            kind = "missing" if isinstance(exc, MissingDependencyError) else "build"
            return Error(kind=kind, text=_describe(exc), traceback=_story(exc))
        return BuildFinish(
            inputs=_fields(self._engine.spec.inputs),
            outputs=_fields(self._engine.spec.outputs),
            weights=_fields(self._engine.weights),
            notes=self._engine.notes,
            model=identity,
            prepared=self._engine.prepared,
            providers=self._engine.providers,
            seconds=time.perf_counter() - start,
        )

    def _tell_progress(self, state: Mapping[str, Any]) -> None:
        self.send(Preparing(seconds=float(state["seconds"]), written=state["written"]))

    # Running.

    def predict(self, data: bytes) -> None:
        """Run a PREDICT and answer it; raise `ProtocolError` if it does not fit."""
        if len(data) < PREDICT_HEAD.size:
            raise ProtocolError(f"Predict: got {len(data)} bytes, expected a head")
        _, request, shard, version, size = PREDICT_HEAD.unpack_from(data)
        body = data[PREDICT_HEAD.size :]
        self._conversation.begin_run(request, shard)
        answer = self._run_or_fail(request, shard, (version, size), body)
        if isinstance(answer, Message):
            self._answer(answer)
            return
        # All outputs are in the places that the master chose.
        self._conversation.end_run()
        self._dealer.send(REPLY_HEAD.pack(REPLY, request, shard, answer))

    def _run_or_fail(
        self, request: int, shard: int, what: PredictJoined | tuple[int, int], body: bytes
    ) -> Message | float:
        """Run: the answer, or only the seconds if all outputs are in their places."""
        try:
            if isinstance(what, PredictJoined):
                outputs, seconds = self._run_joined(what)
            else:
                run, references = self._bound(what[0], what[1], body)
                produced, seconds = self._execute(run, request, shard)
                if not produced and references:
                    return seconds
                outputs = self._place(produced, references)
            return Reply(request=request, shard=shard, outputs=outputs, seconds=seconds)
        except Exception as exc:  # a run that raises anything fails only its request
            kinds = {RunCancelledError: "cancelled", InvalidInputError: "invalid"}
            kind = next((k for error, k in kinds.items() if isinstance(exc, error)), "predict")
            text, story = _describe(exc), _story(exc)
            return Error(request=request, shard=shard, kind=kind, text=text, traceback=story)

    def _run_joined(self, message: PredictJoined) -> tuple[tuple[TensorRef, ...], float]:
        """Run several requests as one batch."""
        if self._joined is None:
            raise ProtocolError("PREDICT_JOINED before a model was built")
        members = [
            ([*map(self._buffer, member["inputs"])], [*map(self._buffer, member["outputs"])])
            for member in message.members
        ]
        weights = self._weights_of(message.weights)
        axes = (message.input_axes, message.output_axes)
        joined = self._joined.bound(members, axes, weights, message.weights)
        joined.gather(members, message.input_axes)
        produced, seconds = self._execute(joined.run, message.request, message.shard)
        if produced:
            names = [item.name for item in produced]
            raise PredictError(f"outputs {names} have other shapes than the model declares")
        joined.scatter(members, message.output_axes)
        return (), seconds

    def _bound(self, version: int, size: int, body: bytes) -> tuple[Run, tuple[TensorRef, ...]]:
        """The run bound to this layout, and the places of its outputs; cached."""
        key = (version, size, body)
        found = self._runs.get(key)
        if found is not None:
            self._runs.move_to_end(key)
            return found[0], found[2]
        inputs, outputs = decode_body(body, size)
        weights = self._weights_of(version)
        resolved = [self._resolve(reference) for reference in inputs]
        buffers = [self._buffer(reference) for reference in outputs]
        run = self._engine.bind([*resolved, *weights], buffers)
        if not any(isinstance(item, Strings) for item in resolved):
            blocks = frozenset(reference[3] for part in (inputs, outputs) for reference in part)
            self._runs[key] = (run, blocks, outputs)
            self._layout_bytes += len(body)
            while len(self._runs) > _MAX_LAYOUTS or self._layout_bytes > _MAX_LAYOUT_BYTES:
                (_, _, oldest), _ = self._runs.popitem(last=False)
                self._layout_bytes -= len(oldest)
        return run, outputs

    def _resolve(self, reference: TensorRef) -> Buffer | Strings:
        name, element_type, shape, _, values = reference
        if element_type == STRING:
            return Strings(name=name, shape=shape, values=values)
        return self._buffer(reference)

    def _buffer(self, reference: TensorRef) -> Buffer:
        name, element_type, shape, number, offset = reference
        size = tensor_bytes(element_type, prod(shape))
        block = None if number is None else self._blocks.get(number)
        if block is None or offset + size > block.size:
            raise ProtocolError(f"tensor {name!r} does not lie in block {number}: {reference}")
        place = block.address + offset
        return Buffer(name=name, element_type=element_type, shape=shape, address=place, size=size)

    def _execute(
        self, run: Run, request: int, shard: int
    ) -> tuple[Sequence[Produced | Strings], float]:
        """Run, unless the run is cancelled before or meanwhile."""
        key = (request, shard)
        self._engine.arm()
        with self._lock:
            if self._cancelled and key in self._cancelled:
                del self._cancelled[key]
                raise RunCancelledError("the run was cancelled before it began")
            self._running = key
        start = time.perf_counter()
        try:
            produced = run.execute()
            seconds = time.perf_counter() - start
        finally:
            with self._lock:
                self._running = None
        return produced, seconds

    def _cancel_runs(self) -> None:
        """The canceller thread."""
        while True:
            try:
                key = self._cancels.wait()
            except ProtocolError:
                _log.exception("the master's message does not fit")
                os._exit(1)
            if key is None:
                return
            with self._lock:
                if key == self._running:
                    self._engine.cancel()
                    continue
                self._cancelled[key] = None
                if len(self._cancelled) > _MAX_CANCELLED:
                    self._cancelled.popitem(last=False)

    # Outputs.

    def _place(
        self, produced: Sequence[Produced | Strings], bound: tuple[TensorRef, ...]
    ) -> tuple[TensorRef, ...]:
        """References to all outputs; those that the engine allocated are copied to a block of this worker."""
        if not produced:
            return ()
        references = {reference[0]: reference for reference in bound}
        strings = sum(len(item.values) for item in produced if isinstance(item, Strings))
        if strings > MAX_STRINGS:
            raise PredictError(
                f"got {strings} strings in outputs, expected at most {MAX_STRINGS}; a batch of fewer "
                "rows has fewer"
            )
        tensors = [item for item in produced if isinstance(item, Produced)]
        size = sum(align(item.size) for item in tensors)
        block, offset = None, 0
        if size:
            self._own_blocks += 1
            block = Block.create(-self._own_blocks, size)
        for item in produced:
            if isinstance(item, Strings):
                references[item.name] = (item.name, STRING, item.shape, None, item.values)
                continue
            # A tensor without elements needs no memory, and no block has 0 bytes.
            number = 0 if block is None else block.number
            if block is not None:
                ctypes.memmove(block.address + offset, item.address, item.size)
            references[item.name] = (item.name, item.element_type, item.shape, number, offset)
            offset += align(item.size)
        if block is not None:
            self._lifeline.send_block(block.number, block.size, block.fd)
            block.close()
        return tuple(references[spec.name] for spec in self._engine.spec.outputs)

    # Weights.

    def _take_weights(self, message: UpdateWeights) -> None:
        """Record where a version lies, and forget those that no run will name any more."""
        self._weights[message.version] = tuple(map(self._buffer, message.tensors))
        for version in [*self._weights]:
            if 0 < version < message.oldest:
                del self._weights[version]
        self._drop_runs(lambda layout, _: 0 < layout[0] < message.oldest)
        if self._joined is not None:
            self._joined.forget(message.oldest)

    def _weights_of(self, version: int) -> tuple[Buffer, ...]:
        weights = self._weights.get(version)
        if weights is None:
            raise ProtocolError(f"version {version} of the weights is not known")
        return weights

    def _attach(self, message: Attach) -> None:
        """Map a block of the master."""
        if message.block in self._blocks:
            raise ProtocolError(f"block {message.block} was attached before")
        try:
            size, fd = self._lifeline.receive_block(message.block, timeout=_BLOCK_TIMEOUT)
            self._blocks[message.block] = Block.attach(message.block, size, fd)
        except OSError as exc:
            raise ProtocolError(f"block {message.block} cannot be attached: {exc}") from exc

    def _drop_runs(self, unwanted: Callable[[_Layout, frozenset[int | None]], bool]) -> None:
        for layout, (_, blocks, _) in [*self._runs.items()]:
            if unwanted(layout, blocks):
                del self._runs[layout]
                self._layout_bytes -= len(layout[2])

    def _detach(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        self._drop_runs(lambda _, blocks: number in blocks)
        if block is not None:
            block.close()


def _fields(specs: Sequence[TensorSpec]) -> tuple[TensorFields, ...]:
    return tuple((spec.name, spec.element_type, spec.shape) for spec in specs)


def _describe(exc: Exception) -> str:
    text = str(exc)[:_MAX_TEXT]
    return text if isinstance(exc, McinferError) else f"{type(exc).__name__}: {text}"


def _story(exc: Exception) -> str:
    return "".join(traceback.format_exception(exc))[:_MAX_TEXT]
