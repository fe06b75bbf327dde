"""A worker that is a thread of this process: `Master(model, devices="inline")`.

::

    the loop ◄══ messages, lifeline, CANCEL, as with a process ══► thread: WorkerLoop ──► Engine, here

Ownership: the thread has descriptors and mappings of its own, so nothing that the master closes is taken from
a run that goes on. A thread cannot be killed: `kill` ends its run through the engine, and then it. A thread
whose run does not end keeps what it has; no other is started in its place before its end.
"""

import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from mcinfer.process import Inherited
from mcinfer.runtime.transport import WorkerTransport
from mcinfer.runtime.worker_process import WorkerProcess
from mcinfer.shm.lifeline import Lifeline
from mcinfer.worker.server import WorkerLoop
from mcinfer.worker.turns import Turns

_log = logging.getLogger("mcinfer.worker")


class InlineWorker(WorkerProcess):
    """As a worker's process; `pid` is this process's, and `pidfd` is readable once the thread has ended."""

    descriptors = WorkerProcess.descriptors + 24  # both ends of all channels, and a ZeroMQ context
    tasks = 4  # it does not watch over its own process

    def _launch(self, given: Sequence[int], inherited: Inherited) -> None:
        del inherited  # the thread has this process's
        self._status = 0
        self._killed = False
        self._stacks_text = ""
        self._loop: WorkerLoop | None = None
        self.pid = os.getpid()
        with ExitStack() as opened:
            self.pidfd = os.eventfd(0)
            opened.callback(os.close, self.pidfd)
            own = []
            for fd in (*given[:3], self.pidfd):  # lifeline, messages, CANCEL
                own.append(os.dup(fd))
                opened.callback(os.close, own[-1])
            self._thread = threading.Thread(
                target=self._serve, args=own, name="mcinfer-inline", daemon=True
            )
            self._thread.start()
            opened.pop_all()

    def _serve(self, channel: int, connection: int, cancels: int, ended: int) -> None:
        try:
            lifeline = Lifeline.inherited(channel)
            start = json.loads(lifeline.greeting())
            # No watcher ends this process when the master hangs up.
            transport = Turns(WorkerTransport(connection), lifeline.fd)
            listening = socket.socket(fileno=cancels)
            self._loop = WorkerLoop(transport, start["token"], lifeline, listening)
            self._status = self._loop.serve()
        except BaseException:  # also SystemExit, which ends this thread alone
            self._status = 1
            _log.exception("the thread of a worker failed")
        finally:
            self._loop = None
            os.eventfd_write(ended, 1)
            os.close(ended)

    def kill(self) -> None:
        """Cancel its run, and have it end after that."""
        self._killed = True
        self.cancels.shutdown(socket.SHUT_RDWR)

    def ask_for_stacks(self) -> None:
        """Note where it is now, and the threads of its other runs."""
        loop, frames = self._loop, sys._current_frames()
        threads = [self._thread, *(loop.threads if loop is not None else ())]
        found = [frames[thread.ident] for thread in threads if thread.ident in frames]
        self._stacks_text = "\n".join("".join(traceback.format_stack(frame)) for frame in found)

    def stacks(self) -> str:
        return self._stacks_text

    def wait(self) -> int:
        """After its end, or until then: the status with which its process would have ended."""
        self._thread.join()
        return 0 if self._killed else self._status

    def abandon(self) -> None:
        self.cancels.shutdown(socket.SHUT_RDWR)
        super().abandon()
