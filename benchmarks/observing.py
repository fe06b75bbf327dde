"""What looking at a master costs its requests, at the smallest size of `round_trips`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from measuring import Effort, Ratio, Record, Way, in_turns, ratio_line, series_row, table
from round_trips import BATCH, SIZES, WORKERS, identity_model

from mcinfer import Master, RequestTrace

PLAIN = "predict"
TRACED = "predict with a trace hook that does nothing"
WATCHED = "predict, statistics() asked 10 times a second"
BOTH = "predict with both"
TARGET = 1.03
"""How many times longer a call may take that is looked at."""


def _ignore(_: RequestTrace) -> None:
    pass


@contextmanager
def _asked(master: Master) -> Iterator[None]:
    """Ask for statistics, as a monitor does, meanwhile."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            master.statistics()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure_observing(folder: Path, effort: Effort, say: Callable[[str], None]) -> Record:
    """Measure and print what a trace hook and `statistics` add to a call."""
    model = str(identity_model(folder / "identity.onnx"))
    size = SIZES[0]
    # Rows that differ: a request of equal ones does not show how it splits, and would run whole.
    rows = np.random.default_rng(0).standard_normal((BATCH, size.row_elements), np.float32)
    inputs = {"x": rows}
    with ExitStack() as stack:
        plain = stack.enter_context(Master(model, WORKERS))
        traced = stack.enter_context(Master(model, WORKERS, trace=_ignore))
        watched = stack.enter_context(Master(model, WORKERS))
        both = stack.enter_context(Master(model, WORKERS, trace=_ignore))
        stack.enter_context(_asked(watched))
        stack.enter_context(_asked(both))
        ways: dict[str, Way] = {
            PLAIN: lambda: plain.predict(inputs),
            TRACED: lambda: traced.predict(inputs),
            WATCHED: lambda: watched.predict(inputs),
            BOTH: lambda: both.predict(inputs),
        }
        series = in_turns(ways, effort)
    ratios = [
        Ratio(
            text=f"{name} / {PLAIN}",
            series=series[name].over(series[PLAIN]),
            bound=TARGET,
            at_least=False,
        )
        for name in (TRACED, WATCHED, BOTH)
    ]
    say(f"\nObserving: {size.name} per request, {effort.rounds} rounds in turns; p50")
    say(
        table(
            ("way", "p50", "rounds"),
            [series_row(name, one) for name, one in series.items()],
        )
    )
    for ratio in ratios:
        say(ratio_line(ratio))
    return {
        "seconds": {name: one.record() for name, one in series.items()},
        "ratios": [ratio.record() for ratio in ratios],
    }
