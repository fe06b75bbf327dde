"""How the batch of a model is split, and how one look at a request shows it.

::

    said by the user, recorded in the cache ──► known at the start
    else the first request ──► whole, on one worker ─────────► the caller's answer
                          └──► the same rows in uneven pieces ─► compared with it

The comparison shows along which axis each output joins, or that an output is the same from every worker. If
the rows depend on each other, the model runs whole. Rows that show nothing (a single one, equal ones) are
replaced by four that are made out of them. After the look nothing is learned: a piece or a join that fails is
answered by a whole run, and ends the split for this master. The comparison is evidence, not proof: a model
that mixes its rows only for some values passes until these values come.

A `Splitter` has no thread. One caller looks at a time; other requests run whole meanwhile. What is known may
be withdrawn, or belong to older weights, by the time that a look ends: then its outcome is dropped.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    PredictTimeoutError,
    WorkerDiedError,
)
from mcinfer.requests.comparing import (
    MADE_ROWS,
    Batch,
    Joint,
    cut_rows,
    in_words,
    judge,
    made_rows,
    tells,
)
from mcinfer.requests.tensors import Arrays, difference
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
    is_free,
    is_guess,
    rows_of,
    split_unevenly,
)
from mcinfer.specs import ModelSpec

_log = logging.getLogger("mcinfer.master")

Verify = Literal["first", "never"]

_LOOKS = 3
"""Requests that may show the split; if none does, all run whole."""

Runs = Callable[[Sequence[Batch]], "Sequence[Arrays | McinferError]"]
"""Runs each of these requests whole, on one worker; all at once."""


# Looking.


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the split at one moment.

    Attributes:
        settled: Whether it is final.
        splits: Whether requests are split: it is settled, and `Split.splits`.
        rescues: Whether a split request that fails may be answered by a whole run.
        open: Whether calls go through the learner: it is not settled, or it was not said yet that requests
            run whole.
        looks: Requests that may still show it.
        guess: What a request has shown that a second one, of another number of rows, is to confirm.
        updated: Whether it holds for replaced weights.
        number: Another one for each, to keep plans apart.
    """

    split: Split
    settled: bool
    splits: bool
    rescues: bool
    open: bool
    looks: int
    guess: Split | None
    updated: bool
    number: int


_numbers = itertools.count(1)


class _CannotTellError(Exception):
    """A request does not show it; says why."""


