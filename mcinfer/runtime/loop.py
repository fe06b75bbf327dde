"""The loop: one thread owns the workers of a master and all shared state.

::

    callers ── Inbox ──► loop: a turn ── events ──► Scheduler (pure) ── orders ──► runs, answers: the loop
                          │  Admission: who waits                             └──► workers: Supervision
                          │  one wait for: messages, pidfds of all workers, the bell, what is due
    callbacks, trace hooks, logs ◄── Delivery (a thread)

Rules of ownership: only the loop's thread touches the scheduler, the processes, the sockets, the record of
shared memory and the accepted requests, so these need no lock. Python runs signal handlers in the main
thread, which is never the loop. The loop runs no user code, and takes no lock that user code can hold.
"""

import atexit
import logging
import math
import select
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from time import monotonic
from weakref import ref

from mcinfer.config import Device
from mcinfer.errors import BuildError, ClosedError, McinferError, ProtocolError
from mcinfer.logs import PoolLog
from mcinfer.private import ModelInMemory
from mcinfer.process import becomes_readable, check_threads
from mcinfer.protocol import (
    REPLY,
    REPLY_HEAD,
    Build,
    BuildFinish,
    Error,
    Message,
    Reply,
    TensorRef,
    decode_reply_body,
)
from mcinfer.requests.frames import IdleFrames
from mcinfer.requests.planner import HostPlace, OpenPlace, Place, Planner
from mcinfer.requests.request import Request
from mcinfer.runtime.admission import Admission
from mcinfer.runtime.connections import Connections, Share
from mcinfer.runtime.delivery import Delivery, call_trace_hook, prepare
from mcinfer.runtime.inbox import CLOSING, Inbox, Question, take
from mcinfer.runtime.supervision import Supervision
from mcinfer.scheduler.dispatch import Entry
from mcinfer.scheduler.scheduler import Scheduler
from mcinfer.scheduler.workers import PoolRules, Run
from mcinfer.shm.arena import Arena
from mcinfer.shm.descriptors import WakeUp
from mcinfer.specs import ModelSpec, specs_of
from mcinfer.statistics import Statistics, TraceHook

_MAX_MESSAGES = 32  # in one turn: one worker must not delay the others, nor the callers
_ROUNDED = 0.002  # seconds: epoll rounds up to milliseconds, which is long beside a short run
_FD_SETSIZE = 1024  # select(2) takes no descriptor from here on
_LONGEST_WAIT = 86400.0  # seconds of one wait: epoll takes no more than 24 days
_LAST_SECONDS = 1.0  # for workers' ends after a fault, and for callbacks at the close


