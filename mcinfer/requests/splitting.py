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

A `Splitter` has no thread. One caller looks at a time; other requests run whole meanwhile.
"""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from mcinfer.errors import (
    ClosedError,
    InvalidInputError,
    McinferError,
    PredictError,
    WorkerDiedError,
)
from mcinfer.logs import PoolLog
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
from mcinfer.requests.tensors import Arrays
from mcinfer.sharding import (
    Axes,
    SaidAxes,
    Shape,
    Split,
    candidates,
    first_split,
    has_free_axes,
    has_single_rows,
    is_fixed,
    is_free,
    is_guess,
    rows_of,
    split_unevenly,
)
from mcinfer.specs import ModelSpec

Verify = Literal["first", "never"]

_LOOKS = 3
"""Requests that may show the split; if none does, all run whole."""

Run = Callable[[Batch], Arrays]
"""Runs a request whole, on one worker; raises `McinferError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitState:
    """What is known of the split at one moment.

    Attributes:
        splits: Whether requests are split: the split is settled, and `Split.splits`.
        rescues: Whether a split request that fails may be answered by a whole run.
        number: Another one for each, to keep plans apart.
    """

    split: Split
    splits: bool
    rescues: bool
    number: int


_numbers = itertools.count(1)


class _CannotTellError(Exception):
    """A request does not show it; says why."""


class Splitter:
    """How a model's batch is split, for one set of axes that the user says.

    Args:
        model: Its inputs and outputs.
        said: The user's axes.
        log: Has the records about the pool.
        verify: As in `mcinfer.Master`.
        whole: Why requests run whole unless the user says what to split; empty if nothing speaks against it.
        ragged: A node whose result's size depends on data: rows of outputs are not counted then.
        updated: Whether it is for replaced weights.
        recorded: What was learned of this model before.
        record: Stores what is learned; None deletes the record.

    Attributes:
        state: What is known now.
        is_decided: Whether there is nothing to look for.
        shown: What a request has shown that another one, of another number of rows, may confirm.
        withdrawn: Why a split was wrong; empty if none was.

    Raises:
        InvalidInputError: The model has no such input, output or axis.
    """

    def __init__(
        self,
        model: ModelSpec,
        said: SaidAxes,
        log: PoolLog,
        *,
        verify: Verify = "first",
        whole: str = "",
        ragged: str = "",
        updated: bool = False,
        recorded: Split | None = None,
        record: Callable[[Split | None], None] = lambda _: None,
    ) -> None:
        self._model, self._log = model, log
        self.said = said
        self.updated = updated
        self._ragged = ragged
        self._record = record
        self._names = tuple(spec.name for spec in model.inputs)
        self._first = first = first_split(model, said)
        if first.known == "unknown" and not has_free_axes(model):
            whole = whole or "every dimension of the inputs is fixed"
        # Runs that take one number of rows show nothing.
        self._is_fixed = is_fixed(model, first)
        if whole and not said.inputs and not self._is_fixed:
            self._first = replace(first, reason=whole)
        self._is_said_whole = first.known == "said" and bool(first.reason)
        is_said = set(said.inputs) == set(self._names) and not first.unjoined
        self.is_decided = bool(whole) or self._is_fixed or self._is_said_whole or is_said
        self._looks_left = _LOOKS
        self._looking = threading.Lock()
        self._warned = False
        self.shown: Split | None = None
        self.withdrawn = ""
        if verify == "never" or self.is_decided:
            self._settle(self._first)
        else:
            self._settle(recorded or self._first, settled=recorded is not None)
        if whole and self.state.splits and said.inputs:
            self._log.warning("requests are split as batch_axes says, without a check: %s", whole)

    def _settle(self, split: Split, settled: bool = True) -> None:
        splits = settled and split.splits
        self.state = SplitState(
            split=replace(split, settled=settled),
            splits=splits,
            rescues=splits and not self._is_fixed,
            number=next(_numbers),
        )
        if split.checked and split.splits:
            self.shown = split

    @property
    def busy(self) -> bool:
        return self._looking.locked()

    def look(
        self, arrays: Batch, run: Run, split_run: Callable[[SplitState], Arrays] | None = None
    ) -> Arrays | None:
        """Answer a request by a whole run, and look how its batch splits.

        Returns:
            The answer; None if there is nothing to look for, or another request is looked at.

        Raises:
            McinferError: The whole run failed, and so did `split_run`, which runs it as the user or the
                model's symbols say.
        """
        if self.state.split.settled or not self._looking.acquire(blocking=False):
            return None
        try:
            try:
                whole = run(arrays)
            except (PredictError, WorkerDiedError) as exc:
                if split_run is None or not self._first.splits:
                    raise
                # Pieces may fit into the devices' memory where the whole does not.
                split = replace(self._first, settled=True)
                with suppress(McinferError):
                    answer = split_run(replace(self.state, split=split, splits=True))
                    self._believe(f"a run of the whole batch failed, its pieces did not ({exc})")
                    return answer
                raise
            self._learn(arrays, whole, run)
            return whole
        finally:
            self._looking.release()

    def learn(self, arrays: Batch, run: Run, before: "Splitter") -> None:
        """Look at an example alone; what was shown before may confirm it, and refutes nothing.

        Raises:
            McinferError: The whole run failed.
        """
        self.shown, self._warned = before.shown, before._warned
        self._looks_left += 1  # what an example does not show costs nothing
        self._learn(arrays, run(arrays), run, refutes=False)

    def withdraw(self, reason: str) -> None:
        """A split request has shown that the split is wrong: from now on requests run whole."""
        if self.state.splits:
            self.withdrawn = reason
            self._settle(replace(self.state.split, reason=reason, checked=False))
            self._record(None)
            self.warn_if_whole()

    def warn_if_whole(self) -> None:
        """Say once why a request that may have rows is not split."""
        state, split = self.state, self.state.split
        if split.settled and not (state.splits or self._is_fixed or self._is_said_whole):
            self.warn(split.reason or f"output {split.unjoined[0]!r}: its axis is not known")

    def warn(self, reason: str) -> None:
        """Say once why requests run whole."""
        if not self._warned:
            self._warned = True
            self._log.warning(
                "requests run whole, on one worker: %s. batch_axes and output_axes say what to split and "
                "join, Master.learn(example) shows it",
                reason,
            )

    def _learn(self, arrays: Batch, whole: Arrays, run: Run, *, refutes: bool = True) -> None:
        """Learn from a request and its answer, and from what another one has shown."""
        try:
            split, sure = self._show(arrays, whole, run)
        except _CannotTellError as exc:
            self._leave_open(str(exc))
            return
        except ClosedError:
            return
        except McinferError as exc:  # the look is lost, not the request
            self._leave_open(f"its pieces were not answered ({exc})")
            return
        other = self.shown
        agrees = other is not None and other.inputs == split.inputs
        if other is not None and refutes and not agrees:
            why = split.reason or "two requests show different axes"
            split = replace(split, inputs=dict.fromkeys(self._names), reason=why)
        confirmed = other is not None and agrees and other.rows != split.rows
        if split.splits and not (confirmed or sure):
            self.shown = split
            self._leave_open("these rows may join by chance: a batch of another size shows it")
            return
        self._settle(split)
        self._warned = False  # what is decided is said all the same
        self._record(split)
        self.warn_if_whole()

    def _leave_open(self, reason: str) -> None:
        """A request shows nothing: others may, or the user's word counts, or all run whole from now on."""
        if self.state.split.settled:
            return  # the symbols decide (`verify`)
        self._looks_left -= 1
        if self.said.inputs and self._first.splits:
            self._believe(reason)
        elif self._looks_left:
            self.warn(reason)
        else:
            self._settle(replace(self._first, reason=reason))
            self.warn_if_whole()

    def _believe(self, reason: str) -> None:
        """Nothing can be compared: trust the user's axes or the model's symbols."""
        self._settle(self._first)
        self._log.warning("requests are split without a check: %s", reason)

    # What a request shows.

    def _show(self, arrays: Batch, whole: Arrays, run: Run) -> tuple[Split, bool]:
        """How a batch splits, by its own rows, or by rows made out of them; and whether that is sure.

        Raises:
            _CannotTellError: Neither show anything.
            McinferError: They could not be run.
        """
        try:
            split = self._decide(arrays, whole, run)
        except _CannotTellError as exc:
            try:
                split = self._decide(arrays, None, run)
            except _CannotTellError as made:
                raise _CannotTellError(f"{exc}; of rows made out of it: {made}") from None
        guessed = is_guess(self._model, split.inputs, self.said)
        if split.splits and (guessed or self._may_be_chance(arrays, split)):
            # Sizes and values that agree by chance do not with another number of rows.
            count = MADE_ROWS + (split.rows == MADE_ROWS)
            try:
                joints = self._try(arrays, None, split.inputs, count, run)
            except _CannotTellError:
                return split, False
            if refuted := _mixed(joints):
                split = self._refuted(refuted, count)
        # Made lengths and places may still agree by chance, numbers that are computed with do not.
        return split, not guessed or all(
            "float" in array.dtype.name
            for name, array in zip(self._names, arrays, strict=True)
            if split.inputs[name] is not None
        )

    def _may_be_chance(self, arrays: Batch, split: Split) -> bool:
        """Whether these values alone may join: where an input goes whole, or sizes vary."""
        pairs = zip(self._model.inputs, arrays, strict=True)
        return bool(self._ragged) or any(
            is_free(spec, axis) and size > 1
            for spec, array in pairs
            if split.inputs[spec.name] is None and spec.name not in self.said.inputs
            for axis, size in enumerate(array.shape)
        )

    def _decide(self, arrays: Batch, whole: Arrays | None, run: Run) -> Split:
        """What rows show: those of a request, with its answer, or, without one, rows made out of them."""
        shapes = {n: array.shape for n, array in zip(self._names, arrays, strict=True)}
        refuted: dict[str, Joint] = {}
        most = 0
        unclear: tuple[Axes, _CannotTellError] | None = None
        least = 1 if whole is None else 2
        for axes in candidates(self._model, shapes, self._first, self.said, least):
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
        is_unknown = whole is not None and self._first.known == "unknown"
        if is_unknown and has_single_rows(self._model, shapes):
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
        # Inputs of any rank may change those of outputs.
        is_any = any(len(shapes[spec.name]) != len(spec.shape) for spec in self._model.inputs)
        return Split(
            inputs=dict(axes),
            outputs=outputs,
            known=self._first.known if said else "learned",
            checked=True,
            rows=rows,
            difference=max((joint.difference for joint in joints.values()), default=0.0),
            sizes={} if self._ragged else sizes,
            ranks={} if is_any else {name: joint.rank for name, joint in joints.items()},
        )

    def _try(
        self, arrays: Batch, whole: Arrays | None, axes: Axes, count: int, run: Run
    ) -> dict[str, Joint]:
        """Compare the pieces of one hypothesis with the whole.

        Raises:
            _CannotTellError: This does not show whether it is right.
            McinferError: It could not be run.
        """
        cuts = [axes[name] for name in self._names]
        if whole is None:
            arrays = made_rows(arrays, cuts, count)
            try:
                whole = run(arrays)
            except (PredictError, InvalidInputError) as exc:
                raise _CannotTellError(f"made rows do not run ({exc})") from None
        rows = split_unevenly(count)
        pieces = cut_rows(arrays, cuts, rows)
        inputs = zip(self._names, cuts, zip(*pieces, strict=True), strict=True)
        differ = {n: tells(parts, axis) for n, axis, parts in inputs if axis is not None}
        if not any(differ.values()):
            raise _CannotTellError("its rows are equal")
        alike = [name for name, differs in differ.items() if not differs]
        joints = self._compare(whole, pieces, rows, run)
        if _mixed(joints):
            return joints
        for name in self._unsure(axes, alike):
            # Its pieces are equal, so that it may be right to cut it, or to send it whole.
            i = self._names.index(name)
            other = [[*piece[:i], arrays[i], *piece[i + 1 :]] for piece in pieces]
            if not _mixed(self._compare(whole, other, rows, run)):
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
        return [n for n in alike if n not in self.said.inputs and sizes.get(n) not in shown]

    def _compare(
        self, whole: Arrays, pieces: Sequence[Batch], rows: Sequence[int], run: Run
    ) -> dict[str, Joint]:
        try:
            answers = [*map(run, pieces)]
        except (PredictError, InvalidInputError) as exc:
            text = f"cannot be had from pieces ({exc})"
            return {spec.name: Joint(kind="mixed", text=text) for spec in self._model.outputs}
        joints = {
            name: judge(output, [answer[name] for answer in answers], rows)
            for name, output in whole.items()
        }
        for name, said in self.said.outputs.items():
            joint = joints[name]
            if joint.kind in ("axis", "same") and joint.axis != said:
                found = f"joins along axis {joint.axis}"
                how = "is the same from every piece" if joint.axis is None else found
                text = f"{how}, output_axes says {said}"
                joints[name] = Joint(kind="mixed", joins=True, text=text)
            elif joint.kind == "unclear":
                kind: Literal["axis", "same"] = "same" if said is None else "axis"
                joints[name] = Joint(kind=kind, axis=said, rank=whole[name].ndim)
        return joints


def _mixed(joints: Mapping[str, Joint]) -> dict[str, Joint]:
    return {name: joint for name, joint in joints.items() if joint.kind == "mixed"}
