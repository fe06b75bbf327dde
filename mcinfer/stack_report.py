"""Where a worker is when it hangs or crashes: memory that it writes its stacks to, and its master reads.

On a crash the interpreter's own handler (faulthandler) writes the Python stacks of all threads. On a request,
which is a signal, the same, and then the native stack of the thread that the signal interrupted, by glibc's
backtrace(3). The first needs neither the interpreter's lock nor any memory; the second runs Python in a
signal handler, in the middle of whatever was going on, so a process that was asked is to be killed, whatever
it says afterwards.

The signal is SIGURG: whoever has no handler yet ignores it, and next to nobody uses it.

Ownership: the memory is a sealed memfd of fixed size; each side has a descriptor of its own and closes it.
"""

import ctypes
import faulthandler
import fcntl
import os
import signal
from collections.abc import Callable

REQUEST = signal.SIGURG

_BYTES = 256 << 10
_MOST_FRAMES = 64
_NATIVE = "Native stack of the thread that the signal came to (most recent call first):"


class StackReport:
    """The master's side: the memory, to be given to one worker process.

    Attributes:
        fd: Its descriptor.
    """

    def __init__(self) -> None:
        """Make it.

        Raises:
            OSError: No descriptor or memory is left.
        """
        self.fd = os.memfd_create("mcinfer-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, _BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError:
            os.close(self.fd)
            raise

    def read(self) -> str:
        """What was written so far; empty if nothing was."""
        written = os.pread(self.fd, _BYTES, 0).partition(b"\0")[0]
        text = written.decode(errors="replace").strip()
        python, native, frames = text.partition(_NATIVE)
        # The first frames are the handler's own: up to faulthandler's raise(3), its caller, and the kernel's.
        lines = frames.splitlines()
        own = [i + 3 for i, line in enumerate(lines) if "(gsignal+" in line or "(raise+" in line]
        return "\n".join([python + native, *lines[own[-1] if own else 1 :]])

    def close(self) -> None:
        """Give the descriptor up."""
        os.close(self.fd)


def write_stacks_to(fd: int) -> Callable[[int], None]:
    """The worker's side: from now on crashes and `REQUEST` write to this descriptor, which is taken over.

    Returns:
        The signal's handler, which must be held for as long as the process lives.
    """
    os.set_inheritable(fd, False)
    faulthandler.enable(fd)
    libc = ctypes.CDLL(None)
    frames = (ctypes.c_void_p * _MOST_FRAMES)()
    # The first call loads what the others need.
    libc.backtrace(frames, _MOST_FRAMES)

    def write_native(_: int) -> None:
        os.write(fd, f"\n{_NATIVE}\n".encode())
        libc.backtrace_symbols_fd(frames, libc.backtrace(frames, _MOST_FRAMES), fd)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write_native)

    # Python's own handlers run between two of its instructions: too late for a thread that is in native code.
    libc.signal(REQUEST, handler)
    faulthandler.register(REQUEST, file=fd, all_threads=True, chain=True)
    return handler
