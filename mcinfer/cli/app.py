"""The commands of the command line, put together."""

from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mcinfer import __version__
from mcinfer.cli import bench, cache, doctor, inspect, run
from mcinfer.cli.serve import serve
from mcinfer.cli.slice import slice_model


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:  # typer does not make a context's type public
        try:
            return super().invoke(ctx)
        except typer.Abort as exc:
            raise KeyboardInterrupt from exc


class _Command(TyperCommand):
    """A command whose help names its arguments by their metavar alone.

    typer writes more around it, each version something else: ``[[MODEL]...]...``, ``<list[Path]>``.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 click's method
        return ["[OPTIONS]", *(name for name, _ in self._arguments())]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if arguments := self._arguments():
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        with formatter.section("Options"):
            formatter.write_dl([each.get_help_record(ctx) for each in options])

    def _arguments(self) -> list[tuple[str, str]]:
        arguments: list[Any] = [each for each in self.params if each.param_type_name == "argument"]
        return [(each.metavar, each.help) for each in arguments]


def call(arguments: Sequence[str] | None) -> int:
    """Run the command that the arguments name; returns the exit status. Errors have no message yet."""
    command = typer.main.get_command(make_app())
    try:
        command.main(arguments, prog_name="mcinfer")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    return 0


def make_app() -> typer.Typer:
    """All commands, in the order that help lists them in."""
    app = typer.Typer(
        cls=_Commands,
        callback=_root,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    group = typer.Typer(
        help="Models that were prepared for all workers to map.", rich_markup_mode=None
    )
    _add(app, "run", run.run)
    _add(app, "inspect", inspect.inspect)
    _add(app, "devices", doctor.devices)
    _add(app, "doctor", doctor.doctor)
    app.add_typer(group, name="cache")
    _add(group, "list", cache.list_entries)
    _add(group, "clear", cache.clear)
    _add(group, "prepare", cache.prepare)
    _add(app, "slice", slice_model)
    _add(app, "serve", serve)
    _add(app, "bench", bench.bench)
    _add(app, "tune", bench.tune)
    _add(app, "ort", _ort, context_settings=_ALL_FOR_THE_PROGRAM)
    return app


def _add(
    app: typer.Typer,
    name: str,
    command: Callable[..., None],
    context_settings: dict[str, Any] | None = None,
) -> None:
    """Add a command, with the first paragraph of its docstring as its help."""
    paragraph, *_ = cleandoc(command.__doc__ or "").split("\n\n")
    sentence, *_ = " ".join(paragraph.split()).removesuffix(".").split(". ")
    app.command(
        name,
        help=paragraph,
        short_help=f"{sentence}.",
        context_settings=context_settings,
        cls=_Command,
    )(command)


_ALL_FOR_THE_PROGRAM = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""`mcinfer.ort` reads the options, ``--help`` among them."""


def _ort(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="PROGRAM [ARGUMENT]")] = None,
) -> None:
    """Run a Python program whose ONNX Runtime sessions share their weights, or run on several devices."""
    from mcinfer.ort.__main__ import main

    main(arguments or [])


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mcinfer {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """One ONNX model on all the devices of this machine."""
