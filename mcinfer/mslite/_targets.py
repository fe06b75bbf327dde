"""From a model and a context to engines, devices, cores and the core's options.

The engine itself finds out that this host lacks a target; then the CPU serves as backup with one warning,
unless ``MCINFER_STRICT_DEVICE=1`` makes that an error.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

from mcinfer.config import EngineOptions, PrepareKind, automatic_workers
from mcinfer.errors import (
    BuildError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    is_refusal,
)
from mcinfer.machine import whole_cpus
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.onnx_files import bytes_at
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._configuration import (
    HANDLE,
    PIDS,
    RANK_TABLE,
    VARIABLE_WEIGHTS,
    entries_of,
    variable_weights,
    warn_of_unused,
    weights_folder,
)
from mcinfer.mslite.context import Context

__tracebackhide__ = is_refusal

T = TypeVar("T")

_MAX_WORKERS_PER_CORE = 5

_CANN_PRECISION = {
    "enforce_fp32": "force_fp32",
    "preferred_fp32": "allow_fp32_to_fp16",
    "enforce_fp16": "force_fp16",
    "enforce_origin": "must_keep_origin_dtype",
    "preferred_optimal": "allow_mix_precision",
}
"""MindSpore Lite's names of Ascend precisions, and those of ONNX Runtime's CANN provider."""


class ModelType(IntEnum):
    """The format of a model. What is ONNX by its name or content is not taken as MINDIR."""

    MINDIR = 0
    ONNX = 3
    MINDIR_LITE = 4


class Source:
    """What a user gave to build a model from.

    Attributes:
        name: As `Model.__str__` prints it.
        model: Absolute path, or content.
        weights: Content of its file of weights, if given.
        prepare: As in `EngineOptions`.
        workspace: Whether it uses the memory between operators that all such models share.
    """

    def __init__(
        self,
        model: str | bytes,
        model_type: ModelType | None,
        context: Context,
        sections: Sections,
        weights: bytes | None = None,
    ) -> None:
        self.name = model if isinstance(model, str) else "buffer"
        self.model = os.path.abspath(model) if isinstance(model, str) else model
        self.model_type = model_type_of(model, model_type)
        self.is_onnx = self.model_type is ModelType.ONNX
        self.context = context
        self.sections = sections
        self.weights = weights
        self.prepare: PrepareKind = "auto"
        self.workspace = False


def model_type_of(model: str | bytes, model_type: ModelType | None = None) -> ModelType:
    """The type of a model: by the ending of its path if that shows it, else as given.

    A model that is to be MINDIR, or of which no type is given, is ONNX if its content is: a program for
    MindSpore Lite passes paths that end in ``.mindir``, and these files may hold ONNX models here.
    """
    by_ending = {".onnx": ModelType.ONNX, ".ms": ModelType.MINDIR_LITE}
    ending = os.path.splitext(model)[1].lower() if isinstance(model, str) else ""
    if ending in by_ending:
        return by_ending[ending]
    given = ModelType.MINDIR if model_type is None else model_type
    return ModelType.ONNX if given is ModelType.MINDIR and _holds_onnx(model) else given


def _holds_onnx(model: str | bytes) -> bool:
    """Whether a model's content begins as ONNX does.

    Field 1 of both formats is the version, a small number in ONNX (``onnx.proto``: ``int64 ir_version = 1``)
    and a text in MindIR (``mind_ir.proto``: ``string ir_version = 1``), and comes first in both.
    """
    # What cannot be read, the engine refuses with the reason.
    start = model[:2] if isinstance(model, bytes) else bytes_at(model, 0, 2) or b""
    return len(start) == 2 and start[0] == 0x08 and 0 < start[1] < 0x80


# Ways to run a model.


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run a model: an engine on a kind of device.

    Attributes:
        target: The context's name of the device; `kind` is the core's.
        options: For the engine, without those that depend on the number of workers.
        remarks: Settings of the context that have no effect on this device, and why.
    """

    target: str
    engine: str
    kind: str
    index: int = 0
    options: EngineOptions = EngineOptions()
    remarks: tuple[str, ...] = ()


def attempts(source: Source) -> list[Attempt]:
    """What to try, a target of the context after another; `BuildError` for a model that no engine runs."""
    if source.model_type is ModelType.MINDIR_LITE:
        raise BuildError(
            "model: got MindSpore Lite's own format (MINDIR_LITE, .ms), expected an ONNX or a MindIR model"
        )
    targets = source.context.device_infos
    if os.environ.get("MCINFER_STRICT_DEVICE") == "1":
        targets = targets[:1]
    config = {}
    if isinstance(source.model, bytes) and (folder := weights_folder(source.sections)):
        config = {FOLDER_KEY: folder} if source.is_onnx else {}
    cpu = source.context.cpu
    base = EngineOptions(session_config=config, variable_weights=variable_weights(source.sections))
    found = []
    for target in targets:
        kind, index, settings, remarks = _ON_TARGET[target](source)
        options = replace(base, provider_options={k: text for k, text in settings.items() if text})
        if target == "cpu":
            options = replace(
                options,
                threads=cpu.thread_num or None,
                inter_op_threads=cpu.inter_op_parallel_num or None,
            )
        if target == "gpu" and source.is_onnx and source.context.gpu.provider == "tensorrt":
            options = replace(options, provider="tensorrt")
        engine = "onnxruntime" if source.is_onnx else "mindspore"
        found.append(Attempt(target, engine, kind, index, options, tuple(remarks)))
    return found


_Way = tuple[str, int, Mapping[str, str], Sequence[str]]
"""The core's kind of device, its index, the provider's options, and what has no effect."""


