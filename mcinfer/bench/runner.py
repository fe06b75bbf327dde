"""Measuring ways of running a model side by side.

```
 Benchmark (this process)
   │  looks at the model with one worker; makes a request's arrays for each batch
   ├── Subject "session"  ── process: ONNX Runtime
   ├── Subject "pipe"     ── process ── processes of the sample
   ├── Subject "sharded"  ── process: Master ── workers
   └── …                            for each repeat, for each load, each of them has its turn
```

All ways are loaded at the same time and take turns, so that other work on the machine disturbs all of them
alike; one way runs at any moment. Each repeat starts them anew, and begins with another one.

Ownership: a `Benchmark` ends all processes that it has started before `run` returns or raises.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import psutil

from mcinfer import __version__
from mcinfer.bench import (
    MODES,
    check_engines,
    check_names,
    shown_name,
)
from mcinfer.bench.inputs import InputOptions, fixed_batch, look_at, make_inputs
from mcinfer.bench.load import MAX_ARRIVALS, read_request, request_types, rotated, write_request
from mcinfer.bench.report import (
    OTHERS,
    OTHERS_BEFORE,
    Load,
    Measurement,
    Memory,
    ModelFacts,
    Report,
    Role,
    Settings,
    Turn,
    Way,
)
from mcinfer.bench.subject import Subject, WayFailedError
from mcinfer.bench.texts import BUSY_CORES, judged
from mcinfer.bench.way import Setup
from mcinfer.config import EngineOptions, parse_devices
from mcinfer.engines.names import DEFAULT_ENGINE, PACKAGES, engines_for
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.machine import cpu_model, whole_cpus
from mcinfer.master import Master
from mcinfer.model_cache.onnx_files import scan
from mcinfer.model_cache.split_records import records_in
from mcinfer.private import PrivateFolder
from mcinfer.sharding import Axes
from mcinfer.specs import ModelSpec

OPEN_LOOP_CLIENTS = 32
"""Requests under way at most in an open loop; the others wait, and their latency counts."""
REQUEST_SECONDS = 600.0
"""Time limit of one request: that of `mcinfer.Timeouts`."""
START_SECONDS = 900.0

_COUNT_SECONDS = 4 * 3600.0
"""Time limit of a turn of a number of requests."""
_LOOKS = 3
"""Seconds at most until other programs are quiet: one that has just ended is none that disturbs."""
_PACKAGES = (*PACKAGES, "numpy", "pyzmq", "msgpack")

_T = TypeVar("_T")

Progress = Callable[[float, str], None]
"""Called with the steps (for a search: seconds) that are over, and a note on the next step."""

MachineFacts = dict[str, str | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The benchmark's settings: the options of ``mcinfer bench``.

    Attributes:
        ways: Names, baselines before modes.
        clients: Closed loops of so many clients, for each batch.
        rates: Open loops of so many requests a second, for each batch.
        mlperf: LoadGen makes the load: its scenarios SingleStream, Offline, and Server at these rates.
        seconds: Length of a turn, if `count` is 0.
        engines: Of mcinfer's modes; see `Setup.engine`.
    """

    model: Path
    devices: int | Sequence[str] | None
    ways: tuple[str, ...]
    inputs: InputOptions
    threads: int | None = None
    batches: tuple[int, ...] = (1,)
    clients: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    mlperf: bool = False
    seconds: float = 2.0
    count: int = 0
    repeats: int = 3
    warmup: float = 0.3
    max_batch_size: int = 8
    batch_axes: Axes = field(default_factory=dict)
    output_axes: Axes = field(default_factory=dict)
    engines: tuple[str, ...] = (DEFAULT_ENGINE,)

    def modes(self, engine: str) -> tuple[str, ...]:
        """Those of mcinfer's that are measured with an engine: `inline` is a session of ONNX Runtime."""
        found = (way for way in self.ways if way in MODES)
        return tuple(way for way in found if way != "inline" or engine == DEFAULT_ENGINE)

    @property
    def loads(self) -> tuple[Load, ...]:
        closed = [Load(batch=1, clients=clients) for clients in self.clients]
        if self.mlperf:
            one = Load(batch=1, clients=1, scenario="SingleStream")
            closed = [one, replace(one, clients=2 * whole_cpus(), scenario="Offline")]
        served = Load(batch=1, clients=OPEN_LOOP_CLIENTS, scenario="Server" if self.mlperf else "")
        opened = [replace(served, rate=rate) for rate in self.rates]
        return tuple(replace(load, batch=n) for n in self.batches for load in (*closed, *opened))


