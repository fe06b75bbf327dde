"""How the batch of a model is split, and how a request shows it.

::

    said by the user, declared by symbols, recorded in the cache ──► first hypothesis
    a request of two rows or more ──► whole, on one worker ───────► the caller's answer
                                 └──► the same rows in pieces ────► compared with it

The comparison shows along which axis each output joins, or that an output is the same from every worker. If
the rows depend on each other, the model runs whole. A settled split adds no cost to a request. A request
with equal rows, or whose outputs do not differ from row to row, decides nothing; NaN equals NaN here. The
comparison is evidence, not proof: a model that mixes its rows only for some values passes until these values
come, and so does one that mixes rows which are further apart than the request was long.

What is known belongs to what the model computes: to its content and options, and to the values of its
weights. It is looked at again with the first request that has four times as many rows, and with new weights
(`WeightVersion.rechecks`).

A `Splitter` has no thread. One caller learns at a time; other requests that could be compared run whole
meanwhile. What is known may be withdrawn, or belong to older weights, by the time that a comparison ends:
then its outcome is dropped.
"""

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mcinfer.errors import (
    InvalidInputError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    WorkerDiedError,
)
from mcinfer.requests.tensors import Arrays, difference, split_rows
from mcinfer.sharding import (
    MAX_RANK,
    Axes,
    SaidAxes,
    Shape,
    Split,
    candidates,
    first_split,
    has_single_rows,
    is_fixed,
    narrow_sizes,
    rows_of,
    split_evenly,
)
from mcinfer.specs import ModelSpec

_log = logging.getLogger("mcinfer.master")

Verify = Literal["first", "never"]

_MAX_TRIALS = 8
_MAX_CHANGES = 4  # how often requests of different shapes may show different axes
_MORE_ROWS = 4  # a split that so many times its rows may refute is checked again
_MAX_PAIRS = 64  # pairs of requests that may not be comparable before the search ends
_MAX_OFFERED_BYTES = 64 << 20  # of requests kept until they are compared as one; or two requests
_MAX_SHOWN = 4  # pieces whose shapes a message shows
_MAX_SHAPES = 256  # shapes in the cache of `teaches`

Batch = Sequence[NDArray[Any]]  # the inputs of a request, in the model's order

Runs = Callable[[Sequence[Batch]], "Sequence[Arrays | McinferError]"]
"""Runs each of these requests whole, on one worker; all at once."""


# Comparing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a comparison shows about one output.

    Attributes:
        kind: ``"axis"``, ``"same"``, ``"unclear"`` (this request does not show it), or ``"mixed"``: the
            pieces do not join to the whole.
        rank: How many dimensions the whole has.
        size: Its size along that axis for each row, if all pieces have the same; else 0.
        difference: The largest between whole and pieces, relative to the largest element of the whole.
        decides: Whether its values show it: finite ones that differ from row to row.
        joins: Whether it would join, but in another way than the user says.
        text: Why it does not join.
    """

    kind: Literal["axis", "same", "unclear", "mixed"]
    axis: int | None = None
    rank: int = 0
    size: int = 0
    difference: float = 0.0
    decides: bool = False
    joins: bool = False
    text: str = ""


def judge(whole: NDArray[Any], parts: Sequence[NDArray[Any]], rows: Sequence[int]) -> Joint:
    """How an output of the whole batch comes together from its parts, which are of so many rows each."""
    joined = [axis for axis in range(whole.ndim) if _adds_up(whole.shape, parts, axis)]
    same = all(part.shape == whole.shape for part in parts)
    if not joined and not same:
        shapes = ", ".join(str(list(part.shape)) for part in parts[:_MAX_SHOWN])
        more = ", …" if len(parts) > _MAX_SHOWN else ""
        text = f"is {list(whole.shape)} for the whole batch and {shapes}{more} in its pieces"
        return Joint(kind="mixed", text=text)
    if whole.size == 0 or any(part.size == 0 for part in parts):
        return Joint(kind="unclear", text="is empty")
    apart: list[tuple[int | None, bool, float]] = [
        (axis, *difference(np.concatenate(parts, axis), whole)) for axis in joined
    ]
    if same:
        fit, far = zip(*(difference(part, whole) for part in parts), strict=True)
        apart.append((None, all(fit), max(far)))
    # With parts that have elements, at most one of these fits: the sizes differ.
    axis, fits, least = max(apart, key=lambda item: (item[1], -item[2]))
    if not fits:
        text = (
            f"differs by {least:.2g} of its largest element between the whole batch and its pieces"
        )
        return Joint(kind="mixed", difference=least, text=text)
    if not _is_finite(whole).any():
        return Joint(kind="unclear", text="has no number")
    if axis is None:
        return Joint(kind="same", rank=whole.ndim, difference=least)
    size, rest = divmod(parts[0].shape[axis], rows[0])
    even = all(part.shape[axis] == size * n for part, n in zip(parts, rows, strict=True))
    size = size if even and not rest else 0
    decides = _rows_differ(whole, axis, max(size, 1))
    return Joint(
        kind="axis", axis=axis, rank=whole.ndim, size=size, difference=least, decides=decides
    )


def _is_finite(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite; of all that are no floats, each."""
    if array.dtype.kind in "biuOSUT":
        return np.ones(array.shape, np.bool_)
    if array.dtype.isbuiltin != 1:  # of ml_dtypes, not all of which know infinity
        array = array.astype(np.float32)
    finite: NDArray[np.bool_] = np.isfinite(array)
    return finite


