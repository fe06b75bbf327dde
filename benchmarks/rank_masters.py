"""Models cut over ranks: are the answers right, how much does a rank hold, how fast is a group."""

import os
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
from bare_processes import unet_inputs
from build_unet import build_unet
from measuring import (
    Effort,
    Ratio,
    Record,
    Series,
    in_turns,
    rates_in_turns,
    report_rates,
)
from numpy.typing import NDArray
from rank_collectives import Measured, Say, markdown, spread
from rank_groups import Ranks
from rank_models import (
    BERT_HEADS,
    BERT_LAYERS,
    BERT_WIDTH,
    Arrays,
    encoder,
    encoder_inputs,
    mlp,
    mlp_inputs,
)

from mcinfer import EngineOptions, Master, Parallel
from mcinfer.ranks.slicing.slicer import slice_model

LARGEST_DIFFERENCE = 1e-5
"""Of an answer to one session's, relative to the largest element of the answer; float32."""
WEIGHTS_SLACK = 1.1
"""How many times its part of the weights a rank may hold."""
PIPELINE_TARGET = 0.9
"""What part of the throughput of two replicas is wanted of a pipeline of two stages."""

CUTS = {
    "tensor 2": Parallel(tensor=2),
    "tensor 4": Parallel(tensor=4),
    "pipeline 2": Parallel(pipeline=2),
    "tensor 2, pipeline 2": Parallel(tensor=2, pipeline=2),
}

IN_FLIGHT = 8
"""Requests that are under way at any moment, where throughput is measured."""

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A model to cut.

    Attributes:
        name: What tables call it.
        build: Writes it to a path.
        inputs: Inputs of so many rows, by name.
        rows: Of a request.
        even: Whether each rank is to hold its part of the weights and little more.
    """

    name: str
    build: Callable[[Path], Path]
    inputs: Callable[[int], Arrays]
    rows: int
    even: bool


def rank_models(quick: bool) -> tuple[RankModel, ...]:
    """The models of the page; for a first look, smaller ones of the same kinds."""
    layers, width = (6, 512) if quick else (24, 2048)
    blocks, channels, heads = (2, 256, 4) if quick else (BERT_LAYERS, BERT_WIDTH, BERT_HEADS)
    tokens = 32 if quick else 128
    size = "tiny" if quick else "small"
    return (
        RankModel(
            name=f"MLP {layers} x {width}",
            build=lambda path: mlp(path, layers=layers, width=width, external_data=True),
            inputs=lambda rows: mlp_inputs(rows, width=width),
            rows=8,
            even=True,
        ),
        RankModel(
            name=f"encoder {blocks} x {channels}",
            build=lambda path: encoder(
                path, layers=blocks, width=channels, heads=heads, external_data=True
            ),
            inputs=lambda rows: encoder_inputs(rows, tokens, width=channels),
            rows=1,
            even=True,
        ),
        RankModel(
            name=f"UNet `{size}`",
            build=lambda path: build_unet(path, size),
            inputs=lambda rows: unet_inputs(rows, size),
            rows=1,
            even=False,
        ),
    )


def _relative_difference(got: Arrays, expected: Arrays) -> float:
    return max(
        float(np.max(np.abs(got[name] - array)) / np.max(np.abs(array)))
        for name, array in expected.items()
    )


def _rank_memory() -> list[int]:
    """What each process below this one takes, in bytes: its own pages and its part of shared ones (PSS)."""
    children = psutil.Process().children(recursive=True)
    return [child.memory_full_info().pss for child in children]


class _OneSession:
    """The whole model in this process, with all its cores."""

    def __init__(self, path: Path, inputs: Arrays) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = inputs

    def run(self) -> Arrays:
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, self._inputs), strict=True))


# One model, cut in all ways.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What came of one model, cut in one way.

    Attributes:
        model: Its name.
        cut: How, as in `CUTS`.
        part: The most that a rank has of the weights' bytes.
        most: What `part` may be at most; None where there is no target.
        difference: The largest to one session's answer, relative.
        identical: Whether the answers of all ranks have the same bits.
        seconds: Of a request.
        over_session: `seconds` over those of one session with the same cores.
        memory: PSS of each rank, in bytes.
    """

    model: str
    cut: str
    part: float
    most: float | None
    difference: float
    identical: bool
    seconds: Series
    over_session: Series
    memory: list[int]

    def record(self) -> Record:
        """For JSON."""
        return {
            "part": self.part,
            "most": self.most,
            "difference": self.difference,
            "identical": self.identical,
            "seconds": self.seconds.record(),
            "over_session": self.over_session.record(),
            "memory": self.memory,
        }

    def row(self) -> list[str]:
        """For the page."""
        weights = f"{self.part:.1%}"
        if self.most is not None:
            weights += f" (≤ {self.most:.1%}: {'met' if self.part <= self.most else '**missed**'})"
        close = "met" if self.difference <= LARGEST_DIFFERENCE else "**missed**"
        return [
            self.model,
            self.cut,
            weights,
            f"{self.difference:.1e} ({close})",
            "yes" if self.identical else "**no**",
            spread(self.seconds),
            f"{self.over_session.middle:.3g}",
            f"{max(self.memory) / MEGABYTE:.0f} MB",
        ]


