"""Measure models that are cut over ranks: right answers, what a rank holds, and what collectives cost.

    python benchmarks/ranks.py [--quick] [--only PART] [--write docs/ranks.md]

One collective, against MPI's and against a barrier (`collectives`); models cut over 2 and 4 ranks, against
one session (`slices`); a pipeline against replicas (`pipeline`). Ways take turns, and ratios are of one
round. MPI is measured where mpi4py and mpirun are installed. `--quick` takes smaller models and fewer
samples. `--write` puts the tables between the marks of a page.
"""

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from measuring import (
    MEGABYTE,
    Effort,
    Lines,
    Ratio,
    Series,
    Setting,
    a_second,
    in_turns,
    main,
    markdown,
    pss,
    rate_of_futures,
    rates_in_turns,
    spread,
)
from models import (
    BERT,
    MLP_LAYERS,
    MLP_WIDTH,
    Arrays,
    Model,
    encoder_model,
    mlp,
    normal,
    unet_inputs,
    unet_model,
)
from rank_groups import Ranks, missing_mpi

from mcinfer import EngineOptions, Master, Parallel
from mcinfer.bench.baselines import open_session
from mcinfer.ranks.slicing.slicer import slice_model

CORES = 2
SIZES = {"barrier": 0, "8 KB": 8 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20}
"""Of the values of a collective, in bytes."""
GROUPS = (2, 4)

LARGEST_DIFFERENCE = 1e-5
"""Of an answer to one session's, relative to the largest element of the answer; float32."""
WEIGHTS_SLACK = 1.1
"""How many times its part of the weights a rank may hold, of a model that divides evenly."""
UNEVEN = "UNet"
PIPELINE_TARGET = 0.9
"""What part of the throughput of two replicas is wanted of a pipeline of two stages."""
IN_FLIGHT = 8
"""Requests that are under way at any moment, where throughput is measured."""

CUTS = {
    "tensor 2": Parallel(tensor=2),
    "tensor 4": Parallel(tensor=4),
    "pipeline 2": Parallel(pipeline=2),
    "tensor 2, pipeline 2": Parallel(tensor=2, pipeline=2),
}


def models_of(setting: Setting) -> list[Model]:
    """The models of the page; for a first look, smaller ones of the same kinds."""
    folder, quick = setting.folder, setting.quick
    layers, width = (6, 512) if quick else (MLP_LAYERS, MLP_WIDTH)
    sizes = {"layers": 2, "width": 256, "heads": 4} if quick else BERT
    tokens, size = (32, "tiny") if quick else (128, "small")
    encoder = folder / "encoder.onnx"
    encoder_model(encoder, **sizes, tokens="sequence", external_data=True)
    return [
        Model(
            name=f"MLP {layers} x {width}",
            path=mlp(folder / "mlp.onnx", layers, width),
            inputs=normal(8, width),
        ),
        Model(
            name=f"encoder {sizes['layers']} x {sizes['width']}",
            path=encoder,
            inputs=normal(1, tokens, sizes["width"]),
        ),
        Model(
            name=f"{UNEVEN} `{size}`",
            path=unet_model(folder / "unet.onnx", size),
            inputs=unet_inputs(1, size),
        ),
    ]


def measure_collectives(setting: Setting) -> Lines:
    """AllReduce of each size, and a barrier, over 2 and 4 ranks: mcinfer's and MPI's, in turns."""
    lacking = missing_mpi()
    rows: list[list[str]] = []
    for size in GROUPS:
        with ExitStack() as stack:
            groups = {"shm": stack.enter_context(Ranks(size, "shm"))}
            if not lacking:
                groups["mpi"] = stack.enter_context(Ranks(size, "mpi"))
            times = {
                what: operation_times(groups, size_bytes, setting.effort(0.5))
                for what, size_bytes in SIZES.items()
            }
        for what, both in times.items():
            shm, mpi = both["shm"], both.get("mpi")
            row = [str(size), what, spread(shm), f"{lacking} is not installed", "", ""]
            if mpi is not None:
                row[3:5] = spread(mpi), f"{shm.over(mpi).middle:.3g}"
            if what != "barrier":
                row[5] = f"{shm.over(times['barrier']['shm']).middle:.3g}"
            rows.append(row)
    ratios = ["mcinfer / MPI", "mcinfer / its barrier"]
    yield markdown(["ranks", "operation", "mcinfer, `shm`", "MPI", *ratios], rows)


def operation_times(groups: dict[str, Ranks], size_bytes: int, effort: Effort) -> dict[str, Series]:
    operation = "all_reduce" if size_bytes else "barrier"
    counts = {
        name: effort.samples(ranks.seconds(operation, 10, size_bytes))
        for name, ranks in groups.items()
    }
    ways = {
        name: lambda name=name: groups[name].seconds(operation, counts[name], size_bytes)
        for name in groups
    }
    return rates_in_turns(ways, effort.rounds)


