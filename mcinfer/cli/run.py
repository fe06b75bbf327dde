"""``mcinfer run``: a batch from a file, split over the devices, into another file."""

from contextlib import closing, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer import __version__
from mcinfer.cli.options import (
    BatchAxisOption,
    DevicesOption,
    ModelArgument,
    OutputAxisOption,
    axes_of,
    by_name,
    parse_cast,
    parse_layout,
    parse_scale,
    parse_timeout,
    parsed,
)
from mcinfer.cli.output_files import output_place
from mcinfer.cli.progress import let_workers_tell, say
from mcinfer.engines.names import PACKAGES, engines_for
from mcinfer.errors import BuildError, InvalidInputError


def run(
    model: ModelArgument,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE",
            help="An .npz file, an array for each input by name; or an .npy file for the only one.",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option(
            "--output",
            metavar="FILE",
            help="The .npz file to write, by output name; or an .npy file for the only one; or a .csv "
            "file, if that is one number a row.",
        ),
    ],
    devices: DevicesOption = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=1,
            help="Rows of one request; if not given 64 for each device, fewer if they have over 64 MiB. "
            "Peak memory: a few requests plus activations.",
        ),
    ] = None,
    layout: Annotated[
        list[Any] | None,
        parsed(
            "[INPUT=]AXES:AXES",
            parse_layout,
            "Axes in the file, and in the model: nhwc:nchw. For all inputs with so many axes, or for one "
            "(x=nhwc:nchw); may be repeated, as those below.",
        ),
    ] = None,
    cast: Annotated[
        list[Any] | None,
        parsed(
            "[INPUT=]TYPE",
            parse_cast,
            "Then convert to the model's type: float32. For all its inputs of this type, or for one.",
        ),
    ] = None,
    scale: Annotated[
        list[Any] | None,
        parsed(
            "[INPUT=]NUMBER",
            parse_scale,
            "Then multiply, in that type: 1/255. For all inputs of floats, or for one.",
        ),
    ] = None,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    timeout: Annotated[
        Any,
        parsed(
            "SECONDS",
            parse_timeout,
            "Time limit of a request; a few run at once. 600 if not given.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard what an interrupted run of this output has done."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the output if it exists.")
    ] = False,
) -> None:
    """Run a batch of any size from a file, split over the devices; rerun to resume.

    Until all is done, the results lie in a file beside the output, ``.NAME.partial``.
    """
    # They import most of mcinfer.
    from mcinfer.cli import batch as batches
    from mcinfer.cli.batch_files import PartialResults, check_column, opened_input, stamps
    from mcinfer.master import Master
    from mcinfer.model_cache.onnx_files import model_files
    from mcinfer.sharding import SaidAxes
    from mcinfer.specs import ModelSpec

    let_workers_tell()
    axes = axes_of(batch_axis, output_axis)
    given = {"--layout": layout, "--cast": cast, "--scale": scale}
    converted = {option: by_name(option, values) for option, values in given.items()}
    place = _output_place(target, force)  # before the work, not after it
    ending = target.suffix.lower()
    with (
        opened_input(source, place.parent) as file,
        closing(Master(model, devices, engine=engines_for(model)[0], **axes)) as master,
    ):
        files = [model]
        with suppress(BuildError, OSError):  # workers say what is wrong with it
            files = model_files(model.absolute())
        for name, path in (*(("MODEL", path) for path in files), ("--input", source)):
            if path.exists() and place.exists() and path.samefile(place):
                text = f"{place} is the file of {name} ({path}), expected another one"
                raise InvalidInputError(f"--output: {text}")
        workers = [worker.device for worker in master.statistics().workers]
        runtimes = {f"{p.name} {p.version}" for p in metadata.distributions() if p.name in PACKAGES}
        kinds = {"cpu" if w == "inline" else w.partition(":")[0] for w in workers}
        depends_on = {  # all that the values depend on
            "model": stamps(files),
            "input": [file.stamp],
            **converted,
            "kind of --devices": sorted(kinds),
            "--batch": batch,  # a runtime chooses kernels by the size of a batch
            "--batch-axis": axes["batch_axes"],
            "--output-axis": axes["output_axes"],
            "version": [__version__, *sorted(runtimes)],
        }
        with closing(PartialResults(place, depends_on, ending=ending, restart=restart)) as results:
            master.start()
            spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
            names = [output.name for output in spec.outputs]
            if ending != ".npz" and len(names) != 1:
                text = f"{target} holds one array, expected an .npz file for {names}"
                raise InvalidInputError(f"--output: {text}")
            if ending == ".csv" and (shape := spec.outputs[0].shape):
                check_column(names[0], spec.outputs[0].dtype, shape)
            arrays = file.arrays(spec, converted, master.allocate)
            if results.plan is None:
                said = SaidAxes(inputs=axes["batch_axes"], outputs=axes["output_axes"])
                planner = batches.Planner(master, spec, arrays, said, batch, len(workers), timeout)
                requests = planner.plan()
            else:  # which holds for the same model, input and options
                requests = batches.Requests(**results.plan)
                done, total = requests.rows(results.done), requests.rows(requests.count)
                say(f"resuming at row {done} of {total}")
            results.begin(asdict(requests))
            with batches.keeping(results, requests):
                batches.answer_all(master, file, arrays, requests, results, timeout)
            reads = {"input": [source]}
            if any(worker.restarts for worker in master.statistics().workers):
                reads["model"] = files  # other workers still have what the model was
            for name, paths in reads.items():
                if stamps(paths) != depends_on[name]:
                    text = f"the {name} changed while it was used; --restart begins anew"
                    raise InvalidInputError(text)
            with batches.keeping(results, requests):
                lines = results.finish(spec)
    print(*lines, sep="\n")


def _output_place(target: Path, force: bool) -> Path:
    if target.suffix.lower() not in (".npz", ".npy", ".csv"):
        raise InvalidInputError(
            f"--output: got {target}, expected a name that ends in .npz, .npy or .csv"
        )
    place = output_place("--output", target)
    if place.exists() and not force:
        raise InvalidInputError(f"--output: {target} exists; --force replaces it")
    return place