def _rows_differ(array: NDArray[Any], axis: int, size: int) -> bool:
    """Whether a row, of that size along the axis, has finite elements that differ from the next row's."""
    along = np.moveaxis(array, axis, 0)
    here, there = along[:-size], along[size:]
    return bool(np.any((here != there) & _is_finite(here) & _is_finite(there)))


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays are alike, with NaN equal to NaN; of any types, also those of text."""
    if one.shape != other.shape:
        return False
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _adds_up(whole: Shape, parts: Sequence[NDArray[Any]], axis: int) -> bool:
    rest = _other_sizes(whole, axis)
    fits = all(part.ndim == len(whole) and _other_sizes(part.shape, axis) == rest for part in parts)
    return fits and sum(part.shape[axis] for part in parts) == whole[axis]


def _in_words(refuted: Mapping[str, Joint]) -> str:
    """Why a batch is not split: the output that differs most, and how many others do."""
    name, worst = max(refuted.items(), key=lambda item: item[1].difference)
    others = len(refuted) - 1
    if all(joint.joins for joint in refuted.values()):
        return f"output {name!r} {worst.text}"
    more = f", and so do{'es' * (others == 1)} {others} other{'s' * (others > 1)}" if others else ""
    return f"the rows of a batch depend on each other: output {name!r} {worst.text}{more}"


def cut_rows(
    arrays: Batch, axes: Sequence[int | None], rows: Sequence[int]
) -> list[list[NDArray[Any]]]:
    """The inputs of each piece: views, of so many rows each."""
    inputs = [split_rows(array, axis, rows) for array, axis in zip(arrays, axes, strict=True)]
    return [[*piece] for piece in zip(*inputs, strict=True)]


def _tells(parts: Sequence[NDArray[Any]], axis: int) -> bool:
    """Whether an input's pieces differ, so that it matters which of them a run gets."""
    first = parts[0]
    row = first[(slice(None),) * axis + (slice(0, 1),)]
    rest = _other_sizes(row.shape, axis)
    if any(_other_sizes(part.shape, axis) != rest for part in parts):
        return True
    if all(_equal(part, np.broadcast_to(row, part.shape)) for part in parts):
        return False
    return not all(_equal(part, first) for part in parts[1:])


def _rows_of(names: Sequence[str], arrays: Batch, axes: Axes) -> int:
    """The rows of a request; one if nothing of it is cut."""
    return rows_of({n: array.shape for n, array in zip(names, arrays, strict=True)}, axes) or 1


def _fit(ours: Batch, theirs: Batch, known: "Known") -> bool:
    """Whether a run may have the rows of two requests, as far as that is known."""
    axes = known.split.inputs.values() if known.settled else [None] * len(ours)
    return all(
        one.ndim == other.ndim
        and (axis is None or _other_sizes(one.shape, axis) == _other_sizes(other.shape, axis))
        for one, other, axis in zip(ours, theirs, axes, strict=True)
    )


