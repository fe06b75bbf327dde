"""The child: `python -m mcinfer.worker FD`, one for each device.

Order matters here. The first message on the lifeline (descriptor FD) identifies the master. Before any
heavy import (so this file imports nothing at its top that needs NumPy), a small thread starts to watch for
the master's end, and then ends this process. The main thread cannot do this, since it may be deep in an
import or a native run:

* the master's pidfd becomes readable when its process ends, also by SIGKILL;
* the lifeline hangs up when no process holds its other end (a child that the user forked may, so this alone
  is not enough).

Only then this process takes over the master's import path, and `mcinfer.worker.server` does the work. The
watcher never reads the lifeline: a read would consume descriptors.
"""

import json
import os
import resource
import signal
import sys

from mcinfer.process import ORPHANED, watch_parent, write_stacks_to
from mcinfer.shm.lifeline import Lifeline


def main() -> int:
    """Run a worker; its exit status."""
    # What Ctrl-C means is for the master to say, should it reach this process group at all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    from mcinfer.runtime.cancels import Cancels
    from mcinfer.runtime.transport import connect
    from mcinfer.worker.server import Tokens, serve

    cancels = Cancels.inherited(start["cancels"])
    connection = connect(start["transport"], start["connection"])
    tokens = Tokens(hello=start["hello_token"], build=start["build_token"])
    return serve(connection, tokens, lifeline, cancels, start["log_level"])


def _limit_memory(size: int) -> None:
    """Let allocations fail that would take this process's own memory past so many bytes."""
    limits = [size, *resource.getrlimit(resource.RLIMIT_DATA)]
    most = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(main())