def measure_slices(setting: Setting) -> Lines:
    """Each model, cut in each way: answers, weights and memory of a rank, latency."""
    rows: list[list[str]] = []
    for model in models_of(setting):
        session = open_session(str(model.path), CORES, ["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]

        def run(
            session: object = session, names: list[str] = names, model: Model = model
        ) -> Arrays:
            answer = session.run(names, model.inputs)  # type: ignore[attr-defined]
            return dict(zip(names, answer, strict=True))

        with Master(model.path, 1) as master:
            master.predict(model.inputs)
            whole = largest_pss(master) / MEGABYTE
        rows.append([model.name, "1 worker", "100%", "", "", "", "", f"{whole:.0f} MB"])
        for cut, parallel in CUTS.items():
            rows.append(row_of(setting, model, cut, parallel, run))
            print(*rows[-1], sep=" · ", file=sys.stderr)
    header = ["model", "cut", "weights of the largest rank", "largest relative difference"]
    header += [
        "ranks bit-identical",
        "latency",
        "over one session",
        "memory of the largest rank (PSS)",
    ]
    yield markdown(header, rows)


def largest_pss(master: Master) -> int:
    return max(pss(worker.pid) for worker in master.statistics().workers if worker.pid)


def row_of(
    setting: Setting, model: Model, cut: str, parallel: Parallel, run: Callable[[], Arrays]
) -> list[str]:
    """One model, cut in one way."""
    slices = setting.folder / "slices"
    report = slice_model(model.path, slices, tensor=parallel.tensor, pipeline=parallel.pipeline)
    part = max(rank.weight_bytes for rank in report.ranks) / report.weight_bytes
    weights = f"{part:.1%}"
    if not model.name.startswith(UNEVEN):
        most = WEIGHTS_SLACK / parallel.ranks
        weights += f" (≤ {most:.1%}: {'met' if part <= most else '**missed**'})"
    identical = are_identical(setting.folder, [slices / r.file for r in report.ranks], model.inputs)
    shutil.rmtree(slices)
    with Master(model.path, parallel.ranks, parallel=parallel) as master:
        predict = partial(master.predict, model.inputs, shards=1)
        got, expected = predict(), run()
        difference = max(
            float(np.max(np.abs(got[name] - array)) / np.max(np.abs(array)))
            for name, array in expected.items()
        )
        times = in_turns({"ranks": predict, "one": run}, setting.effort(1.0))
        memory = largest_pss(master)
    close = "met" if difference <= LARGEST_DIFFERENCE else "**missed**"
    return [
        model.name,
        cut,
        weights,
        f"{difference:.1e} ({close})",
        "yes" if identical else "**no**",
        spread(times["ranks"]),
        f"{times['ranks'].over(times['one']).middle:.3g}",
        f"{memory / MEGABYTE:.0f} MB",
    ]


def are_identical(folder: Path, slices: list[Path], inputs: Arrays) -> bool:
    """Whether ranks that each run their slice on the same inputs give the same bits."""
    given = folder / "inputs.npz"
    np.savez(given, **inputs)  # type: ignore[arg-type]
    with Ranks(len(slices)) as ranks:
        answers = ranks.ask_each(
            [{"do": "run", "model": str(one), "inputs": str(given)} for one in slices]
        )
    return len({answer["digest"] for answer in answers}) == 1


def measure_pipeline(setting: Setting) -> Lines:
    """Requests a second of two stages, each with one core, against two replicas with one core each."""
    rows: list[list[str]] = []
    options = EngineOptions(threads=1)
    for model in models_of(setting):
        stages = Master(model.path, 2, parallel=Parallel(pipeline=2), options=options)
        with stages, Master(model.path, 2, options=options) as replicas:
            ways = {
                name: partial(
                    rate_of_futures,
                    partial(master.submit, model.inputs),
                    setting.seconds(5.0),
                    IN_FLIGHT,
                )
                for name, master in (("stages", stages), ("replicas", replicas))
            }
            for way in ways.values():
                way()
            rates = rates_in_turns(ways, setting.rounds)
        series = rates["stages"].over(rates["replicas"])
        ratio = Ratio(text="", series=series, bound=PIPELINE_TARGET)
        cells = [spread(one, a_second) for one in rates.values()]
        rows.append([model.name, *cells, spread(series, "{:.3g}".format), ratio.verdict])
    header = ["model", "pipeline of 2 stages", "2 replicas", "pipeline / replicas", ""]
    yield markdown(header, rows)


PARTS = {
    "collectives": measure_collectives,
    "slices": measure_slices,
    "pipeline": measure_pipeline,
}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, cores=CORES))
