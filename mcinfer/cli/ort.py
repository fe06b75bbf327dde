"""``mcinfer ort``: a Python program whose ONNX Runtime sessions share their weights, or run on devices."""

import os
import subprocess
import sys
from typing import Annotated

import typer

SETTINGS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""`mcinfer.ort` reads the options, ``--help`` among them."""


def ort(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="PROGRAM [ARGUMENT]")] = None,
) -> None:
    """Run a Python program whose ONNX Runtime sessions share their weights, or run on several devices.

    The program takes the place of this process, so that its signals, its streams and its exit status are
    its own.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
    sys.stdout.flush()
    command = [sys.executable, *flags, "-m", "mcinfer.ort", *(arguments or ())]
    os.execv(sys.executable, command)  # noqa: S606 no shell
