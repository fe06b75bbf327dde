"""Several processes of ``mcinfer serve`` at one address, by uvicorn's supervisor.

::

    supervisor ══ a socket ════► process: event loop ── inline sessions ──► one entry of the model cache
               ── pings, SIGTERM ──►                ── figures ──────────► a file in the supervisor's folder

The first process starts alone: it prepares the models, or says why it cannot. Once all serve, a process that
dies is started again. What waits at its socket meanwhile is answered by the new one.

Ownership: the supervisor has the sockets, the folder and the processes. A process whose supervisor dies
answers what it has accepted, and ends.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack
from copy import copy
from math import inf
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import SIGNALS, Multiprocess, Process

from mcinfer.cli import prefixed_log
from mcinfer.cli.endpoint import ENDING, Config, Endpoint, Listening, tracing
from mcinfer.cli.progress import let_workers_tell, say
from mcinfer.errors import McinferError
from mcinfer.runtime.transport import runtime_folder
from mcinfer.serve.figures import ALL_SERVE, served
from mcinfer.serve.models import Models, settle
from mcinfer.serve.service import ServeOptions

_log = logging.getLogger("mcinfer.serve")

_SILENT_SECONDS = 30.0
"""A process that answers no ping for so long is replaced; one that starts answers none while it imports."""

_MORE_SECONDS = 10.0
"""For a process to end, beyond those for its requests."""


def run_processes(count: int, models: Models, options: ServeOptions, endpoint: Endpoint) -> bool:
    """Serve by so many processes until SIGINT or SIGTERM, which is raised again afterwards.

    SIGHUP replaces them one after the other, and the new ones load the models anew.

    Returns:
        False if a process could not load a model. It has said why.

    Raises:
        InvalidInputError: The address is taken.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with endpoint.shared(count) as listening, runtime_folder() as made:
            folder = Path(made.path)
            config = _Config(models, options, endpoint, folder)
            supervisor = _Supervisor(config, listening, folder)
            supervisor.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if supervisor.ended_by:
        signal.raise_signal(supervisor.ended_by)
    return not supervisor.failed