def _other_sizes(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


# Learning.


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the split at one moment.

    Attributes:
        settled: Whether it is final.
        splits: Whether requests are split: it is settled, and `Split.splits`.
        open: Whether calls go through the learner: requests of few rows may show something, since it is not
            settled, or not for all sizes; or it was not said yet that requests run whole.
        most_rows: A request of more rows is to be compared before it is split.
        most_joined: If a joined run may have more rows, requests are to be offered (`Splitter.offer`).
        rechecks: `WeightVersion.rechecks` of the weights for which it holds.
        number: Another one for each, to keep plans apart.
    """

    split: Split
    settled: bool
    splits: bool
    open: bool
    most_rows: float
    most_joined: float
    rechecks: int
    number: int


_numbers = itertools.count(1)


class OutgrownError(PredictError):
    """A request has many more rows than the one from which the split was learned: compare it first."""


class _CannotTellError(Exception):
    """This request does not show it; says why."""


class Splitter:
    """How a model's batch is split, for one set of axes that the user says.

    Args:
        model: Its inputs and outputs.
        said: The user's axes.
        verify: ``"first"``: the first request that can show it is compared; ``"never"``: the user's axes and
            the model's symbols decide, and nothing is learned.
        whole: Why requests run whole unless the user says what to split; empty if nothing speaks against it.
        recorded: What was learned of this model before, as `as_record` made it.
        record: Stores what is learned; None deletes the record.

    Raises:
        InvalidInputError: The model has no such input, output or axis.
    """

    def __init__(
        self,
        model: ModelSpec,
        said: SaidAxes,
        *,
        verify: Verify = "first",
        whole: str = "",
        recorded: object = None,
        record: Callable[[dict[str, Any] | None], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._said = said
        self._verify = verify
        self._record = record
        self._names = tuple(spec.name for spec in model.inputs)
        self._first = first_split(model, said)
        self._whole = whole
        self._is_fixed = is_fixed(model, self._first)
        """Whether runs take one number of rows, of which nothing is learned."""
        if whole and not said.inputs and not self._is_fixed:
            self._first = replace(self._first, reason=whole)
        self._learning = threading.Lock()
        self._teaching: dict[tuple[int, tuple[Shape, ...]], bool] = {}
        self._warned = self._warned_open = self._is_withdrawn = False
        self._offered: tuple[int, list[Batch]] = 0, []
        """Copies of requests that may be joined, for one version of the weights."""
        self._trials = self._pairs = self._changes = self._unshown = 0
        split, settled = self._first, verify == "never" or self._has_nothing_to_learn
        if not settled and (found := of_record(recorded, model)) is not None:
            split, settled = found, True
        self.known = self._known(split, settled=settled)
        if whole and self.known.splits and said.inputs:
            _log.warning("requests are split as batch_axes says, without a check: %s", whole)

    def _known(self, split: Split, *, settled: bool, rechecks: int = 0, rows: int = 0) -> Known:
        """What is known from now on; requests of up to four times so many rows need no further check."""
        split = replace(split, settled=settled)
        splits = settled and split.splits
        shown = splits and split.checked and split.rows and self._verify != "never"
        most_rows = _MORE_ROWS * max(split.rows, rows) - 1 if shown else math.inf
        return Known(
            split=split,
            settled=settled,
            splits=splits,
            open=not splits or bool(split.narrow),
            most_rows=most_rows,
            most_joined=most_rows if settled else 1,
            rechecks=rechecks,
            number=next(_numbers),
        )

    def known_for(self, rechecks: int) -> Known:
        """What is known for weights after so many rechecks (`WeightVersion.rechecks`)."""
        known = self.known
        if known.rechecks == rechecks:
            return known
        if known.rechecks > rechecks:
            # A request from before an update runs whole, and shows nothing.
            return replace(known, settled=False, splits=False, open=False, rechecks=rechecks)
        if self._is_withdrawn or self._verify == "never" or self._has_nothing_to_learn:
            self.known = known = replace(known, rechecks=rechecks)
            return known
        self._trials = self._pairs = 0
        self._offered = 0, []
        self.known = known = self._known(self._first, settled=False, rechecks=rechecks)
        return known

    @property
    def busy(self) -> bool:
        return self._learning.locked()

    def teaches(self, known: Known, shapes: tuple[Shape, ...]) -> bool:
        """Whether a request of these shapes is to be compared; `known` is what was known when it came."""
        now = self.known
        if known.rechecks != now.rechecks:
            return False  # it is from before an update of the weights
        key = (now.number, shapes)
        found = self._teaching.get(key)
        if found is None:
            if len(self._teaching) >= _MAX_SHAPES:
                self._teaching.clear()
            by_name = self._by_name(shapes)
            more = (rows_of(by_name, now.split.inputs) or 0) > now.most_rows
            found = not now.settled or more or (now.splits and not now.split.covers(by_name))
            found = found and next(self._candidates(shapes), None) is not None
            self._teaching[key] = found
        return found

    def answer(
        self,
        known: Known,
        arrays: Batch,
        pieces: int,
        run: Runs,
        split_run: Callable[[Known], Arrays],
    ) -> Arrays:
        """Answer a request by a whole run, and learn from it.

        `known` is what was known when it came, `pieces` (two at least) into how many it would be cut;
        `split_run` runs it split.

        Raises:
            McinferError: The whole run failed, and so did a run that is split as it was, or as the user or
                the model says.
        """
        mine = False
        try:
            mine = self._learning.acquire(blocking=False)
            (whole,) = run([arrays])
            if isinstance(whole, McinferError):
                return self._without_whole(known, arrays, whole, split_run, mine=mine)
            now = self.known
            if mine and self.teaches(known, tuple(array.shape for array in arrays)):
                self._learn(_Trial(self._names, [arrays], [whole], run, pieces), now)
            return whole
        finally:
            if mine:
                self._learning.release()

    def relearn(
        self, rechecks: int, arrays: Batch, pieces: int, run: Runs, timeout: float
    ) -> Split:
        """Forget what was learned, and learn from this request, unless there is nothing to learn.

        Raises:
            McinferError: The whole run failed.
            PredictTimeoutError: Another thread learns for longer than the time-out.
        """
        if self._has_nothing_to_learn:
            return self.known.split
        mine = False
        try:
            mine = self._learning.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
            if not mine:
                raise PredictTimeoutError(f"others were learning the split for {timeout:g} s")
            (whole,) = answers_of(run, [arrays])
            settled = self._verify == "never"
            self.known = self._known(self._first, settled=settled, rechecks=rechecks)
            self._warned = self._warned_open = self._is_withdrawn = False
            self._trials = self._pairs = self._changes = self._unshown = 0
            self._learn(_Trial(self._names, [arrays], [whole], run, pieces), self.known)
            return self.known.split
        finally:
            if mine:
                self._learning.release()

    @property
    def _gives_up(self) -> bool:
        """Whether pairs of requests have shown nothing for too long, while nothing is settled."""
        return self._trials >= _MAX_TRIALS or self._pairs >= _MAX_PAIRS

    @property
    def _said_whole(self) -> bool:
        """Whether the user says that all inputs go whole."""
        return self._first.known == "said" and bool(self._first.reason)

    @property
    def _has_nothing_to_learn(self) -> bool:
        """Whether nothing can be compared, all go whole as the user says, or runs take one number of rows."""
        return bool(self._whole) or self._said_whole or self._is_fixed

    def offer(self, known: Known, version: int, arrays: Batch, most: int) -> list[Batch] | None:
        """Note a request that may be joined with others if that is right; copies its inputs.

        `known` is what was known when it came, `version` that of its weights; a joined run has at `most` so
        many rows. Returns some requests, this one among them, for `learn_from_offers`, once they may show it.
        """
        if known.most_joined == math.inf or known.rechecks != self.known.rechecks or self.busy:
            return None
        # Other threads may be here at once: a list that is there for all is never changed.
        before, offered = self._offered
        if before != version or not (offered and _fit(offered[0], arrays, known)):
            offered = []
        if not known.settled and offered and all(map(_equal, offered[0], arrays)):
            return None  # the one before serves as well, and is copied already
        offered = [*offered, [*map(np.array, arrays)]]
        rows = [1] * len(offered)
        if known.settled:
            rows = [_rows_of(self._names, batch, known.split.inputs) for batch in offered]
            sizes = [sum(array.nbytes for array in batch) for batch in offered]
            while sum(rows) > most or (len(rows) > 2 and sum(sizes) > _MAX_OFFERED_BYTES):
                del offered[0], rows[0], sizes[0]
        enough = len(offered) > 1 and sum(rows) > known.most_joined
        self._offered = version, [] if enough else offered
        return offered if enough else None

    def learn_from_offers(self, known: Known, requests: Sequence[Batch], run: Runs) -> None:
        """Compare requests, each by itself, with one run of all."""
        if not self._learning.acquire(blocking=False):
            return
        try:
            now = self.known
            if known.number != now.number:
                return
            self._pairs += 1
            trial = _Trial(self._names, requests, answers_of(run, requests), run)
            self._trials += 1
            self._learn(trial, now)
            self._trials -= not trial.ran
        except McinferError:
            pass  # they failed by themselves
        finally:
            now = self.known
            if not now.settled and self._gives_up:
                self.known = replace(now, most_joined=math.inf)  # with its number: plans hold
            self._learning.release()

    def withdraw(self, reason: str) -> None:
        """A split request has shown that the split is wrong: from now on requests run whole."""
        known = self.known
        if known.split.splits:
            self._is_withdrawn = True
            split = replace(known.split, reason=reason, checked=False)
            self.known = self._known(split, settled=True, rechecks=known.rechecks)
            self._record(None)  # it may be by the model's own weights, whatever the version is now
            self.warn(reason)

    def warn_if_whole(self) -> None:
        """Say once why a request that may have rows is not split."""
        known, split = self.known, self.known.split
        if not known.settled or known.splits:
            return
        if known.open:
            self.known = replace(known, open=False)  # with its number: plans hold
        if not self._warned and not self._is_fixed:
            self.warn(split.reason or f"output {split.unjoined[0]!r}: its axis is not known")

    # How.

    def warn(self, reason: str) -> None:
        """Say once why requests run whole, unless the user says so."""
        if self._warned:
            return
        self._warned = True
        if self._said_whole:
            return
        _log.warning(
            "requests run whole, on one worker: %s. batch_axes and output_axes say what to split and join",
            reason,
        )

    def _puts_off(self, trial: "_Trial", now: Known) -> bool:
        """Whether it was a check with more rows, which has shown nothing: what fewer have shown holds."""
        rows = sum(trial.rows(now.split.inputs))
        if not (now.splits and rows > now.most_rows):
            return False
        self._unshown += 1
        if self._unshown >= _MAX_TRIALS:
            self._settle(now.split, now, rows)
        return True

    def _leave_open(self, trial: "_Trial", reason: str) -> None:
        """Say once that a request has not shown how its batch is split."""
        if self._warned_open or (trial.joins and not self._gives_up):
            return
        self._warned_open = True
        text = (
            "this request does not show whether its rows can be split: %s; it ran whole, on one worker, "
            "and mcinfer compares the next ones"
        )
        if trial.joins:
            text = "requests are not joined to one run: none shows that it is right: %s"
        _log.warning(text, reason)

    def _without_whole(
        self,
        known: Known,
        arrays: Batch,
        failure: McinferError,
        split_run: Callable[[Known], Arrays],
        *,
        mine: bool,
    ) -> Arrays:
        """The whole run failed, but pieces may fit into the devices' memory, or into the time.

        If it is not `mine` to learn, another thread compares, which shows more.
        """
        now = self.known
        late = isinstance(failure, PredictTimeoutError)
        broke = isinstance(failure, (PredictError, WorkerDiedError))
        if now.rechecks != known.rechecks:
            raise failure
        if now.splits and (late or broke):
            # It was learned from fewer rows: the next check is for those that have many more than this one.
            rows = _rows_of(self._names, arrays, now.split.inputs)
            believed = self._known(now.split, settled=True, rechecks=now.rechecks, rows=rows)
            if mine and self.known is now:
                self.known = believed
        elif broke and self._first.splits and not now.split.checked:
            believed = self._known(self._first, settled=True, rechecks=now.rechecks)
        else:
            raise failure
        try:
            answer = split_run(believed)
        except McinferError as exc:
            raise (exc if late else failure) from None
        if mine and not now.splits and self.known is now:
            self._believe(f"a run of the whole batch failed, its pieces did not ({failure})", now)
        return answer

    def _settle(self, split: Split, now: Known, rows: int = 0) -> None:
        """From now on this is known, for the weights that what was known until `now` is for."""
        self._unshown = 0
        self.known = self._known(split, settled=True, rechecks=now.rechecks, rows=rows)

    def _believe(self, reason: str, now: Known) -> None:
        """Nothing can be compared: trust the user's axes or the model's symbols, or run whole."""
        if self._first.splits:
            self._settle(self._first, now)
            _log.warning("requests are split without a check: %s", reason)
        else:
            self._give_up(reason, now)

    def _give_up(self, reason: str, now: Known) -> None:
        """Requests run whole, since nothing can be compared."""
        self._settle(replace(self._first, reason=reason), now)
        self.warn(reason)

    def _by_name(self, shapes: Sequence[Shape]) -> dict[str, Shape]:
        return dict(zip(self._names, shapes, strict=True))

    def _candidates(self, shapes: Sequence[Shape], least_rows: int = 2) -> Iterator[Axes]:
        """The axes along which a request of these shapes may be cut."""
        by_name, split = self._by_name(shapes), self.known.split
        if split.checked and split.covers(by_name):  # it has more rows
            if (rows_of(by_name, split.inputs) or 0) >= least_rows:
                yield split.inputs
            return
        yield from candidates(self._model, by_name, self._first, self._said, least_rows)

    def _learn(self, trial: "_Trial", now: Known) -> None:
        """Learn from a comparison, if `now` is what is known until it ends."""
        try:
            split = self._decide(trial)
            random = not split.splits and trial.is_random()
        except _CannotTellError as exc:
            if self.known is now and not self._puts_off(trial, now):
                self._leave_open(trial, str(exc))
            return
        except McinferError:  # the check is lost, not the request
            if self.known is now:
                self._puts_off(trial, now)
            return
        if self.known is not now:
            return  # an update came meanwhile, or a request has shown that the split is wrong
        self._trials = self._pairs = 0
        if random:
            reason = "two runs of the same inputs differ"
            if self._first.known == "said":
                self._believe(f"{reason}, so there is nothing to compare with", now)
            else:
                self._give_up(reason, now)
            return
        before, split = now.split, self._agreed(now.split, split)
        self._settle(split, now)
        if not now.rechecks and (not before.checked or as_record(split) != as_record(before)):
            self._record(as_record(split))
        if not split.splits:
            self.warn(split.reason)

    def _agreed(self, before: Split, split: Split) -> Split:
        """What holds for this request, and for those that have shown another split, or the same one."""
        if not (before.checked and before.splits and split.splits):
            return split
        if before.inputs == split.inputs and before.outputs == split.outputs:
            sizes = {(name, axis): size for name, axis, size in before.narrow}
            both = [place for place in split.narrow if place[:2] in sizes]
            return replace(
                split,
                rows=max(split.rows, before.rows),
                difference=max(split.difference, before.difference),
                narrow=tuple((n, axis, max(size, sizes[n, axis])) for n, axis, size in both),
            )
        self._changes += 1
        if self._changes <= _MAX_CHANGES:
            return split
        reason = "requests of different shapes show different axes"
        return replace(split, inputs=dict.fromkeys(self._names), reason=reason, narrow=())

    def _decide(self, trial: "_Trial") -> Split:
        """What a request shows.

        Raises:
            _CannotTellError: It shows nothing.
            McinferError: It could not be run.
        """
        shapes = self._by_name(trial.shapes)
        refuted: dict[str, Joint] = {}
        most = 0
        unclear: tuple[Axes, _CannotTellError] | None = None
        for axes in self._candidates(trial.shapes, trial.least_rows):
            # Where the likeliest shows nothing, one that cuts more may; any other is only less likely.
            cut = {} if unclear is None else unclear[0]
            if any(axis is not None and axes[name] != axis for name, axis in cut.items()):
                continue
            most = max(most, sum(trial.rows(axes)))
            try:
                joints = self._try(trial, axes)
            except _CannotTellError as exc:
                if not refuted and unclear is None:
                    unclear = axes, exc
                continue  # where the likeliest is wrong, this one may never show
            mixed = {name: joint for name, joint in joints.items() if joint.kind == "mixed"}
            if not mixed:
                outputs: dict[str, int | str | None] = {n: j.axis for n, j in joints.items()}
                said = axes == self._first.inputs and outputs == self._first.outputs
                return Split(
                    inputs=dict(axes),
                    outputs=outputs,
                    known=self._first.known if said else "learned",
                    checked=True,
                    rows=sum(trial.rows(axes)),
                    difference=max((joint.difference for joint in joints.values()), default=0.0),
                    sizes={name: joint.size for name, joint in joints.items() if joint.size},
                    ranks=self._ranks(trial.shapes, joints),
                    narrow=narrow_sizes(self._model, shapes, axes),
                )
            refuted = refuted or mixed
        if unclear is not None:
            raise unclear[1]
        if not refuted:
            raise _CannotTellError("it has no two rows")
        is_guess = self._first.known == "unknown" and not self.known.splits
        if is_guess and has_single_rows(self._model, shapes):
            self._teaching[self.known.number, tuple(trial.shapes)] = False
            raise _CannotTellError("an input of a single row may be the batch")
        return Split(
            inputs=dict.fromkeys(self._names),
            outputs={
                **{spec.name: "other outputs cannot" for spec in self._model.outputs},
                **{name: joint.text for name, joint in refuted.items()},
            },
            known="learned",
            checked=True,
            rows=most,
            difference=max(joint.difference for joint in refuted.values()),
            reason=_in_words(refuted),
        )

    def _ranks(self, shapes: Sequence[Shape], joints: Mapping[str, Joint]) -> dict[str, int]:
        """The dimensions that outputs will have; none if inputs of any rank may change them."""
        inputs = zip(self._model.inputs, shapes, strict=True)
        if any(len(shape) != len(spec.shape) for spec, shape in inputs):
            return {}
        return {name: joint.rank for name, joint in joints.items()}

    def _try(self, trial: "_Trial", axes: Axes) -> dict[str, Joint]:
        """Compare the pieces of one hypothesis with the whole.

        Raises:
            _CannotTellError: This request does not show whether it is right.
            McinferError: It could not be run.
        """
        parts = [*zip(*trial.parts(axes), strict=True)]
        cut = [(i, n, axes[n]) for i, n in enumerate(self._names) if axes[n] is not None]
        alike = [name for i, name, axis in cut if not _tells(parts[i], axis or 0)]
        if len(alike) == len(cut):
            raise _CannotTellError("its rows are equal")
        joints = self._compare(trial, axes)
        if any(joint.kind == "mixed" for joint in joints.values()):
            return joints
        for name in self._unsure(axes, alike):
            # Its pieces are equal, so that it may be right to cut it, or to send it whole.
            other = self._compare(trial, {**axes, name: None})
            if all(joint.kind != "mixed" for joint in other.values()):
                raise _CannotTellError(f"the rows of input {name!r} are equal")
        for name, joint in joints.items():
            if joint.kind == "unclear":
                raise _CannotTellError(f"output {name!r} {joint.text}")
        if all(joint.kind == "same" for joint in joints.values()):
            text = "is the same for the whole batch and for each piece"
            return {name: Joint(kind="mixed", text=text) for name in joints}
        dull = [n for n, joint in joints.items() if joint.kind == "axis" and not joint.decides]
        if any(joint.decides for joint in joints.values()):
            # Another output shows that it is right; how these join, the user or the model's symbols may say.
            dull = [n for n in dull if joints[n].axis != self._first.outputs[n]]
        if dull:
            raise _CannotTellError(f"the rows of output {dull[0]!r} are equal")
        return joints

    def _unsure(self, axes: Axes, alike: Sequence[str]) -> list[str]:
        """The inputs with equal pieces for which no other evidence shows that they belong to the batch."""
        sizes = {
            spec.name: spec.shape[axis]
            for spec in self._model.inputs
            if (axis := axes[spec.name]) is not None and spec.shape
        }
        shown = {size for name, size in sizes.items() if name not in alike} - {None}
        return [n for n in alike if n not in self._said.inputs and sizes.get(n) not in shown]

    def _compare(self, trial: "_Trial", axes: Axes) -> dict[str, Joint]:
        try:
            rows = trial.rows(axes)
            whole, answers = trial.run(axes)
        except (PredictError, InvalidInputError) as exc:
            if trial.joins and self.known.splits:
                # Fewer rows are right, and such a run is taken apart where it fails.
                raise _CannotTellError(f"they do not run as one ({exc})") from exc
            text = f"cannot be had from pieces and from the whole batch alike ({exc})"
            return {spec.name: Joint(kind="mixed", text=text) for spec in self._model.outputs}
        joints = {
            name: judge(output, [answer[name] for answer in answers], rows)
            for name, output in whole.items()
        }
        for name, said in self._said.outputs.items():
            joint = joints[name]
            if joint.kind in ("axis", "same") and joint.axis != said:
                is_same = joint.axis is None
                how = (
                    "is the same from every piece" if is_same else f"joins along axis {joint.axis}"
                )
                text = f"{how}, output_axes says {said}"
                joints[name] = Joint(kind="mixed", joins=True, text=text)
            elif joint.kind == "unclear":
                kind: Literal["axis", "same"] = "same" if said is None else "axis"
                joints[name] = Joint(kind=kind, axis=said, rank=whole[name].ndim)
        return joints


# What is compared.


class _Trial:
    """One batch, whole and in pieces: one of both has run, the other is to be run.

    Args:
        names: Of the model's inputs.
        requests: Those that have run: the whole batch, or its pieces, each a request by itself.
        answers: Theirs.
        run: Runs requests.
        pieces: In how many to cut the whole; 0 where the requests are to run as one.

    Attributes:
        joins: Whether requests are to run as one.
        ran: Whether they did.
        shapes: Shapes of the inputs of a request.
        least_rows: Least rows of these inputs.
    """

    def __init__(
        self,
        names: Sequence[str],
        requests: Sequence[Batch],
        answers: Sequence[Arrays],
        run: Runs,
        pieces: int = 0,
    ) -> None:
        self.joins, self.ran, self.least_rows = not pieces, False, 2 if pieces else 1
        self.shapes = tuple(array.shape for array in requests[0])
        self._names, self._requests, self._answers = names, requests, answers
        self._run, self._pieces = run, pieces

    def rows(self, axes: Axes) -> tuple[int, ...]:
        rows = tuple(_rows_of(self._names, request, axes) for request in self._requests)
        return rows if self.joins else split_evenly(rows[0], self._pieces)

    def parts(self, axes: Axes) -> Sequence[Batch]:
        if self.joins:
            return self._requests
        return cut_rows(self._requests[0], [axes[name] for name in self._names], self.rows(axes))

    def run(self, axes: Axes) -> tuple[Arrays, Sequence[Arrays]]:
        """The answers to the whole and to its pieces."""
        if not self.joins:
            return self._answers[0], answers_of(self._run, self.parts(axes))
        whole = []
        for i, name in enumerate(self._names):
            parts, axis = [request[i] for request in self._requests], axes[name]
            if axis is None:
                if not all(_equal(part, parts[0]) for part in parts[1:]):
                    raise _CannotTellError(f"input {name!r} differs between two requests")
                whole.append(parts[0])
                continue
            try:
                whole.append(np.concatenate(parts, axis))
            except ValueError:
                raise _CannotTellError(f"input {name!r} has other sizes in two requests") from None
        self.ran = True
        return answers_of(self._run, [whole])[0], self._answers

    def is_random(self) -> bool:
        """Whether two runs of the same inputs differ."""
        (other,) = answers_of(self._run, self._requests[:1])
        return any(
            other[name].shape != output.shape or not difference(other[name], output)[0]
            for name, output in self._answers[0].items()
        )


def answers_of(run: Runs, requests: Sequence[Batch]) -> list[Arrays]:
    """The answers to requests; raises the first failure."""
    answers = []
    for outcome in run(requests):
        if isinstance(outcome, McinferError):
            raise outcome
        answers.append(outcome)
    return answers


# Records.


def _integers(values: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(value) for name, value in values.items()}


def _places(places: Sequence[Any]) -> tuple[tuple[str, int, int], ...]:
    return tuple((str(name), int(axis), int(size)) for name, axis, size in places)


_RECORDED: Mapping[str, Callable[[Any], Any]] = {
    "inputs": dict,
    "outputs": dict,
    "rows": int,
    "difference": float,
    "reason": str,
    "sizes": _integers,
    "narrow": _places,
    "ranks": _integers,
}
"""What the cache keeps of a split, and how it is read."""


def as_record(split: Split) -> dict[str, Any]:
    """What the cache keeps of a split, as JSON."""
    return {name: getattr(split, name) for name in _RECORDED}


def of_record(content: Any, model: ModelSpec) -> Split | None:
    """The split that `as_record` wrote; None if it does not fit the model."""
    try:
        read = {name: kind(content[name]) for name, kind in _RECORDED.items()}
        split = Split(**read, known="recorded", checked=True)
        SaidAxes(inputs=split.inputs).check(model)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        return None
    sides = ((split.inputs, model.inputs), (split.outputs, model.outputs))
    fits = (
        all(
            axis is None or isinstance(axis, str) or (type(axis) is int and axis >= 0)
            for axis in split.outputs.values()
        )
        and all(size >= 1 for size in split.sizes.values())
        and all(0 <= rank <= MAX_RANK for rank in split.ranks.values())
        and all(name in split.inputs and axis >= 0 for name, axis, _ in split.narrow)
        and all([*axes] == [spec.name for spec in specs] for axes, specs in sides)
    )
    return split if fits and (split.splits or split.reason) else None