def _on_cpu(source: Source) -> _Way:
    cpu, remarks = source.context.cpu, []
    if cpu.precision_mode == "preferred_fp16":
        remarks.append(
            "cpu precision_mode preferred_fp16: the engines have no float16 mode of their own on a "
            "CPU, so the model runs in the precision that it is written in"
        )
    if cpu.thread_affinity_mode and not cpu.thread_affinity_core_list:
        remarks.append(
            "cpu thread_affinity_mode has no effect: name cores in thread_affinity_core_list"
        )
    return "cpu", 0, {}, remarks


def _on_gpu(source: Source) -> _Way:
    gpu = source.context.gpu
    remarks: list[str] = []
    half, tensorrt = gpu.precision_mode == "preferred_fp16", gpu.provider == "tensorrt"
    if not source.is_onnx:
        return "cuda", gpu.device_id, {}, remarks
    if gpu.provider not in ("", "tensorrt"):
        remarks.append(f"gpu provider {gpu.provider!r} is unknown, expected '' or 'tensorrt'")
    if half and not tensorrt:
        remarks.append(
            "gpu precision_mode preferred_fp16: the CUDA provider lowers float32 to TensorFloat-32 "
            "at most; float16 takes a float16 model, or the provider 'tensorrt'"
        )
    # TensorFloat-32 has a mantissa of 10 bits.
    option = "trt_fp16_enable" if tensorrt else "use_tf32"
    return "cuda", gpu.device_id, {option: "1" if half else "0"}, remarks


def _on_ascend(source: Source) -> _Way:
    ascend, entries = source.context.ascend, entries_of(source.sections)
    table = entries.get(RANK_TABLE, "")
    precision = entries.get("precision_mode", ascend.precision_mode)
    if not source.is_onnx:
        return "ascend", ascend.device_id, {}, ()
    unused = [name for name in ("provider", "rank_id") if getattr(ascend, name)]
    remarks = [f"ascend {', '.join(unused)} has no effect on ONNX models"]
    settings = {"precision_mode": _CANN_PRECISION.get(precision, precision)}
    return "ascend", ascend.device_id, settings, remarks if unused and not table else ()


_ON_TARGET: Mapping[str, Callable[[Source], _Way]] = {
    "cpu": _on_cpu,
    "gpu": _on_gpu,
    "ascend": _on_ascend,
}


def open_first(source: Source, build: Callable[[Attempt], T], *, alone: bool, stacklevel: int) -> T:
    """Build on the first usable target; warn of what has no effect, and of targets that failed.

    The warning for a target comes before it is tried: if warnings are errors, nothing was built yet. The
    model is for this process `alone`, or for a runner; `stacklevel` is as of `warnings.warn`, seen from the
    caller. Raises the last target's error.
    """
    warn_of_unused(source.sections, _used_keys(source, alone=alone), stacklevel=stacklevel + 1)
    refusal = ""
    failure: McinferError = BuildError("no target to build for")
    for attempt in attempts(source):
        instead = f"{refusal}: the model runs on the {attempt.target}" if refusal else ""
        if remarks := "; ".join(filter(None, (instead, *attempt.remarks))):
            warnings.warn(remarks, UserWarning, stacklevel=stacklevel + 1)
        try:
            return build(attempt)
        except (MissingDependencyError, BuildError) as exc:
            failure = exc
        refusal = f"target {attempt.target} cannot be used here ({failure})"
    raise failure


def _used_keys(source: Source, *, alone: bool) -> set[tuple[str, str]]:
    """Section and key of the entries of a configuration that have an effect on a model."""
    target, onnx = source.context.device_infos[0], source.is_onnx
    used = {VARIABLE_WEIGHTS}
    if target == "ascend" and onnx:
        used.add("precision_mode")
    if alone:
        used |= {PIDS, HANDLE}
        if target != "gpu" and onnx:
            used.add(RANK_TABLE)
    folder = {"mindir_path"} if onnx and isinstance(source.model, bytes) else set()
    return {("ascend_context", key) for key in used} | {("model_file", key) for key in folder}


# Workers and cores.


def count_workers(context: Context, kind: str, wanted: int, device_ids: Sequence[int]) -> int:
    """The number of workers of a runner: as wanted, or by MindSpore Lite's rule if that is 0.

    The rule is about cores, or the CPU quota if that is less; on another kind of device than the CPU there is
    one worker for each of `device_ids`.
    """
    cores = len(os.sched_getaffinity(0))
    if wanted > _MAX_WORKERS_PER_CORE * cores:
        raise InvalidInputError(
            f"workers_num: got {wanted}, expected at most {_MAX_WORKERS_PER_CORE} for each of "
            f"{cores} cores"
        )
    if wanted or kind != "cpu":
        return wanted or max(1, len(device_ids))
    threads, cpus = context.cpu.thread_num, whole_cpus()
    return max(1, cpus // threads) if threads else automatic_workers(cpus)


def pinned_cores(context: Context, workers: int) -> tuple[tuple[int, ...], ...] | None:
    """Each worker's cores, from the context's list; None if there is none."""
    listed = context.cpu.thread_affinity_core_list
    if not listed:
        return None
    threads = context.cpu.thread_num or max(1, len(listed) // workers)
    if len(listed) != threads * workers:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {len(listed)} cores, expected threads x workers = "
            f"{threads} x {workers}"
        )
    usable = sorted(os.sched_getaffinity(0))
    if absent := [core for core in listed if core not in usable]:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {absent}, expected some of {usable}"
        )
    places = range(0, len(listed), threads)
    return tuple(tuple(dict.fromkeys(listed[i : i + threads])) for i in places)  # each core once
