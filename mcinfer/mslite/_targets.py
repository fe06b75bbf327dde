"""From a context to engines, devices, cores and the core's options.

The engine itself finds out that this host lacks a target; then the CPU serves as backup with one warning,
unless ``MCINFER_STRICT_DEVICE=1`` makes that an error.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from mcinfer.config import EngineOptions, automatic_workers
from mcinfer.errors import BuildError, InvalidInputError, McinferError, MissingDependencyError
from mcinfer.machine import whole_cpus
from mcinfer.model_cache.onnx_files import open_regular
from mcinfer.mslite._checks import Sections
from mcinfer.mslite._configuration import Entries, rank_table
from mcinfer.mslite.context import Context

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


def model_type_of(model: str | bytes, model_type: ModelType | None = None) -> ModelType:
    """The type of a model: by the ending of its path if that shows it, else as given.

    A model that is to be MINDIR, or of which no type is given, is ONNX if its content is: a program for
    MindSpore Lite passes paths that end in ``.mindir``, and these files may hold ONNX models here.
    """
    if isinstance(model, str):
        by_ending = {".onnx": ModelType.ONNX, ".ms": ModelType.MINDIR_LITE}
        ending = os.path.splitext(model)[1].lower()
        if ending in by_ending:
            return by_ending[ending]
    given = ModelType.MINDIR if model_type is None else model_type
    return ModelType.ONNX if given is ModelType.MINDIR and _holds_onnx(model) else given


def _holds_onnx(model: str | bytes) -> bool:
    """Whether a model's content begins as ONNX does.

    Field 1 of both formats is the version, a small number in ONNX (``onnx.proto``: ``int64 ir_version = 1``)
    and a text in MindIR (``mind_ir.proto``: ``string ir_version = 1``), and comes first in both.
    """
    start = model[:2] if isinstance(model, bytes) else b""
    if isinstance(model, str):
        with suppress(OSError, BuildError), open_regular(model) as (descriptor, _):
            # What cannot be read, the engine refuses with the reason.
            start = os.pread(descriptor, 2, 0)
    return len(start) == 2 and start[0] == 0x08 and 0 < start[1] < 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way to run a model: an engine on a kind of device.

    Attributes:
        target: The context's name of the device; `kind` is the core's.
        options: For the engine, without those that depend on the number of workers.
        remarks: Settings of the context that have no effect on this device, and why; the same for all of a
            target's engines.
    """

    target: str
    engine: str
    kind: str
    index: int = 0
    options: EngineOptions = field(default_factory=EngineOptions)
    remarks: tuple[str, ...] = ()


def attempts(context: Context, model_type: ModelType, sections: Sections) -> list[list[Attempt]]:
    """For each target of the context, in order, the engines to try there."""
    targets = context.device_infos
    if os.environ.get("MCINFER_STRICT_DEVICE") == "1":
        targets = targets[:1]
    return [_attempts_on(target, context, model_type, sections) for target in targets]


def open_first(
    groups: Sequence[Sequence[Attempt]], build: Callable[[Attempt], T], *, stacklevel: int
) -> T:
    """Build on the first usable target; warn of settings without effect, and of targets that failed.

    The warning for a target comes before it is tried: if warnings are errors, nothing was built yet. The
    `stacklevel` is as of `warnings.warn`, seen from the caller. Raises the last target's error.
    """
    refusals: list[str] = []
    failure: McinferError = BuildError("no target to build for")
    for group in groups:
        target, remarks = group[0].target, [*group[0].remarks]
        if refusals:
            remarks.insert(0, f"{'; '.join(refusals)}: the model runs on the {target}")
        if remarks:
            warnings.warn("; ".join(remarks), UserWarning, stacklevel=stacklevel + 1)
        missing: McinferError | None = None
        for attempt in group:
            try:
                return build(attempt)
            except MissingDependencyError as exc:
                failure = missing = missing or exc
            except BuildError as exc:
                failure = exc
                break
        refusals.append(f"target {target} cannot be used here ({failure})")
    raise failure


def _attempts_on(
    target: str, context: Context, model_type: ModelType, sections: Sections
) -> list[Attempt]:
    onnx = model_type is ModelType.ONNX
    kind, index, threads, operators = target, 0, 0, 0
    settings: dict[str, str] = {}
    if target == "cpu":
        threads, operators = context.cpu.thread_num, context.cpu.inter_op_parallel_num
        remarks = _cpu_remarks(context)
    elif target == "gpu":
        gpu = context.gpu
        kind, index = "cuda", gpu.device_id
        settings, remarks = {"precision_mode": gpu.precision_mode, "provider": gpu.provider}, []
        if onnx:
            tensorrt = gpu.provider == "tensorrt"
            kind = "tensorrt" if tensorrt else "cuda"
            # TensorFloat-32 has a mantissa of 10 bits.
            option = "trt_fp16_enable" if tensorrt else "use_tf32"
            settings = {option: "1" if gpu.precision_mode == "preferred_fp16" else "0"}
            remarks = _gpu_remarks(context)
    else:
        ascend = context.ascend
        index = ascend.device_id
        entries = sections.get("ascend_context", {})
        precision = entries.get("precision_mode", ascend.precision_mode)
        settings, remarks = {"precision_mode": precision}, []
        if onnx:
            settings = {"precision_mode": _CANN_PRECISION.get(precision, precision)}
            unused = [name for name in ("provider", "rank_id") if getattr(ascend, name)]
            if unused and not rank_table(sections):
                remarks = [f"ascend {', '.join(unused)} has no effect on ONNX models"]
        else:
            settings["provider"] = entries.get("provider", ascend.provider)
            settings["rank_id"] = str(ascend.rank_id or "")
            settings["rank_table_file"] = rank_table(sections)
            if settings["rank_table_file"]:
                settings["group_info_file"] = context.group_info_file
    engines = ["onnxruntime"] if onnx else ["mindspore_lite"]
    if target == "cpu" and model_type is ModelType.MINDIR:
        engines.insert(0, "mindspore")
    lite = model_type is ModelType.MINDIR_LITE
    options = EngineOptions(
        threads=threads or None,
        inter_op_threads=operators or None,
        session_config={"model_type": "MINDIR_LITE"} if lite else {},
        provider_options={key: value for key, value in settings.items() if value},
    )
    return [
        Attempt(
            target=target,
            engine=engine,
            kind=kind,
            index=index,
            options=options,
            remarks=tuple(remarks),
        )
        for engine in engines
    ]


