"""A worker's loop: receive, run, reply.

::

    main thread     wait ──► PREDICT ──► bind (cached by the body's bytes) ──► engine run ──► REPLY ──► wait
    canceller thread         waits at a socket of its own: CANCEL ──► engine.cancel

Where the engine executes several runs at once, as many threads take turns in the place of the main thread:
see `turns`. If the model is cut over several ranks, each is a worker like any other, with an engine that runs
its slice.

Ownership: the blocks belong to the master and are mapped until DETACH. Bound runs hold addresses in the
blocks, so they are dropped before the blocks. A lock guards the cancellations; the main thread, or the one
that has the turn, owns the rest.
"""

import ctypes
import logging
import os
import select
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate, count
from typing import Any

from mcinfer.config import CARD_KINDS, INLINE, CoreShare, Device
from mcinfer.engines import open_engine
from mcinfer.engines.base import (
    BoundRun,
    Engine,
    EngineRequest,
    OutOfMemoryError,
    Produced,
    RunCancelledError,
    Strings,
    memory_limit,
)
from mcinfer.engines.preparation import identity, readable_content
from mcinfer.errors import (
    BuildError,
    CardLostError,
    CollectiveTimeoutError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    ProtocolError,
    RankDiedError,
)
from mcinfer.machine import format_core_list
from mcinfer.private import in_words
from mcinfer.process import ORPHANED
from mcinfer.protocol import (
    MAX_NOTE,
    MAX_NOTES,
    MAX_SPECS,
    PREDICT,
    PREDICT_HEAD,
    REPLY,
    REPLY_HEAD,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    PredictJoined,
    Preparing,
    Reply,
    TensorFields,
    TensorRef,
    UpdateWeights,
    WorkerState,
    decode,
    encode,
    state_after,
)
from mcinfer.runtime.cancels import Cancels
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.arena import AttachedBlocks, OfferedBlock, SharedBlock, align
from mcinfer.shm.block import Block
from mcinfer.shm.lifeline import Lifeline
from mcinfer.specs import STRING, TensorSpec
from mcinfer.worker.runs import Runs
from mcinfer.worker.turns import SharedTransport
from mcinfer.worker.wide import WideEngine

_MAX_CANCELLED = 4096
"""Most cancellations that are kept: one that comes after its answer is never used."""

_MAX_TEXT = 1 << 20
"""Most characters of an error: a runtime's text may have any length."""

_BLOCK_TIMEOUT = 10.0

_Bound = tuple[BoundRun, tuple[TensorRef, ...]]
"""A run, and the places that its outputs are bound to."""

CARD_LOST = 74
"""Exit status of a worker that cannot use its card any more: EX_IOERR of sysexits.h. The run is to blame."""

_log = logging.getLogger("mcinfer.worker")


