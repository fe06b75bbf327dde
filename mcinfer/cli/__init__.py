"""The command line: ``mcinfer run``, ``inspect``, ``slice``, ``bench`` and others.

Exit status 0 on success, 1 on a failure with one clear line on standard error, 2 on wrong usage, 130 after
Ctrl-C, 143 after SIGTERM, 129 after SIGHUP: these two end a command as Ctrl-C does. Each command is a module
of its own; `mcinfer.cli.app` puts them together. Imports that take long are in the functions that need them,
so that help and completion come at once.
"""

import io
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import FrameType

from mcinfer.errors import McinferError, MissingDependencyError, printable
from mcinfer.extras import install
from mcinfer.logs import TextFormatter
from mcinfer.private import fill_streams, naming_limit

_INTERRUPTED = 128 + signal.SIGINT
_READER_SECONDS = 1.0  # that a last word waits for the reader of a full pipe

_ENDS = {
    _INTERRUPTED: "interrupted",
    128 + signal.SIGTERM: "terminated",
    128 + signal.SIGHUP: "hung up",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    A program of ``mcinfer ort`` ends as it would end by itself, by an exception too.

    Args:
        arguments: Without the program's name; None: those of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["ort"]:  # its program has this process for itself, and typer is not imported
        from mcinfer.ort.__main__ import main as run_program

        run_program(given[1:])
        return 0
    _open_streams()
    came: list[int] = []
    status = _status(arguments, came)
    if came and status:
        status = 128 + came[0]
    if status in _ENDS:
        _say(_ENDS[status])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What is still buffered must not raise at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _status(arguments: Sequence[str] | None, came: list[int]) -> int:
    try:
        with prefixed_log(), _signals_as_interrupts(came), naming_limit():
            if find_spec("typer") is None:
                raise MissingDependencyError(
                    f"the command line needs the package typer: {install('cli')}"
                )
            from mcinfer.cli.app import call

            status = call(arguments)
            sys.stdout.flush()
            return status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return 1  # the reader of our output has enough
    except (McinferError, OSError) as exc:
        _say(str(exc))
        return 1


def _open_streams() -> None:
    """Open standard streams that are closed: else other files would take their numbers.

    Standard output writes any name, whatever its encoding is.
    """
    fill_streams()
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def prefixed_log() -> Iterator[None]:
    """Print warnings that are logged, unless logging is configured."""
    before = logging.lastResort
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(TextFormatter())
    logging.lastResort = handler
    try:
        yield
    finally:
        logging.lastResort = before


@contextmanager
def _signals_as_interrupts(came: list[int]) -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise what Ctrl-C does, so that work is saved and nothing is left behind.

    Each does so once: a closing terminal may send the second before all is saved. A signal that is ignored
    (nohup) or has another handler stays as it is; so do both outside of the main thread.

    Args:
        came: Gets the numbers of the signals that came.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        if number not in came:
            came.append(number)
            raise KeyboardInterrupt

    main_thread = threading.current_thread() is threading.main_thread()
    ends = (signal.SIGTERM, signal.SIGHUP) if main_thread else ()
    taken = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _say(text: str) -> None:
    """Say it on standard error, unless that is a pipe that is full, and its reader stands still."""
    with suppress(OSError):  # the terminal may be gone
        taken = select.poll()
        if sys.stderr is sys.__stderr__:
            taken.register(2, select.POLLOUT)
            if not taken.poll(_READER_SECONDS * 1000):
                return
        print(f"mcinfer: {printable(' '.join(text.split()))}", file=sys.stderr)