def _cpu_remarks(context: Context) -> list[str]:
    cpu, remarks = context.cpu, []
    if cpu.precision_mode == "preferred_fp16":
        remarks.append(
            "cpu precision_mode preferred_fp16: the engines have no float16 mode of their own on a "
            "CPU, so the model runs in the precision that it is written in"
        )
    mode = 0 if cpu.thread_affinity_core_list else cpu.thread_affinity_mode
    if mode and order_cores(core_capacities(), mode) is None:
        remarks.append(
            "cpu thread_affinity_mode has no effect: the cores of this machine are all alike"
        )
    return remarks


def _gpu_remarks(context: Context) -> list[str]:
    gpu, remarks = context.gpu, []
    if gpu.provider not in ("", "tensorrt"):
        remarks.append(f"gpu provider {gpu.provider!r} is unknown, expected '' or 'tensorrt'")
    if gpu.precision_mode == "preferred_fp16" and gpu.provider != "tensorrt":
        remarks.append(
            "gpu precision_mode preferred_fp16: the CUDA provider lowers float32 to TensorFloat-32 "
            "at most; float16 takes a float16 model, or the provider 'tensorrt'"
        )
    return remarks


def used_entries(context: Context, model_type: ModelType, *, from_buffer: bool) -> Entries:
    """The entries of a configuration that have an effect on such a model."""
    used = set()
    if from_buffer and model_type is ModelType.ONNX:
        used.add(("model_file", "mindir_path"))
    if context.device_infos[0] == "ascend":
        used.add(("ascend_context", "precision_mode"))
        if model_type is not ModelType.ONNX:
            used.add(("ascend_context", "provider"))
    return used


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
    if wanted:
        return wanted
    if kind != "cpu":
        return max(1, len(device_ids))
    threads = context.cpu.thread_num
    cpus = whole_cpus()
    return max(1, cpus // threads) if threads else automatic_workers(cpus)


def pinned_cores(context: Context, workers: int) -> tuple[tuple[int, ...], ...] | None:
    """Each worker's cores, from the context's list or by its mode; None if it has neither."""
    listed = context.cpu.thread_affinity_core_list
    ordered = listed or order_cores(core_capacities(), context.cpu.thread_affinity_mode)
    if not ordered:
        return None
    threads = context.cpu.thread_num or max(1, len(ordered) // workers)
    if listed and len(listed) != threads * workers:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {len(listed)} cores, expected threads x workers = "
            f"{threads} x {workers}"
        )
    usable = sorted(os.sched_getaffinity(0))
    absent = [core for core in listed if core not in usable]
    if absent:
        raise InvalidInputError(
            f"cpu_thread_affinity_core_list: got {absent}, expected some of {usable}"
        )
    # One worker after another takes as many as it has threads, each core once; then from the start again.
    return tuple(
        tuple(dict.fromkeys(ordered[(w * threads + t) % len(ordered)] for t in range(threads)))
        for w in range(workers)
    )


def core_capacities(folder: Path = Path("/sys/devices/system/cpu")) -> dict[int, int]:
    """The performance of each core that this process may use, in the kernel's unit; 0 if unknown.

    ``cpu_capacity`` where the kernel has it (Documentation/arch/arm64/cpu-capacity.rst), else the highest
    frequency in kHz.
    """
    capacities = {}
    for core in sorted(os.sched_getaffinity(0)):
        capacities[core] = 0
        for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
            try:
                capacities[core] = int((folder / f"cpu{core}" / name).read_text(encoding="ascii"))
                break
            except (OSError, ValueError):
                continue
    return capacities


def order_cores(capacities: Mapping[int, int], mode: int) -> list[int] | None:
    """The cores in the order in which threads take them; None if there is no order.

    Mode 1: big cores, then middle, then little ones; mode 2: middle, little, big. Of two kinds only, the
    weaker one is the middle. Mode 0 has no order.
    """
    kinds = sorted(set(capacities.values()), reverse=True)
    if not mode or len(kinds) < 2:
        return None
    if mode == 2:
        kinds = [*kinds[1:], kinds[0]]
    return [core for kind in kinds for core in sorted(capacities) if capacities[core] == kind]