class Splitter:
    """How a model's batch is split, for one set of axes that the user says.

    Args:
        model: Its inputs and outputs.
        said: The user's axes.
        verify: ``"first"``: one look shows what the user does not say; ``"never"``: the user's axes and the
            model's symbols decide, and nothing is learned.
        whole: Why requests run whole unless the user says what to split; empty if nothing speaks against it.
        ragged: A node whose result's size depends on data: rows of outputs are not counted then.
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
        ragged: str = "",
        recorded: object = None,
        record: Callable[[dict[str, Any] | None], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._said = said
        self._ragged = ragged
        self._record = record
        self._names = tuple(spec.name for spec in model.inputs)
        self._first = first = first_split(model, said)
        self._is_fixed = is_fixed(model, first)
        """Whether runs take one number of rows, of which nothing is learned."""
        if whole and not said.inputs and not self._is_fixed:
            self._first = replace(first, reason=whole)
        self._is_said_whole = first.known == "said" and bool(first.reason)
        is_said = set(said.inputs) == set(self._names) and not first.unjoined
        self._is_known = bool(whole) or self._is_fixed or self._is_said_whole or is_said
        """Whether there is nothing to look for."""
        self._is_never = verify == "never"
        self._looking = threading.Lock()
        self._is_withdrawn = self._warned = False
        split, settled = self._first, self._is_never or self._is_known
        if not settled and (found := of_record(recorded, model)) is not None:
            split, settled = found, True
        self.known = self._new(split, settled=settled)
        if whole and self.known.splits and said.inputs:
            _log.warning("requests are split as batch_axes says, without a check: %s", whole)

    def _new(self, split: Split, *, settled: bool, updated: bool = False) -> Known:
        split = replace(split, settled=settled)
        splits = settled and split.splits
        return Known(
            split=split,
            settled=settled,
            splits=splits,
            rescues=splits and not self._is_fixed,
            open=not splits,
            looks=_LOOKS,
            guess=None,
            updated=updated,
            number=next(_numbers),
        )

    def known_for(self, updated: bool) -> Known:
        """What is known for the model's own weights, or for replaced ones."""
        known = self.known
        if known.updated and not updated:
            # A request from before the first update runs whole, and shows nothing.
            return replace(known, settled=False, splits=False, open=False, updated=False)
        if updated and not known.updated:
            if self._is_withdrawn or self._is_never or self._is_known:
                self.known = known = replace(known, updated=True)
            else:
                self.known = known = self._new(self._first, settled=False, updated=True)
        return known

    @property
    def busy(self) -> bool:
        return self._looking.locked()

    def begin(self, known: Known) -> bool:
        """Claim the look, for a request that came when this was known; True is to be followed by `look`."""
        now = self.known
        if now.settled or now.updated != known.updated:
            return False
        return self._looking.acquire(blocking=False)

    def look(
        self, arrays: Batch, run: Runs, split_run: Callable[[Known], Arrays] | None = None
    ) -> Arrays:
        """Answer a request by a whole run, and look how its batch splits; after `begin`.

        Raises:
            McinferError: The whole run failed, and so did `split_run`, which runs it as the user or the
                model's symbols say.
        """
        now = self.known
        try:
            (whole,) = run([arrays])
            if isinstance(whole, McinferError):
                return self._without_whole(whole, now, split_run)
            self._learn(arrays, whole, run, now)
            return whole
        finally:
            self._looking.release()

    def relearn(self, updated: bool, arrays: Batch, run: Runs, timeout: float) -> Split:
        """Forget what was learned, and look at this request, unless there is nothing to look for.

        Raises:
            McinferError: The whole run failed.
            PredictTimeoutError: Another thread looks for longer than the time-out.
        """
        if self._is_known:
            return self.known.split
        mine = False
        try:
            mine = self._looking.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
            if not mine:
                raise PredictTimeoutError(f"others were learning the split for {timeout:g} s")
            (whole,) = answers_of(run, [arrays])
            before = self.known.split
            guess = before if before.checked and before.splits else self.known.guess
            fresh = self._new(self._first, settled=self._is_never, updated=updated)
            # One more than others have: what it does not show costs nothing.
            self.known = now = replace(fresh, guess=guess, looks=_LOOKS + 1)
            self._warned = self._is_withdrawn = False
            self._learn(arrays, whole, run, now, anew=True)
            return self.known.split
        finally:
            if mine:
                self._looking.release()

    def withdraw(self, reason: str) -> None:
        """A split request has shown that the split is wrong: from now on requests run whole."""
        known = self.known
        if known.split.splits:
            self._is_withdrawn = True
            split = replace(known.split, reason=reason, checked=False)
            self.known = self._new(split, settled=True, updated=known.updated)
            self._record(None)  # it may be by the model's own weights, whatever the version is now
            self.warn_if_whole()

    def warn_if_whole(self) -> None:
        """Say once why a request that may have rows is not split."""
        known, split = self.known, self.known.split
        if not known.settled or known.splits:
            return
        if known.open:
            self.known = replace(known, open=False)  # with its number: plans hold
        if not (self._is_fixed or self._is_said_whole):
            self.warn(split.reason or f"output {split.unjoined[0]!r}: its axis is not known")

    def warn(self, reason: str) -> None:
        """Say once why requests run whole."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "requests run whole, on one worker: %s. batch_axes and output_axes say what to split and "
                "join, Master.learn(example) shows it",
                reason,
            )

    def _learn(
        self, arrays: Batch, whole: Arrays, run: Runs, now: Known, *, anew: bool = False
    ) -> None:
        """Learn from a request and its answer, if `now` is what is known until the look ends.

        With `anew`, what an earlier request has shown may confirm this one, and refutes nothing.
        """
        reason, split, sure = "", now.split, True
        try:
            split, sure = self._show(arrays, whole, run)
        except _CannotTellError as exc:
            reason = str(exc)
        except ClosedError:  # its caller has cancelled it
            return
        except McinferError as exc:  # the look is lost, not the request
            reason = f"its pieces were not answered ({exc})"
        if self.known is not now:
            return  # an update came meanwhile
        guess = now.guess
        if reason:
            self._leave_open(reason, now)
            return
        agrees = guess is not None and guess.inputs == split.inputs
        if guess is not None and not (agrees or anew):
            why = split.reason or "two requests show different axes"
            split = replace(split, inputs=dict.fromkeys(self._names), reason=why)
        confirmed = guess is not None and agrees and guess.rows != split.rows
        sure = sure and not is_guess(self._model, split.inputs, self._said)
        if split.splits and not (confirmed or sure):
            reason = "these rows may join by chance: a batch of another size shows it"
            self._leave_open(reason, replace(now, guess=split))
            return
        self.known = self._new(split, settled=True, updated=now.updated)
        self._warned = False  # what is decided is said all the same
        if not now.updated:
            self._record(as_record(split))
        self.warn_if_whole()

    def _leave_open(self, reason: str, now: Known) -> None:
        """A request shows nothing: others may, or the user's word counts, or all run whole from now on."""
        left = now.looks - 1
        if now.settled:
            return  # the symbols decide (`verify`)
        if self._said.inputs and self._first.splits:
            self._believe(reason, now)
        elif left:
            self.known = replace(now, looks=left)
            self.warn(reason)
        else:
            split = replace(self._first, reason=reason)
            self.known = self._new(split, settled=True, updated=now.updated)
            self.warn_if_whole()

    def _without_whole(
        self, failure: McinferError, now: Known, split_run: Callable[[Known], Arrays] | None
    ) -> Arrays:
        """The whole run failed, but pieces may fit into the devices' memory."""
        broke = isinstance(failure, (PredictError, WorkerDiedError))
        if split_run is None or not (broke and self._first.splits):
            raise failure
        try:
            answer = split_run(self._new(self._first, settled=True, updated=now.updated))
        except McinferError:
            raise failure from None
        if self.known is now:
            self._believe(f"a run of the whole batch failed, its pieces did not ({failure})", now)
        return answer

    def _believe(self, reason: str, now: Known) -> None:
        """Nothing can be compared: trust the user's axes or the model's symbols."""
        self.known = self._new(self._first, settled=True, updated=now.updated)
        _log.warning("requests are split without a check: %s", reason)

    # What a request shows.

    def _show(self, arrays: Batch, whole: Arrays, run: Runs) -> tuple[Split, bool]:
        """How a batch splits, by its own rows, or by rows made out of them; and whether that is sure.

        Raises:
            _CannotTellError: Neither show anything.
            McinferError: They could not be run.
        """
        sure = True
        try:
            split = self._decide(arrays, whole, run)
        except _CannotTellError as exc:
            try:
                split = self._decide(arrays, None, run)
            except _CannotTellError as made:
                raise _CannotTellError(f"{exc}; of rows made out of it: {made}") from None
        else:
            if split.splits and self._may_be_chance(arrays, split):
                try:
                    joints = self._try(arrays, None, split.inputs, MADE_ROWS, run)
                    if refuted := _mixed(joints):
                        split = self._refuted(refuted, MADE_ROWS)
                except _CannotTellError:
                    sure = False
        if not split.splits and self._first.known == "said":
            (again,) = answers_of(run, [arrays])
            pairs = [(again[name], one) for name, one in whole.items()]
            if not all(a.shape == b.shape and difference(a, b)[0] for a, b in pairs):
                raise _CannotTellError("two runs of the same inputs differ")
        return split, sure

    def _may_be_chance(self, arrays: Batch, split: Split) -> bool:
        """Whether these values alone may join: where an input goes whole, or sizes vary."""
        pairs = zip(self._model.inputs, arrays, strict=True)
        return bool(self._ragged) or any(
            is_free(spec, axis) and size > 1
            for spec, array in pairs
            if split.inputs[spec.name] is None and spec.name not in self._said.inputs
            for axis, size in enumerate(array.shape)
        )

    def _decide(self, arrays: Batch, whole: Arrays | None, run: Runs) -> Split:
        """What rows show: those of a request, with its answer, or, without one, rows made out of them."""
        shapes = {n: array.shape for n, array in zip(self._names, arrays, strict=True)}
        refuted: dict[str, Joint] = {}
        most = 0
        unclear: tuple[Axes, _CannotTellError] | None = None
        least = 1 if whole is None else 2
        for axes in candidates(self._model, shapes, self._first, self._said, least):
            # Where the likeliest shows nothing, one that cuts more may; any other is only less likely.
            cut = {} if unclear is None else unclear[0]
            if any(axis is not None and axes[name] != axis for name, axis in cut.items()):
                continue
            count = MADE_ROWS if whole is None else rows_of(shapes, axes) or 0
            try:
                joints = self._try(arrays, whole, axes, count, run)
            except _CannotTellError as exc:
                if not refuted and unclear is None:
                    unclear = axes, exc
                continue  # where the likeliest is wrong, this one may never show
            mixed = _mixed(joints)
            if not mixed:
                return self._shown(shapes, axes, joints, count)
            most, refuted = max(most, count), refuted or mixed
        if unclear is not None:
            raise unclear[1]
        if not refuted:
            raise _CannotTellError("it has no two rows")
        if (
            whole is not None
            and self._first.known == "unknown"
            and has_single_rows(self._model, shapes)
        ):
            raise _CannotTellError("an input of a single row may be the batch")
        return self._refuted(refuted, most)

    def _refuted(self, refuted: Mapping[str, Joint], rows: int) -> Split:
        return Split(
            inputs=dict.fromkeys(self._names),
            outputs={
                **{spec.name: "other outputs cannot" for spec in self._model.outputs},
                **{name: joint.text for name, joint in refuted.items()},
            },
            known="learned",
            checked=True,
            rows=rows,
            difference=max(joint.difference for joint in refuted.values()),
            reason=in_words(refuted),
        )

    def _shown(
        self, shapes: Mapping[str, Shape], axes: Axes, joints: Mapping[str, Joint], rows: int
    ) -> Split:
        outputs: dict[str, int | str | None] = {name: joint.axis for name, joint in joints.items()}
        said = axes == self._first.inputs and outputs == self._first.outputs
        sizes = {name: joint.size for name, joint in joints.items() if joint.size}
        ranks = {name: joint.rank for name, joint in joints.items()}
        if any(len(shapes[spec.name]) != len(spec.shape) for spec in self._model.inputs):
            ranks = {}  # inputs of any rank may change those of outputs
        return Split(
            inputs=dict(axes),
            outputs=outputs,
            known=self._first.known if said else "learned",
            checked=True,
            rows=rows,
            difference=max((joint.difference for joint in joints.values()), default=0.0),
            sizes={} if self._ragged else sizes,
            ranks=ranks,
        )

    def _try(
        self, arrays: Batch, whole: Arrays | None, axes: Axes, count: int, run: Runs
    ) -> dict[str, Joint]:
        """Compare the pieces of one hypothesis with the whole.

        Raises:
            _CannotTellError: This does not show whether it is right.
            McinferError: It could not be run.
        """
        if whole is None:
            arrays = made_rows(arrays, [axes[name] for name in self._names])
            answer = run([arrays])[0]
            if isinstance(answer, (PredictError, InvalidInputError)):
                raise _CannotTellError(f"made rows do not run ({answer})")
            if isinstance(answer, McinferError):
                raise answer
            whole = answer
        rows = split_unevenly(count)
        pieces = cut_rows(arrays, [axes[name] for name in self._names], rows)
        parts = [*zip(*pieces, strict=True)]
        cut = [(i, n, axes[n]) for i, n in enumerate(self._names) if axes[n] is not None]
        alike = [name for i, name, axis in cut if not tells(parts[i], axis or 0)]
        if len(alike) == len(cut):
            raise _CannotTellError("its rows are equal")
        joints = self._compare(whole, pieces, rows, run)
        if any(joint.kind == "mixed" for joint in joints.values()):
            return joints
        for name in self._unsure(axes, alike):
            # Its pieces are equal, so that it may be right to cut it, or to send it whole.
            i = self._names.index(name)
            other = [[*piece[:i], arrays[i], *piece[i + 1 :]] for piece in pieces]
            found = self._compare(whole, other, rows, run)
            if all(joint.kind != "mixed" for joint in found.values()):
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

    def _compare(
        self, whole: Arrays, pieces: Sequence[Batch], rows: Sequence[int], run: Runs
    ) -> dict[str, Joint]:
        try:
            answers = answers_of(run, pieces)
        except (PredictError, InvalidInputError) as exc:
            text = f"cannot be had from pieces ({exc})"
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


def _mixed(joints: Mapping[str, Joint]) -> dict[str, Joint]:
    return {name: joint for name, joint in joints.items() if joint.kind == "mixed"}


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


_RECORDED: Mapping[str, Callable[[Any], Any]] = {
    "inputs": dict,
    "outputs": dict,
    "rows": int,
    "difference": float,
    "reason": str,
    "sizes": _integers,
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
        and all([*axes] == [spec.name for spec in specs] for axes, specs in sides)
    )
    return split if fits and (split.splits or split.reason) else None
