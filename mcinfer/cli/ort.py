"""``mcinfer ort``: a Python program whose ONNX Runtime sessions share their weights, or run on devices."""

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
    """Run a Python program whose ONNX Runtime sessions share their weights, or run on several devices."""
    from mcinfer.ort.__main__ import main

    main(arguments or [])