@contextmanager
def prepared(
    model: Path,
    batches: Sequence[int],
    inputs: InputOptions,
    axes: Mapping[str, Any],
    show: Callable[[str], None],
    engines: Sequence[str] = (DEFAULT_ENGINE,),
    **options: Any,
) -> Iterator[tuple[ModelSpec, Setup, dict[int, Path], Path | None]]:
    """Look at a model with one worker, which prepares it if it has not been; and write its requests.

    `axes` are the user's `batch_axes` and `output_axes`, `options` more arguments of the `mcinfer.Master`.
    Yields the arguments of a way of one's own choice of workers, by batch a file with a request's arrays,
    and, where there is anything to compare with it, one with the worker's answer to the first of them. The
    worker has the first engine that loads the model, in float32.

    Raises:
        InvalidInputError: The options do not fit the model.
        BuildError: mcinfer cannot load the model.
    """
    with PrivateFolder() as private, ExitStack() as stack:
        folder = Path(private.path)
        # What is learned is kept apart: it is learned from random inputs.
        records = folder / "splits"
        records.mkdir(mode=0o700)
        stack.enter_context(records_in(records))
        show("loading the model")
        engine = engines_for(model)[0]
        if engines[0] != engine:
            options = {"devices": 1}
        # What is measured next is neither disturbed by preparing nor without the prepared model.
        waiting = replace(options.pop("options", EngineOptions()), prepare="wait")
        with Master(model, engine=engine, **axes, **options, options=waiting) as master:
            show("learning how its batch is split")
            spec, split = look_at(master, batches, inputs, **axes)
            files = {batch: folder / f"{batch}.request" for batch in batches}
            for batch, path in files.items():
                write_request(path, make_inputs(spec, split, batch, inputs))
            expected = None
            if any(other != engine for other in engines):
                expected = folder / "expected"
                first = read_request(files[batches[0]])
                write_request(expected, dict(master.predict(first, shards=1)))
        setup = Setup(
            model=str(model.absolute()),
            cores=whole_cpus(),
            split=split,
            fixed_batch=fixed_batch(spec, split),
            batches=tuple(files),
            **axes,
        )
        yield spec, setup, files, expected


