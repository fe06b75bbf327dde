"""A worker's loop: receive, run, reply.

::

    main thread     wait ──► PREDICT ──► bind (cached by the body's bytes) ──► engine run ──► REPLY ──► wait
    canceller thread         waits at a socket of its own: CANCEL ──► engine.cancel

The loop knows one engine, whatever is around it (`opening`). If that executes several runs at once, as many
threads take turns in the place of the main thread (`turns`).

Ownership: the blocks belong to the master and are mapped until DETACH. Bound runs hold addresses in the
blocks, so they are dropped before the blocks. A lock guards the cancellations; the main thread, or the one
that has the turn, owns the rest.
"""

import logging
import os
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mcinfer.config import Device
from mcinfer.engines.base import (
    BoundRun,
    Engine,
    RunCancelledError,
    memory_limit,
)
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
from mcinfer.private import in_words
from mcinfer.process import ORPHANED
from mcinfer.protocol import (
    MAX_SPECS,
    PREDICT,
    REPLY,
    REPLY_HEAD,
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Cancel,
    Detach,
    Error,
    Exit,
    Hello,
    Message,
    Predict,
    PredictJoined,
    Preparing,
    TensorRef,
    UpdateWeights,
    WorkerState,
    cut_predict,
    decode,
    encode,
    state_after,
)
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.shm.arena import AttachedBlocks, OfferedBlock, SharedBlock
from mcinfer.shm.lifeline import Lifeline
from mcinfer.worker.opening import open_worker_engine
from mcinfer.worker.runs import OutputBlocks, Runs
from mcinfer.worker.turns import Turns, pin_to_part

_MAX_CANCELLED = 4096
"""Most cancellations that are kept: one that comes after its answer is never used."""

_MAX_TEXT = 1 << 20
"""Most characters of an error: a runtime's text may have any length."""

_CANCEL_BYTES = 64  # more than a CANCEL has
_BLOCK_TIMEOUT = 10.0

_Bound = tuple[BoundRun, tuple[TensorRef, ...]]
"""A run, and the places that its outputs are bound to."""

CARD_LOST = 74
"""Exit status of a worker that cannot use its card any more: EX_IOERR of sysexits.h. The run is to blame."""

_log = logging.getLogger("mcinfer.worker")


