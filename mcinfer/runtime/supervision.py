"""The workers of a pool: they start, run, die and are replaced; how they are. The loop's thread owns it.

It carries out the scheduler's orders about workers (`WorkerSink`) and reports what becomes of their
processes: that one runs, could not be started, or has ended. The master learns of an end from a pidfd, in the
same wait as of messages. Which processes a worker has is the business of `Connections`.

What fails in an order is put into `news`: events that the loop reports at the begin of its next turn.

Workers of one device may hold its weights once; then they start in order (`Sharing`).
"""

import logging
import math
import select
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic

from mcinfer.errors import ClosedError, McinferError, ProtocolError, ReadyTimeoutError
from mcinfer.machine import oom_kills, usable_memory
from mcinfer.process import STRAY, STRAY_REASON, becomes_readable
from mcinfer.protocol import (
    MAX_NOTES,
    Build,
    BuildFinish,
    Detach,
    Error,
    Exit,
    Message,
    Preparing,
)
from mcinfer.requests.lent_blocks import MOST_BYTES, LentBlocks
from mcinfer.requests.request import Outcome
from mcinfer.runtime.connections import Connections
from mcinfer.runtime.delivery import Delivery, preparing
from mcinfer.runtime.inbox import Inbox, Question
from mcinfer.runtime.worker_process import Gang
from mcinfer.scheduler.scheduler import Scheduler
from mcinfer.scheduler.workers import PoolRules
from mcinfer.statistics import Health, WorkerStatistics

_LOOK_INTERVAL = 1.0  # seconds between two looks at workers
_HEALTH_INTERVAL = 0.2  # seconds between two checks of `wait_ready`
_MAX_NOTES = 100  # different notes that are logged

_LEVELS = {"degraded": logging.WARNING, "failed": logging.ERROR}


class Sharing:
    """The workers of one device that hold its weights once: the order in which they start and end.

    The first that starts is the *maker*: its process loads the weights and hands them over, with its
    BUILD_FINISH. The others start after that, and use them. The end of the maker ends these, and it is asked
    to end only when they are gone. The next maker starts when no process is left, since the device need not
    have room for the weights twice.

    Attributes:
        maker: The worker whose process makes the weights, or has made them; None without one.
        users: Those whose processes use them, or will.
        is_made: Whether others may start and use them.
        was_made: Whether any process has made them.
        apart: Whether each worker loads them for itself, since they could not be shared.
    """

    def __init__(self) -> None:
        self.maker: int | None = None
        self.users: set[int] = set()
        self.is_made = self.was_made = self.apart = False
        self._waiting: deque[int] = deque()
        self._holds_exit = False

    def order(self, worker: int) -> None:
        """The worker is to be started; see `next`."""
        self._waiting.append(worker)

    def withdraw(self, worker: int) -> bool:
        """The worker is not to be started any more; False if it was not waiting."""
        if worker not in self._waiting:
            return False
        self._waiting.remove(worker)
        return True

    def next(self) -> int | None:
        """Take the next worker that may be started now, if any."""
        is_free = self.maker is None and not self.users
        if not self._waiting or not (self.apart or self.is_made or is_free):
            return None
        worker = self._waiting.popleft()
        if self.is_made:
            self.users.add(worker)
        elif not self.apart:
            self.maker = worker
        return worker

    def note_made(self, made: bool) -> None:
        """The maker has the model, and has made the weights for the others, or could not."""
        self.is_made, self.apart = made, not made
        self.was_made |= made

    def hold_exit(self, worker: int) -> bool:
        """Whether the worker, which is to end, must wait for those that use its weights; see `take_exit`."""
        if worker != self.maker:
            return False
        self.is_made, self._holds_exit = False, bool(self.users)
        return self._holds_exit

    def note_end(self, worker: int) -> bool:
        """A worker's process has ended; whether the users cannot go on without it."""
        self.users.discard(worker)
        if worker != self.maker:
            return False
        self.maker, self.is_made, self._holds_exit = None, False, False
        return True

    def take_exit(self) -> int | None:
        """The maker, once, if it is to be asked to end now."""
        if self.users or not self._holds_exit:
            return None
        self._holds_exit = False
        return self.maker