class Server:
    """A worker's side of its conversation with the master.

    Args:
        connection: Carries the messages.
        token: Shown in HELLO; it came over the lifeline.
        lifeline: Brings the blocks.
        cancels: Brings CANCEL.
        group: Descriptors of the group that it is a rank of, if any.
        in_thread: No watcher ends this process when the master hangs up, since the master is in it.

    Attributes:
        threads: Those that execute runs beside the one that serves.
    """

    def __init__(
        self,
        connection: WorkerTransport,
        token: str,
        lifeline: Lifeline,
        cancels: Cancels,
        group: Sequence[int] = (),
        *,
        in_thread: bool = False,
    ) -> None:
        self._connection = connection
        self._in_thread = in_thread
        self._token = token
        self._cancels = cancels
        self._lifeline = lifeline
        self._group = [*group]
        self._poll = select.poll()
        self._state = WorkerState.SPAWNED
        # From BUILD on; `TRANSITIONS` allow no run before it.
        self._engine: Engine
        self._lanes: list[Runs] = []  # of each thread that executes runs
        self._is_built = False
        self._wide: WideEngine | None = None
        self.threads: list[threading.Thread] = []
        self._cores: Sequence[int] = ()
        self._notes: tuple[str, ...] = ()  # of this worker's own
        self._shared: SharedTransport | None = None  # by the threads of several lanes
        self._is_shared = False
        self._ended = False
        self._failures: list[BaseException] = []  # of threads
        self._blocks = AttachedBlocks()
        self._block_numbers = count(1)
        self._lock = threading.Lock()
        self._sending = threading.RLock()
        self._running: dict[Engine, tuple[int, int]] = {}
        self._cancelled: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._stopped = False
        self._canceller = threading.Thread(
            target=self._cancel_runs, name="mcinfer-cancel", daemon=True
        )
        self._canceller.start()

    def serve(self) -> int:
        """Serve the master until EXIT or a hang-up, and close all that was opened; the exit status."""
        try:
            self.send(Hello(version=VERSION, pid=os.getpid(), token=self._token))
            self._loop()
        except CardLostError as exc:
            _log.error("%s; this worker ends, and is started again", exc)
            return CARD_LOST
        except ConnectionError:
            return ORPHANED
        except ProtocolError:
            _log.exception("the master's message does not fit")
            return 1
        finally:
            self.close()
        return 0

    def _loop(self) -> None:
        """Serve until EXIT; raises `ProtocolError` at a message that does not fit."""
        wait = self._connection.wait
        if self._in_thread:
            wait = self._wait
            self._watch(self._connection.fd)
        while True:
            data = wait()
            if data and data[0] == PREDICT:
                self.predict(data)
            elif not self.handle(decode(data)):
                return
            elif self._shared is not None and self._state is WorkerState.READY:
                self._take_turns(self._shared)
                return

    def _watch(self, *fds: int) -> None:
        """Have `_wait` wait for these, and for a hang-up."""
        for fd in fds:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._lifeline.fd, 0)  # a hang-up is always reported

    def _wait(self) -> bytes:
        """The next message; `ConnectionResetError` once the master has hung up."""
        while not self._stopped:
            data = self._connection.receive()
            if data is not None:
                return data
            self._poll.poll()
        raise ConnectionResetError("the master has hung up")

    def _start_lanes(self) -> None:
        """Have a thread for each run at once; all wait for the turn, which this thread has."""
        engines = [self._engine, *(self._engine.twin() for _ in range(1, self._engine.concurrent))]
        self._lanes = [Runs(engine, self._blocks) for engine in engines]
        self._connection = self._shared = shared = SharedTransport(self._connection, self._sending)
        self._watch(shared.fd, shared.bell)
        shared.take_turn()
        for lane in range(1, len(engines)):
            thread = threading.Thread(
                target=self._serve_lane, args=(shared, lane), name="mcinfer-run", daemon=True
            )
            thread.start()
            self.threads.append(thread)

    def _take_turns(self, shared: SharedTransport) -> None:
        """Serve in the threads of all lanes; this one has the first."""
        # Until EXIT. In READY the same messages may come, and an answer would need to know of other runs.
        self._state, self._is_shared = WorkerState.BUSY, True
        shared.pass_turn_on()
        self._serve_lane(shared, 0)
        if self._failures:
            raise self._failures[0]

    def _serve_lane(self, shared: SharedTransport, lane: int) -> None:
        """Take the turn, again and again, until EXIT, or an error of any lane that ends this worker."""
        try:
            self._pin(lane)
            while True:
                shared.take_turn()
                ran = False  # and passed the turn on before
                while not (ran or self._ended):
                    data = self._wait()
                    if data and data[0] == PREDICT:
                        self.predict(data, lane)
                        ran = True
                    else:
                        message = decode(data)
                        ran = isinstance(message, PredictJoined)
                        if not self.handle(message, lane):
                            self._ended = True  # and never False again: lanes end side by side
                if not ran:
                    return
        except BaseException as exc:  # the main thread raises it
            self._failures.append(exc)
            self._ended = True
            self._stop_runs()
            shared.wake()
        finally:
            shared.pass_turn_on()

    def _pin(self, lane: int) -> None:
        """Keep the calling thread to its part of this worker's cores, where there are enough.

        Else the system may put two runs on one core for a while, with another one idle. A thread that only
        waits for its run would be kept to a core on which another run computes.
        """
        cores, lanes = self._cores, len(self._lanes)
        if lanes <= len(cores) and not self._engine.pins:
            start, stop = (part * len(cores) // lanes for part in (lane, lane + 1))
            with suppress(OSError):  # this process may not use them any more
                os.sched_setaffinity(0, cores[start:stop])

    def send(self, message: Message) -> None:
        """Send a message, or an error if it is the result of a build or a run that no message can hold."""
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
        if not self._is_shared:
            self._state = state_after(self._state, type(message))
        self._connection.send(data)

    def handle(self, message: Message, lane: int = 0) -> bool:
        """Follow a message other than PREDICT, in the thread of a lane; whether more may come.

        Raises:
            ProtocolError: The message may not come now, or cannot be followed.
        """
        self._state = state_after(self._state, type(message))
        match message:
            case PredictJoined():
                runs = self._lanes[lane]
                self._run(message.request, message.shard, runs, False, runs.joined, message)
            case Attach():
                self._attach(message)
            case Detach():
                for runs in self._lanes:
                    runs.drop_block(message.block)
                self._blocks.drop(message.block)
            case UpdateWeights():
                for runs in self._lanes:
                    runs.take_weights(message)
            case Build():
                self.send(self._build(message))
        return not isinstance(message, Exit)

    @property
    def is_opening(self) -> bool:
        """Whether a thread still opens the model with all cores: no one waits for it."""
        return self._wide is not None and self._wide.is_opening

    def close(self) -> None:
        self._ended = True
        if self._shared is not None:
            self._shared.pass_turn_on()  # if the build failed, this thread has it
        for thread in self.threads:
            thread.join()
        if self._is_built:
            self._engine.close()
            for runs in self._lanes:
                runs.close()
            if self._wide is not None:
                self._wide.close()
        self._blocks.close()
        self._connection.close()
        self._stopped = True
        self._cancels.hang_up()
        self._canceller.join(_BLOCK_TIMEOUT)
        self._cancels.close()
        self._lifeline.close()

    def _build(self, message: Build) -> Message:
        start = time.perf_counter()
        slab = None if message.slab is None else self._blocks.take(message.slab)
        try:
            message = self._pin_to_allowed(message)
            device = Device.parse(message.device)
            request = EngineRequest(
                model=message.model,
                device=Device("cpu", 0) if device.kind == INLINE else device,
                options=message.options,
                share=message.share,
            )
            content = readable_content(request)
            request = replace(request, content=content)
            if message.ranks > 1:
                from mcinfer.ranks import open_rank

                cut, group = (message.tensor, message.pipeline), self._group
                self._engine = open_rank(request, message.rank, cut, group, self._report_progress)
            elif request.device.kind in CARD_KINDS:
                from mcinfer.cards.staging import open_on_card

                self._engine = open_on_card(
                    message, request, slab, self._blocks, self._report_progress
                )
            else:
                self._engine = open_engine(message.engine, request, self._report_progress)
            self._is_built = True
            if several := self._engine.concurrent > 1:
                self._start_lanes()
            else:
                self._lanes = [Runs(self._engine, self._blocks)]
            # A model that draws random numbers has one state of them.
            widens = self._engine.widens and not several
            if message.pool and content is not None and not content.random and widens:
                self._wide = WideEngine(
                    message.share, self._engine, partial(_open_wide, message, request), content
                )
            if content is not None and not content.unchanged():
                raise BuildError(f"{message.model} was changed while it was loaded")
            known: dict[str, Any] = {}
            if content is not None:
                known = {name: getattr(content, name) for name in ("random", "ragged")}
                known["model"] = identity(request, content, self._engine.version)
        except CardLostError:  # no fault of the model: as if this process had died
            raise
        except (RankDiedError, CollectiveTimeoutError) as exc:  # nor of this rank
            return _error("broken", exc)
        except Exception as exc:  # of any class: it is the runtime's
            kind = "missing" if isinstance(exc, MissingDependencyError) else "build"
            return _error(kind, exc, model=message.model)
        engine, described = self._engine, self._engine.description
        notes = [*self._notes, *(in_words(note, message.model) for note in engine.notes)]
        options = described.provider_options.items()
        try:
            return BuildFinish(
                inputs=_fields(engine.spec.inputs),
                outputs=_fields(engine.spec.outputs),
                weights=_fields(engine.weights),
                notes=tuple(note[:MAX_NOTE] for note in notes[:MAX_NOTES]),
                **known,
                providers=engine.providers,
                seconds=time.perf_counter() - start,
                concurrent=engine.concurrent,
                slab=self._hand_over(engine.slab),
                reaches=engine.reaches,
                about=dict(described.about),
                properties=dict(described.properties),
                overridable=_fields(described.overridable),
                provider_options={name: dict(given) for name, given in options},
            )
        except ProtocolError as exc:
            text = f"what is to be said of the model does not fit a message (at most {MAX_SPECS}"
            return _error("build", BuildError(f"{text} inputs, outputs, …): {exc}"))

    def _pin_to_allowed(self, message: Build) -> Build:
        """Pin this process to its share of the cores that it may use now; the message with that share."""
        planned, allowed = message.share, sorted(os.sched_getaffinity(0))
        share = planned.of_allowed(allowed)
        if share is not planned:
            before, now = map(format_core_list, (planned.usable or planned.cores, allowed))
            what = "a worker that starts has its part of these"
            if not share.usable:
                what = f"{format_core_list(share.cores)} are left" if share.cores else "not pinned"
            self._notes = (f"planned for cores {before}, and {now} are allowed now: {what}",)
        if share.cores:
            with suppress(OSError):  # they were taken in between: it is not pinned
                os.sched_setaffinity(0, share.cores)
                self._cores = () if share.shared else share.cores
        names = (field.name for field in fields(share))
        return replace(message, **{name: getattr(share, name) for name in names})

    def _hand_over(self, slab: SharedBlock | None) -> tuple[int, int] | None:
        """Give the master a block of weights that this worker made; its number and bytes."""
        if slab is None:
            return None
        self._lifeline.send_block(slab.number, slab.size, slab.fd, slab.token)
        self._block_numbers = count(1 - slab.number)
        return slab.number, slab.size

    def _report_progress(self, state: Mapping[str, Any]) -> None:
        if self._stopped:
            raise RunCancelledError("the master has hung up")
        self.send(Preparing(seconds=float(state["seconds"]), written=state["written"]))

    def predict(self, data: bytes, lane: int = 0) -> None:
        """Follow a PREDICT in the thread of a lane, and answer it; `ProtocolError` if it may not come now."""
        if len(data) < PREDICT_HEAD.size:
            raise ProtocolError(f"Predict: got {len(data)} bytes, expected a head")
        _, request, shard, version, size, wide = PREDICT_HEAD.unpack_from(data)
        body = data[PREDICT_HEAD.size :]
        self._state = state_after(self._state, Predict)
        runs = self._lanes[lane]
        self._run(request, shard, runs, wide, runs.single, version, size, body)

    def _run(
        self,
        request: int,
        shard: int,
        runs: Runs,
        wide: bool,
        bind: Callable[..., _Bound],
        *what: Any,
    ) -> None:
        """Run and answer; `bind` makes the run out of what the message says.

        `bind` is a method of `runs`, those of the calling thread. A wide run that fails runs again narrow; if
        that succeeds, the wide engine is to blame, and closed. If any run lacks memory, the wide engine gives
        back what it has, and the run is tried again.
        """
        answer, lacks_memory = self._attempt(request, shard, runs.engine, wide, bind, what)
        if isinstance(answer, Error) and answer.kind == "predict":
            opened = self._wide if self._wide is not None and self._wide.is_open else None
            if opened is not None and (wide or lacks_memory):
                why = answer.text
                if lacks_memory:
                    self._close_wide(opened, why)
                answer, _ = self._attempt(request, shard, runs.engine, False, bind, what)
                if opened.is_open and not isinstance(answer, Error):
                    self._close_wide(opened, why)
        if isinstance(answer, bytes):
            if not self._is_shared:
                self._state = WorkerState.READY
            self._connection.send(answer)
        elif answer is not None:
            self.send(answer)

    def _close_wide(self, wide: WideEngine, why: str) -> None:
        _log.warning("runs use this worker's cores alone from now on: %s", why)
        for runs in self._lanes:
            runs.drop_wide()
        wide.close()

    def _attempt(
        self,
        request: int,
        shard: int,
        engine: Engine,
        wide: bool,
        bind: Callable[..., _Bound],
        what: Sequence[Any],
    ) -> tuple[bytes | Error | None, bool]:
        """Run; the answer that is to be sent, and whether memory was short.

        It is encoded if all outputs are at the master's places. It is None if it was sent, since a block of
        this worker's is the next on the lifeline when the answer that names it comes; or if there is none.
        Whatever the kind of run, `BoundRun.execute` copies in, executes and copies out.
        """
        key, widened = (request, shard), None
        if self._wide is not None:
            widened = self._wide.engine(what[-1]) if wide else None
            if widened is None and self._wide.on_pool:
                self._wide.return_cores()
        engine = widened or engine
        run: BoundRun | None = None
        try:
            try:
                run, references = bind(*what) if widened is None else bind(*what, widened)
            finally:
                if self._shared is not None:
                    self._shared.pass_turn_on()
            engine.arm()
            with self._lock:
                if self._stopped or (self._cancelled and key in self._cancelled):
                    self._cancelled.pop(key, None)
                    raise RunCancelledError("the run was cancelled before it began")
                self._running[engine] = key
            start = time.perf_counter()
            try:
                produced = run.execute()
                seconds = time.perf_counter() - start
            finally:
                with self._lock:
                    del self._running[engine]
            is_wide = widened is not None
            if wide and self._wide is not None:
                self._wide.learn(what[-1], seconds, wide=is_wide)
            if not produced:
                return REPLY_HEAD.pack(REPLY, request, shard, seconds, is_wide), False
            with self._sending:
                outputs = self._place(produced, references)
                reply = Reply(
                    request=request, shard=shard, outputs=outputs, seconds=seconds, wide=is_wide
                )
                self.send(reply)
            return None, False
        except CardLostError:
            raise
        except Exception as exc:  # of any class: a run that raises fails its request only
            if self._stopped and isinstance(exc, RunCancelledError):
                return None, False  # this worker ends, so its master has the run from another one
            if run is None:
                engine.skip(exc)
            kind = "predict"
            if isinstance(exc, (RunCancelledError, InvalidInputError)):
                kind = "cancelled" if isinstance(exc, RunCancelledError) else "invalid"
            error = _error(kind, exc, request, shard)
            if self._engine.broken:
                error = replace(error, kind="broken", text=self._engine.broken[:_MAX_TEXT])
            return error, isinstance(exc, (OutOfMemoryError, MemoryError))

    def _cancel_runs(self) -> None:
        """The canceller's loop, until a hang-up, which also ends the run in progress and the main thread."""
        try:
            while (key := self._cancels.wait()) is not None:
                with self._lock:
                    running = [engine for engine, run in self._running.items() if run == key]
                    if running:
                        running[0].cancel()
                        continue
                    self._cancelled[key] = None
                    if len(self._cancelled) > _MAX_CANCELLED:
                        self._cancelled.popitem(last=False)
        except ProtocolError:
            _log.exception("the master's message does not fit")
        if self._stopped:
            return
        self._stop_runs()
        self._lifeline.hang_up()

    def _stop_runs(self) -> None:
        """End those in progress; no other begins."""
        with self._lock:
            self._stopped = True
            for engine in self._running:
                engine.cancel()

    def _place(
        self, produced: Sequence[Produced | Strings], bound: tuple[TensorRef, ...]
    ) -> tuple[TensorRef, ...]:
        """References to all outputs, in the model's order; of a rank, to those that it gives, or all.

        Outputs that the engine produced by itself go to a block of this worker's: those without a bound
        place, and those with another shape than the model declares.
        """
        if not produced:
            return ()
        gives = self._engine.gives
        references = {ref[0]: ref for ref in bound if gives is None or ref[0] in gives}
        for item in produced:
            if isinstance(item, Strings):
                references[item.name] = (item.name, STRING, item.shape, None, item.values)
        tensors = [item for item in produced if isinstance(item, Produced)]
        offsets = [0, *accumulate(align(item.size) for item in tensors)]
        number = 0  # of no block, if all tensors are empty: the master does not take one then
        if offsets[-1]:
            number = -next(self._block_numbers)
            block = Block.create(number, offsets[-1])
            for item, offset in zip(tensors, offsets, strict=False):
                ctypes.memmove(block.address + offset, item.address, item.size)
            self._lifeline.send_block(number, block.size, block.fd)
            block.close()
        for item, offset in zip(tensors, offsets, strict=False):
            references[item.name] = (item.name, item.element_type, item.shape, number, offset)
        names = [spec.name for spec in self._engine.spec.outputs]
        return tuple(references[name] for name in names if name in references)

    def _attach(self, message: Attach) -> None:
        number, device = message.block, None
        if number in self._blocks:
            raise ProtocolError(f"block {number} was attached before")
        is_built = self._state is not WorkerState.CONNECTED
        try:
            if message.device:  # not opened yet: the card may have no room, or not be open
                device = Device.parse(message.device)
                if is_built and self._blocks.card is None:
                    raise ProtocolError("this worker has no card")
            elif not is_built:
                raise ProtocolError("a block of the host came before BUILD")
            size, fd, token = self._lifeline.receive_block(number, timeout=_BLOCK_TIMEOUT)
            self._blocks.add(
                OfferedBlock(number=number, size=size, fd=fd, token=token, device=device)
            )
        except (McinferError, OSError) as exc:
            raise ProtocolError(f"block {number} cannot be attached: {exc}") from exc


def _open_wide(message: Build, request: EngineRequest, share: CoreShare) -> Engine:
    """The model as it is: prepared once more, its weights would be in memory twice."""

    def refuse(_: Mapping[str, Any]) -> None:
        raise McinferError("the prepared model is not in the cache any more")

    return open_engine(message.engine, replace(request, share=share), refuse)


def _fields(specs: Sequence[TensorSpec]) -> tuple[TensorFields, ...]:
    return tuple((spec.name, spec.element_type, spec.shape) for spec in specs)


def _error(
    kind: str, exc: Exception, request: int | None = None, shard: int | None = None, model: str = ""
) -> Error:
    """The message of an error; `model` is the path that it may name (`in_words`)."""
    text = str(exc) if isinstance(exc, McinferError) else f"{type(exc).__name__}: {exc}"
    if isinstance(exc, MemoryError) and not isinstance(exc, McinferError):
        text += memory_limit()
    return Error(
        request=request,
        shard=shard,
        kind=kind,
        text=in_words(text, model)[:_MAX_TEXT],  # which may make it longer
        traceback="".join(traceback.format_exception(exc))[:_MAX_TEXT],
    )
