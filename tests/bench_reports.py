"""Reports as a benchmark would write them, for tests of tables, pages and comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcinfer.bench.report import (
    QUANTILES,
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

SPEEDS = {"session": 1.0, "threads": 1.15, "pipe": 0.7, "sharded": 1.05, "batched": 1.9}
"""Ways, and how many times as fast as the first they are in `large`."""

BASELINES = ("session", "threads", "threads-1", "pipe", "pipe-each")


def turn(
    rate: float = 100.0,
    *,
    seconds: float = 2.0,
    slowest: float = 0.05,
    failed: int = 0,
    unfinished: int = 0,
    run_seconds: float | None = None,
    cores: float = 2.0,
    kept_up: bool = True,
    error: str = "",
) -> Turn:
    """A turn of so many requests a second, whose latencies rise from a fifth of the slowest one's."""
    requests = round(rate * seconds)
    latencies = tuple(slowest * (0.2 + 0.8 * q**6) for q in QUANTILES) if requests else ()
    return Turn(
        requests=requests,
        failed=failed,
        unfinished=unfinished,
        seconds=seconds,
        latencies=latencies,
        mean_latency=slowest * (0.2 + 0.8 / 7) if requests else 0.0,
        run_seconds=run_seconds,
        cpu_seconds=cores * seconds,
        kept_up=kept_up,
        error=error,
    )


def way(name: str, *, role: Role | None = None, workers: int = 1, repeats: int = 3) -> Way:
    return Way(
        name=name,
        text=f"how {name} does it",
        role=role or ("baseline" if name in BASELINES else "mcinfer"),
        workers=workers,
        start_seconds=tuple(0.5 + 0.1 * workers + 0.01 * n for n in range(repeats)),
        memory=tuple(
            Memory(
                pss=(90 + 25 * workers + n) * 10**6,
                uss=(60 + 22 * workers + n) * 10**6,
                processes=workers,
            )
            for n in range(repeats)
        ),
    )


def report(
    ways: Sequence[Way],
    turns: Mapping[tuple[str, Load], Sequence[Turn]],
    *,
    name: str = "unet.onnx",
) -> Report:
    return Report(
        made_at="2025-01-02T03:04:05+00:00",
        took_seconds=321.5,
        mcinfer="0.6.0",
        machine={"cpu": "AMD EPYC 7B13", "cores": 8, "load_average_before": 0.2},
        model=ModelFacts(
            name=name,
            bytes=52_428_800,
            inputs=("latents: float32[batch, 4, 32, 32]", "step: int64[]"),
            outputs=("noise: float32[batch, 4, 32, 32]",),
        ),
        settings=Settings(
            devices=("cpu:0", "cpu:1", "cpu:2", "cpu:3"),
            seconds=2.0,
            count=0,
            repeats=3,
            warmup_seconds=0.5,
            seed=0,
            dims={"height": 32},
            max_batch_size=16,
            arrays={
                str(batch): {"latents": ("float32", (batch, 4, 32, 32)), "step": ("int64", ())}
                for batch in {load.batch for _, load in turns}
            },
        ),
        ways=tuple(ways),
        measurements=tuple(
            Measurement(way=way, load=load, turns=tuple(taken))
            for (way, load), taken in turns.items()
        ),
    )


def small(**rates: Sequence[float]) -> Report:
    """Ways under one load, ``batch 2, 4 clients``, with their requests a second in each repeat."""
    load = Load(batch=2, clients=4)
    turns = {
        (name, load): [turn(rate, slowest=5 / (rate or 1)) for rate in each]
        for name, each in rates.items()
    }
    return report([way(name) for name in rates], turns)


def large() -> Report:
    """Ways under closed and open loops, one that failed, ways that did not keep up."""
    ways = [way(name, workers=4 if name not in BASELINES else 1) for name in SPEEDS]
    broken = replace(
        way("ours.py:Broken", role="baseline"),
        start_seconds=(),
        memory=(),
        error="ValueError: this way cannot run [batch] of <this> model",
    )
    turns = {}
    for load in (Load(batch=b, clients=c) for b in (1, 8) for c in (1, 16)):
        for name, speed in SPEEDS.items():
            rate = 60 * speed * load.clients**0.3 / load.batch**0.6
            how = {"slowest": load.clients / rate * 2.2, "run_seconds": 0.6 / rate}
            turns[name, load] = [turn(rate * n, **how) for n in (1.0, 0.97, 1.04)]
    load = Load(batch=8, clients=64, rate=50.0)
    for name, speed in SPEEDS.items():
        late = max(0, round(2 * (50.0 - 30 * speed)))
        slowest = 3.0 if late else 0.15 / speed
        behind = turn(50.0 - late / 2, slowest=slowest, unfinished=late, kept_up=not late)
        turns[name, load] = [behind] * 3
    return report([*ways, broken], turns)
