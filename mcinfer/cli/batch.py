"""The work of ``mcinfer run``: a file of any size through a pool, in the memory of a few requests.

::

    input file ── rows, in order ──► a request ──► Master.predict ──► rows ──► a file beside the output,
                                     a request     (over all workers)          which it becomes at the end

A file is cut along axes that the user or the model says and a request has shown; else the file's first rows
run before the rest, whole and in pieces (`Master.learn`). A file of one request, and one whose batch nothing
shows, run whole. A file is counted in *units*: rows of a batch of any size, or pieces of a fixed batch. One
request more is under way than all workers need, so that they do not wait while rows are read or written.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, prod
from time import monotonic
from typing import Any

from numpy.typing import NDArray

from mcinfer import sharding
from mcinfer.cli.batch_files import InputArray, InputFile, PartialResults
from mcinfer.cli.progress import megabytes, say, showing_work
from mcinfer.errors import InvalidInputError, McinferError, PredictError
from mcinfer.master import Master
from mcinfer.sharding import Axes, JoinError, SaidAxes, Shape, Split, first_split, rows_of
from mcinfer.specs import ModelSpec

_REQUEST_BYTES = 64 << 20
"""Inputs and outputs of a request at most, where the user does not say how many rows it has."""

_WORKER_ROWS = 64
"""Rows of a request for each worker at most: the memory of a row's activations is not known."""

_SAVE_SECONDS = 1.0
"""A killed process loses the work of this time at most; each save waits for the disk."""

_ADVICE = "--batch-axis and --output-axis say what to split and join"
_RESUME = "run the same command again to resume"

