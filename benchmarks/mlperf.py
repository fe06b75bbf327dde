"""Sessions and masters under LoadGen, the load generator of MLPerf Inference.

    python benchmarks/mlperf.py [--quick] [--only MODEL] [--write docs/benchmarks.md] [--plot FOLDER]

Every query is one row. SingleStream: the next query when the last one is answered, in the caller's thread.
Offline: all at once. Server: Poisson arrivals, a latency counts from its arrival; first at rates that all
ways share, then at a way's own, to find by halving the most queries a second of which 99 % take 20 ms at
most. The ways: as many threads as cores on one session of ONNX Runtime with one thread a run; an inline
master; two workers; two that join up to 8 rows. They have turns at each step, with the same arrivals.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from measuring import (
    Lines,
    Ratio,
    Series,
    Setting,
    add_plot,
    figure,
    main,
    markdown,
    others_seconds,
    save_figure,
    used_seconds,
)
from models import TOKENS, Arrays, encoder_model, mlp, mobilenet_model, normal

from mcinfer import Master
from mcinfer.bench.baselines import open_session
from mcinfer.bench.figures import number
from mcinfer.bench.load import rotated
from mcinfer.bench.mlperf import LATENCIES, ask, complete
from mcinfer.bench.report import Scenario

THREADS, INLINE, WORKERS, JOINED = WAYS = ("threads", "inline", "two workers", "joined")
COLOURS = ("#d95f02", "#1b9e77", "#2166ac", "#9467bd")
TICKS = (1, 2, 5, 10, 20, 50)
"""Of the pictures' axes, in milliseconds."""
CORES = 2

SECONDS = 1.0
"""Of a turn."""
QUIET, TRIES = 0.2, 2
"""A turn in which other programs had more than so many cores is tried so often."""
LIMIT_MS = 20.0
"""Within so long 99 % of a server's answers are to come."""
SHARES = (0.25, 0.5, 0.75, 0.95)
"""Of what all cores could do by the processor time of a row: the rates that all ways are asked at."""
HALVINGS = 3
PATIENCE = 60.0
"""Seconds for a request."""

_IMAGE = {"image": normal(1, 224, 224, 3)["x"]}
MODELS: dict[str, tuple[str, Callable[[Path], Path], Arrays]] = {
    "encoder": ("encoder, 1 ms a row", encoder_model, normal(1, TOKENS, 256)),
    "mobilenet": ("MobileNetV2's structure", mobilenet_model, _IMAGE),
    "mlp": ("MLP, 0.9 ms a row", partial(mlp, layers=24, width=512), normal(1, 512)),
}
FIGURES = (
    *("SingleStream: queries/s", "its p50, ms", "its p99, ms"),
    *("Offline: rows/s", "its processor time a row, ms"),
    "Server: queries/s with p99 ≤ 20 ms",
    *("p50 at half the load, ms", "p99 at half the load, ms"),
)
TARGETS = {INLINE: {0: 0.97, 3: 0.97, 5: 0.97}, WORKERS: {3: 0.9, 5: 0.9}, JOINED: {}}
"""What part of the threads' rate is wanted, at least: by way and place in `FIGURES`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries a second (of Server, those asked for), latencies, and processor time of a query."""

    rate: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    used_ms: float = 0.0


