"""The child: `python -m mcinfer.worker FD`, one for each device.

The first message on the lifeline (descriptor FD) identifies the master. Before any heavy import, a small
thread starts to watch for the master's end, and then ends this process (`mcinfer.process.watch_parent`); the
main thread may be deep in an import or a native run. So this file imports nothing at its top that needs
NumPy. Only then this process takes over the master's import path, and `mcinfer.worker.server` does the work.
"""

import json
import os
import resource
import signal
import sys

from mcinfer.process import ORPHANED, watch_parent, write_stacks_to
from mcinfer.shm.lifeline import Lifeline


def main() -> int:
    """Run a worker; return its exit status."""
    # The master decides what Ctrl-C means.
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
    """Limit this process's own memory; larger allocations fail."""
    limits = [size, *resource.getrlimit(resource.RLIMIT_DATA)]
    most = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(main())