_Arrays = Mapping[str, InputArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How a batch is cut into requests; all that is needed to resume a run.

    Attributes:
        axes: By input, the axis that it is cut along, or None: each request takes it whole.
        sizes: By input that is cut, the size of one unit along that axis.
        units: How many units the file has.
        step: Units of one request; the last may have fewer.
        unit_rows: Rows of one unit, to count rows by.
        shards: Over how many workers a request is split.
        outputs: By output, in the model's order, the axis along which the answers follow one another; None:
            it is the same in all, as it is where there is one request.
    """

    axes: Axes
    sizes: Mapping[str, int]
    units: int
    step: int
    unit_rows: int
    shards: int
    outputs: Axes

    @property
    def count(self) -> int:
        return max(1, -(-self.units // self.step))

    def rows(self, requests: int) -> int:
        """Rows of the first so many requests."""
        return min(requests * self.step, self.units) * self.unit_rows

    def inputs(self, arrays: _Arrays, number: int) -> dict[str, NDArray[Any]]:
        """The inputs of a request: views, or converted."""
        units = range(number * self.step, (number + 1) * self.step + 1, self.step)
        return {
            name: _cut(arrays[name], axis, *(at * self.sizes.get(name, 1) for at in units))
            for name, axis in self.axes.items()
        }


def _cut(array: InputArray, axis: int | None, start: int, stop: int) -> NDArray[Any]:
    return array[...] if axis is None else array[(*(slice(None),) * axis, slice(start, stop))]


def plan_requests(
    model: ModelSpec, arrays: _Arrays, workers: int, rows: int | None, split: Split | None
) -> Requests:
    """Cut a batch; only the shapes of the arrays count.

    Args:
        model: The model's inputs and outputs.
        arrays: By input.
        workers: Over how many a request is split. It has rows for each, where that is possible.
        rows: Rows of a request; None: `_WORKER_ROWS` for each worker, or as many as fit `_REQUEST_BYTES`.
        split: None, or one that does not split: the whole batch is one request.
    """
    plan = sharding.cut_batch(model, [arrays[spec.name].shape for spec in model.inputs], 1, split)
    axes = {spec.name: axis for spec, axis in zip(model.inputs, plan.input_axes, strict=True)}
    cut = {
        spec.name: spec.shape[axis] if spec.shape else None
        for spec in model.inputs
        if (axis := axes[spec.name]) is not None
    }
    fixed = {name: size for name, size in cut.items() if isinstance(size, int)}
    units, unit_rows = (sum(plan.rows), 1) if cut else (1, max(1, sum(plan.rows)))
    if fixed:
        units, unit_rows = len(plan.rows), next(iter(fixed.values()))
    input_bytes = total_bytes = sum(arrays[name].nbytes for name in cut)
    joins = [*zip(model.outputs, plan.outputs, strict=True)]
    for spec, join in joins:
        if join.axis is not None:  # one of unknown shape is taken to be as large as the inputs
            known = join.shape is not None
            total_bytes += prod(join.shape or ()) * spec.dtype.itemsize if known else input_bytes
    unit_bytes = max(1, total_bytes // max(1, units))
    for_each = max(1, min(_REQUEST_BYTES // unit_bytes // workers, _WORKER_ROWS // unit_rows))
    step = max(1, min(rows // unit_rows if rows else for_each * workers, units))
    return Requests(
        axes=axes,
        sizes={name: fixed.get(name, 1) for name in cut},
        units=units,
        step=step,
        unit_rows=unit_rows,
        shards=workers,
        outputs={spec.name: join.axis if units > step else None for spec, join in joins},
    )


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds out how a file is cut; its first rows run where that is not known."""

    master: Master
    model: ModelSpec
    arrays: _Arrays
    said: SaidAxes
    rows: int | None
    workers: int
    timeout: float | None

    def plan(self) -> Requests:
        """The requests; an `InvalidInputError` if `rows` is given and the file cannot be cut."""
        model, split, shapes = self.model, self.master.split, self._shapes
        sharding.cut_batch(model, [*shapes.values()], 1, split)  # raises if they do not fit
        known = split.settled and split.splits and self._fits(split)
        if sharding.is_fixed(model, split) or known:
            return self._requests(split)
        likely = [*sharding.candidates(model, shapes, first_split(model, self.said), self.said)]
        if self.rows is None or split.known != "said" or not split.reason:
            assumed = self._requests(self._along(likely[0]) if likely else None)
            if assumed.count == 1:  # the master learns from it
                return assumed
            if not split.checked or split.splits:
                split = self._learn(likely)
            if split.splits:
                return self._requests(split)
        text = f"{split.reason}; {_ADVICE}"
        if self.rows is not None:
            raise InvalidInputError(f"--batch: got {self.rows}, but the file cannot be cut: {text}")
        say(f"the whole file runs as one request, on one worker: {text}")
        whole = replace(self._along(likely[0]), reason=text)
        return plan_requests(model, self.arrays, 1, None, whole)

    @property
    def _shapes(self) -> dict[str, Shape]:
        return {name: array.shape for name, array in self.arrays.items()}

    def _requests(self, split: Split | None) -> Requests:
        return plan_requests(self.model, self.arrays, self.workers, self.rows, split)

    def _fits(self, split: Split) -> bool:
        """Whether what a request has shown counts for this file."""
        return rows_of(self._shapes, split.inputs) is not None

    def _along(self, axes: Axes) -> Split:
        """A split along these axes, as far as the size of its requests depends on it."""
        outputs = dict.fromkeys((spec.name for spec in self.model.outputs), 0)
        return Split(inputs=axes, outputs=outputs, known="unknown")

    def _learn(self, likely: list[Axes]) -> Split:
        """What the first rows show: a split, or one with the reason why there is none."""
        refuted: list[Split] = []
        with silent_about_splits():
            for axes in likely:
                split = self._show(axes)
                if split.splits or not split.checked:
                    return split
                refuted.append(split)
        return refuted[0]

    def _show(self, axes: Axes) -> Split:
        """What the first rows along these axes show; `Split.checked` says whether they show anything."""
        most = rows_of(self._shapes, axes) or 0
        step = self._requests(self._along(axes)).step
        # A number that is also the size of another axis would leave open which of both is cut.
        others = {
            size
            for name, shape in self._shapes.items()
            for axis, size in enumerate(shape)
            if axis != axes[name]
        }
        # Some rows for each worker; where they show nothing, those of a request.
        for least in (2 * self.workers, max(step, 4 * self.workers)):
            rows = min(most, next(n for n in count(max(2, least)) if n not in others))
            example = {n: _cut(array, axes[n], 0, rows) for n, array in self.arrays.items()}
            try:
                split = self.master.learn(example, timeout=self.timeout)
            except (PredictError, InvalidInputError) as exc:  # other axes may be right
                reason = f"its first {rows} rows do not run by themselves ({exc})"
                return replace(self._along(axes), checked=True, reason=reason)
            if split.settled and split.splits and not self._fits(split):
                reason = "its first rows are cut along other axes than the file"
                return replace(split, reason=reason)
            if split.settled:
                if split.splits and not split.checked:
                    say("requests are split without a check: two runs of the same rows differ")
                return split
            if rows == most:
                break
            others.add(rows)  # a second size may show more
        return replace(
            split,
            reason=f"its first {rows} rows are equal, or do not show in all outputs how they are joined "
            "(mcinfer inspect --probe learns it from other rows)",
        )


def answer_all(
    master: Master,
    file: InputFile,
    arrays: _Arrays,
    requests: Requests,
    results: PartialResults,
    timeout: float | None,
) -> None:
    """Have all requests answered that are not yet."""

    def predict(number: int) -> dict[str, NDArray[Any]]:
        inputs = requests.inputs(arrays, number)
        # As many shards also while a worker is started again.
        return master.predict(inputs, timeout=timeout, shards=requests.shards)

    answers: deque[Future[dict[str, NDArray[Any]]]] = deque()
    # A run that is resumed has as many shards as before, and may have other workers.
    under_way = 1 + ceil(len(master.statistics().workers) / requests.shards)
    begun, before, due = monotonic(), requests.rows(results.done), 0.0
    total = max(1, requests.rows(requests.count))
    with (
        # One request teaches the master; of several, what contradicts the split is an error.
        silent_about_splits() if requests.count > 1 else nullcontext(),
        showing_work("running", total, "rows") as work,
        ThreadPoolExecutor(under_way) as threads,
    ):
        try:
            work.show(before)
            while results.done < requests.count:
                while len(answers) < min(under_way, requests.count - results.done):
                    file.let_go()
                    answers.append(threads.submit(predict, results.done + len(answers)))
                results.add(answers.popleft().result())
                done = requests.rows(results.done)
                if not due and (missing := results.missing_bytes(max(1, done) / total)):
                    say(f"--output: about {megabytes(missing)} more than are free will be needed")
                if results.done < requests.count and monotonic() >= due:
                    results.save()
                    due = monotonic() + _SAVE_SECONDS
                speed = (done - before) / max(monotonic() - begun, 1e-9)
                work.show(done, f"({speed:.1f} rows/s)")
        except BaseException:
            master.close()  # so that the threads end
            raise
    for name, axis in requests.outputs.items():
        if axis is None and requests.count > 1:
            how = f"it was the same in all {requests.count} requests, one is written"
            say(f"output {name!r} has no batch dimension: {how}")


@contextmanager
def keeping(results: PartialResults, requests: Requests) -> Iterator[None]:
    """If the work fails, save the answers so far and say how many; discard them if they do not join."""
    try:
        yield
    except JoinError as exc:
        results.forget()
        raise JoinError(f"{exc}; --batch-axis INPUT=none for each input runs it whole") from exc
    except BaseException as exc:
        error, text = str(exc), ""
        if isinstance(exc, OSError) and not isinstance(exc, McinferError):
            error = f"--output: {results.path}: {exc.strerror}"
        if kept := results.keep():
            total = requests.rows(requests.count)
            text = f"{requests.rows(kept)} of {total} rows are kept; {_RESUME}"
        if isinstance(exc, (McinferError, OSError)):
            raise McinferError("; ".join(filter(None, (error, text)))) from exc
        if text:
            say(text)
        raise


@contextmanager
def silent_about_splits() -> Iterator[None]:
    """Suppress the master's warnings of what it finds out about how a batch is split."""

    def keep(record: logging.LogRecord) -> bool:
        return record.module != "splitting"

    log = logging.getLogger("mcinfer.master")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
