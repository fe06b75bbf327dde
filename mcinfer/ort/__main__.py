"""``python -m mcinfer.ort program.py``: runs a program whose sessions are mcinfer's.

The program runs as Python would run it: its arguments, its place in ``sys.path``, its traceback and its exit
status are its own.
"""

import argparse
import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any

from mcinfer.config import parse_devices
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.ort.session import install


def _devices(text: str) -> int | list[str]:
    """``"2"``: so many devices; ``"cpu:0,cpu:1"``: these."""
    chosen = int(text) if text.isdecimal() else text.split(",")
    try:
        parse_devices(chosen, whole_cpus())
    except InvalidInputError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return chosen


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcinfer ort",
        description="Run a Python program whose ONNX Runtime sessions run on all devices.",
        usage="%(prog)s [--devices DEVICES] (PROGRAM | -m MODULE) [ARGUMENT …]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=_devices,
        metavar="DEVICES",
        help="how many (2), or which (cpu:0,cpu:1), for every session; if not given, the providers of "
        "each session say it",
    )
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="PROGRAM is the name of a module, as for python -m",
    )
    parser.add_argument(
        "program", metavar="PROGRAM", help="path of a Python program, or a folder or zip with one"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    return parser


def main(given: Sequence[str]) -> None:
    """Run a program; its exceptions come out as they are, `SystemExit` among them.

    Args:
        given: The options of ``mcinfer ort``, the program, and its arguments.
    """
    parser = _parser()
    chosen = parser.parse_args(given)
    program: str = chosen.program
    if not chosen.is_module:
        try:
            os.close(os.open(program, os.O_RDONLY))
        except OSError as exc:  # as Python says it
            parser.exit(2, f"mcinfer ort: can't open file {program!r}: {exc}\n")
    elif not _is_found(program):
        parser.exit(1, f"mcinfer ort: No module named {program}\n")
    install(**({} if chosen.devices is None else {"devices": chosen.devices}))
    sys.argv = [program, *chosen.arguments]
    sys.excepthook = _show_from_program
    # As Python does, and not `runpy.run_path`, which takes the module away when the program's end is reached:
    # its threads and its exit handlers come after that.
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    # `python -m mcinfer.ort` has put the working folder first; with -P or -I, Python puts nothing there.
    if chosen.is_module:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined] # what python -m calls
    elif get_importer(program) is not None:  # a folder, or a zip
        sys.path[: not sys.flags.safe_path] = [os.path.abspath(program)]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        path = os.path.abspath(program)
        code: Any
        if path.endswith(".pyc"):
            code = SourcelessFileLoader("__main__", path).get_code("__main__")
        else:
            loader = SourceFileLoader("__main__", path)
            code = loader.source_to_code(loader.get_data(path), path)
        vars(main_module).update(__file__=path, __cached__=None, __builtins__=builtins)
        exec(code, vars(main_module))  # noqa: S102 the program


def _is_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _show_from_program(
    kind: type[BaseException], exc: BaseException, trace: TracebackType | None
) -> None:
    """Show an exception that ends the program, from the program's own first frame on."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in _OWN_FRAMES:
        first = first.tb_next
    sys.__excepthook__(kind, exc.with_traceback(first or trace), first or trace)


_OWN_FRAMES = (__file__, "<frozen runpy>")


if __name__ == "__main__":
    main(sys.argv[1:])