class Supervision:
    """The workers of one pool; `health`, `wait_ready` and `restart_workers` are for any thread.

    Attributes:
        scheduler: Whose orders it carries out; set before the start.
        poll: What the loop waits with; set before the start.
        news: What orders have led to, to be reported.
        started: The first start.
        failure: Why the pool could not be started, or has failed.
        serving: How many workers take requests.
        at_once: How many runs these execute at once.
        look_due: When to look at workers' processes, and at the blocks that they have made.
    """

    def __init__(
        self,
        connections: Connections,
        inbox: Inbox,
        delivery: Delivery,
        rules: PoolRules,
    ) -> None:
        self.scheduler: Scheduler
        self.poll: select.epoll
        self.news: deque[Callable[[], object]] = deque()
        self.started = Outcome[BuildFinish]()
        self.failure: McinferError | None = None
        self.serving = 0
        self.at_once = 0
        self._limits_growth = rules.restart.max_memory_bytes is not None
        self.look_due = 0.0 if self._limits_growth else math.inf
        self._connections = connections
        connections.lost = self._note_lost
        self._inbox = inbox
        self._delivery = delivery
        self._limits = rules.limits
        self._restarted: Outcome[None] | None = None
        self._notes: set[str] = set()
        self._lost_at: float | None = None  # when the pool ceased to be ready, until it is again
        self._oom_kills: dict[int, int] = {}  # by worker: at its start
        self._sharing: dict[int, Sharing] = {}  # by worker
        of_devices: dict[str, Sharing] = {}
        for worker, ranks in enumerate(connections.builds):
            if ranks[0].shares_weights:
                self._sharing[worker] = of_devices.setdefault(ranks[0].device, Sharing())

    # Orders of the scheduler.

    def start_worker(self, worker: int) -> None:
        """Carry out the order, when the worker may start."""
        sharing = self._sharing.get(worker)
        if sharing is None:
            self._start(worker)
            return
        sharing.order(worker)
        self._start_next(sharing)

    def _start_next(self, sharing: Sharing) -> None:
        while (worker := sharing.next()) is not None:
            self._start(worker)

    def _start(self, worker: int) -> None:
        process = None
        try:
            process = self._connections.start(worker)
            for child in process.ranks:
                self.poll.register(child.pidfd, select.EPOLLIN)
        except Exception as exc:  # /proc/sys/fs/epoll/max_user_watches, no `sys.executable`, …
            if process is not None:
                process.kill()
                self._connections.reap(worker)
            how = f"could not be {'started' if process is None else 'watched'}: {exc}"
            self.news.append(partial(self._report_end, worker, how))
            return
        self._oom_kills[worker] = oom_kills()
        self.news.append(partial(self._note_start, worker, process.pid))

    def _note_start(self, worker: int, pid: int) -> None:
        self.scheduler.handle_started(monotonic(), worker, pid)
        self._delivery.log(logging.INFO, "%s started", self.scheduler.workers[worker].name)

    def send(self, worker: int, message: Message) -> None:
        sharing = self._sharing.get(worker)
        if isinstance(message, Build) and sharing is not None:
            if sharing.apart:
                message = replace(message, shares_weights=False)
            elif worker != sharing.maker and sharing.maker is not None:
                self._connections.build_with(worker, message, maker=sharing.maker)
                return
        if isinstance(message, Exit) and sharing is not None and sharing.hold_exit(worker):
            why = f"it uses the weights of worker {worker}, which is to end"
            self.news.append(partial(self._end_users, sharing, why))
            return
        self._connections.send(worker, message)

    def _end_users(self, sharing: Sharing, why: str) -> None:
        for user in sorted(sharing.users):
            if not self.scheduler.is_exiting(user):
                self.scheduler.handle_killed(user, why, planned=True)
                self._connections.kill(user)

    def _note_lost(self, process: Gang, reason: str) -> None:
        def end() -> None:
            if self._connections.processes.get(process.index) is process:
                self.outlaw(process.index, reason)

        self.news.append(end)

    def kill_worker(self, worker: int) -> None:
        sharing = self._sharing.get(worker)
        if sharing is not None and sharing.withdraw(worker):
            self.news.append(partial(self._report_end, worker, "was not started"))
        self._connections.kill(worker)

    def ask_for_stacks(self, worker: int) -> None:
        """Log that a worker hangs, and ask it for its stacks."""
        process = self._connections.processes.get(worker)
        if process is None:
            return
        standing = self._connections.standings().get(worker, "")
        also = f", and {standing}" if standing else ""
        what = self.scheduler.workers[worker].last_error
        self._delivery.log(logging.ERROR, "%s%s; it is ended", what, also)
        process.ask_for_stacks()

    def announce(self, health: Health, planned: bool) -> None:
        """Log a change; the end of a loss is a warning as the loss is, and says how long it was."""
        self._note_serving(health)
        now = monotonic()
        level = logging.INFO if planned else _LEVELS.get(health.state, logging.INFO)
        if health.state == "ready" and self._lost_at is not None:
            how_long, self._lost_at = now - self._lost_at, None
            text = str(health).removeprefix("ready")
            self._delivery.log(logging.WARNING, "ready again, after %.1f s%s", how_long, text)
            return
        if level > logging.INFO and self._lost_at is None:
            self._lost_at = now
        self._delivery.log(level, "%s", health)

    def _note_serving(self, health: Health) -> None:
        self.serving = health.serving
        self.at_once = sum(w.concurrent for w in self.scheduler.workers if w.serves)

    def pool_started(self, error: McinferError | None) -> None:
        specs = self.scheduler.lifecycle.specs
        if error is None and specs is not None:
            # Before the pool's first report: a first request comes at once.
            self._note_serving(self.scheduler.health(monotonic()))
            self.started.set(specs)
        else:
            self.failure = error
            self.news.append(lambda: self.scheduler.handle_close(monotonic()))

    def workers_restarted(self, error: McinferError | None) -> None:
        if self._restarted is not None and not self._restarted.settled:
            self._restarted.settle(error)

    def pool_closed(self, abandoned: Sequence[int]) -> None:
        for worker in abandoned:
            name = self.scheduler.workers[worker].name
            self._delivery.log(logging.ERROR, "%s does not end, not even killed", name)
        self._inbox.finished = True

    # Deaths.

    def note_ends(self, ready: Sequence[int]) -> None:
        """Report the processes that have ended, by their pidfds; what they sent has been received."""
        for index, process in [*self._connections.processes.items()]:
            ended = [child for child in process.ranks if child.pidfd in ready]
            for child in ended:
                self.poll.unregister(child.pidfd)
            if ended:
                process.note_ends(ended, asked=self.scheduler.is_exiting(index))
                if not process.running:
                    self._reap(index)
                elif process.killed and not self.scheduler.workers[index].is_killed:
                    self.scheduler.handle_killed(index, "")

    def _reap(self, index: int) -> None:
        """A worker's processes have ended: free what belongs to them, log and report it."""
        process = self._connections.processes[index]
        stacks = process.stacks()
        how, statuses = self._connections.reap(index)
        if not process.peers and self._limits.worker_memory_bytes is not None:
            how += f" (it may have {self._limits.worker_memory_bytes} bytes of memory of its own)"
        if STRAY in statuses:
            how += f" ({STRAY_REASON})"
        if statuses == {-signal.SIGKILL} and oom_kills() > self._oom_kills.get(index, 0):
            how += (
                "; the out-of-memory killer ended a process of this container (control group) meanwhile, "
                f"which may have {usable_memory()} bytes of memory"
            )
        expected = self.scheduler.is_exiting(index)
        level = logging.INFO if expected and not stacks else logging.WARNING
        where = f"; where it was:\n{stacks}" if stacks else ""
        self._delivery.log(level, "%s %s%s", self.scheduler.workers[index].name, how, where)
        self._report_end(index, how)

    def _report_end(self, worker: int, how: str) -> None:
        """Report that a worker has no process; `how`, in words."""
        sharing = self._sharing.get(worker)
        if sharing is not None and sharing.note_end(worker):
            # Before it is decided who takes its runs.
            self._end_users(sharing, f"it uses the weights of worker {worker}, which has ended")
        self.scheduler.handle_died(monotonic(), worker, how)
        if sharing is not None:
            if (maker := sharing.take_exit()) is not None:
                self._connections.send(maker, Exit())
            self._start_next(sharing)

    def outlaw(self, worker: int, reason: str) -> None:
        """End a worker that broke the protocol or cannot be reached; its death is reported as any other."""
        if self._connections.processes[worker].killed:
            return  # it is ended already
        name = self.scheduler.workers[worker].name
        self._delivery.log(logging.ERROR, "%s %s; it is ended", name, reason)
        self.scheduler.handle_killed(worker, reason)
        self._connections.outlaw(worker)

    def detach(self, number: int) -> None:
        """The arena has dropped a block: workers unmap it too."""
        for worker in [*self._connections.processes]:
            if not self.scheduler.is_exiting(worker):
                self._connections.detach(worker, number)

    def note_lent(self, blocks: LentBlocks, now: float) -> None:
        """A worker has lent a block: the end of its last view sends no event."""
        if blocks.size > MOST_BYTES:
            self.look_soon(now)

    def look_soon(self, now: float) -> None:
        """Something goes on of which no event may tell the end."""
        self.look_due = min(self.look_due, now + _LOOK_INTERVAL)

    def look(self, now: float) -> None:
        """Have workers close blocks that they need not keep, also where they get no more runs.

        And report which of those with runs is stopped by a signal, and how much memory each has, where the
        policy limits it.
        """
        self.look_due = now + _LOOK_INTERVAL if self._limits_growth else math.inf
        for worker, process in [*self._connections.processes.items()]:
            w = self.scheduler.workers[worker]
            if w.runs and not w.is_killed:
                with suppress(OSError):
                    stopped = any(child.standing() == "T" for child in process.ranks)
                    self.scheduler.handle_standing(worker, stopped=stopped)
                if w.is_killed:
                    self._delivery.log(logging.ERROR, "%s; it is ended", w.last_error)
            if self._limits_growth:
                with suppress(OSError):
                    self.scheduler.handle_own_memory(now, worker, process.own_bytes())
            if not self.scheduler.is_exiting(worker):
                for number in process.blocks.trim():
                    self._connections.send(worker, Detach(block=number))
                self.note_lent(process.blocks, now)

    # What workers say of themselves.

    def take_weights(self, index: int, message: BuildFinish) -> BuildFinish | Error:
        """Get the weights that a worker has made for others of its device, which may start then.

        Returns:
            The message; or an error, so that the worker is started again, if there were such weights before:
            the device may be full for a moment, and would not hold them for each worker. Past the worker's
            restart budget, each loads them for itself.

        Raises:
            ProtocolError: It was not asked to make any, or has not handed them over.
        """
        sharing = self._sharing.get(index)
        if sharing is None or sharing.maker != index or sharing.is_made:
            if message.slab is not None:
                raise ProtocolError(f"slab {message.slab} was not asked for")
            return message
        notes = message.notes
        if message.slab is not None:
            try:
                self._connections.take_slab(index, message.slab)
            except OSError as exc:  # no descriptor is left
                note = f"the workers of a device do not share its weights: {exc}"
                notes = (*notes, note)[-MAX_NOTES:]
                message = replace(message, slab=None, notes=notes)
        made, spent = message.slab is not None, self.scheduler.workers[index].budget.spent
        if sharing.was_made and not (made or spent) and self.started.settled:
            why = "; ".join(notes) or "it made none"
            return Error(kind="build", text=f"its device's weights are not shared any more: {why}")
        sharing.note_made(made)
        self._start_next(sharing)
        return message

    def report(self, index: int, message: Message) -> None:
        """Show and log what a worker says of its start, or of a failure; each note once."""
        w, show = self.scheduler.workers[index], self._delivery.show
        match message:
            case Preparing():
                show(preparing(self._connections.model, message.written, message.seconds))
            case BuildFinish():
                show("")
                for note in message.notes:
                    if note not in self._notes and len(self._notes) < _MAX_NOTES:
                        self._notes.add(note)
                        self._delivery.log(logging.WARNING, "%s", note)
            case Error():
                show("")
                if message.traceback:
                    self._delivery.log(logging.DEBUG, "%s: %s", w.name, message.traceback)

    # How the pool is.

    def health(self) -> Health:
        return self._inbox.ask(self.take_health)

    def take_health(self) -> Health:
        """The scheduler's health, corrected by the state of the processes."""
        health = self.scheduler.health(monotonic())
        if self.failure is not None:
            return replace(health, state="failed", reasons=(str(self.failure),), serving=0)
        if self._inbox.finished:
            return replace(health, state="closed", reasons=(), serving=0)
        standings = self._connections.standings()
        wrong = [w for w in self.scheduler.workers if w.serves and w.index in standings]
        if not wrong:
            return health
        return replace(
            health,
            state="degraded" if health.state == "ready" else health.state,
            reasons=(*health.reasons, *[f"{w.name} {standings[w.index]}" for w in wrong]),
            serving=health.serving - len(wrong),
        )

    def take_statistics(self) -> tuple[WorkerStatistics, ...]:
        """One entry for each process; the ranks of a group share what the scheduler knows of the group."""
        found = []
        for w in self.scheduler.lifecycle.statistics():
            process = self._connections.processes.get(w.index)
            pids = [w.pid, *(child.pid for child in process.ranks[1:])] if process else []
            for rank in range(self.scheduler.workers[w.index].build.ranks):
                index, device = self._connections.label(w.index, rank)
                pid = pids[rank] if rank < len(pids) else None
                found.append(replace(w, index=index, device=device, pid=pid, rank=rank))
        return tuple(found)

    # Replacing.

    def restart_workers(self, timeout: float) -> None:
        """See `Master.restart_workers`."""
        end = monotonic() + timeout
        own = Outcome[None]()
        try:
            while True:
                restarted = self._inbox.ask(partial(self._restart, own))
                if not restarted.wait(end - monotonic()):
                    raise ReadyTimeoutError(f"not all workers were replaced within {timeout:g} s")
                if restarted is own:  # and not another call's
                    return own.result()
        finally:
            self._inbox.post(Question(partial(self._forget_restart, own)))

    def _restart(self, own: Outcome[None]) -> Outcome[None]:
        """Begin to replace all workers, unless that is in progress; the restart to wait for."""
        if self._restarted is not None and not self._restarted.settled:
            return self._restarted
        self._restarted = own
        try:
            self.scheduler.handle_restart(monotonic())
        except McinferError:
            own.settle()
            raise
        return own

    def _forget_restart(self, restarted: "Outcome[None]") -> None:
        """The caller of the restart does not wait any more: replace no further workers."""
        if restarted is self._restarted:
            self._restarted = None  # its error's traceback leads to the master
            if not restarted.settled:
                self.scheduler.handle_restart_abandoned(monotonic())
                restarted.settle()

    # The end of the loop.

    def end_all(self, seconds: float) -> None:
        """End all processes, and wait for that for at most so many seconds."""
        processes = [*self._connections.processes.items()]
        for _, process in processes:
            process.kill()
        end = monotonic() + seconds
        for index, process in processes:
            if all(becomes_readable(child.pidfd, end - monotonic()) for child in process.ranks):
                self._connections.reap(index)

    def refuse_all(self) -> None:
        """Answer those who still wait for a start or a restart."""
        closed = ClosedError("the master was closed")
        if self._restarted is not None and not self._restarted.settled:
            self._restarted.settle(closed)
        if not self.started.settled:
            self.started.settle(self.failure or closed)
