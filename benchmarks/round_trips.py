"""What splitting, sending and joining one batch costs, at four sizes of request."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from measuring import (
    Effort,
    Ratio,
    Record,
    Series,
    Way,
    in_turns,
    ratio_line,
    series_row,
    table,
)
from numpy.typing import NDArray
from onnx import TensorProto, helper
from zeromq_baseline import EchoPool

from mcinfer import Master
from mcinfer.bench.baselines import Pipe
from mcinfer.bench.figures import seconds_text
from mcinfer.bench.way import Setup
from mcinfer.sharding import Split

BATCH = 2
WORKERS = 2

PIPE = "pipe: pickled through multiprocessing.Pipe"
ECHO = "ZeroMQ, one message there and back"
ECHO_ALL = "ZeroMQ, two workers"
PREDICT = "mcinfer.predict, plain arrays"
ALLOCATED = "mcinfer.predict, allocated arrays"
COPY = "one memcpy of the input"
ENGINE = "the engine's own run of a shard (mean)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size of request, and what is wanted there of mcinfer against the pipe."""

    name: str
    row_elements: int
    times_faster: float | None = None

    @property
    def input_bytes(self) -> int:
        """Bytes of the whole batch."""
        return BATCH * self.row_elements * 4


SIZES = (
    Size(name="8 KB", row_elements=1024),
    Size(name="0.8 MB", row_elements=100_000, times_faster=3.0),
    Size(name="8 MB", row_elements=1_000_000, times_faster=10.0),
    Size(name="64 MB", row_elements=8_000_000, times_faster=25.0),
)
ECHO_TARGET = 2.5
"""How many raw round trips a dispatch of 8 KB may take."""


def identity_model(path: Path) -> Path:
    """A model that copies its input: y = x, float32[batch, elements]."""
    sides = ["batch", "elements"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, sides)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sides)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    onnx.save(model, str(path))
    return path


class EngineTime:
    """The engine's own seconds per shard, by what the workers report."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._last = (0.0, 0)
        self.rounds: list[float] = []

    def _totals(self) -> tuple[float, int]:
        workers = self._master.statistics().workers
        return sum(w.busy_seconds for w in workers), sum(w.completed for w in workers)

    def begin(self) -> None:
        """The first round begins."""
        self._last = self._totals()

    def note(self) -> None:
        """The mean of all runs since the last call is a round's number."""
        last, self._last = self._last, self._totals()
        self.rounds.append((self._last[0] - last[0]) / (self._last[1] - last[1]))


def pipe_setup(model: str) -> Setup:
    """Of the pipe's processes, one for each worker."""
    return Setup(
        model=model,
        cores=WORKERS,
        devices=("cpu:0",) * WORKERS,
        threads=1,
        split=Split(inputs={"x": 0}, outputs={"y": 0}, known="declared"),
        max_batch_size=1,
        max_delay=0.0,
    )


def measure_dispatch(folder: Path, effort: Effort, say: Callable[[str], None]) -> Record:
    """Measure and print all sizes."""
    model = str(identity_model(folder / "identity.onnx"))
    say(
        f"Dispatch: batch {BATCH} over {WORKERS} workers, an Identity model, "
        f"{effort.rounds} rounds in turns; p50 [least … greatest round]"
    )
    records: list[Record] = []
    with ExitStack() as stack:
        pipe = Pipe(pipe_setup(model))
        stack.callback(pipe.close)
        echo = stack.enter_context(EchoPool(WORKERS))
        master = stack.enter_context(Master(model, WORKERS))
        for size in SIZES:
            series = _measure_size(size, pipe, echo, master, effort)
            ratios = _ratios(size, series)
            _print_size(size, series, ratios, say)
            records.append(
                {
                    "size": size.name,
                    "input_bytes": size.input_bytes,
                    "seconds": {name: one.record() for name, one in series.items()},
                    "ratios": [ratio.record() for ratio in ratios],
                }
            )
    return {"batch": BATCH, "workers": WORKERS, "sizes": records}


def _measure_size(
    size: Size, pipe: Pipe, echo: EchoPool, master: Master, effort: Effort
) -> dict[str, Series]:
    plain = np.random.default_rng(0).standard_normal((BATCH, size.row_elements), np.float32)
    allocated = master.allocate({"x": plain.shape})
    allocated["x"][...] = plain
    target = np.zeros_like(plain)
    for answer in (pipe.run({"x": plain}), master.predict({"x": plain})):
        check_answer(answer["y"], plain)
    check_answer(master.predict(allocated)["y"], plain)
    engine = EngineTime(master)

    ways: dict[str, Way] = {
        PIPE: lambda: pipe.run({"x": plain}),
        ECHO: echo.one,
        ECHO_ALL: echo.all,
        PREDICT: lambda: master.predict({"x": plain}),
        ALLOCATED: lambda: master.predict(allocated),
        COPY: lambda: np.copyto(target, plain),
    }
    series = in_turns(ways, effort, before=engine.begin, after_round=engine.note)
    series[ENGINE] = Series(tuple(engine.rounds))
    return series


def check_answer(answer: NDArray[Any], expected: NDArray[Any]) -> None:
    """See that the Identity model gave back what it was given.

    Raises:
        RuntimeError: It did not.
    """
    if not np.array_equal(answer, expected):
        raise RuntimeError("a way under measurement gave a wrong answer")


def _ratios(size: Size, series: dict[str, Series]) -> list[Ratio]:
    predict, allocated = series[PREDICT], series[ALLOCATED]
    ratios = [
        Ratio(
            text="pipe / predict",
            series=series[PIPE].over(predict),
            bound=size.times_faster,
        ),
        Ratio(
            text="pipe / predict with allocated arrays",
            series=series[PIPE].over(allocated),
            bound=size.times_faster,
        ),
        Ratio(text="plain / allocated arrays", series=predict.over(allocated), bound=1.0),
    ]
    if size.times_faster is None:
        bounds = {"predict": predict, "predict with allocated arrays": allocated}
        ratios = [
            Ratio(
                text=f"{name} / ZeroMQ round trip",
                series=one.over(series[ECHO]),
                bound=ECHO_TARGET,
                at_least=False,
            )
            for name, one in bounds.items()
        ] + ratios
        ratios.append(
            Ratio(text="predict / ZeroMQ, two workers", series=predict.over(series[ECHO_ALL]))
        )
    else:
        ratios.append(Ratio(text="predict / memcpy", series=predict.over(series[COPY])))
    return ratios


def _print_size(
    size: Size, series: dict[str, Series], ratios: list[Ratio], say: Callable[[str], None]
) -> None:
    rows = [series_row(name, one) for name, one in series.items()]
    say("")
    say(table((f"{size.name} ({size.input_bytes:,} bytes)", "p50", "rounds"), rows))
    for name in (PREDICT, ALLOCATED):
        rest = series[name].middle - series[ENGINE].middle
        say(f"  {name}: {seconds_text(max(rest, 0.0))} beside the engine's run")
    for ratio in ratios:
        say(ratio_line(ratio))