class Way:
    """A system under test: `run` answers in the caller's thread, `submit` gives a future."""

    def __init__(self, run: Callable[[], object], submit: "Callable[[], Future[Any]]") -> None:
        self._run, self._submit = run, submit
        self._answers = 0
        self._errors: list[BaseException] = []

    def turn(
        self, scenario: Scenario, folder: Path, rate: float, seconds: float, seed: int = 0
    ) -> Turn:
        """Let LoadGen ask for so many seconds; Offline, for as many rows as `rate` gives in them."""
        issue = self._answer if scenario == "SingleStream" else self._issue
        begin, self._answers = used_seconds(), 0
        found = ask(issue, scenario, folder, seconds=seconds, rate=rate, seed=seed)
        used_ms = 1e3 * (used_seconds() - begin) / self._answers
        if self._errors:
            raise self._errors[0]
        for key in ("result_qps_with_loadgen_overhead", "result_samples_per_second"):
            rate = found.get(key, rate)
        p50, p99 = (found[LATENCIES[part]] / 1e6 for part in (0.5, 0.99))
        return Turn(rate, p50, p99, used_ms)

    def _answer(self, samples: Sequence[Any]) -> None:
        for sample in samples:
            try:
                self._run()
            except BaseException as exc:  # `turn` raises it: LoadGen waits for every answer
                self._errors.append(exc)
            self._complete(sample.id)

    def _issue(self, samples: Sequence[Any]) -> None:
        for sample in samples:
            self._submit().add_done_callback(partial(self._answered, sample.id))

    def _answered(self, number: int, future: "Future[Any]") -> None:
        if (error := future.exception()) is not None:
            self._errors.append(error)
        self._complete(number)

    def _complete(self, number: int) -> None:
        self._answers += 1
        complete(number)


def open_ways(model: Path, inputs: Arrays, opened: ExitStack) -> dict[str, Way]:
    """All ways, closed with the stack."""
    session = open_session(str(model), 1, ["CPUExecutionProvider"])
    pool = opened.enter_context(ThreadPoolExecutor(CORES))
    run: Callable[[], object] = partial(session.run, None, inputs)
    found = {THREADS: Way(run, partial(pool.submit, run))}
    masters = {
        INLINE: Master(model, "inline"),
        WORKERS: Master(model, CORES),
        JOINED: Master(model, CORES, max_batch_size=8),
    }
    for name, master in masters.items():
        opened.enter_context(master)
        run = partial(master.predict, inputs, timeout=PATIENCE)
        found[name] = Way(run, partial(master.submit, inputs, timeout=PATIENCE))
    return found


@dataclass(slots=True)
class Round:
    """The turns of one way in one round; those of Server begin with one for each of `SHARES`."""

    single: Turn = Turn()
    offline: Turn = Turn()
    server: list[Turn] = field(default_factory=list)
    disturbed: int = 0

    @property
    def most(self) -> float:
        """The highest rate that held, also where a lower one did not: that was disturbed."""
        return max((turn.rate for turn in self.server if turn.p99_ms <= LIMIT_MS), default=0.0)

    @property
    def next_rate(self) -> float:
        """In the middle of the highest that held and the next one above, or what will be too many."""
        too_many = max(1.1 * self.offline.rate, 1.2 * self.most)
        above = (turn.rate for turn in self.server if turn.rate > self.most)
        return (self.most + min(above, default=too_many)) / 2

    @property
    def figures(self) -> tuple[float, ...]:
        """In the order of `FIGURES`."""
        single, offline, half = self.single, self.offline, self.server[SHARES.index(0.5)]
        first = single.rate, single.p50_ms, single.p99_ms, offline.rate, offline.used_ms
        return *first, self.most, half.p50_ms, half.p99_ms


def one_round(
    ways: Mapping[str, Way], number: int, setting: Setting, most: float
) -> dict[str, Round]:
    """One round; all cores could answer so many queries a second, if they did nothing else."""

    def turn_of(name: str, scenario: Scenario, rate: float = 1e3) -> Turn:
        for _ in range(TRIES):
            begin, before, seconds = perf_counter(), others_seconds(), setting.seconds(SECONDS)
            turn = ways[name].turn(scenario, setting.folder, rate, seconds, number)
            if others_seconds() - before < QUIET * (perf_counter() - begin):
                return turn
        rounds[name].disturbed += 1
        return turn

    rounds = {name: Round() for name in WAYS}
    for step in range(-2, len(SHARES) + (0 if setting.quick else HALVINGS)):
        for name in rotated(WAYS, number + step):
            one = rounds[name]
            if step == -2:
                one.single = turn_of(name, "SingleStream")
            elif step == -1:
                one.offline = turn_of(name, "Offline", most)
            else:
                share = SHARES[step] if step < len(SHARES) else 0.0
                one.server.append(turn_of(name, "Server", share * most or one.next_rate))
    return rounds


