"""The command line: ``mcinfer run``, ``inspect``, ``devices``, ``doctor``, ``cache``, ``bench``, ``tune``.

Exit status 0 on success, 1 on a failure with one clear line on standard error, 2 on wrong usage with
how to use it, 130 after Ctrl-C. Each command is a module of its own; `mcinfer.cli.app` puts them
together. They import what is heavy when they run, so that help and completion come at once.
"""

import os
import signal
import sys
from collections.abc import Sequence

from mcinfer.errors import McinferError, MissingDependencyError

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; those of this process if not given.

    Returns:
        The exit status.
    """
    try:
        status = _run(arguments)
        _flush()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        status = 1  # whoever read our output has enough
    except (McinferError, OSError) as exc:
        _tell(str(exc))
        status = 1
    if status == _INTERRUPTED:
        _tell("interrupted")
    try:
        _flush()
    except OSError:
        # What is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        import typer  # noqa: F401 tried apart from our own modules, whose faults are to be seen
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            "the command line needs the package typer: pip install 'mcinfer[cli]'"
        ) from exc
    from mcinfer.cli.app import call

    return call(arguments)


def _flush() -> None:
    print(end="", flush=True)  # unlike sys.stdout.flush, does not mind that there is no output


def _tell(text: str) -> None:
    print(f"mcinfer: {' '.join(text.split())}", file=sys.stderr)
