"""``mcinfer ort``: a Python program whose ONNX Runtime sessions run on all devices."""

import os
import subprocess
import sys
from typing import Annotated

import typer

from mcinfer.cli.options import DevicesOption

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows PROGRAM are the program's arguments, whatever they look like."""

_IsModule = Annotated[
    bool, typer.Option("-m", help="PROGRAM is the name of a module, as for python -m.")
]
_Program = Annotated[
    list[str],
    typer.Argument(
        metavar="PROGRAM [ARGUMENT...]", help="Path of a Python program, and its arguments."
    ),
]


def ort(program: _Program, devices: DevicesOption = None, is_module: _IsModule = False) -> None:
    """Run a Python program whose ONNX Runtime sessions run on all devices.

    The program takes the place of this process, so that its signals, its streams and its exit status are
    its own.
    """
    options = []
    if devices is not None:
        text = str(devices) if isinstance(devices, int) else ",".join(devices)
        options = ["--devices", text]
    if is_module:
        options.append("-m")
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
    sys.stdout.flush()
    command = [sys.executable, *flags, "-m", "mcinfer.ort", *options, *program]
    os.execv(sys.executable, command)  # noqa: S606 no shell