def measure_slices(folder: Path, effort: Effort, say: Say, *, quick: bool) -> Measured:
    """Each model, cut in each way: answers, weights and memory of a rank, latency."""
    record: Record = {}
    rows: list[list[str]] = []
    for model in rank_models(quick):
        path = model.build(folder / "whole.onnx")
        inputs = model.inputs(model.rows)
        session = _OneSession(path, inputs)
        alone = _one_worker(path, inputs)
        rows.append([model.name, "1 worker", "100%", "", "", "", "", f"{alone / MEGABYTE:.0f} MB"])
        cuts: Record = {"one worker's memory": alone}
        for cut, parallel in CUTS.items():
            measured = _measure_cut(folder, model, cut, parallel, session, effort)
            cuts[cut] = measured.record()
            rows.append(measured.row())
            say(" · ".join(measured.row()))
        record[model.name] = cuts
    header = (
        "model | cut | weights of the largest rank | largest relative difference | "
        "ranks bit-identical | latency | over one session | memory of the largest rank (PSS)"
    )
    return Measured(record, markdown(header, rows))


def _one_worker(path: Path, inputs: Arrays) -> int:
    """The memory of one worker with the whole model."""
    with Master(path, 1) as master:
        master.predict(inputs)
        return max(_rank_memory())


def _measure_cut(
    folder: Path,
    model: RankModel,
    cut: str,
    parallel: Parallel,
    session: _OneSession,
    effort: Effort,
) -> Cut:
    path, inputs = folder / "whole.onnx", model.inputs(model.rows)
    slices = folder / "slices"
    report = slice_model(path, slices, tensor=parallel.tensor, pipeline=parallel.pipeline)
    part = max(rank.weight_bytes for rank in report.ranks) / report.weight_bytes
    identical = _identical(folder, [slices / rank.file for rank in report.ranks], inputs)
    shutil.rmtree(slices)
    with Master(path, parallel.ranks, parallel=parallel) as master:

        def run() -> Arrays:
            return master.predict(inputs, shards=1)

        difference = _relative_difference(run(), session.run())
        times = in_turns({"ranks": run, "one": session.run}, effort)
        memory = _rank_memory()
    return Cut(
        model=model.name,
        cut=cut,
        part=part,
        most=WEIGHTS_SLACK / parallel.ranks if model.even else None,
        difference=difference,
        identical=identical,
        seconds=times["ranks"],
        over_session=times["ranks"].over(times["one"]),
        memory=memory,
    )


def _identical(folder: Path, slices: list[Path], inputs: Arrays) -> bool:
    """Whether ranks that each run their slice on the same inputs give the same bits."""
    given = folder / "inputs.npz"
    np.savez(given, **inputs)  # type: ignore[arg-type]
    with Ranks(len(slices)) as ranks:
        answers = ranks.ask_each(
            [
                {"do": "run", "model": str(one), "inputs": str(given), "threads": 1, "count": 1}
                for one in slices
            ]
        )
    return len({answer["digest"] for answer in answers}) == 1


# Throughput of a pipeline.


def measure_pipeline(folder: Path, effort: Effort, say: Say, *, quick: bool) -> Measured:
    """Requests a second of two stages, each with one core, against two replicas with one core each."""
    record: Record = {}
    rows: list[list[str]] = []
    options = EngineOptions(threads=1)
    for model in rank_models(quick):
        path = model.build(folder / "whole.onnx")
        request = model.inputs(model.rows)
        with ExitStack() as stack:
            pipeline = stack.enter_context(
                Master(path, 2, parallel=Parallel(pipeline=2), options=options)
            )
            replicas = stack.enter_context(Master(path, 2, options=options))
            masters = {"pipeline of 2 stages": pipeline, "2 replicas": replicas}
            ways = {
                name: partial(_throughput, master, request, effort.seconds)
                for name, master in masters.items()
            }
            for way in ways.values():
                way()
            rates = rates_in_turns(ways, effort.rounds)
        stages, whole = rates.values()
        ratio = Ratio(text="pipeline / replicas", series=stages.over(whole), bound=PIPELINE_TARGET)
        record[model.name] = report_rates(
            f"{model.name}, {IN_FLIGHT} requests of {model.rows} rows at a time",
            rates,
            [ratio],
            say,
        )
        cells = [spread(one, "{:.1f}/s".format) for one in (stages, whole)]
        rows.append([model.name, *cells, spread(ratio.series, "{:.3g}".format), ratio.verdict])
    header = "model | pipeline of 2 stages | 2 replicas | pipeline / replicas | "
    return Measured(record, markdown(header, rows))


def _throughput(master: Master, request: dict[str, NDArray[Any]], seconds: float) -> float:
    """Answers a second, with `IN_FLIGHT` requests under way."""
    waiting = deque(master.submit(request) for _ in range(IN_FLIGHT))
    begin, done = perf_counter(), 0
    while perf_counter() < begin + seconds:
        waiting.popleft().result()
        waiting.append(master.submit(request))
        done += 1
    rate = done / (perf_counter() - begin)
    while waiting:
        waiting.popleft().result()
    return rate
