"""The work of ``mcinfer run``: a file of any size through a pool, in the memory of a few requests.

::

    input file ── rows, in order ──► a request ──► Master.predict ──► rows ──► a folder beside the output,
                                     a request     (over all workers)          and its file at the end

A file is cut along axes that are known to be its batch: the user or the model says so and a request has shown
it, or the file's first rows run whole and in pieces before the rest (`Master.learn`). A file of one request,
and one whose batch nothing shows, run whole. It is counted in *units*: rows of a batch of any size, or pieces
of a fixed batch. Two requests are under way, so that workers do not wait for what is read or written.
"""

import errno
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from itertools import count
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

from numpy.typing import NDArray

from mcinfer import __version__, sharding
from mcinfer.cli.batch_files import InputFile, PartialResults, opened_input, stamp
from mcinfer.cli.output_files import output_place
from mcinfer.cli.progress import megabytes, showing_work
from mcinfer.errors import BuildError, InvalidInputError, McinferError, PredictError
from mcinfer.master import Master
from mcinfer.model_cache.onnx_files import external_files, open_regular, scan
from mcinfer.sharding import Axes, JoinError, SaidAxes, Shape, Split, first_split, rows_of
from mcinfer.specs import ModelSpec

_REQUEST_BYTES = 64 << 20
"""Of inputs and outputs of one request, where the user does not say how many rows it has."""

_WORKER_ROWS = 64
"""Of one request as well: what a row takes between the layers is not known."""

_UNDER_WAY = 2
_SAVE_SECONDS = 1.0
"""How much work is lost when the process is killed: to save more often would be to wait for the disk."""

_ADVICE = "--batch-axis and --output-axis say what to split and join"
_OTHER_ROWS = "mcinfer inspect --probe learns it from other rows"
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "mindspore", "mindspore-lite")

_Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done, as the options of ``mcinfer run`` say it.

    Attributes:
        model: Path of the model.
        source: An .npz file with its inputs by name, or an .npy file with the only one.
        target: The .npz file to write.
        master: What else `Master` takes: the engine, the devices.
        rows: Of one request; None: 64 for each worker, or as many as have 64 MiB of inputs and outputs.
        said: The axes that the user says.
        timeout: Seconds for one request; None is `Timeouts.predict`.
        restart: Whether to discard what an interrupted run has done.
        force: Whether to replace an output that exists.
    """

    model: Path
    source: Path
    target: Path
    master: Mapping[str, Any]
    rows: int | None
    said: SaidAxes
    timeout: float | None
    restart: bool
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """How a batch is cut into requests; all that a run needs to be resumed.

    Attributes:
        axes: By input, the axis that it is cut along, or None: each request takes it whole.
        sizes: By input that is cut, what one unit has along that axis.
        units: All of them.
        step: Units of one request; the last may have fewer.
        unit_rows: Rows of one unit, to count rows by.
        shards: Over how many workers a request is split.
        outputs: By output, in the model's order, the axis along which the requests' answers follow one
            another; None: it is the same in all, as it is where there is one request.
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
        """How many requests; one for a batch of no rows."""
        return max(1, -(-self.units // self.step))

    def rows(self, requests: int) -> int:
        """Rows of the first so many requests."""
        return min(requests * self.step, self.units) * self.unit_rows

    def inputs(self, arrays: _Arrays, number: int) -> dict[str, NDArray[Any]]:
        """The inputs of a request: views."""
        start, stop = number * self.step, min((number + 1) * self.step, self.units)
        return {
            name: _cut(arrays[name], axis, *(at * self.sizes.get(name, 1) for at in (start, stop)))
            for name, axis in self.axes.items()
        }


def _cut(array: NDArray[Any], axis: int | None, start: int, stop: int) -> NDArray[Any]:
    return array if axis is None else array[(*(slice(None),) * axis, slice(start, stop))]


def plan_requests(
    model: ModelSpec, arrays: _Arrays, workers: int, rows: int | None, split: Split | None
) -> Requests:
    """Cut a batch; the shapes alone count.

    Args:
        model: What the model takes and gives.
        arrays: By input.
        workers: Over how many a request is split: it has rows for each, where that is possible.
        rows: Of one request; see `Job`.
        split: How; with None, and with one that does not split, the whole batch is one request.

    Raises:
        InvalidInputError: The shapes do not fit the model, as `Master.predict` would say.
    """
    plan = sharding.plan(model, [arrays[spec.name].shape for spec in model.inputs], 1, split)
    axes = {spec.name: cut.axis for spec, cut in zip(model.inputs, plan.inputs, strict=True)}
    cut = {
        spec.name: spec.shape[axis] if spec.shape else None
        for spec in model.inputs
        if (axis := axes[spec.name]) is not None
    }
    fixed = {name: size for name, size in cut.items() if isinstance(size, int)}
    units = (len(plan.rows) if fixed else sum(plan.rows)) if cut else 1
    unit_rows = next(iter(fixed.values()), 1) if cut else max(1, sum(plan.rows))
    input_bytes = sum(arrays[name].nbytes for name in cut)
    outputs = [*zip(model.outputs, plan.outputs, strict=True)]
    unit_bytes = (
        input_bytes
        + sum(  # an output of unknown shape is taken to be as large as the inputs
            input_bytes if join.shape is None else prod(join.shape) * spec.dtype.itemsize
            for spec, join in outputs
            if join.axis is not None
        )
    )
    unit_bytes = max(1, unit_bytes // max(1, units))
    for_each = max(1, min(_REQUEST_BYTES // unit_bytes // workers, _WORKER_ROWS // unit_rows))
    step = max(1, min(rows // unit_rows if rows else for_each * workers, units))
    return Requests(
        axes=axes,
        sizes={name: fixed.get(name, 1) for name in cut},
        units=units,
        step=step,
        unit_rows=unit_rows,
        shards=workers,
        outputs={spec.name: join.axis if units > step else None for spec, join in outputs},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Finds out how a file is cut; its first rows run where that is not known."""

    master: Master
    model: ModelSpec
    arrays: _Arrays
    job: Job
    rows: int | None
    workers: int

    def plan(self) -> Requests:
        """The requests.

        Raises:
            InvalidInputError: The inputs do not fit the model; or rows are given for requests, and the file
                cannot be cut.
            McinferError: The first rows cannot be run.
        """
        model, split, said = self.model, self.master.split, self.job.said
        sharding.plan(model, [*self._shapes.values()], 1, split)  # raises if they do not fit
        known = split.checked and split.splits and self._fits(split)
        if sharding.is_fixed(model, split) or known:
            return self._requests(split)
        if self.rows is not None and split.known == "said" and split.reason:
            raise InvalidInputError(f"--batch: got {self.rows}, but {split.reason}")
        likely = [*sharding.candidates(model, self._shapes, first_split(model, said), said)]
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
        return rows_of(self._shapes, split.inputs) is not None and split.covers(self._shapes)

    def _along(self, axes: Axes) -> Split:
        """What a split along these axes would be, for all that matters to the size of its requests."""
        outputs = dict.fromkeys((spec.name for spec in self.model.outputs), 0)
        return Split(inputs=axes, outputs=outputs, known="unknown")

    def _learn(self, likely: list[Axes]) -> Split:
        """What the first rows show: a split to go on with, or one with the reason why there is none."""
        refuted: list[Split] = []
        with silent_about_splits():
            for axes in likely:
                split = self._show(axes)
                if split.splits or not split.checked:
                    return split
                refuted.append(split)
        return refuted[0]

    def _show(self, axes: Axes) -> Split:
        """What the first rows along these axes show; `Split.checked` says whether it is anything."""
        split, shown = self.master.split, 0
        for shown in self._example_rows(axes):
            example = {n: _cut(array, axes[n], 0, shown) for n, array in self.arrays.items()}
            try:
                split = self.master.learn(example, timeout=self.job.timeout)
            except (PredictError, InvalidInputError) as exc:  # other axes may be right
                reason = f"its first {shown} rows do not run by themselves ({exc})"
                return replace(self._along(axes), checked=True, reason=reason)
            if split.settled:
                if split.splits and not split.checked:
                    say("requests are split without a check: two runs of the same rows differ")
                if split.splits and not self._fits(split):
                    reason = "its first rows are cut along other axes than the file"
                    return replace(split, reason=reason)
                return split
        reason = (
            f"its first {shown} rows are equal, or do not show in all outputs how they are joined"
        )
        return replace(split, reason=f"{reason} ({_OTHER_ROWS})")

    def _example_rows(self, axes: Axes) -> Iterator[int]:
        """The rows of an example: some for each worker; where they show nothing, those of a request."""
        most = rows_of(self._shapes, axes) or 0
        step = self._requests(self._along(axes)).step
        # A size that other axes have as well would be one thing more that they might be.
        others = {
            size
            for name, shape in self._shapes.items()
            for axis, size in enumerate(shape)
            if axis != axes[name]
        }
        few = next(n for n in count(max(2, 2 * self.workers)) if n not in others)
        more = next(n for n in count(max(step, 2 * few)) if n not in others)
        yield min(few, most)
        if few < most:
            yield min(more, most)


# Running.


def run_batch(job: Job) -> list[str]:
    """Run what is in a file, and write another.

    Returns:
        For each output a line with its name, element type and shape.

    Raises:
        McinferError, OSError: It failed; says what is kept of it.
    """
    target = _output_place(job)  # before the work, not after it
    said, options = job.said, job.master
    with (
        opened_input(job.source, target.parent) as file,
        closing(
            Master(job.model, batch_axes=said.inputs, output_axes=said.outputs, **options)
        ) as master,
    ):
        files = _model_files(job.model)
        _refuse_sources(target, {"MODEL": files, "--input": [job.source]})
        devices = [worker.device for worker in master.statistics().workers]
        depends_on = {
            "model": _stamps(files),
            "input": file.stamp,
            # Without --devices a run is resumed in as many shards, also if there are fewer cores by then.
            "--devices": devices if options.get("devices") is not None else None,
            "--batch": job.rows,
            "--batch-axis": dict(said.inputs),
            "--output-axis": dict(said.outputs),
            "version": [__version__, *_versions()],
        }
        with closing(PartialResults(target, depends_on, restart=job.restart)) as results:
            master.start()
            model = ModelSpec(inputs=master.inputs, outputs=master.outputs)
            arrays = file.arrays(model)
            planner = _Planner(
                master=master,
                model=model,
                arrays=arrays,
                job=job,
                rows=job.rows,
                workers=len(devices),
            )
            requests = _requests(planner, results)
            results.begin(asdict(requests), requests.outputs)

            def changed() -> list[str]:
                now = {"model": _stamps(files), "input": _stamps([job.source])[0]}
                return [name for name, stamps in now.items() if stamps != depends_on[name]]

            with _keeping(results, requests, changed):
                # One request teaches the master; of several, what contradicts the split is an error.
                with silent_about_splits() if requests.count > 1 else nullcontext():
                    _answer(job, master, file, arrays, requests, results)
                restarted = any(worker.restarts for worker in master.statistics().workers)
                for name in changed():
                    if name == "input" or restarted:  # other workers still have what the model was
                        raise InvalidInputError(f"the {name} changed while it was used")
                return results.finish(model)


def _output_place(job: Job) -> Path:
    if job.target.suffix.lower() != ".npz":
        raise InvalidInputError(f"--output: got {job.target}, expected a name that ends in .npz")
    place = output_place("--output", job.target)
    if place.exists() and not job.force:
        raise InvalidInputError(f"--output: {job.target} exists; --force replaces it")
    return place


def _model_files(model: Path) -> list[Path]:
    """The model and its external data."""
    files = [model.absolute()]
    with suppress(BuildError, OSError):  # workers say what is wrong with it
        files += external_files(files[0], None, scan(files[0]).external)
    return files


def _refuse_sources(target: Path, sources: Mapping[str, list[Path]]) -> None:
    """Raise `InvalidInputError` if a file that is read would be replaced."""
    for name, files in sources.items():
        for file in files:
            with suppress(FileNotFoundError):
                if os.path.samefile(target, file):
                    raise InvalidInputError(
                        f"--output: {target} is the file of {name} ({file}), expected another one"
                    )


def _stamps(files: list[Path]) -> list[dict[str, Any]]:
    """What tells files from others; an empty dictionary for one that cannot be read."""
    stamps: list[dict[str, Any]] = []
    for file in files:
        try:
            with open_regular(file) as (descriptor, _):
                stamps.append(stamp(descriptor))
        except (OSError, BuildError):
            stamps.append({})
    return stamps


def _versions() -> list[str]:
    found = {f"{p.name} {p.version}" for p in metadata.distributions() if p.name in _RUNTIMES}
    return sorted(found)


def _requests(planner: _Planner, results: PartialResults) -> Requests:
    """How the file is cut, as before if a run is resumed.

    Raises:
        McinferError: The split is not known any more to be the one that it was, or the folder is damaged.
    """
    if results.plan is None:
        return planner.plan()
    try:
        before = Requests(**results.plan)
        left, rows = before.count - results.done, before.step * before.unit_rows
    except (TypeError, AttributeError, ArithmeticError) as exc:
        raise results.damage(str(exc)) from exc
    text = f"--output: {results.path} holds results of another split of the batch; --restart discards them"
    if left > 0:
        try:
            now = replace(planner, workers=before.shards, rows=rows).plan()
        except InvalidInputError as exc:  # it cannot be cut, as is known now
            raise McinferError(f"{text} ({exc})") from exc
        if now != before:
            raise McinferError(text)
    say(f"resuming at row {before.rows(results.done)} of {before.rows(before.count)}")
    return before


def _answer(
    job: Job,
    master: Master,
    file: InputFile,
    arrays: _Arrays,
    requests: Requests,
    results: PartialResults,
) -> None:
    """Have all requests answered that are not yet."""
    # Also while a worker is started again.
    predict = partial(master.predict, timeout=job.timeout, shards=requests.shards)
    answers: deque[Future[dict[str, NDArray[Any]]]] = deque()
    begun, before, due = monotonic(), requests.rows(results.done), 0.0
    total = max(1, requests.rows(requests.count))
    with (
        showing_work(sys.stderr, "running", total, "rows") as work,
        ThreadPoolExecutor(_UNDER_WAY) as threads,
    ):
        try:
            work.show(before)
            sent = results.done
            while results.done < requests.count:
                while sent < requests.count and len(answers) < _UNDER_WAY:
                    file.let_go()
                    answers.append(threads.submit(predict, requests.inputs(arrays, sent)))
                    sent += 1
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
def _keeping(
    results: PartialResults, requests: Requests, changed: Callable[[], list[str]]
) -> Iterator[None]:
    """Save what is done if the work goes no further, and say so; forget it if it is worth nothing."""
    try:
        yield
    except JoinError as exc:
        results.forget()
        raise JoinError(f"{exc}; --batch-axis INPUT=none for each input runs it whole") from exc
    except BaseException as exc:
        error = str(exc)
        kept = results.keep()
        if isinstance(exc, OSError):
            error = f"--output: {exc.filename or results.path}: {exc.strerror}"
            if exc.errno == errno.ENOSPC and results.done:
                share = requests.rows(results.done) / max(1, requests.rows(requests.count))
                error += f", about {megabytes(results.missing_bytes(share))} more are needed"
        text = ""
        if kept:
            how = "; run the same command again to resume"
            if names := changed():
                how = f", but the {' and the '.join(names)} changed: only --restart goes on, without them"
            text = f"{requests.rows(kept)} of {requests.rows(requests.count)} rows are kept{how}"
        if isinstance(exc, (McinferError, OSError)):
            raise McinferError("; ".join(filter(None, (error, text)))) from exc
        if text:
            say(text)
        raise


def say(text: str) -> None:
    """Write a line to standard error, at once."""
    print(f"mcinfer: {text}", file=sys.stderr, flush=True)


@contextmanager
def silent_about_splits() -> Iterator[None]:
    """Have the master warn of nothing that it finds out about how a batch is split."""

    def keep(record: logging.LogRecord) -> bool:
        return record.module != "splitting"

    log = logging.getLogger("mcinfer.master")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
