"""Measuring ways of running a model side by side.

```
 Benchmark (this process)
   │  looks at the model with one worker; makes a request's arrays for each batch
   ├── Subject "session"  ── process: ONNX Runtime
   ├── Subject "pipe"     ── process ── processes of the sample
   ├── Subject "sharded"  ── process: Master ── workers
   └── …                            for each repeat, for each load, each of them has its turn
```

All ways are loaded at the same time and take turns, so that whatever else the machine does hits all of them;
only one has something to do at any moment. In each repeat they are started anew, and another one begins.

Ownership: a `Benchmark` ends all processes that it has started before `run` returns or raises.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from mcinfer import __version__
from mcinfer.bench.failures import WayFailedError
from mcinfer.bench.inputs import InputOptions, fixed_batch, make_inputs
from mcinfer.bench.known_ways import MODES, check_names, shown_name
from mcinfer.bench.load import MAX_ARRIVALS
from mcinfer.bench.looking import look_at, own_records
from mcinfer.bench.report import Load, Measurement, Memory, Report, Role, Settings, Turn, Way
from mcinfer.bench.request_file import write_request
from mcinfer.bench.subject import Subject
from mcinfer.bench.surroundings import describe_model, machine
from mcinfer.bench.way import Setup
from mcinfer.config import CoreShare, EngineOptions, TransportKind, parse_devices, share_cores
from mcinfer.errors import InvalidInputError
from mcinfer.machine import whole_cpus
from mcinfer.master import Master
from mcinfer.sharding import Axes, Split
from mcinfer.specs import ModelSpec

OPEN_LOOP_CLIENTS = 32
"""Requests under way at most in an open loop; what arrives beyond them waits, and its latency counts."""

_REQUEST_SECONDS = 600.0
"""That one request may take: as `mcinfer.Timeouts` has it."""
_COUNT_SECONDS = 4 * 3600.0
"""That a turn of a number of requests may take."""
_START_SECONDS = 900.0

Progress = Callable[[float, str], None]
"""Called with the number of steps that are done, and what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured.

    Attributes:
        model: Path of the model.
        devices: As `mcinfer.Master` takes them.
        threads: Of each worker; None is as many as it has cores.
        batches: Rows of a request.
        clients: Closed loops of so many clients, for each batch.
        rates: Open loops of so many requests a second, for each batch.
        seconds: Of a turn, if `count` is 0.
        count: Requests of a turn.
        repeats: How often each way has its turn under each load.
        warmup: Seconds before each turn that are not counted.
        ways: Names, baselines before modes.
        max_batch_size: For the mode that joins requests.
        max_delay: Likewise, seconds.
        scaling: Whether pools of fewer workers are measured, too.
        inputs: What the requests' arrays are made of.
        batch_axes: As `mcinfer.Master` takes them.
        output_axes: Likewise.
        transport: Likewise, of mcinfer's own ways.
    """

    model: Path
    devices: int | Sequence[str] | None
    threads: int | None = None
    batches: tuple[int, ...] = (1,)
    clients: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    seconds: float = 2.0
    count: int = 0
    repeats: int = 3
    warmup: float = 0.3
    ways: tuple[str, ...]
    max_batch_size: int = 8
    max_delay: float = 0.001
    scaling: bool = True
    inputs: InputOptions
    batch_axes: Axes = field(default_factory=dict)
    output_axes: Axes = field(default_factory=dict)
    transport: TransportKind = "zeromq"

    @property
    def loads(self) -> tuple[Load, ...]:
        """Of every way."""
        return tuple(
            load
            for batch in self.batches
            for load in (
                *(Load(batch=batch, clients=clients) for clients in self.clients),
                *(Load(batch=batch, clients=OPEN_LOOP_CLIENTS, rate=rate) for rate in self.rates),
            )
        )


@dataclass(slots=True)
class _Entry:
    """A way, and what was found of it so far.

    Attributes:
        name: For the report.
        source: What its process is asked for.
        errors: What went wrong, and under which loads; none of them for what concerns all.
    """

    name: str
    source: str
    role: Role
    setup: Setup
    text: str
    workers: int
    errors: dict[str, list[str]] = field(default_factory=dict)
    given_up: bool = False
    starts: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    turns: dict[Load, list[Turn]] = field(default_factory=dict)
    refused: set[Load] = field(default_factory=set)
    subject: Subject | None = None

    def give_up(self, error: str) -> None:
        """Nothing more is measured of it."""
        self.errors[error] = []
        self.given_up = True
        if self.subject is not None:
            self.subject.close()

    def report(self) -> Way:
        """For the report."""
        return Way(
            name=self.name,
            text=self.text,
            role=self.role,
            workers=self.workers,
            start_seconds=tuple(self.starts),
            memory=tuple(self.memory),
            error="; ".join(
                f"{', '.join(loads)}: {error}" if loads else error
                for error, loads in self.errors.items()
            ),
        )


class Benchmark:
    """One benchmark. `run` it once, then ask for its `report`; also after it was interrupted.

    Args:
        plan: What is to be measured.
        progress: Told of how far it is.

    Attributes:
        steps: How many there are in all: starts and turns.
        done: How many of them are over.
        turns_taken: Turns in which something was answered.

    Raises:
        InvalidInputError: There are no such devices.
    """

    def __init__(self, plan: Plan, progress: Progress) -> None:
        _check_rates(plan)
        check_names([way for way in plan.ways if way not in MODES])
        self._plan = plan
        self._progress = progress
        self._began = datetime.now(UTC)
        self._start = monotonic()
        self._machine = machine()
        self._cores = sorted(os.sched_getaffinity(0))
        self._cpus = (
            whole_cpus()
        )  # as the master counts them: fewer than cores where there is a quota
        self._devices = tuple(map(str, parse_devices(plan.devices, self._cpus)))
        self._known: tuple[ModelSpec, Split] | None = None
        self._entries: list[_Entry] = []
        self.turns_taken = 0
        self.done = 0
        self._finished = False
        pools = len(self._pool_sizes())
        self.steps = plan.repeats * (len(plan.ways) * (1 + len(plan.loads)) + 2 * pools)

    def run(self) -> Report:
        """Measure everything; what came of it.

        Raises:
            InvalidInputError: The plan does not fit the model.
            BuildError: mcinfer cannot load the model.
        """
        with (
            tempfile.TemporaryDirectory(prefix="mcinfer-bench-") as name,
            own_records(Path(name)),
        ):
            self._tell("loading the model")
            self._known = self._look()
            files = self._write_inputs(Path(name), *self._known)
            main = [self._entry(way) for way in self._plan.ways]
            pools = self._pools()
            self._entries = [*main, *pools]
            loads = self._plan.loads
            scaling = self._scaling_load()
            self._measure(main, loads, files)
            self._measure(pools, (scaling,), files)
        self._finished = True
        return self.report()

    def report(self) -> Report:
        """What was found so far.

        Raises:
            InvalidInputError: Not even the model was looked at.
        """
        model, _ = self._model
        plan = self._plan
        loads = (*plan.loads, self._scaling_load())
        return Report(
            made_at=self._began.isoformat(timespec="seconds"),
            took_seconds=round(monotonic() - self._start, 1),
            mcinfer=__version__,
            machine=self._machine,
            model=describe_model(plan.model, model),
            settings=Settings(
                devices=self._devices,
                seconds=0.0 if plan.count else plan.seconds,
                count=plan.count,
                repeats=plan.repeats,
                warmup_seconds=plan.warmup,
                seed=plan.inputs.seed,
                dims=dict(plan.inputs.dims),
                max_batch_size=plan.max_batch_size,
                max_delay=plan.max_delay,
                transport=plan.transport,
            ),
            ways=tuple(entry.report() for entry in self._entries),
            measurements=tuple(
                Measurement(way=entry.name, load=load, turns=tuple(entry.turns[load]))
                for load in dict.fromkeys(loads)
                for entry in self._entries
                if entry.turns.get(load)
            ),
            finished=self._finished,
        )

    # What there is to measure.

    @property
    def _model(self) -> tuple[ModelSpec, Split]:
        """What was found of it."""
        if self._known is None:
            raise InvalidInputError("nothing was measured")
        return self._known

    def _look(self) -> tuple[ModelSpec, Split]:
        """What the model is like. It is prepared by that, if it has not been."""
        plan = self._plan
        axes = plan.batch_axes, plan.output_axes
        with Master(
            plan.model,
            self._devices[:1],
            options=EngineOptions(threads=plan.threads),
            batch_axes=plan.batch_axes,
            output_axes=plan.output_axes,
        ) as master:
            self._tell("learning how its batch is split")
            return look_at(master, plan.batches, plan.inputs, *axes)

    def _write_inputs(self, folder: Path, model: ModelSpec, split: Split) -> dict[int, Path]:
        files = {}
        for batch in self._plan.batches:
            files[batch] = folder / f"{batch}.request"
            write_request(files[batch], make_inputs(model, split, batch, self._plan.inputs))
        return files

    def _setup(self, workers: int, shares: Sequence[CoreShare] = ()) -> Setup:
        """Of a way with so many workers, each with such a share; without any, with all cores."""
        model, split = self._model
        return Setup(
            model=str(self._plan.model.absolute()),
            cores=self._cpus,
            devices=self._devices[:workers],
            threads=self._plan.threads or (shares[0].threads if shares else None),
            split=split,
            fixed_batch=fixed_batch(model, split),
            batches=self._plan.batches,
            batch_axes=self._plan.batch_axes,
            output_axes=self._plan.output_axes,
            max_batch_size=self._plan.max_batch_size,
            max_delay=self._plan.max_delay,
            transport=self._plan.transport,
            worker_cores=tuple(share.cores for share in shares),
        )

    def _entry(self, name: str) -> _Entry:
        role: Role = "mcinfer" if name in MODES else "baseline"
        return _Entry(
            name=shown_name(name),
            source=name,
            role=role,
            setup=self._setup(len(self._devices)),
            text=name,  # until it has started: its class would bring its runtime into this process
            workers=len(self._devices),
        )

    def _pools(self) -> list[_Entry]:
        """Pools of fewer workers, each with the share of the device that it has in the whole pool."""
        count = len(self._devices)
        parsed = parse_devices(self._devices, self._cpus)
        shares = share_cores(parsed, self._cores, cpus=self._cpus)
        mine = [share for share in shares.values() if isinstance(share, CoreShare)]
        return [
            _Entry(
                name=f"pool-{size}",
                source="concurrent",
                role="scaling",
                setup=self._setup(size, mine[:size]),
                text=f"mcinfer.submit over {size} of {count} workers",
                workers=size,
            )
            for size in self._pool_sizes()
        ]

    def _pool_sizes(self) -> list[int]:
        """1, 2, 4, … and the whole pool's; none where there is but one worker."""
        count = len(self._devices)
        if count == 1 or not self._plan.scaling:
            return []
        return [*(1 << n for n in range(count.bit_length()) if 1 << n < count), count]

    def _scaling_load(self) -> Load:
        """Enough for the whole pool to have something to do all the time."""
        return Load(batch=max(self._plan.batches), clients=2 * len(self._devices))

    # Measuring.

    def _measure(
        self, entries: Sequence[_Entry], loads: Sequence[Load], files: dict[int, Path]
    ) -> None:
        with ExitStack() as stack:
            try:
                for repeat in range(self._plan.repeats):
                    for entry in _rotated(entries, repeat):
                        self._start_way(entry, files, stack)
                    for load in loads:
                        for entry in _rotated(entries, repeat):
                            self._take_turn(entry, load, repeat)
                    for entry in entries:
                        self._weigh(entry)
            except KeyboardInterrupt:
                for entry in entries:  # all at once, and then one after another is waited for
                    if entry.subject is not None:
                        entry.subject.interrupt()
                raise

    def _start_way(self, entry: _Entry, files: dict[int, Path], stack: ExitStack) -> None:
        """Start a way, anew for each repeat, so that none rests on how one start happened to go."""
        self._tell(f"starting {entry.name}")
        self.done += 1
        if entry.given_up:
            return
        if entry.subject is not None:
            entry.subject.close()
        entry.subject = stack.enter_context(Subject(entry.source, entry.setup, files))
        try:
            entry.starts.append(entry.subject.start(_START_SECONDS))
        except WayFailedError as exc:
            entry.give_up(str(exc))
        else:
            entry.workers = entry.subject.workers
            if entry.role != "scaling":
                entry.text = entry.subject.text

    def _take_turn(self, entry: _Entry, load: Load, repeat: int) -> None:
        self._tell(f"{entry.name}: {load}")
        if entry.subject is not None and not entry.given_up and load not in entry.refused:
            plan = self._plan
            most = _COUNT_SECONDS if plan.count else 3 * (plan.warmup + plan.seconds)
            try:
                turn = entry.subject.turn(
                    load,
                    seconds=plan.seconds,
                    count=plan.count,
                    warmup=plan.warmup,
                    seed=plan.inputs.seed + repeat,
                    timeout=most + 2 * load.clients * _REQUEST_SECONDS,
                )
            except WayFailedError as exc:
                # Such as a batch that the model does not take: other loads may be all right.
                entry.errors.setdefault(str(exc), []).append(str(load))
                entry.refused.add(load)
                entry.given_up = not entry.subject.alive
            else:
                entry.turns.setdefault(load, []).append(turn)
                self.turns_taken += 1
        self.done += 1

    def _weigh(self, entry: _Entry) -> None:
        if entry.subject is not None and not entry.given_up:
            try:
                entry.memory.append(entry.subject.memory())
            except WayFailedError as exc:
                entry.give_up(str(exc))

    def _tell(self, text: str) -> None:
        self._progress(self.done, text)


def _check_rates(plan: Plan) -> None:
    """Raise `InvalidInputError` for an open loop in which nothing would arrive, or far too much."""
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


def _rotated(entries: Sequence[_Entry], repeat: int) -> list[_Entry]:
    """Each repeat begins with another one, so that none always follows the same."""
    if not entries:
        return []
    first = repeat % len(entries)
    return [*entries[first:], *entries[:first]]