def measure(name: str, setting: Setting) -> Lines:
    """One model: figures, ratios, and its picture."""
    title, make, inputs = MODELS[name]
    with ExitStack() as opened:
        ways = open_ways(make(setting.folder / f"{name}.onnx"), inputs, opened)
        warm = [ways[way].turn("SingleStream", setting.folder, 1e3, 1.0) for way in WAYS]
        most = 1e3 * CORES / warm[0].used_ms
        each = [one_round(ways, number, setting, most) for number in range(setting.rounds)]
    rounds = {name: [one[name] for one in each] for name in WAYS}
    every = [one for ones in rounds.values() for one in ones]
    turns = len(every) * (2 + len(every[0].server))
    disturbed = sum(one.disturbed for one in every)
    yield f"{tables(title, rounds)}\n\nDisturbed by other programs: {disturbed} of {turns} turns."
    if setting.options.plot is not None:
        draw(rounds, setting.options.plot / f"mlperf_{name}.svg")


def tables(title: str, rounds: Mapping[str, Sequence[Round]]) -> str:
    """The medians, and the ratios to threads."""
    found = {
        way: [Series(values) for values in zip(*(one.figures for one in ones), strict=True)]
        for way, ones in rounds.items()
    }
    medians = [[way, *(number(one.middle) for one in series)] for way, series in found.items()]
    ratios = []
    for way in WAYS[1:]:
        cells = [way]
        for place, (ours, theirs) in enumerate(zip(found[way], found[THREADS], strict=True)):
            series = ours.over(theirs)
            ratio = Ratio(text="", series=series, bound=TARGETS[way].get(place))
            cell = f"{series.middle:.2f} [{series.low:.2f} … {series.high:.2f}]"
            verdict = "met" if ratio.met else "**missed**"
            cells.append(cell if ratio.met is None else f"{cell}, ≥ {ratio.bound}: {verdict}")
        ratios.append(cells)
    heads = (title, *FIGURES), ("over threads", *(name.partition(",")[0] for name in FIGURES))
    return "\n\n".join(map(markdown, heads, (medians, ratios)))


def draw(rounds: Mapping[str, Sequence[Round]], path: Path) -> None:
    """The latencies of Server over its queries a second, of the round in which each was least."""
    picture = figure(9.0, 3.6)
    panels = picture.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("p50", "p99"), strict=True):
        for (way, ones), colour in zip(rounds.items(), COLOURS, strict=True):
            turns = [*zip(*(one.server[: len(SHARES)] for one in ones), strict=True)]
            rates = [each[0].rate for each in turns]
            times = [min(getattr(turn, f"{name}_ms") for turn in each) for each in turns]
            axes.plot(rates, times, marker="o", ms=4, color=colour, label=way)
        axes.axhline(LIMIT_MS, color="#777777", linestyle=":", label="the limit")
        axes.set(title=name, xlabel="queries a second", yscale="log")
        axes.set(xlim=(0, None), ylim=(None, 3 * LIMIT_MS))
        axes.minorticks_off()
        axes.set_yticks(TICKS, TICKS)
        axes.grid(visible=True, alpha=0.3)
    panels[0].set(ylabel="latency (ms)")
    names = panels[0].get_legend_handles_labels()
    picture.legend(*names, loc="outside lower center", ncols=5, frameon=False)
    save_figure(picture, path)


PARTS = {f"mlperf-{name}": partial(measure, name) for name in MODELS}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=3, cores=CORES, add_options=add_plot))
