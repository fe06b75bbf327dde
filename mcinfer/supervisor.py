"""The master's shell: carries out what the scheduler decides, and tells it what happened.

::

    any thread ── submit ──► [lock: scheduler ► send] ─────────────► worker sockets
    I/O thread ── one wait for: messages, pidfds of all workers, the wake-up descriptor, the next due time
                  └─► [lock: receive, deaths, time ► scheduler ► actions] ──► settle futures, lock released
    a caller that waits ── takes the messages itself, one caller at a time, in the place of the I/O thread

Rules of ownership: one lock guards the scheduler, the socket and the process table. Whoever takes
it carries out the actions of its event before letting go, so actions never overtake each other. Futures
are settled with the lock released; those that users hold in the I/O thread alone, one after another, since
their callbacks are user code.

Ctrl-C raises in the main thread, between any two instructions: whatever changes shared state there is
inside `HeldInterrupts`.

ZeroMQ's descriptor is edge-triggered, and sending may use up its sign of a message that has come:
whoever sends then receives what is there, or wakes the I/O thread, which does.

After a fork the child has no I/O thread and must not touch the sockets: every entry compares the pid.
"""

import atexit
import hmac
import logging
import math
import os
import secrets
import select
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic

from mcinfer.actions import (
    Action,
    KillWorker,
    PoolClosed,
    PoolStarted,
    Release,
    Send,
    SendPredict,
    Settle,
    StartWorker,
    TakeBack,
)
from mcinfer.answers import Answers
from mcinfer.config import Limits, RestartPolicy, Timeouts
from mcinfer.errors import ClosedError, McinferError, ProtocolError
from mcinfer.interrupts import HeldInterrupts
from mcinfer.processes import OutputForwarder, WorkerProcess
from mcinfer.protocol import (
    VERSION,
    Attach,
    Build,
    BuildFinish,
    Detach,
    Error,
    Hello,
    Message,
    Reply,
    UpdateWeights,
    decode,
    encode,
    encode_predict_joined,
)
from mcinfer.runtime_folder import RuntimeFolder
from mcinfer.scheduler import Scheduler, describe_exit
from mcinfer.shard_queue import ShardId
from mcinfer.shm.arena import Arena
from mcinfer.shm.block import Block
from mcinfer.staging import Arrays, Job
from mcinfer.statistics import Statistics
from mcinfer.transport import Router, SendError
from mcinfer.wakeup import WakeUp

_log = logging.getLogger("mcinfer.master")

_LONGEST_WAIT = 86400.0
"""Seconds of one wait: waking for nothing once a day costs nothing, and it takes no more than 24 days."""

_LAST_OUTPUT = 1.0
"""Seconds that a closing master gives to what its workers printed last."""