class WorkerLoop:
    """A worker's side of its conversation with the master.

    Args:
        connection: Carries the messages.
        token: Shown in HELLO; it came over the lifeline.
        lifeline: Brings the blocks.
        cancels: The worker's end of the channel for CANCEL; the loop closes it.
        group: Descriptors of the group that it is a rank of, if any.
    """

    def __init__(
        self,
        connection: WorkerTransport,
        token: str,
        lifeline: Lifeline,
        cancels: socket.socket,
        group: Sequence[int] = (),
    ) -> None:
        self._connection = connection
        self._token = token
        self._cancels = cancels
        cancels.setblocking(True)  # whatever a program gives to `socket.setdefaulttimeout`
        self._lifeline = lifeline
        self._group = [*group]
        self._state = WorkerState.SPAWNED
        self._engine: Engine | None = None  # from BUILD on; `TRANSITIONS` allow no run before it
        self._lanes: list[Runs] = []  # of each thread that executes runs
        self._turns: Turns | None = None  # of several threads
        self._cores: Sequence[int] = ()  # of which each has a part
        self._outputs: OutputBlocks  # from BUILD on
        self._blocks = AttachedBlocks()
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._running: dict[Engine, tuple[int, int]] = {}
        self._cancelled: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._stopped = False
        self._canceller = threading.Thread(
            target=self._cancel_runs, name="mcinfer-cancel", daemon=True
        )
        self._canceller.start()

    @property
    def lingers(self) -> bool:
        """See `Engine.lingers`."""
        return self._engine is not None and self._engine.lingers

    def serve(self) -> int:
        """Serve the master until EXIT or a hang-up, and close all that was opened; the exit status."""
        try:
            self.send(Hello(version=VERSION, pid=os.getpid(), token=self._token))
            while self._state is not WorkerState.READY:
                if not self.handle(decode(self._connection.wait())):
                    return 0
            first = partial(self._serve_lane, 0)
            if self._turns is None:
                first()
            else:
                self._turns.serve(first)
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

    def _serve_lane(self, lane: int) -> None:
        """Follow messages until EXIT; raises `ProtocolError` at one that does not fit."""
        wait, runs = self._connection.wait, self._lanes[lane]
        try:
            pin_to_part(self._cores, lane, len(self._lanes))
            while True:
                data = wait()
                if data and data[0] == PREDICT:
                    self.predict(data, runs)
                elif not self.handle(decode(data), runs):
                    return
        except BaseException:
            self._stop_runs()  # of other lanes
            raise

    def send(self, message: Message) -> None:
        """Send a message that changes the state of this worker."""
        data = encode(message)
        self._state = state_after(self._state, type(message))
        self._connection.send(data)

    def handle(self, message: Message, runs: Runs | None = None) -> bool:
        """Follow a message other than PREDICT, with the calling thread's `runs`; whether more may come.

        Raises:
            ProtocolError: The message may not come now, or cannot be followed.
        """
        if self._stopped:
            raise ConnectionResetError("the master has hung up")
        self._state = state_after(self._state, type(message))
        match message:
            case PredictJoined() if runs is not None:
                self._run(message.request, message.shard, runs, False, runs.joined, message)
            case Attach():
                self._attach(message)
            case Detach():
                if message.block < 0:
                    self._outputs.drop(message.block)
                else:
                    for lane in self._lanes:
                        lane.drop_block(message.block)
                    self._blocks.drop(message.block)
            case UpdateWeights():
                for lane in self._lanes:
                    lane.take_weights(message)
            case Build():
                self._build(message)
        return not isinstance(message, Exit)

    def close(self) -> None:
        self._connection.close()  # and the threads of all lanes
        if self._engine is not None:
            self._engine.close()
        for runs in self._lanes:
            runs.close()
        self._blocks.close()
        self._stopped = True
        self._cancels.shutdown(socket.SHUT_RDWR)  # also for a forked child that holds an end
        self._canceller.join(_BLOCK_TIMEOUT)
        self._cancels.close()
        self._lifeline.close()

    def _build(self, message: Build) -> None:
        start = time.perf_counter()
        try:
            engine, cores, facts = open_worker_engine(
                message, self._blocks, self._group, self._report_progress
            )
            self._engine = engine
            self._outputs = OutputBlocks(engine, self._lifeline, message.rank, message.ranks)
            self._open_lanes(engine, cores)
        except (CardLostError, ProtocolError):  # no fault of the model: as if this process had died
            raise
        except (RankDiedError, CollectiveTimeoutError) as exc:  # nor of this rank
            return self.send(_error("broken", exc))
        except Exception as exc:  # of any class: it is the runtime's
            kind = "missing" if isinstance(exc, MissingDependencyError) else "build"
            return self.send(_error(kind, exc, model=message.model))
        try:
            seconds = time.perf_counter() - start
            self.send(BuildFinish(**facts, seconds=seconds, slab=self._hand_over(engine.slab)))
        except ProtocolError as exc:
            text = f"what is to be said of the model does not fit a message (at most {MAX_SPECS}"
            self.send(_error("build", BuildError(f"{text} inputs, outputs, …): {exc}")))

    def _open_lanes(self, engine: Engine, cores: Sequence[int]) -> None:
        """Make the runs of each thread, and those threads; each is kept to its part of the cores."""
        if engine.concurrent == 1:
            self._lanes = [Runs(engine, self._blocks)]
            return
        twins = [engine.twin() for _ in range(1, engine.concurrent)]
        self._lanes = [Runs(each, self._blocks) for each in (engine, *twins)]
        self._cores = cores
        self._connection = self._turns = Turns(self._connection, self._lifeline.fd)
        for lane in range(1, len(self._lanes)):
            self._turns.start(partial(self._serve_lane, lane))

    def _hand_over(self, slab: SharedBlock | None) -> tuple[int, int] | None:
        """Give the master a block of weights that this worker made; its number and bytes."""
        if slab is None:
            return None
        self._lifeline.send_block(slab.number, slab.size, slab.fd, slab.token)
        return slab.number, slab.size

    def _report_progress(self, state: Mapping[str, Any]) -> None:
        if self._stopped:
            raise RunCancelledError("the master has hung up")
        self.send(Preparing(seconds=float(state["seconds"]), written=state["written"]))

    def predict(self, data: bytes, runs: Runs) -> None:
        """Follow a PREDICT, and answer it; `ProtocolError` if it may not come now."""
        (request, shard, version, size, alone), returned, body = cut_predict(data)
        if self._state is not WorkerState.BUSY:  # which it stays: other runs may be under way
            self._state = state_after(self._state, Predict)
        if returned:
            self._outputs.take_back(returned)
        self._run(request, shard, runs, alone, runs.single, version, size, body)

    def _run(
        self,
        request: int,
        shard: int,
        runs: Runs,
        alone: bool,
        bind: Callable[..., _Bound],
        *what: Any,
    ) -> None:
        """Run and answer; `bind` makes the run out of what the message says.

        `bind` is a method of `runs`, those of the calling thread. Whatever the kind of run, its `execute`
        copies in, executes and copies out.
        """
        key, engine = (request, shard), runs.engine
        run: BoundRun | None = None
        try:
            try:
                run, references = bind(*what)
            finally:
                if self._turns is not None:
                    self._turns.pass_on()
            engine.arm()
            with self._lock:
                if self._stopped or (self._cancelled and key in self._cancelled):
                    self._cancelled.pop(key, None)
                    raise RunCancelledError("the run was cancelled before it began")
                self._running[engine] = key
            start = time.perf_counter()
            try:
                produced = run.execute_alone() if alone else run.execute()
                seconds = time.perf_counter() - start
            finally:
                with self._lock:
                    del self._running[engine]
            if not produced:
                data = REPLY_HEAD.pack(REPLY, request, shard, seconds, run.wide)
            else:
                head = (request, shard, seconds, run.wide)
                with self._placing:  # its block is the next on the lifeline when the reply comes
                    self._connection.send(self._outputs.reply(head, produced, references))
                return
        except CardLostError:
            raise
        except Exception as exc:  # of any class: a run that raises fails its request only
            if self._stopped and isinstance(exc, RunCancelledError):
                return  # this worker ends, so its master has the run from another one
            if run is None:
                engine.skip(exc)
            kind = "predict"
            if isinstance(exc, RunCancelledError):
                kind = "cancelled"
            elif isinstance(exc, InvalidInputError):
                kind = "refused" if exc.by_runtime else "invalid"
            error = _error(kind, exc, request, shard)
            if engine.broken:
                error = replace(error, kind="broken", text=engine.broken[:_MAX_TEXT])
            data = encode(error)
        self._connection.send(data)

    def _cancel_runs(self) -> None:
        """The canceller's loop, until a hang-up, which also ends the run in progress and the main thread."""
        try:
            while data := self._cancels.recv(_CANCEL_BYTES):
                message = decode(data)
                if not isinstance(message, Cancel):
                    raise ProtocolError(f"{type(message).__name__} came in the place of CANCEL")
                key = message.request, message.shard
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

    def _attach(self, message: Attach) -> None:
        number = message.block
        if number in self._blocks:
            raise ProtocolError(f"block {number} was attached before")
        try:
            device = Device.parse(message.device) if message.device else None
            size, fd, token = self._lifeline.receive_block(number, timeout=_BLOCK_TIMEOUT)
            self._blocks.add(
                OfferedBlock(number=number, size=size, fd=fd, token=token, device=device)
            )
        except (McinferError, OSError) as exc:
            raise ProtocolError(f"block {number} cannot be attached: {exc}") from exc


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
