"""How a file becomes requests: it is cut only along axes that are known to be its batch.

::

    said, declared, or from sizes ──► the file's first rows, cut along it ──► Master.learn ──► a checked split
    a file of one request, and one whose batch nothing shows, run whole

`Master.predict` learns from the first request as well. Here the answers of several requests are joined, so
that the split has to be known before the first one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.large_batches.reading import StoredArray
from mcinfer.large_batches.requests import Requests, check_inputs, plan_requests
from mcinfer.large_batches.wording import say, silent_about_splits
from mcinfer.master import Master
from mcinfer.requests.request import Arrays
from mcinfer.sharding import (
    Axes,
    SaidAxes,
    Shape,
    Split,
    candidates,
    first_split,
    is_fixed,
    plan,
    rows_of,
)
from mcinfer.specs import ModelSpec

_ADVICE = "--batch-axis and --output-axis say what to split and join"
_OTHER_ROWS = "mcinfer inspect --probe learns it from other rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A file that is to run.

    Attributes:
        master: Started.
        model: What it takes and gives.
        arrays: The file's, by input.
        rows: Of one request, as the user says; None: as many as are good.
        said: The axes that the user says, as the master was given them.
        timeout: Seconds for one request, None is `Timeouts.predict`.
    """

    master: Master
    model: ModelSpec
    arrays: Mapping[str, StoredArray]
    rows: int | None
    said: SaidAxes
    timeout: float | None

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the inputs, in the model's order."""
        return {spec.name: self.arrays[spec.name].shape for spec in self.model.inputs}

    def requests(self, workers: int, split: Split | None) -> Requests:
        """The requests of a split; see `plan_requests`."""
        return plan_requests(self.model, self.arrays, workers, self.rows, split)


def plan_work(work: Work, workers: int) -> Requests:
    """Cut a file into requests; where the split is not known, its first rows run to show it.

    Args:
        work: What is to be done.
        workers: Over how many a request is split.

    Raises:
        InvalidInputError: The inputs do not fit the model; or rows are given for requests, and the file
            cannot be cut.
        McinferError: The first rows cannot be read or run.
    """
    model, split = work.model, work.master.split
    check_inputs(model, work.arrays)
    shapes = work.shapes
    plan(model, [*shapes.values()], 1, split)  # says what does not fit
    if is_fixed(model, split):
        return work.requests(workers, split)
    if split.checked and split.splits and _fits(split, shapes):
        return work.requests(workers, split)
    if work.rows is not None and split.known == "said" and split.reason:
        raise InvalidInputError(f"--batch: got {work.rows}, but {split.reason}")
    likely = [*candidates(model, shapes, first_split(model, work.said), work.said)]
    assumed = work.requests(workers, _along(model, likely[0]) if likely else None)
    if assumed.count == 1:  # the master learns from it
        return assumed
    if not split.checked or split.splits:
        split = _learn(work, workers, likely)
    if split.splits:
        return work.requests(workers, split)
    text = f"{split.reason}; {_ADVICE}"
    if work.rows is not None:
        raise InvalidInputError(f"--batch: got {work.rows}, but the file cannot be cut: {text}")
    say(f"the whole file runs as one request, on one worker: {text}")
    return work.requests(1, replace(_along(model, likely[0]), reason=text))


def _fits(split: Split, shapes: Mapping[str, Shape]) -> bool:
    """Whether what a request has shown counts for inputs of these shapes."""
    return rows_of(shapes, split.inputs) is not None and split.covers(shapes)


def _along(model: ModelSpec, axes: Axes) -> Split:
    """What a split along these axes would be, for all that matters to the size of its requests."""
    return Split(
        inputs=axes, outputs=dict.fromkeys((s.name for s in model.outputs), 0), known="unknown"
    )


def _learn(work: Work, workers: int, likely: Sequence[Axes]) -> Split:
    """What the file's first rows show: a split to go on with, or one with the reason why there is none."""
    refuted: list[Split] = []
    with silent_about_splits():
        for axes in likely:
            split = _show(work, workers, axes)
            if split.splits or not split.checked:
                return split
            refuted.append(split)
    return refuted[0]


def _show(work: Work, workers: int, axes: Axes) -> Split:
    """What the first rows along these axes show; `Split.checked` says whether it is anything."""
    split = work.master.split
    rows = 0
    for rows in _example_rows(work, workers, axes):
        example = _example(work, axes, rows)
        try:
            split = work.master.learn(example, timeout=work.timeout)
        except (PredictError, InvalidInputError) as exc:  # others may be right
            reason = f"its first {rows} rows do not run by themselves ({exc})"
            return replace(_along(work.model, axes), checked=True, reason=reason)
        if split.settled:
            if split.splits and not split.checked:
                say("requests are split without a check: two runs of the same rows differ")
            if split.splits and not _fits(split, work.shapes):
                return replace(
                    split, reason="its first rows are cut along other axes than the file"
                )
            return split
    reason = f"its first {rows} rows are equal, or do not show in all outputs how they are joined"
    return replace(split, reason=f"{reason} ({_OTHER_ROWS})")


def _example_rows(work: Work, workers: int, axes: Axes) -> Iterator[int]:
    """Of how many rows an example is: some for each worker; where they show nothing, those of a request."""
    shapes = work.shapes
    most = rows_of(shapes, axes) or 0
    step = work.requests(workers, _along(work.model, axes)).step
    # A size that other axes have as well would be one thing more that they might be.
    others = {
        size
        for name, shape in shapes.items()
        for axis, size in enumerate(shape)
        if axis != axes[name]
    }
    few = next(rows for rows in count(max(2, 2 * workers)) if rows not in others)
    more = next(rows for rows in count(max(step, 2 * few)) if rows not in others)
    yield min(few, most)
    if few < most:
        yield min(more, most)


def _example(work: Work, axes: Axes, rows: int) -> Arrays:
    """The first rows of the file."""
    example = {}
    for name, array in work.arrays.items():
        axis = axes[name]
        example[name] = array.whole() if axis is None else array.rows(axis)(0, rows)
    return example