@dataclass(slots=True)
class Contender:
    """A way that takes turns with others, and the results so far.

    Attributes:
        errors: By error, the loads under which it came; no loads for one that ended the way.
    """

    name: str
    subject: Subject
    role: Role = "mcinfer"
    errors: dict[str, list[str]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    turns: dict[Load, list[Turn]] = field(default_factory=dict)

    @property
    def out(self) -> bool:
        """Whether it is given up."""
        return bool(self.errors) and not self.subject.alive

    def attempt(self, kept: list[_T], step: Callable[[], _T], load: Load | None = None) -> None:
        """Keep the outcome of a step; after one that failed (too large a batch, say) no other of the load."""
        if self.out or any(str(load) in loads for loads in self.errors.values()):
            return
        try:
            kept.append(step())
        except WayFailedError as exc:
            self.fail(str(exc), load)

    def fail(self, error: str, load: Load | None = None) -> None:
        """Note an error under a load, or one that ends the way."""
        if load is None:
            self.errors[error] = []
            self.subject.close()
        else:
            self.errors.setdefault(error, []).append(str(load))

    def report(self) -> Way:
        return Way(
            name=self.name,
            text=self.subject.text,
            role=self.role,
            engine=self.subject.engine,
            difference=self.subject.difference,
            workers=self.subject.workers,
            start_seconds=tuple(self.starts),
            memory=tuple(self.memory),
            error="; ".join(
                f"{', '.join(loads)}: {error}" if loads else error
                for error, loads in self.errors.items()
            ),
        )


def take_turns(
    contenders: Sequence[Contender],
    loads: Sequence[Load],
    repeats: int,
    show: Callable[[Contender, Load | None], None],
    *,
    patience: float,
    anew: bool,
    seed: int = 0,
    warmup: float,
    **how: float,
) -> float:
    """Have ways take turns under each load, in each repeat; the seconds of all turns.

    Each repeat begins with another way. With `anew` it also starts all of them anew, so that no single start
    decides a way's figures, and weighs them at its end. Without, they are warmed up once, and one that fails
    a request is given up. `show` is called before each start (no load) and turn; a start may take `patience`
    seconds. `how` are arguments of `Subject.turn`.
    """
    in_turns = 0.0
    with ExitStack() as stack:
        for contender in contenders:
            stack.enter_context(contender.subject)
        try:
            for repeat in range(repeats):
                order = rotated(contenders, repeat)
                how |= {"seed": seed + repeat, "warmup": warmup if anew or not repeat else 0.0}
                for one in order if anew or not repeat else ():
                    show(one, None)
                    one.attempt(one.starts, partial(one.subject.start, patience))
                for load in loads:
                    for one in order:
                        show(one, load)
                        begin, mine = monotonic(), one.turns.setdefault(load, [])
                        one.attempt(mine, partial(one.subject.turn, load, **how), load)
                        in_turns += monotonic() - begin
                        if not anew and mine and mine[-1].failed:
                            last = mine.pop()
                            one.fail(f"{last.failed} of {last.made} requests failed: {last.error}")
                for one in contenders if anew else ():
                    one.attempt(one.memory, one.subject.memory)
        except KeyboardInterrupt:
            for contender in contenders:  # all at once, and then one after another is waited for
                contender.subject.interrupt()
            raise
    return in_turns


class Benchmark:
    """One benchmark. `run` it once, then ask for its `report`; also after it was interrupted.

    Attributes:
        steps: Starts and turns in all; `done` of them are over.
        starts: Starts in all.
        turn_seconds: Length of all turns; 0 where they are of a number of requests.

    Raises:
        InvalidInputError: There are no such devices or ways, or a rate makes no load.
    """

    def __init__(self, plan: BenchOptions, progress: Progress) -> None:
        _check_rates(plan)
        check_names([way for way in plan.ways if way not in MODES])
        check_engines(plan.engines)
        self._plan = plan
        self._progress = progress
        self._began = datetime.now(UTC)
        self._start = monotonic()
        # As the master counts them: fewer than cores where there is a quota.
        self._devices = tuple(map(str, parse_devices(plan.devices, whole_cpus())))
        self._model = ModelSpec(inputs=(), outputs=())
        self._arrays: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        self._entries: list[Contender] = []
        self.done = 0
        self._finished = False
        ways = sum(way not in MODES for way in plan.ways)
        ways += sum(len(plan.modes(engine)) for engine in plan.engines)
        turns = plan.repeats * ways * len(plan.loads)
        self.turn_seconds = 0.0 if plan.count else turns * (plan.warmup + plan.seconds)
        self.starts = plan.repeats * ways
        self.steps = turns + self.starts

    def run(self, facts: Callable[[], MachineFacts]) -> Report:
        """Measure everything; `facts` gives those about the machine until then (`watched_machine`).

        Raises:
            InvalidInputError: The plan does not fit the model.
            BuildError: mcinfer cannot load the model.
        """
        plan, self._facts = self._plan, facts
        with prepared(
            plan.model,
            plan.batches,
            plan.inputs,
            {"batch_axes": plan.batch_axes, "output_axes": plan.output_axes},
            partial(self._progress, 0.0),
            devices=self._devices[:1],
            engines=plan.engines,
            options=EngineOptions(threads=plan.threads),
        ) as (self._model, setup, files, expected):
            self._arrays = {str(batch): request_types(path) for batch, path in files.items()}
            setup = replace(
                setup,
                devices=self._devices,
                threads=plan.threads,
                max_batch_size=plan.max_batch_size,
            )
            # The role is not asked of the class, which would bring its runtime into this process.
            self._entries = [
                Contender(shown_name(way), Subject(way, setup, files), "baseline")
                for way in plan.ways
                if way not in MODES
            ]
            self._entries += [
                Contender(
                    way if engine == DEFAULT_ENGINE else f"{way}/{engine}",
                    Subject(way, replace(setup, engine=engine), files, expected),
                )
                for engine in plan.engines
                for way in plan.modes(engine)
            ]
            self._measure()
        self._finished = True
        return self.report()

    def report(self) -> Report:
        """The results so far, and the verdict."""
        model, plan = self._model, self._plan
        report = Report(
            made_at=self._began.isoformat(timespec="seconds"),
            took_seconds=round(monotonic() - self._start, 1),
            mcinfer=__version__,
            machine=self._facts(),
            model=ModelFacts(
                name=plan.model.name,
                bytes=_model_bytes(plan.model),
                inputs=tuple(map(str, model.inputs)),
                outputs=tuple(map(str, model.outputs)),
            ),
            settings=Settings(
                devices=self._devices,
                seconds=0.0 if plan.count else plan.seconds,
                count=plan.count,
                repeats=plan.repeats,
                warmup_seconds=plan.warmup,
                seed=plan.inputs.seed,
                dims=dict(plan.inputs.dims),
                max_batch_size=plan.max_batch_size,
                threads=plan.threads,
                arrays=self._arrays,
                batch_axes=dict(plan.batch_axes),
                output_axes=dict(plan.output_axes),
            ),
            ways=tuple(entry.report() for entry in self._entries),
            measurements=tuple(
                Measurement(way=entry.name, load=load, turns=tuple(entry.turns[load]))
                for load in plan.loads
                for entry in self._entries
                if entry.turns.get(load)
            ),
            finished=self._finished,
        )
        return judged(report)

    @property
    def has_measured(self) -> bool:
        """Whether any way has answered something."""
        return any(any(entry.turns.values()) for entry in self._entries)

    def _measure(self) -> None:
        plan = self._plan
        most = _COUNT_SECONDS if plan.count else 3 * (plan.warmup + plan.seconds)
        take_turns(
            self._entries,
            plan.loads,
            plan.repeats,
            self._show,
            patience=START_SECONDS,
            anew=True,
            seconds=plan.seconds,
            count=plan.count,
            warmup=plan.warmup,
            seed=plan.inputs.seed,
            timeout=most + 2 * max(load.clients for load in plan.loads) * REQUEST_SECONDS,
        )

    def _show(self, entry: Contender, load: Load | None) -> None:
        text = f"{entry.name}: {load}" if load else f"starting {entry.name}"
        self._progress(self.done, text)
        self.done += 1


def _check_rates(plan: BenchOptions) -> None:
    """Raise `InvalidInputError` for an open loop in which no request would arrive, or far too many."""
    for rate in plan.rates:
        made = plan.count or rate * plan.seconds
        if made > MAX_ARRIVALS or made / rate > _COUNT_SECONDS:
            raise InvalidInputError(
                f"--rate: got {rate:g}, which is {made:g} requests in {made / rate:g} s; expected at most "
                f"{MAX_ARRIVALS} in {_COUNT_SECONDS:g} s"
            )
        if made < 1:
            raise InvalidInputError(
                f"--rate: got {rate:g}, expected at least {1 / plan.seconds:g}: in {plan.seconds:g} s "
                "(--duration) less than one request would arrive"
            )


# The machine.


def machine() -> MachineFacts:
    """Processor, cores, memory, load and versions; no names, no paths."""
    versions = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def watched_machine() -> Callable[[], MachineFacts]:
    """Look what other programs do, for a second or until they are quiet; what gives the facts from then on.

    Other programs' use of the cores is that before, and that from the end of this call to that of the facts'.
    """
    facts = machine()
    for _ in range(_LOOKS):
        others = _use_by_others()
        sleep(1.0)
        facts[OTHERS_BEFORE] = before = others()
        if before <= BUSY_CORES:
            break
    others = _use_by_others()
    return lambda: facts | {OTHERS: others()}


def _use_by_others() -> Callable[[], float]:
    """What gives the cores that other programs have used since this call, on average."""
    begin, before = monotonic(), _busy_seconds()

    def cores() -> float:
        seconds = monotonic() - begin
        return round(max(0.0, _busy_seconds() - before) / max(1.0, seconds), 2)

    return cores


def _model_bytes(path: Path) -> int:
    """The bytes of the file, and of the files beside it that hold its weights."""
    files = [path]
    try:
        files += [path.parent / name for name in scan(path).external]
        return sum(file.stat().st_size for file in files)
    except (McinferError, OSError):  # no ONNX file, or it is a folder
        return path.stat().st_size


def _busy_seconds() -> float:
    """Busy time of this process's cores, steal time included, without its own and its children's so far."""
    cores = os.sched_getaffinity(0)
    times = [t for i, t in enumerate(psutil.cpu_times(percpu=True)) if i in cores]
    own = os.times()
    busy = sum(t.user + t.nice + t.system + t.irq + t.softirq + t.steal for t in times)
    return float(busy) - (own.user + own.system + own.children_user + own.children_system)