class _Supervisor(Multiprocess):
    """uvicorn's, with a socket for each process, a start that may fail, and an end that has an end.

    Attributes:
        failed: Whether a process could not start.
        ended_by: The signal that ended it, or 0.
    """

    handle_ttin = handle_ttou = None  # type: ignore[assignment] # there are as many as sockets

    config: "_Config"

    def __init__(self, config: "_Config", listening: Listening, folder: Path) -> None:
        super().__init__(config, [*listening.sockets])
        self._listening, self._folder, self._serving = listening, folder, False
        self.failed, self.ended_by = False, 0
        self._end = inf  # when the delay after SIGTERM is over

    def _start(self, place: int, config: "_Config | None" = None) -> Process:
        process = Process(config or self.config, [self.sockets[place]])
        process.start()
        return process

    def init_processes(self) -> None:
        self.processes.append(self._start(0))

    def keep_subprocess_alive(self) -> None:
        """Go on with the start, or have others take the places of processes that have ended."""
        if monotonic() >= self._end:
            self.should_exit.set()
        if self.should_exit.is_set():  # by a signal
            return
        ready = True
        for place, each in enumerate(self.processes):
            if (serves := _serves(each)) is not None:
                ready &= serves
                continue
            each.kill()  # if it does not answer
            each.join()
            if (status := each.exitcode) != STARTUP_FAILURE:  # of which the process has spoken
                how = signal.Signals(-status).name if status and status < 0 else f"status {status}"
                _log.warning("process %s has ended: %s", each.pid, how)
            if status == STARTUP_FAILURE or not self._serving:
                self.failed = True
                self.should_exit.set()
                return
            self.processes[place] = self._start(place)
        if ready and not self._serving:
            started = len(self.processes)
            self.processes += [self._start(place) for place in range(started, len(self.sockets))]
            if started == len(self.sockets):
                self._serving = True
                (self._folder / ALL_SERVE).touch()
                self._say_serving()

    def _say_serving(self) -> None:
        names = ", ".join(served(self._folder)) or "no model"
        place = self.config.endpoint.place(self.sockets[0])
        say(f"serving {names} by {len(self.sockets)} processes at {place}")

    def restart_all(self) -> None:
        """Replace them one after the other: two have a socket until the first of them has ended.

        A new one takes the place if it can load all that is served; a model that is gone is not.
        """
        config = copy(self.config)
        config.models = config.models.needing(served(self._folder))
        for place, old in enumerate(self.processes):
            new = self._start(place, config)
            while not (serves := _serves(new)):
                is_ending = {signal.SIGINT, signal.SIGTERM} & {*self.signal_queue}
                if is_ending or serves is None:
                    new.kill()
                    new.join()
                    _log.warning(
                        "process %s does not start, and process %s stays", new.pid, old.pid
                    )
                    return
                wait((new.process.sentinel,), 0.1)
            old.terminate()
            old.process.join(self._most_seconds)
            old.process.kill()  # if it has not ended
            old.join()
            self.processes[place] = new

    def handle_int(self) -> None:
        super().handle_int()
        self.ended_by = signal.SIGINT

    def handle_term(self) -> None:
        """Have no probe find a process ready, and end after the delay; what dies in it is replaced."""
        self.ended_by = signal.SIGTERM
        (self._folder / ALL_SERVE).unlink(missing_ok=True)
        delay = self.config.endpoint.drain_delay if self._serving else 0.0
        self._end = min(self._end, monotonic() + delay)

    def handle_hup(self) -> None:
        if not self.ended_by:
            super().handle_hup()

    def terminate_all(self) -> None:
        """End them; what still loads has accepted nothing."""
        if self._serving:
            asyncio.run(self._listening.accept_last())
        for each in self.sockets:
            each.close()
        for process in self.processes:
            process.terminate() if self._serving else process.kill()

    @property
    def _most_seconds(self) -> float:
        """For a process to end."""
        return (self.config.timeout_graceful_shutdown or 0) + _MORE_SECONDS

    def join_all(self) -> None:
        """Wait for them; another SIGINT goes on to them, and then they drop what they have accepted."""
        end = monotonic() + self._most_seconds
        while running := {p.pid: p.process for p in self.processes if p.exitcode is None}:
            wait([process.sentinel for process in running.values()], 0.1)
            again = signal.SIGINT in self.signal_queue
            self.signal_queue.clear()
            for pid, process in running.items():
                if again and pid:
                    os.kill(pid, signal.SIGINT)
                if monotonic() > end:
                    process.kill()


def _serves(process: Process) -> bool | None:
    """Whether a process serves; None if it has ended, or says nothing."""
    process.parent_conn.send(b"ping")
    wait((process.parent_conn, process.process.sentinel), _SILENT_SECONDS)
    is_there = process.process.is_alive() and process.parent_conn.poll()
    return bool(process.parent_conn.recv()) if is_there else None


class _Config(Config):
    """What each process goes by."""

    def load(self) -> None:
        try:
            super().load()
        except McinferError as exc:
            say(str(exc))
            sys.exit(STARTUP_FAILURE)
        self.lifespan_class = _Life


class _Life:
    """The models of one process while it serves, in the place of what ASGI calls a lifespan."""

    def __init__(self, config: _Config) -> None:
        self._config, self._opened = config, AsyncExitStack()
        self.state, self.should_exit = {ENDING: config.service.ending}, False

    async def startup(self) -> None:
        """Load the models; if one fails, say so, and have uvicorn end the process."""
        threading.Thread(target=_end_with_supervisor, daemon=True).start()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes sends it to all
        let_workers_tell()
        config, opened = self._config, self._opened
        opened.enter_context(prefixed_log())
        opened.enter_context(config.endpoint.logging(config.access))
        opened.enter_context(tracing(config.models, config.options))
        try:
            await opened.enter_async_context(config.models)
        except (McinferError, OSError) as exc:
            await opened.aclose()
            say(str(exc))
            self.should_exit = True
            return
        settle()
        keeping = asyncio.create_task(config.service.figures.keep())
        opened.push_async_callback(asyncio.wait, (keeping,))
        opened.callback(keeping.cancel)

    async def shutdown(self) -> None:
        """End the models: there is no request any more."""
        await self._opened.aclose()


def _end_with_supervisor() -> None:
    if supervisor := parent_process():
        supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)
