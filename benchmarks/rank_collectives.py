"""What one collective costs, against MPI's and against a barrier; and what it adds to a layer of a model."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measuring import Effort, Ratio, Record, Series, rates_in_turns, ratio_line, series_row, table
from rank_groups import Ranks, missing_mpi
from rank_models import chain, chain_inputs

from mcinfer.bench.figures import seconds_text

SIZES = {"8 KB": 8 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20}
GROUPS = (2, 4)
CHAIN_LAYERS = 24
CHAIN_SIZES = ("8 KB", "4 MB")

Say = Callable[[str], None]


class Measured(NamedTuple):
    """What came of a part: the numbers, and a table for the page."""

    record: Record
    table: str


def spread(series: Series, text: Callable[[float], str] = seconds_text) -> str:
    """A cell of a table: the middle, and the least and the greatest of the rounds."""
    return f"{text(series.middle)} [{text(series.low)} … {text(series.high)}]"


def markdown(header: str, rows: list[list[str]]) -> str:
    """A table for the page; `header` has its titles, with a bar between two."""
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


# One collective.


def measure_collectives(folder: Path, effort: Effort, say: Say) -> Measured:
    """AllReduce of each size, and a barrier, over 2 and 4 ranks: mcinfer's and MPI's, in turns."""
    del folder
    lacking = missing_mpi()
    if lacking:
        say(f"MPI is left out: {lacking} is not installed (`make bench-ranks` installs both)")
    record: Record = {"mpi": not lacking}
    rows: list[list[str]] = []
    for size in GROUPS:
        with ExitStack() as stack:
            groups = {"shm": stack.enter_context(Ranks(size, "shm"))}
            if not lacking:
                groups["mpi"] = stack.enter_context(Ranks(size, "mpi"))
            times = {
                what: _operation_times(groups, size_bytes, effort)
                for what, size_bytes in {"barrier": 0, **SIZES}.items()
            }
        say("")
        flat = {f"{what}, {way}": one for what, both in times.items() for way, one in both.items()}
        rounds = [series_row(*item) for item in flat.items()]
        say(table((f"{size} ranks", "p50", "rounds"), rounds))
        barrier = times["barrier"]["shm"]
        for what, both in times.items():
            shm, mpi = both["shm"], both.get("mpi")
            row = [str(size), what, spread(shm), "not measured", "", ""]
            if mpi is not None:
                over_mpi = shm.over(mpi)
                say(ratio_line(Ratio(text=f"{what}: mcinfer's / MPI's", series=over_mpi)))
                row[3:5] = spread(mpi), f"{over_mpi.middle:.3g}"
            if what != "barrier":
                over_barrier = shm.over(barrier)
                say(ratio_line(Ratio(text=f"{what}: mcinfer's / its barrier", series=over_barrier)))
                row[5] = f"{over_barrier.middle:.3g}"
            rows.append(row)
        record[f"{size} ranks"] = {name: one.record() for name, one in flat.items()}
    header = "ranks | operation | mcinfer, `shm` | MPI | mcinfer / MPI | mcinfer / its barrier"
    return Measured(record, markdown(header, rows))


def _operation_times(
    groups: dict[str, Ranks], size_bytes: int, effort: Effort
) -> dict[str, Series]:
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


# A layer with a collective.


def measure_layers(folder: Path, effort: Effort, say: Say) -> Measured:
    """What AllReduce adds to a layer: a slice with a sum in each layer, against the same without sums."""
    record: Record = {}
    rows = []
    for name in CHAIN_SIZES:
        elements = SIZES[name] // 4
        inputs = folder / "inputs.npz"
        np.savez(inputs, **chain_inputs(elements))  # type: ignore[arg-type]
        models = {
            name: chain(
                folder / f"{name}.onnx",
                layers=CHAIN_LAYERS,
                elements=elements,
                collectives=name == "with sums",
            )
            for name in ("with sums", "without")
        }
        with Ranks(2) as ranks:
            times = _layer_times(ranks, models, inputs, effort)
            rates = {
                "a barrier": lambda ranks=ranks: ranks.seconds("barrier", effort.samples(1e-4))
            }
            times |= rates_in_turns(rates, effort.rounds)
        added = Series(
            tuple(
                (a - b) / CHAIN_LAYERS
                for a, b in zip(times["with sums"].values, times["without"].values, strict=True)
            )
        )
        say("")
        rounds = [series_row(*item) for item in {**times, "a sum adds to a layer": added}.items()]
        say(table((f"{CHAIN_LAYERS} layers of {name}, 2 ranks", "p50", "rounds"), rounds))
        over = added.over(times["a barrier"])
        say(ratio_line(Ratio(text="a sum / a barrier", series=over)))
        record[name] = {"added": added.record(), **{k: v.record() for k, v in times.items()}}
        cells = (times["with sums"], times["without"], added, times["a barrier"])
        rows.append([name, *map(spread, cells), f"{over.middle:.3g}"])
    header = (
        f"value | {CHAIN_LAYERS} layers with AllReduce | {CHAIN_LAYERS} layers without | "
        "AllReduce adds to a layer | a barrier | added / barrier"
    )
    return Measured(record, markdown(header, rows))


def _layer_times(
    ranks: Ranks, models: dict[str, Path], inputs: Path, effort: Effort
) -> dict[str, Series]:
    def seconds(name: str, count: int) -> float:
        command = {"do": "run", "model": str(models[name]), "inputs": str(inputs)}
        answers = ranks.ask({**command, "threads": 1, "count": count})
        return max(float(answer["seconds"]) for answer in answers)

    counts = {name: effort.samples(seconds(name, 5)) for name in models}
    ways = {name: lambda name=name: seconds(name, counts[name]) for name in models}
    return rates_in_turns(ways, effort.rounds)