class Loop:
    """The workers of one master, their requests, and the thread that owns both.

    Attributes:
        inbox: How callers reach it.
        supervision: The workers.
        arena: The shared memory of tensors.
        frames: The memory of it that is not in use.
        model: The model, if it is in memory; closed when no worker is started any more.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Build]],
        rules: PoolRules,
        memory_bytes: int,
        log: PoolLog,
        *,
        trace: "ref[TraceHook] | None" = None,
        open_place: OpenPlace,
        share: Share,
    ) -> None:
        builds = [ranks[0] for ranks in groups]  # one, unless a model is cut
        self._log, self._delivery = log, Delivery(log)
        limits = self._limits = rules.limits
        self._max_rows = rules.max_batch_size
        self._opens = open_place
        self.inbox = Inbox(limits, self._delivery, self._open_place)
        self._connections = Connections(
            groups, lambda n: self.admission.block(n), limits, share, log.label
        )
        self.supervision = Supervision(self._connections, self.inbox, self._delivery, rules)
        self._block_numbers = count()
        self.arena = Arena(
            memory_bytes, dropped=self.supervision.detach, numbers=self._block_numbers
        )
        self.frames = IdleFrames()
        scheduler = self._scheduler = Scheduler(builds, self, self.supervision, rules)
        self.supervision.scheduler = scheduler
        self.admission = self.inbox.admission = Admission(scheduler, self.arena, self.frames)
        self.inbox.table = scheduler.table
        self.model: ModelInMemory | None = None
        self._trace = trace
        self._ended = WakeUp()
        self._readable = True  # whether there may be messages
        self._settled: list[Request] = []  # in this turn; their callers are to be woken
        self._run_claims = [True]
        self._thread: threading.Thread | None = None

    # Life, for any thread.

    def start(self) -> BuildFinish:
        """Start all workers, wait until they have the model, and return its description.

        Raises:
            BuildError: A worker could not load it, the system has no descriptor or thread left, or threads
                are not Python's own (`check_threads`); no process is left.
            ClosedError: The loop was closed meanwhile; no process is left.
        """
        check_threads("a Master")
        try:
            self._open()
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread
            raise BuildError(f"no pool can be opened: {exc}") from exc
        try:
            if self.inbox.closing:
                raise ClosedError("the master was closed while it was starting")
            self.inbox.ask(lambda: self._scheduler.handle_start(monotonic()))
            self.supervision.started.wait()
            return self.supervision.started.result()
        except BaseException:
            self.close(None if self.supervision.started.settled else 0.0)
            raise

    def _open(self) -> None:
        """Open the transport and start the threads; all or nothing."""
        with ExitStack() as opened:
            self._connections.open()
            self._transport = self._connections.transport
            opened.callback(self._connections.close)
            self._poll = self.supervision.poll = select.epoll()
            opened.callback(self._poll.close)
            # Each ring is seen once, so that nothing has to read it.
            self._poll.register(self.inbox.bell.fd, select.EPOLLIN | select.EPOLLET)
            self._poll.register(self._transport.fd, select.EPOLLIN)
            atexit.register(self.close)
            opened.callback(atexit.unregister, self.close)
            opened.callback(self._delivery.close)
            self._delivery.start()
            thread = threading.Thread(target=self._run, name="mcinfer-loop", daemon=True)
            try:
                thread.start()
                self._adopt(thread)
                opened.pop_all()
            except BaseException:
                if not take(self._run_claims):
                    # Ctrl-C, and the thread runs: it closes all of this.
                    self._adopt(thread)
                    self.inbox.finished = True
                    self.inbox.bell.set()
                    opened.pop_all()
                raise

    def _adopt(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.inbox.opened = True

    def close(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """End all workers; see `Master.close`."""
        if self.inbox.is_forked:
            return
        self.inbox.closing = True
        thread = self._thread
        if thread is None:
            self.inbox.finished = True
            return
        try:
            self.inbox.post(Question(partial(self._end, timeout, drain=drain)))
            if self.inbox.may_wait():
                self._wait_for_end(thread)
        except BaseException:
            if drain:
                self.close()  # Ctrl-C: who waits for requests to be answered does not any more
            raise

    def _wait_for_end(self, thread: threading.Thread) -> None:
        """Wait until the loop has closed everything.

        `Thread.join` alone will not do: after one that a signal's handler interrupts, Python 3.11 takes the
        thread for ended, and the next one does not wait (`_wait_for_tstate_lock` in its threading.py).
        """
        becomes_readable(self._ended.fd)
        thread.join()
        self._delivery.wait(_LAST_SECONDS)

    def abandon(self) -> None:
        """Ask the loop to close everything, without waiting: for finalizers."""
        if self._thread is not None and not self.inbox.is_forked:
            self.inbox.post(Question(partial(self._end, None)))

    def planner(self, model: ModelSpec, built: BuildFinish) -> Planner:
        """What makes the requests of this model, which the workers have loaded."""
        return Planner(
            model,
            place=HostPlace(self.arena, self.inbox.allocate, self.frames),
            queue=self.inbox,
            limits=self._limits,
            max_rows=self._max_rows,
            weights=specs_of(built.weights),
            ragged=built.ragged,
            log=self._log,
        )

    @property
    def state(self) -> str:
        """The state in words, without asking the loop."""
        if self.inbox.state != "ready":
            return self.inbox.state
        if not self.supervision.started.settled:
            return "starting"
        serving, workers = self.supervision.serving, len(self._scheduler.workers)
        return "ready" if serving == workers else f"{serving} of {workers} workers serve"

    def statistics(self, weights_version: int) -> Statistics:
        return self.inbox.ask(partial(self._take_statistics, weights_version))

    def _open_place(self, device: Device) -> Place:
        limit, dropped = self._limits.memory_bytes, self.supervision.detach
        return self._opens(device, limit, self.inbox, dropped, self._block_numbers)

    # The loop's thread.

    def _run(self) -> None:
        if not take(self._run_claims):
            return
        self.inbox.loop_thread = threading.get_ident()
        try:
            while not self.inbox.finished:
                self._turn()
        except BaseException as exc:  # a bug here must not leave callers waiting or workers running
            self._delivery.log(logging.CRITICAL, "the loop failed", failure=exc)
            self._collapse(exc)
        finally:
            try:
                self._tear_down()
            finally:
                self.inbox.loop_thread = 0  # another thread may have it from now on
                self._ended.set()
                atexit.unregister(self.close)

    def _turn(self) -> None:
        """Handle all that has come; wait once if that was nothing."""
        admission, inbox, news = self.admission, self.inbox.items, self.supervision.news
        places = admission.places
        while news:
            news.popleft()()
        count = len(inbox)
        while count:
            # It counts as in the inbox until it counts as in flight.
            item = inbox[0]
            if isinstance(item, Request):
                places.attempt(item, has_waited=False)
            elif isinstance(item, Question):
                item.make()
            else:
                admission.allocate(item)
            del item
            inbox.popleft()
            count -= 1
        if self._readable:
            self._receive()
        scheduler, now = self._scheduler, monotonic()
        if now >= scheduler.due:
            scheduler.handle_time(now)
        if now >= self.supervision.look_due:
            self.supervision.look(now)
        if now >= admission.due or now >= places.due:
            admission.look(now)
        if places.waiting:
            places.serve()
        if self._settled:
            self._wake_callers()
        if self._readable or inbox or news or self.inbox.finished:
            return
        if scheduler.table.in_flight and self.supervision.look_due == math.inf:
            self.supervision.look_soon(now)
        self.inbox.asleep = True
        if inbox or not self._transport.may_sleep():
            self.inbox.asleep = False
            self._readable = True
            return
        due = min(scheduler.due, self.supervision.look_due, admission.due, places.due)
        wait = due - monotonic()
        if 0 < wait < _ROUNDED and self._poll.fileno() < _FD_SETSIZE:
            select.select((self._poll,), (), (), wait)
            wait = 0.0
        ready = self._poll.poll(min(wait, _LONGEST_WAIT) if wait > 0 else 0)
        self.inbox.asleep = False
        bell, ended = self.inbox.bell.fd, []
        for fd, _ in ready:
            if fd != bell:
                self._readable = True
                if fd != self._transport.fd:
                    ended.append(fd)
        if ended:
            self._receive()  # also their last messages
            self.supervision.note_ends(ended)
            self._readable = True

    def _wake_callers(self) -> None:
        """Wake the callers of what was settled, at the end of a turn.

        Each would take the interpreter's lock at the next call of ZeroMQ, and the loop would wait for it.
        """
        for request in self._settled:
            request.wake()
        self._settled.clear()

    def _end(self, seconds: float | None, *, drain: bool = False) -> None:
        """Nothing once the loop has ended: then it is called in any thread, also by a finalizer."""
        if self.inbox.finished:
            return
        if drain:
            self._scheduler.handle_drain(monotonic(), math.inf if seconds is None else seconds)
        else:
            self._scheduler.handle_close(monotonic(), seconds)
        self.admission.places.refuse_all(CLOSING if drain else "the master is closed")

    def _collapse(self, exc: BaseException) -> None:
        """A fault of mcinfer: end all workers, fail all requests."""
        failure = ClosedError(f"the master failed: {exc!r}")
        self.inbox.failure = failure
        self.inbox.finished = self.inbox.closing = True
        self.admission.places.fail_all(failure)
        self._scheduler.table.give_up()
        self.supervision.end_all(_LAST_SECONDS)

    def _tear_down(self) -> None:
        """Close sockets and descriptors at the end, even if one of these fails."""
        self.inbox.finished = True
        self.supervision.serving = 0
        # So that no caller rings: a finalizer may call after the bell's own.
        self.inbox.asleep = False
        with ExitStack() as last:  # what was entered last comes first
            last.callback(self._delivery.close)
            for place in self.inbox.places.values():
                # Given back once the work of its device is done.
                last.callback(self._delivery.put, place.release)
            if self.model is not None:
                last.callback(self.model.close)
            last.callback(self._refuse_all)
            for arena in self.admission.arenas:
                last.callback(arena.close)
            last.callback(self._poll.close)
            last.callback(self._connections.close)
            last.callback(self._wake_callers)

    def _refuse_all(self) -> None:
        self.admission.refuse_all()
        self.supervision.refuse_all()
        self.inbox.gone = True
        self.inbox.refuse()

    def _take_statistics(self, weights_version: int) -> Statistics:
        table, refused = self._scheduler.table, self.admission.places.refused
        idle = self.frames.bytes
        lent = [gang.blocks for gang in self._connections.processes.values()]
        return Statistics(
            **table.counts(),
            queued_shards=len(self._scheduler.queue),
            batch_sizes=self._scheduler.batch_sizes.snapshot(),
            memory_bytes=self.arena.size + sum(blocks.size for blocks in lent),
            memory_used_bytes=max(0, self.arena.used - idle) + sum(blocks.used for blocks in lent),
            weights_version=weights_version,
            refused={why: n + refused[why] for why, n in self.inbox.refused.items()},
            health=self.supervision.take_health(),
            workers=self.supervision.take_statistics(),
            cards=tuple(place.statistics() for place in self.inbox.places.values()),
            join_gain=self._scheduler.joining.gain,
        )

    # What comes.

    def _receive(self) -> None:
        """Handle the messages that are there, or the first of very many."""
        if self.inbox.finished:
            return
        receive, peers = self._transport.receive, self._connections.peers
        for _ in range(_MAX_MESSAGES):
            received = receive()
            if received is None:
                self._readable = False
                return
            peer, data = received
            if len(data) >= REPLY_HEAD.size and data[0] == REPLY and peer in peers:
                gang = peers[peer][0]
                if len(gang.ranks) == 1:
                    _, *run = REPLY_HEAD.unpack_from(data)
                    self._take_reply(gang.index, data[REPLY_HEAD.size :], *run)
                    continue
            index, message = self._connections.read(peer, data)
            if index is not None and message is not None:
                self._handle_message(index, message, monotonic())

    def _take_reply(
        self, index: int, body: bytes, number: int, shard: int, seconds: float, wide: bool
    ) -> None:
        """Take a REPLY of a worker of one process: its body, and its head, which is not checked yet."""
        now = monotonic()
        entry = self._scheduler.table.entries.get(number)
        error: Error | None = None
        try:
            if body or entry is None or not entry.request.is_laid_out:
                error = self._take_outputs(index, number, shard, decode_reply_body(body))
            self._scheduler.handle_answer(now, index, number, shard, seconds, wide, error)
        except Exception as exc:
            self._refuse(index, exc)

    def _handle_message(self, index: int, message: Message | ProtocolError, now: float) -> None:
        try:
            if isinstance(message, ProtocolError):
                raise message
            if isinstance(message, Reply):
                run = message.request, message.shard
                error = self._take_outputs(index, *run, message.outputs)
                message = error or message
            elif isinstance(message, BuildFinish):
                message = self.supervision.take_weights(index, message)
            self._scheduler.handle_message(now, index, message)
        except Exception as exc:
            self._refuse(index, exc)
            return
        self.supervision.report(index, message)
        if isinstance(message, BuildFinish):
            self.inbox.note_reach(index, message.reaches)

    def _refuse(self, index: int, exc: Exception) -> None:
        """End a worker whose message was not one of the protocol, or could not be handled."""
        if isinstance(exc, ProtocolError):
            self.supervision.outlaw(index, f"breaks the protocol: {exc}")
            return
        # What one worker sends must not end the service of the others.
        self._delivery.log(logging.ERROR, "a message could not be handled", failure=exc)
        self.supervision.outlaw(index, f"sent what could not be handled: {exc!r}")

    def _take_outputs(
        self, index: int, number: int, shard: int, outputs: tuple[TensorRef, ...]
    ) -> Error | None:
        """Have the requests of a run check the reply, and take what lies in the worker's own blocks.

        Returns:
            The run's failure, if this process has no memory for the outputs.
        """
        w = self._scheduler.workers[index]
        run = w.find_begun(number, shard)
        if run is None:
            return None  # the scheduler will say what is wrong with it
        blocks = self._connections.processes[index].blocks
        members = run.members
        if len(members) > 1 and outputs:
            raise ProtocolError(
                "reply with outputs to a joined run, whose outputs all have a place"
            )
        try:
            for member, part in members:
                request: Request = self._scheduler.table.entries[member].request
                request.take(part, outputs, blocks.lease, index, self.arena.limit)
                if outputs and blocks.is_crowded:
                    request.copies = True
            self.supervision.note_lent(blocks, monotonic())
        except (OSError, MemoryError) as exc:
            blocks.give_up(outputs)
            text = f"the master cannot take the answer: {exc!r}"
            return Error(request=number, shard=shard, kind="predict", text=text)
        return None

    # Orders about requests.

    def send_run(self, worker: int, run: Run) -> None:
        given = []
        for number, shard in run.members:
            request = self._scheduler.table.entries[number].request
            request.workers[shard] = worker
            given.append((request, shard))
        self._connections.send_run(worker, given, wide=run.wide)

    def settle(self, entry: Entry, error: McinferError | None) -> None:
        request: Request = entry.request
        future = request.future
        request.copies = request.copies or self.arena.crowded
        if error is not None:
            error.refusal = None  # the request was accepted
        request.set_ending(error, cancelled=entry.ending == "cancelled")
        self._settled.append(request)
        if not self._scheduler.table.in_flight:  # no other answer is to come
            self._wake_callers()
        if self._trace is not None:
            hook, context = self._trace(), request.context
            if hook is not None and context is not None:
                # A queued call must not hold a result, unless its parts are still to be joined: here, or
                # by a caller without a future.
                is_bare = request.error is not None or request.is_simple
                held = request.error if is_bare else request
                joins = not is_bare and future is not None
                given = hook, context, entry, monotonic(), held, joins
                call = partial(call_trace_hook, self._log, *given)
                (self._delivery.put if joins else self._delivery.trace)(call)
        elif future is not None and error is None and (request.copies or not request.is_simple):
            # What it holds must not wait until its user asks for it.
            self._delivery.put(partial(prepare, ref(future)))

    def release(self, entry: Entry) -> None:
        # And its memory, once it is answered and no view of it is left; a trace still has the entry.
        request, entry.request = entry.request, None
        request.release()
