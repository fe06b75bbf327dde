"""What the workers of a pool take of the machine's memory, by what the kernel says.

A page that several processes have mapped is shared out among them in PSS (proportional set size), so that
the sum over all processes is what is really taken. USS (unique set size) is what one process has for
itself. RSS counts a shared page once per process, and says nothing here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from measuring import Ratio, Record, Series, ratio_line, table
from weight_models import LargeModel, check_prepared, pool, run_every_worker

from mcinfer import Master

COUNTS = (1, 2, 4, 8)
RUNS = 3
"""Of each worker, before it is looked at."""
TARGET = 1.35
"""How many times the memory of one worker four may take, the activations of three left out."""

PLAIN = "plain"
SHARED = "shared"
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What a process takes, in bytes.

    Attributes:
        pss: Its own pages, and its part of those that others have mapped, too.
        uss: The pages that nobody else has mapped: no more and no less is free when it ends.
        anonymous: Its part of pages that no file backs: the heap, and with it the activations.
    """

    pss: int
    uss: int
    anonymous: int


def process_memory(pid: int) -> ProcessMemory:
    """By /proc/PID/smaps_rollup (proc_pid_smaps(5))."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value, _ = line.split()
        sizes[name.rstrip(":")] = int(value) * 1024
    private = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
    return ProcessMemory(
        pss=sizes["Pss"], uss=sum(sizes[name] for name in private), anonymous=sizes["Pss_Anon"]
    )


def pss_with_children(pid: int) -> list[int]:
    """Bytes of PSS of a process, and of each that it or a child of it started."""
    own = psutil.Process(pid)
    return [process_memory(each.pid).pss for each in (own, *own.children(recursive=True))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What the workers of one pool take together, in bytes.

    Attributes:
        pss: The sum of theirs.
        uss: Likewise.
        loaded: Of `anonymous`, before the first run: the processes themselves, and weights of their own.
        activations: By how much `anonymous` grew in the runs. USS would not do: the first run touches
            the mapped weights, which are a single worker's own while nobody else has them mapped.
    """

    pss: int
    uss: int
    loaded: int
    activations: int


def _footprint(model: LargeModel, workers: int, way: str) -> Footprint:
    with pool(model, workers, prepared=way == SHARED) as master:
        if way == SHARED:
            check_prepared()
        before = _memories(master)
        run_every_worker(master, model.inputs(model.rows * workers), RUNS)
        after = _memories(master)
    loaded = sum(memory.anonymous for memory in before)
    return Footprint(
        pss=sum(memory.pss for memory in after),
        uss=sum(memory.uss for memory in after),
        loaded=loaded,
        activations=sum(memory.anonymous for memory in after) - loaded,
    )


def _memories(master: Master) -> list[ProcessMemory]:
    return [process_memory(w.pid) for w in master.statistics().workers if w.pid is not None]


# Measuring.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Summed PSS over the number of workers.

    Attributes:
        model: Name of the model.
        weight_bytes: Of its weights.
        workers: How many, ascending.
        pss: By way (`PLAIN`, `SHARED`), bytes for each number of workers.
    """

    model: str
    weight_bytes: int
    workers: tuple[int, ...]
    pss: dict[str, tuple[float, ...]]


Footprints = dict[tuple[str, int], list[Footprint]]
"""By way and number of workers; one per round."""


def measure_memory(
    models: Sequence[LargeModel], rounds: int, say: Callable[[str], None]
) -> tuple[Record, list[MemoryCurve]]:
    """Pools of all sizes, plain and shared, in turns; and the curves to draw."""
    record: Record = {}
    curves = []
    for model in models:
        with pool(model, 1, prepared=True):
            pass  # the cache is warm from here on
        found: Footprints = {}
        for _ in range(rounds):
            for workers in COUNTS:
                for way in (PLAIN, SHARED):
                    found.setdefault((way, workers), []).append(_footprint(model, workers, way))
        record[model.name] = _report(model, found, rounds, say)
        pss = {
            way: tuple(_series(found, way, workers, "pss").middle for workers in COUNTS)
            for way in (PLAIN, SHARED)
        }
        curves.append(
            MemoryCurve(model=model.name, weight_bytes=model.weight_bytes, workers=COUNTS, pss=pss)
        )
    return record, curves


def _series(found: Footprints, way: str, workers: int, name: str) -> Series:
    return Series(tuple(getattr(one, name) for one in found[way, workers]))


def _report(
    model: LargeModel, found: Footprints, rounds: int, say: Callable[[str], None]
) -> Record:
    ratios = _ratios(found)
    say("")
    say(
        f"Memory: {model.name}, {model.weight_bytes / MEGABYTE:.0f} MB of weights, batch {model.rows} per "
        f"worker, rounds in turns: {rounds}"
    )
    rows, numbers = [], []
    names = ("pss", "uss", "loaded", "activations")
    for way, workers in found:
        series = {name: _series(found, way, workers, name) for name in names}
        cells = [_megabytes(series[name].middle) for name in names]
        each = [_megabytes(series[name].middle / workers) for name in ("pss", "uss")]
        rows.append((f"{workers} {'workers' if workers > 1 else 'worker'}, {way}", *cells, *each))
        numbers.append(
            {"workers": workers, "way": way, **{name: s.record() for name, s in series.items()}}
        )
    header = (
        "MB, all workers",
        "PSS",
        "USS",
        "heap, loaded",
        "activations",
        "PSS each",
        "USS each",
    )
    say(table(header, rows))
    for ratio in ratios:
        say(ratio_line(ratio))
    return {"bytes": numbers, "ratios": [ratio.record() for ratio in ratios]}


def _megabytes(size: float) -> str:
    return f"{size / MEGABYTE:.1f}" if size < 10 * MEGABYTE else f"{size / MEGABYTE:.0f}"


def _ratios(found: Footprints) -> list[Ratio]:
    def pss(way: str, workers: int) -> Series:
        return _series(found, way, workers, "pss")

    both = [*zip(found[SHARED, 1], found[SHARED, 4], strict=True)]
    more = [(b.pss - (b.activations - a.activations)) / a.pss for a, b in both]
    none = [(b.pss - b.activations) / (a.pss - a.activations) for a, b in both]
    return [
        Ratio(
            text="shared: 4 workers, without 3 workers' activations / 1",
            series=Series(tuple(more)),
            bound=TARGET,
            at_least=False,
        ),
        Ratio(text="shared: 4 workers / 1, without any activations", series=Series(tuple(none))),
        Ratio(text="shared: 4 workers / 1 worker", series=pss(SHARED, 4).over(pss(SHARED, 1))),
        Ratio(text="plain: 4 workers / 1 worker", series=pss(PLAIN, 4).over(pss(PLAIN, 1))),
        *(
            Ratio(
                text=f"{workers} {'workers' if workers > 1 else 'worker'}: shared / plain",
                series=pss(SHARED, workers).over(pss(PLAIN, workers)),
            )
            for workers in COUNTS
        ),
    ]