class Supervisor:
    """The processes, the socket and the I/O thread of one master."""

    def __init__(
        self,
        builds: Sequence[Build],
        *,
        timeouts: Timeouts,
        restart: RestartPolicy,
        limits: Limits,
        memory_bytes: int,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
    ) -> None:
        """Take what is to be run; nothing starts before `start`."""
        self._scheduler = Scheduler(
            builds,
            timeouts=timeouts,
            restart=restart,
            queue_limit=limits.queue,
            max_batch_size=max_batch_size,
            max_delay=max_delay,
        )
        self._builds = builds
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._jobs: dict[int, Job] = {}
        self._next_number = 0
        self._processes: dict[int, WorkerProcess] = {}
        self._peers: dict[bytes, int] = {}
        self._notes: set[str] = set()
        self._started: Future[BuildFinish] = Future()
        self._thread: threading.Thread | None = None
        self._wakes_at = math.inf
        self._answers = Answers(wake=self._wake_io_thread, answered=self._wake_driver)
        self._start_called = False
        self._abandoned = False
        self._finished = False
        self._torn_down = False
        self._failure: McinferError | None = None
        self._wakeup = WakeUp()
        self._driving = threading.Lock()
        self._driver = 0
        self._driver_wakeup = WakeUp()
        self.arena = Arena(memory_bytes, wake=self._wakeup.set, dropped=self._detach)

    # Life.

    def claim_start(self) -> None:
        """Raise `ClosedError` unless this is the first start, and it was not closed before."""
        with self._lock:
            if self._start_called or self._finished:
                raise ClosedError("a master can be started once; make a new one")
            self._start_called = True

    def start(self) -> BuildFinish:
        """Start all workers, wait until they have the model, and say what the model is like.

        Raises:
            BuildError: A worker could not load it; no process is left.
            ClosedError: It was closed meanwhile; likewise.
            OSError: The system has no descriptor, thread or folder left for it.
        """
        with ExitStack() as opened:
            self._folder = RuntimeFolder()
            opened.callback(self._folder.remove)
            self._router = Router(self._folder.endpoint)
            opened.callback(self._router.close)
            self._poll = select.epoll()
            opened.callback(self._poll.close)
            self._poll.register(self._wakeup.fd, select.EPOLLIN)
            self._poll.register(self._router.fd, select.EPOLLIN)
            self._output = OutputForwarder()
            opened.callback(self._output.close, 0.0)
            self._driver_poll = select.poll()
            self._driver_poll.register(self._router.fd, select.POLLIN)
            self._driver_poll.register(self._driver_wakeup.fd, select.POLLIN)
            atexit.register(self.close)
            opened.callback(atexit.unregister, self.close)
            thread = threading.Thread(target=self._run, name="mcinfer-io", daemon=True)
            with HeldInterrupts(), self._lock:
                self._check_not_closed()
                thread.start()
                self._thread = thread
                opened.pop_all()
        try:
            with HeldInterrupts():
                with self._lock:
                    self._check_not_closed()
                    self._carry_out(self._scheduler.handle_start(monotonic()))
                self._answers.give()
            self._wakeup.set()
            return self._started.result()
        except BaseException:
            self.close(0.0 if not self._started.done() else None)
            raise

    def close(self, timeout: float | None = None) -> None:
        """End all workers; in-flight requests fail with `ClosedError`. May be called again.

        Args:
            timeout: Seconds for workers to end by themselves; None is `Timeouts.close`.
        """
        if os.getpid() != self._pid:
            return
        with HeldInterrupts():
            with self._lock:
                if self._thread is None:
                    self._finished = True
                    return
                self._close(self._timeouts.close if timeout is None else timeout)
            self._answers.give()
            self._wakeup.set()
        if self.may_wait():
            self._thread.join()

    def _check_not_closed(self) -> None:
        """For the start, which another thread's `close` may overtake; the lock is held."""
        if self._finished:
            raise ClosedError("the master was closed while it was starting")

    def abandon(self) -> None:
        """Ask the I/O thread to close everything: for finalizers, so it takes no lock and never waits."""
        self._abandoned = True
        if os.getpid() == self._pid:
            self._wakeup.set()

    def check_open(self) -> None:
        """Raise `ClosedError` unless requests can be taken here."""
        self._check_process()
        if self._finished:
            raise ClosedError("the master is closed")
        if self._thread is None:
            raise ClosedError(
                "the master is not started: call start(), or use it in a with statement"
            )

    def _check_process(self) -> None:
        """Raise `ClosedError` in a fork: its copy of the lock may be held by a thread it does not have."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this master belongs to process {self._pid}; process {os.getpid()} was forked from it "
                "and needs a master of its own"
            )

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for answers: not in a callback, which others wait behind."""
        return threading.current_thread() is not self._thread

    # Requests.

    @property
    def serving(self) -> int:
        """How many workers are ready or busy."""
        return self._scheduler.serving

    def submit(self, job: Job, start: float, timeout: float, priority: int = 0) -> None:
        """Queue a job, to be answered within `timeout` seconds of `start`; its future says how.

        Raises:
            ClosedError: The master is closed.
            QueueFullError: Too many requests are in flight.
        """
        with HeldInterrupts():
            with self._lock:
                self._enter(job, start, timeout, priority)
            job.future.add_done_callback(partial(self._on_done, job.number))
            self._answers.give()

    def _enter(self, job: Job, start: float, timeout: float, priority: int) -> None:
        if self._finished:
            raise ClosedError("the master is closed")
        job.number = self._next_number
        self._jobs[job.number] = job
        try:
            actions = self._scheduler.handle_request(
                start, job.number, job.shards, timeout, priority=priority, join=job.join
            )
        except McinferError:
            del self._jobs[job.number]
            raise
        self._next_number += 1
        self._carry_out(actions)
        self._receive(monotonic())
        # Its deadline and where it was put are all that it can bring forward.
        if min(start + timeout, self._scheduler.next_turn()) < self._wakes_at:
            self._hurry()

    def wait(self, job: Job) -> Arrays:
        """Wait for the answer to a job that was submitted.

        The first caller that waits takes the messages itself, in the place of the I/O thread: that saves two
        changes of thread for each answer. When its own has come it gives them back.

        Raises:
            McinferError: What the job failed with.
        """
        future = job.future
        driving = False
        try:
            with HeldInterrupts():
                driving = not future.done() and self._driving.acquire(blocking=False)
                if driving:
                    self._driver = threading.get_ident()
                    with suppress(ValueError, OSError):  # the pool was closed meanwhile
                        self._poll.modify(self._router.fd, 0)
            while driving and not future.done() and not self._torn_down:
                self._drive()
        finally:
            if driving:
                # In this order: Ctrl-C can be raised after each call, and the first is the one that counts.
                try:
                    self._poll.modify(self._router.fd, select.EPOLLIN)
                except (ValueError, OSError):
                    pass  # the pool was closed meanwhile, which answers the job as well
                finally:
                    self._driver = 0
                    self._driving.release()
        return future.result()

    def _drive(self) -> None:
        """One wait for messages, in a caller's thread; the I/O thread keeps deaths and time."""
        for fd, _ in self._driver_poll.poll():
            if fd == self._driver_wakeup.fd:
                self._driver_wakeup.clear()
        with HeldInterrupts():
            with self._lock:
                self._receive(monotonic())
            self._answers.give()

    def _on_done(self, number: int, future: "Future[Arrays]") -> None:
        """A future is done; if its caller cancelled it, the run is to stop.

        It must not hold the job: a future that a user keeps would keep the job's memory.
        """
        if not future.cancelled() or os.getpid() != self._pid:
            return
        with HeldInterrupts():
            with self._lock:
                self._carry_out(self._scheduler.handle_cancel(number))
                self._receive(monotonic())
                self._hurry()
            self._answers.give()

    def _hurry(self) -> None:
        """Wake the I/O thread if something is due before it would wake by itself."""
        due = self._scheduler.next_time()
        if due is not None and due < self._wakes_at:
            self._wakeup.set()

    def statistics(self, weights_version: int) -> Statistics:
        """A snapshot.

        Args:
            weights_version: Of the weights, which are not this one's concern.

        Raises:
            ClosedError: This process was forked from the master's.
        """
        self._check_process()
        size, used = self.arena.size, self.arena.used
        with self._lock:
            ledger = self._scheduler.ledger
            return Statistics(
                accepted=ledger.accepted,
                succeeded=ledger.succeeded,
                failed=ledger.failed,
                cancelled=ledger.cancelled,
                in_flight=ledger.in_flight,
                queued_shards=len(ledger.queue),
                memory_bytes=size,
                memory_used_bytes=used,
                weights_version=weights_version,
                workers=self._scheduler.statistics(),
            )

    # The I/O thread.

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
        except BaseException as exc:  # a bug here must not leave callers waiting or workers running
            _log.critical("the I/O thread failed", exc_info=True)
            self._collapse(exc)
        finally:
            self._tear_down()

    def _turn(self) -> None:
        """One wait, and all that it brought."""
        with self._lock:
            due = self._scheduler.next_time()
            planned, now = self._wakes_at, monotonic()
            self._wakes_at = math.inf if due is None else due
            if now < planned < self._wakes_at:
                # To wake for nothing once is cheaper than to be woken for each request's deadline.
                self._wakes_at = planned
        timeout = max(0.0, min(self._wakes_at - now, _LONGEST_WAIT))
        events = self._poll.poll(timeout)
        woken = [fd for fd, _ in events]
        if self._wakeup.fd in woken:
            self._wakeup.clear()
            self.arena.reclaim()
        with self._lock:
            now = monotonic()
            self._receive(now)
            for index, process in [*self._processes.items()]:
                if process.pidfd in woken:
                    self._bury(index, process, now)
            due = self._scheduler.next_time()
            if due is not None and due <= now:
                self._carry_out(self._scheduler.handle_time(now))
            if self._abandoned:
                self._close(self._timeouts.close)
            self._receive(now)
        self._answers.give()
        self._answers.give_public()

    def _receive(self, now: float) -> None:
        """All messages that are there."""
        if self._torn_down:
            return
        while (received := self._router.receive()) is not None:
            peer, data = received
            index = self._peers.get(peer)
            if index is None:
                self._greet(peer, data, now)
                continue
            try:
                message = decode(data)
                if isinstance(message, Reply):
                    self._take(index, message)
                actions = self._scheduler.handle_message(now, index, message)
            except ProtocolError as exc:
                self._kill(index, f"breaks the protocol: {exc}")
                continue
            except Exception as exc:  # what one worker sends must not end the service of the others
                _log.exception("a message could not be handled")
                self._kill(index, f"sent what could not be handled: {exc!r}")
                continue
            if isinstance(message, BuildFinish):
                self._tell(index, message.notes)
            self._carry_out(actions)
            if not isinstance(message, Reply) or self._scheduler.next_turn() < self._wakes_at:
                self._hurry()
            if isinstance(message, Error) and message.traceback:
                _log.debug("%s: %s", self._scheduler.name(index), message.traceback)

    def _tell(self, index: int, notes: Sequence[str]) -> None:
        """Log what there is to know of how a worker loaded the model, unless another one said so too."""
        for note in notes:
            if note not in self._notes:
                self._notes.add(note)
                _log.warning("%s: %s", self._builds[index].model, note)

    def _greet(self, peer: bytes, data: bytes, now: float) -> None:
        """A message of an unknown peer: a worker of ours with its token, or it is ignored."""
        try:
            message = decode(data)
        except ProtocolError as exc:
            _log.debug("ignored a message of a stranger: %s", exc)
            return
        if isinstance(message, Hello) and message.version == VERSION:
            for index, process in self._processes.items():
                known = process.peer is None and message.pid == process.pid
                if known and hmac.compare_digest(message.token, process.token):
                    process.peer = peer
                    self._peers[peer] = index
                    self._carry_out(self._scheduler.handle_message(now, index, message))
                    return
        _log.debug("ignored a %s of a stranger", type(message).__name__)

    def _take(self, index: int, reply: Reply) -> None:
        """Have the jobs check the reply, and get the blocks that the worker made for it."""
        members = self._scheduler.running(index)
        if not members or members[0] != (reply.request, reply.shard):
            return  # the scheduler will say what is wrong with it
        if len(members) > 1 and reply.outputs:
            raise ProtocolError(
                "reply with outputs to a joined run, whose outputs all have a place"
            )
        process = self._processes[index]

        def fetch(number: int) -> Block:
            try:
                size, fd = process.lifeline.receive_block(number)
                return Block.attach(number, size, fd)
            except OSError as exc:
                raise ProtocolError(f"block {number} of the worker's: {exc}") from exc

        for request, shard in members:
            self._jobs[request].take(shard, reply.outputs, fetch)

    def _bury(self, index: int, process: WorkerProcess, now: float) -> None:
        """A worker's process has ended."""
        self._poll.unregister(process.pidfd)
        del self._processes[index]
        if process.peer is not None:
            del self._peers[process.peer]
        # What it had begun it had taken the permit for; the answer before that may have been lost with it.
        ahead_begun = self._scheduler.has_ahead(index) and not process.permits.take()
        how = describe_exit(process.reap())
        expected = self._scheduler.is_exiting(index)
        _log.log(
            logging.INFO if expected else logging.WARNING, "%s %s", self._scheduler.name(index), how
        )
        self._carry_out(self._scheduler.handle_died(now, index, how, ahead_begun=ahead_begun))

    # Actions.

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the scheduler says, in order; the lock is held. `Answers.give` is to follow without it."""
        pending = deque(actions)
        while pending:
            match pending.popleft():
                case SendPredict(worker=worker, members=members):
                    self._send_predict(worker, members)
                case TakeBack(worker=worker):
                    process = self._processes.get(worker)
                    if process is not None and process.permits.take():
                        pending += self._scheduler.handle_taken_back(monotonic(), worker)
                case Settle(request=request, error=error):
                    self._answers.add(self._jobs[request], error)
                case Release(request=request):
                    del self._jobs[request]  # and its memory, once nobody holds a view of it
                case Send(worker=worker, message=message):
                    self._send(worker, message)
                case StartWorker(worker=worker):
                    pending += self._start_worker(worker)
                case KillWorker(worker=worker):
                    if worker in self._processes:
                        self._processes[worker].kill()
                case PoolStarted(error=error):
                    pending += self._finish_start(error)
                case PoolClosed(abandoned=abandoned):
                    for worker in abandoned:
                        _log.error("%s does not end, not even killed", self._scheduler.name(worker))
                    self._finished = True

    def _wake_io_thread(self) -> None:
        """There are futures to answer that users hold; in its own turn the I/O thread looks by itself."""
        if self.may_wait():
            self._wakeup.set()

    def _wake_driver(self) -> None:
        """A future was settled: if the driver waits for it, in another thread, it must look."""
        if self._driver not in (0, threading.get_ident()):
            self._driver_wakeup.set()

    def _send(self, worker: int, message: Message) -> None:
        self._send_data(worker, encode(message))

    def _send_data(self, worker: int, data: bytes) -> None:
        """Send without waiting; a worker that cannot be reached is killed, and its death reported."""
        process = self._processes.get(worker)
        if process is None or process.peer is None:
            return
        try:
            self._router.send(process.peer, data)
        except SendError as exc:
            self._kill(worker, f"cannot be reached: {exc}")

    def _kill(self, worker: int, reason: str) -> None:
        """End a worker that cannot be worked with; its death is reported as any other."""
        _log.error("%s %s; it is killed", self._scheduler.name(worker), reason)
        self._scheduler.handle_killed(worker, reason)
        self._processes[worker].kill()

    def _send_predict(self, worker: int, members: tuple[ShardId, ...]) -> None:
        jobs = [(self._jobs[request], shard) for request, shard in members]
        for job, _ in jobs:
            self._attach(worker, job.blocks)
        first, shard = jobs[0]
        self._give_weights(worker, first)
        if len(jobs) == 1:
            data = first.message(shard)
        else:
            tensors = [job.tensors(shard) for job, shard in jobs]
            version = first.weights.number
            data = encode_predict_joined(first.number, shard, version, tensors, first.axes)
        process = self._processes.get(worker)
        if process is not None:
            process.permits.give()
        self._send_data(worker, data)

    def _attach(self, worker: int, blocks: frozenset[int]) -> None:
        """Give the worker the blocks that it does not have yet."""
        process = self._processes.get(worker)
        if process is None or blocks <= process.attached:
            return
        for number in blocks - process.attached:
            block = self.arena.block(number)
            if block is None:
                continue
            try:
                process.lifeline.send_block(number, block.size, block.fd)
            except OSError as exc:
                self._kill(worker, f"does not take a block: {exc}")
                return
            process.attached.add(number)
            self._send(worker, Attach(block=number, size=block.size))

    def _give_weights(self, worker: int, job: Job) -> None:
        """Tell the worker where the job's weights lie, if it was not told yet."""
        version, process = job.weights, self._processes.get(worker)
        if process is None or not version.number or version.number in process.weights:
            return
        self._attach(worker, version.blocks)
        process.weights = {n for n in process.weights if n >= version.oldest} | {version.number}
        tensors = tuple(version.tensors.values())
        self._send(
            worker,
            UpdateWeights(version=version.number, oldest=version.oldest, tensors=tensors),
        )

    def _detach(self, number: int) -> None:
        """The arena has dropped a block."""
        if self._thread is None or os.getpid() != self._pid:
            return
        with self._lock:
            for worker, process in self._processes.items():
                if number in process.attached:
                    process.attached.discard(number)
                    if not self._scheduler.is_exiting(worker):
                        self._send(worker, Detach(block=number))
        self._wakeup.set()

    def _start_worker(self, worker: int) -> list[Action]:
        """Start a worker's process; what is to be done next."""
        build = self._builds[worker]
        token = secrets.token_hex(16)
        try:
            process = WorkerProcess(
                worker, build.device, self._folder.endpoint, token, self._output
            )
        except OSError as exc:
            how = f"could not be started: {exc}"
            return self._scheduler.handle_died(monotonic(), worker, how)
        self._processes[worker] = process
        self._poll.register(process.pidfd, select.EPOLLIN)
        self._scheduler.handle_started(worker, process.pid)
        _log.info("%s started", self._scheduler.name(worker))
        return []

    def _finish_start(self, error: McinferError | None) -> list[Action]:
        """The scheduler knows whether the pool is up; what is to be done next."""
        specs = self._scheduler.specs
        if error is None and specs is not None:
            self._started.set_result(specs)
            return []
        self._failure = error
        return self._scheduler.handle_close(monotonic(), self._timeouts.close)

    def _close(self, timeout: float) -> None:
        self._carry_out(self._scheduler.handle_close(monotonic(), timeout))

    def _collapse(self, exc: BaseException) -> None:
        """Last resort: end everything, answer everyone."""
        with self._lock:
            self._finished = True
            for process in self._processes.values():
                process.kill()
            jobs = [*self._jobs.values()]
            self._jobs.clear()
        self._answers.fail_all(jobs, ClosedError(f"the master failed: {exc!r}"))

    def _tear_down(self) -> None:
        """After the last worker: give up sockets, descriptors and the folder."""
        atexit.unregister(self.close)
        with self._lock:
            for process in self._processes.values():
                process.abandon()
            self._processes.clear()
            self._peers.clear()
            self._torn_down = True
            self._router.close()
            self._poll.close()
        self._folder.remove()
        self.arena.close()
        self._output.close(_LAST_OUTPUT)
        self._answers.end()
        if not self._started.done():
            self._started.set_exception(self._failure or ClosedError("the master was closed"))
