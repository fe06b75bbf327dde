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
            help="The .npz file to write, by output name; or an .npy file for the only one.",
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
    from mcinfer.cli.batch_files import PartialResults, opened_input, stamps
    from mcinfer.master import Master
    from mcinfer.model_cache.onnx_files import model_files
    from mcinfer.sharding import SaidAxes
    from mcinfer.specs import ModelSpec

    let_workers_tell()
    axes = axes_of(batch_axis, output_axis)
    place = _output_place(target, force)  # before the work, not after it
    as_npy = target.suffix.lower() == ".npy"
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
            "kind of --devices": sorted(kinds),
            "--batch": batch,  # a runtime chooses kernels by the size of a batch
            "--batch-axis": axes["batch_axes"],
            "--output-axis": axes["output_axes"],
            "version": [__version__, *sorted(runtimes)],
        }
        with closing(PartialResults(place, depends_on, restart=restart)) as results:
            master.start()
            spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
            names = [output.name for output in spec.outputs]
            if as_npy and len(names) != 1:
                text = f"{target} holds one array, expected an .npz file for {names}"
                raise InvalidInputError(f"--output: {text}")
            arrays = file.arrays(spec)
            if results.plan is None:
                said = SaidAxes(inputs=axes["batch_axes"], outputs=axes["output_axes"])
                planner = batches.Planner(master, spec, arrays, said, batch, len(workers), timeout)
                requests = planner.plan()
            else:  # which holds for the same model, input and options
                requests = batches.Requests(**results.plan)
                done, total = requests.rows(results.done), requests.rows(requests.count)
                say(f"resuming at row {done} of {total}")
            results.begin(asdict(requests), requests.outputs)
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
                lines = results.finish(spec, as_npy=as_npy)
    print(*lines, sep="\n")


def _output_place(target: Path, force: bool) -> Path:
    if target.suffix.lower() not in (".npz", ".npy"):
        raise InvalidInputError(
            f"--output: got {target}, expected a name that ends in .npz or .npy"
        )
    place = output_place("--output", target)
    if place.exists() and not force:
        raise InvalidInputError(f"--output: {target} exists; --force replaces it")
    return place
