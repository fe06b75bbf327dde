"""The child: `python -m mcinfer.worker FD`, one for each device.

Order matters here. The first message on the lifeline (descriptor FD) identifies the master. Before any heavy
import (nothing at the top of this file needs NumPy), a small thread starts to watch for the master's end, and
then ends this process, since the main thread may be deep in an import or a native run:

* the master's pidfd becomes readable when its process ends, also by SIGKILL;
* the lifeline hangs up when no process holds its other end. This alone is not enough: a child that the user
  forked may hold it.
"""

import gc
import json
import logging
import os
import resource
import signal
import socket
import sys

from mcinfer.logs import JsonFormatter, TextFormatter
from mcinfer.process import ORPHANED, end, watch_parent, write_stacks_to
from mcinfer.shm.lifeline import Lifeline


def main() -> int:
    # The master decides what Ctrl-C means, if it reaches this process group at all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A terminal that lets no background process write (`stty tostop`) would stop this one.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    lifeline = Lifeline.inherited(int(sys.argv[1]))
    greeting = lifeline.greeting()
    if not greeting:
        return ORPHANED
    start = json.loads(greeting)
    watch_parent(start["master"], lifeline.fd)
    write_stacks_to(start["stacks"])
    if start["most_memory"] is not None:
        _limit_memory(start["most_memory"])
    sys.path[:] = start["path"]
    if start["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start["pythonpath"]
    log = logging.StreamHandler()
    json_lines, text = JsonFormatter(start["fields"]), TextFormatter(start["mark"])
    log.setFormatter(json_lines if start["json"] else text)
    logging.basicConfig(level=start["log_level"], handlers=[log])
    gc.disable()  # a look for garbage in what is imported, again and again, is a tenth of a start
    from mcinfer.runtime.transport import WorkerTransport
    from mcinfer.worker.server import WorkerLoop

    gc.freeze()
    gc.enable()
    cancels = socket.socket(fileno=start["cancels"])
    cancels.set_inheritable(False)
    connection = WorkerTransport(start["connection"])
    loop = WorkerLoop(connection, start["token"], lifeline, cancels, start["group"])
    status = loop.serve()
    if loop.lingers:
        sys.stdout.flush()
        os._exit(status)
    return status


def _limit_memory(size: int) -> None:
    """Let allocations fail that would take this process's own memory past `size` bytes."""
    limits = [size, *resource.getrlimit(resource.RLIMIT_DATA)]
    most = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    end(main())
