"""A watch over the process that started this one, which ends with it.

Nothing heavy is imported here: it has to begin before the imports that a child may be deep in when its parent
goes.
"""

import os
import select
import threading

ORPHANED = 70
"""Exit status of a process whose parent is gone: EX_SOFTWARE of sysexits.h; nobody is there to see it."""


def watch_parent(pid: int, channel: int) -> None:
    """End this process as soon as its parent is gone; the watching is done by a daemon thread.

    Args:
        pid: The parent's. Its pidfd becomes readable when it ends, also by SIGKILL.
        channel: A descriptor whose other end the parent holds: it hangs up when nobody does any more. (A
            child that the parent forked may, so this alone is not enough.) It is never read.
    """
    try:
        parent = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ORPHANED)
    # Without this a parent that died, and whose number was given to another, would be watched.
    if os.getppid() != pid:
        os._exit(ORPHANED)
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(channel, 0)  # POLLHUP and POLLERR come unasked

    def watch() -> None:
        poll.poll()
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="mcinfer-watch-master", daemon=True).start()
