"""``python -m mcinfer.ort program.py``: runs a program whose sessions are mcinfer's.

The program runs as Python would run it: its arguments, its place in ``sys.path``, its module ``__main__``,
its traceback and its exit status are its own.
"""

import argparse
import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Container, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from types import FrameType, ModuleType, TracebackType

from mcinfer.errors import InvalidInputError
from mcinfer.ort.inline import PREPARE
from mcinfer.ort.options import working_folder
from mcinfer.ort.session import install


def _devices(text: str) -> int | list[str]:
    """``"2"``: so many devices; ``"cpu:0,cpu:1"``: these."""
    from mcinfer.config import parse_devices
    from mcinfer.machine import whole_cpus

    chosen = int(text) if text.isdecimal() else text.split(",")
    try:
        parse_devices(chosen, whole_cpus())
    except InvalidInputError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcinfer ort",
        description="Run a Python program whose ONNX Runtime sessions hold one copy of a model's weights in "
        "all processes of the machine, or run on several devices.",
        usage="%(prog)s [--devices DEVICES | --prepare WHEN] (PROGRAM | -m MODULE) [ARGUMENT ...]",
        allow_abbrev=False,
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--devices",
        type=_devices,
        metavar="DEVICES",
        help="how many (2), or which (cpu:0,cpu:1), for every session: its runs go to a worker process for "
        "each; if not given, sessions run in the program's own process",
    )
    choice.add_argument(
        "--prepare",
        choices=PREPARE,
        metavar="WHEN",
        help="when sessions in the program's own process map a model that is new on this machine: "
        "background (later sessions; the default), switch, wait, always, never",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="PROGRAM is the name of a module, as for python -m",
    )
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        nargs=argparse.PARSER,  # it and all that follows, whatever that looks like
        help="path of a Python program, or of a folder or zip with one; the rest are its arguments",
    )
    return parser


def main(given: Sequence[str]) -> None:
    """Run a program; its exceptions come out as they are, `SystemExit` among them.

    Args:
        given: The options of ``mcinfer ort``, the program, and its arguments.
    """
    parser = _parser()
    chosen = parser.parse_args(given)
    program, *arguments = chosen.program
    if not chosen.is_module:
        try:
            os.close(os.open(program, os.O_RDONLY))
        except OSError as exc:  # as Python says it
            said = f"[Errno {exc.errno}] {exc.strerror}"
            parser.exit(2, f"mcinfer ort: can't open file {os.path.abspath(program)!r}: {said}\n")
    defaults = {"devices": chosen.devices, "prepare": chosen.prepare}
    install(**{name: value for name, value in defaults.items() if value is not None})
    # It stays there when the program's last line is done: threads and `atexit` may need it.
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    sys.argv = [program, *arguments]
    sys.excepthook = partial(_show_from_program, _files_of_callers())
    # Python has put its own program's folder, or the working folder, first; with -P or -I, nothing.
    if chosen.is_module:
        if not sys.flags.safe_path:
            sys.path[0] = working_folder()
        _run_as_main(program)
        return
    if not sys.flags.safe_path:
        del sys.path[0]
    if pkgutil.get_importer(program) is not None:  # a folder or a zip
        sys.path.insert(0, os.path.abspath(program))
        _run_as_main("__main__", False)
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))
    path = os.path.abspath(program)
    vars(module).update(
        __file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a program that is compiled, as runpy does
        if code is None:
            file.seek(0)
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102 the user's own program


def _files_of_callers() -> set[str]:
    frame: FrameType | None = sys._getframe()
    files = {"<frozen runpy>"}
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    return files


def _show_from_program(
    above: Container[str],
    kind: type[BaseException],
    exc: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show an exception that ends the program, from the program's own first frame on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in above:
        trace = trace.tb_next
    sys.__excepthook__(kind, exc.with_traceback(trace), trace)


_run_as_main = runpy._run_module_as_main  # type: ignore[attr-defined] # what Python calls for -m


if __name__ == "__main__":
    main(sys.argv[1:])
