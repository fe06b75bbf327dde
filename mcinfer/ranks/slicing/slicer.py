"""One model becomes a folder of slices, one for each rank, and a report.

::

    model ──► Weights ──► cut_stages ──► slice_tensor, for each stage ──► a model and a RankPlan
              (stubs)     pipeline       tensor                               for each rank
                                                                                   │
    FOLDER/   slices.json     the report                                           │
              model0.data     the weights of rank 0                                │
              rank0/          its segments and its plan: for `RankEngine`  ◄───────┤
              model0.onnx     or all of this in one file, for others       ◄───────┘

Rank ``stage * tensor + t`` is the t-th slice of a stage. A file of a slice has the plan, without steps, in a
metadata property `METADATA_KEY`: the rank, the inputs and outputs of the whole model, and which values it
receives from which rank and sends to which. A folder appears under its name when it is complete and its
slices are checked.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcinfer.config import Parallel
from mcinfer.errors import BuildError, InvalidInputError, ModelNotFoundError
from mcinfer.extras import requires
from mcinfer.machine import usable_memory
from mcinfer.model_cache.children import ChildFailedError, Progress, run_child
from mcinfer.model_cache.onnx_files import scan
from mcinfer.private import OthersError, in_words, inherited, naming_limit, opened_place

with requires("cutting a model needs the package onnx", "onnx", extra="onnx"):
    from onnx import ModelProto

from mcinfer.ranks.slicing.graphs import (
    ASSUMED_BATCH,
    ASSUMED_SIZE,
    drop_false_shapes,
    infer,
    is_collective,
    label,
    tensor_bytes,
    tensor_spec,
    with_inner,
)
from mcinfer.ranks.slicing.pipeline import cut_stages
from mcinfer.ranks.slicing.plans import METADATA_KEY, REPORT_FILE, VERSION, RankPlan, rank_folder
from mcinfer.ranks.slicing.segments import write_segments
from mcinfer.ranks.slicing.tensor import StageReport, slice_tensor
from mcinfer.ranks.slicing.weights import DataFile, Weights
from mcinfer.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The slice of one rank.

    Attributes:
        stage: The pipeline stage.
        file: The model, in the folder.
        nodes: How many, collectives included.
        weight_bytes: Of its initialisers.
        operations: The estimate of the multiplications and additions of its stage in one run, before the
            stage is cut over ranks.
        receives: By value, the rank that sends it.
        sends: By value, the ranks that receive it.
        bytes_received: In one run, from other stages.
    """

    rank: int
    stage: int
    file: str
    nodes: int
    weight_bytes: int
    operations: int
    receives: Mapping[str, int]
    sends: Mapping[str, Sequence[int]]
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Whether the slices give what the model gives, on made-up inputs.

    Attributes:
        state: ``"passed"``, or ``"left out"``: not asked for, or not possible.
        reason: Why it was left out.
        difference: By output, the largest difference, relative to the model's largest magnitude.
        tolerance: By output, the largest difference that is allowed.
    """

    state: str
    reason: str = ""
    difference: Mapping[str, float]
    tolerance: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReport:
    """What `slice_model` did; `REPORT_FILE` has it as JSON.

    Bytes of activations are estimates, with the sizes in `assumed` in place of symbols.

    Attributes:
        model: Name of the model's file.
        tensor: Ranks of a stage.
        pipeline: Stages.
        weight_bytes: Of the whole model's initialisers.
        assumed: The sizes of symbols along the first axis, and along others.
    """

    model: str
    tensor: int
    pipeline: int
    weight_bytes: int
    ranks: Sequence[RankReport]
    stages: Sequence[StageReport]
    assumed: tuple[int, int] = (ASSUMED_BATCH, ASSUMED_SIZE)
    check: CheckReport

    def as_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


_UNCHECKED = CheckReport(state="left out", reason="not asked for", difference={}, tolerance={})


def slice_model(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    check: bool = True,
    force: bool = False,
    segments: bool = False,
    progress: Progress | None = None,
) -> SliceReport:
    """Cut a model into slices for ``tensor * pipeline`` ranks, and check them.

    Args:
        model: Path of an ONNX model. It may be larger than memory: weights are copied in pieces.
        folder: Folder to write, which appears when all is done.
        tensor: Over how many ranks the weights of each stage are cut.
        pipeline: How many stages run one after another.
        check: Run the slices on made-up inputs, in a child process, and compare with the whole model. A model
            that draws random numbers, or whose weights do not fit into memory twice, is not checked, and the
            report says so.
        force: Replace slices that are in the folder.
        segments: Write the segments and the plan of each rank into `rank_folder`, and no files of slices.
        progress: Called with ``{"phase": "slicing"}`` or ``{"phase": "checking"}``.

    Raises:
        InvalidInputError: An argument does not fit, or the model cannot be cut so.
        ModelNotFoundError: There is no model.
        BuildError: The model is not sound, or the slices do not give what it gives.
        OSError: Files cannot be read or written.
    """
    tick = progress or (lambda _: None)
    if Parallel(tensor=tensor, pipeline=pipeline).ranks < 2:
        raise InvalidInputError(
            f"tensor, pipeline: got {tensor} and {pipeline}, expected at least 2 ranks: a tensor or a "
            "pipeline of 2 or more"
        )
    with ExitStack() as opened:
        try:
            place = opened.enter_context(opened_place(folder))
        except OthersError as exc:
            raise InvalidInputError(f"folder: {exc}") from exc
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise InvalidInputError(f"folder: there is no folder {Path(folder).parent}") from exc
        if not place.name:
            raise InvalidInputError(f"folder: got {folder}, expected a folder in another one")
        shown = place.parent.readlink() / place.name
        _check_place(place, shown, force)
        draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}.partial")
        opened.callback(shutil.rmtree, draft, ignore_errors=True)
        try:
            draft.mkdir()
            tick({"phase": "slicing"})
            with naming_limit():
                report = write_slices(
                    model, draft, tensor=tensor, pipeline=pipeline, segments=segments
                )
            if check and report.check is _UNCHECKED:
                tick({"phase": "checking"})
                report = replace(report, check=_checked(Path(model), draft, report, tick))
                _write_report(draft, report)
            _check_place(place, shown, force)
            _move(draft, place)
        except OSError as exc:  # such as of a full disk; by the descriptor, its name says nothing
            if exc.errno and str(exc.filename or place).startswith(f"{place.parent}/"):
                raise OSError(exc.errno, exc.strerror, str(shown)) from exc
            raise
    return report


def write_slices(
    model: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    segments: bool = False,
) -> SliceReport:
    """Write the slices into a folder that exists and is empty; they are not checked.

    Raises what `slice_model` raises, and leaves what it has written by then.
    """
    path, target = Path(model), Path(folder)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: there is no such file")
    random = scan(path).random
    if random and tensor > 1:
        raise InvalidInputError(
            f"model: {random} draws random numbers, which would differ between the ranks of tensor; expected "
            "a model that draws none, or a pipeline alone, where one rank draws them"
        )
    with Weights(path) as weights:
        whole = weights.model
        _check_unsliced(whole)
        drop_false_shapes(whole)
        values = infer(whole)
        initialisers = {tensor.name: tensor for tensor in whole.graph.initializer}
        spec = ModelSpec(
            inputs=tuple(tensor_spec(v) for v in whole.graph.input if v.name not in initialisers),
            outputs=tuple(tensor_spec(values.types.get(v.name, v)) for v in whole.graph.output),
        )
        ranks: list[RankReport] = []
        reports = []
        for number, stage in enumerate(cut_stages(whole, pipeline, values)):
            slices = slice_tensor(stage.model, tensor, values)
            reports.append(slices.report)
            made = {value.name for value in stage.model.graph.output}
            for t, recipes in enumerate(slices.recipes):
                rank = number * tensor + t
                plan = RankPlan(
                    rank=rank,
                    tensor=tensor,
                    pipeline=pipeline,
                    spec=spec,
                    receives={name: of * tensor + t for name, of in stage.receives.items()},
                    sends={
                        name: tuple(to * tensor + t for to in users)
                        for name, users in stage.sends.items()
                    },
                    made=tuple(value.name for value in spec.outputs if value.name in made),
                )
                part = ModelProto()
                part.CopyFrom(slices.model)
                with DataFile(target / f"model{rank}.data") as file:
                    part.graph.initializer.extend(weights.write(each, file) for each in recipes)
                    weights.write_rest(part, file)
                report = RankReport(
                    rank=rank,
                    stage=number,
                    file=f"model{rank}.onnx",
                    nodes=len(part.graph.node),
                    weight_bytes=sum(map(tensor_bytes, part.graph.initializer)),
                    operations=stage.operations,
                    receives=plan.receives,
                    sends=plan.sends,
                    bytes_received=stage.bytes_received,
                )
                ranks.append(report)
                if segments:
                    (target / rank_folder(rank)).mkdir()
                    write_segments(part, plan, target / rank_folder(rank))
                else:
                    text = json.dumps(plan.to_json())
                    part.metadata_props.add(key=METADATA_KEY, value=text)
                    content = part.SerializeToString(deterministic=True)
                    (target / report.file).write_bytes(content)
    check = _UNCHECKED
    if random:
        check = replace(check, reason=f"{random} draws random numbers, so no two runs are alike")
    whole_report = SliceReport(
        model=Path(in_words(str(path), str(path))).name,
        tensor=tensor,
        pipeline=pipeline,
        weight_bytes=sum(map(tensor_bytes, initialisers.values())),
        ranks=ranks,
        stages=reports,
        check=check,
    )
    _write_report(target, whole_report)
    return whole_report


def _check_unsliced(model: ModelProto) -> None:
    node = next(filter(is_collective, with_inner(model.graph.node)), None)
    if node is not None or any(entry.key == METADATA_KEY for entry in model.metadata_props):
        why = f", with the collective {label(node)}" if node else ""
        raise InvalidInputError(f"model: got a slice of a model{why}, expected a whole model")


# The files.


def _write_report(folder: Path, report: SliceReport) -> None:
    text = json.dumps(report.as_json(), indent=1)
    (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")


# The folder.


def _check_place(place: Path, shown: Path, force: bool) -> None:
    if place.exists() and not place.is_dir():
        raise InvalidInputError(f"folder: {shown} is there and is no folder")
    names = {entry.name for entry in place.iterdir()} if place.exists() else set()
    others = sorted(name for name in names if not _is_ours(name))
    if names and (others or REPORT_FILE not in names):
        first = f": {others[0]!r}" if others else ""
        raise InvalidInputError(f"folder: {shown} is there, and not all in it is slices{first}")
    if names and not force:
        raise InvalidInputError(
            f"folder: {shown} has slices already, expected a new folder, or force (--force)"
        )


def _is_ours(name: str) -> bool:
    return name == REPORT_FILE or bool(re.fullmatch(r"model\d+\.(onnx|data)", name))


def _move(draft: Path, place: Path) -> None:
    """Give the folder its name; slices that are there go."""
    before = draft.with_suffix(".before")
    if place.exists() and any(place.iterdir()):
        place.rename(before)
    try:
        draft.rename(place)
    except BaseException:
        with suppress(FileNotFoundError):
            before.rename(place)
        raise
    shutil.rmtree(before, ignore_errors=True)


# The check.


def _checked(model: Path, folder: Path, report: SliceReport, tick: Progress) -> CheckReport:
    needed, usable = 2 * report.weight_bytes, usable_memory()
    if needed > usable:
        return replace(
            _UNCHECKED,
            reason=f"the weights twice are {needed} bytes, and {usable} bytes of memory are usable",
        )
    try:
        found = run_child(
            "mcinfer.ranks.check_slices:check",
            [str(model.absolute()), str(folder)],
            lambda state: tick({"phase": "checking", **state}),
            pass_fds=(*inherited(str(model)), *inherited(str(folder.parent))),
        )
    except ChildFailedError as exc:
        raise BuildError(f"{model}: its slices could not be checked: {exc}") from exc
    if "reason" in found:
        return replace(_UNCHECKED, reason=found["reason"])
    return CheckReport(state="passed", **found)
