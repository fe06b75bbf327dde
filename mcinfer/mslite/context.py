"""`Context`: where and how a model is to run, as in MindSpore Lite.

Names, defaults and error texts are those of its Python API (``mindspore_lite.Context``). The values are only
kept, and read when a model is built.
"""

import os
import warnings
from typing import TypeVar

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import (
    Option,
    Sections,
    check_list,
    check_sections,
    check_type,
    typed,
)
from mcinfer.ranks.collectives.launch import from_launcher

TARGETS = ("cpu", "gpu", "ascend")
"""The kinds of device that a context can name."""

T = TypeVar("T")


def _count(name: str, failed: str = "") -> Option[int]:
    def check(name: str, value: int) -> None:
        if check_type(name, value, int) < 0:
            raise InvalidInputError(f"{failed}{name} must be a non-negative int.")

    return Option(name, 0, check)


def _choice(name: str, default: str, *choices: str) -> Option[str]:
    def check(name: str, value: str) -> None:
        if check_type(name, value, str) not in choices:
            raise InvalidInputError(f"{name} must be in [{', '.join(choices)}], but got {value}.")

    return Option(name, default, check)


def _affinity_mode(name: str, value: int) -> int:
    if check_type(name, value, int) in (0, 1, 2):
        return value
    text = f"{name} must be 0, 1 or 2, but got {value}: 0 is used"
    warnings.warn(text, UserWarning, stacklevel=4)  # through Option.__set__ and _Part.__setattr__
    return 0


def _device_ids(name: str, value: list[int]) -> None:
    if any(index < 0 for index in check_list(name, value, int)):
        text = f"Set parallel failed, {name} contain a negative number. Got {value}"
        raise InvalidInputError(text)


def _target(name: str, value: list[str]) -> list[str]:
    wanted = value or ["cpu"]
    for target in check_list(name, wanted, str):
        if target.lower() not in TARGETS:
            raise InvalidInputError(
                f"target elements must be in {[*TARGETS]}, but got {target.lower()}."
            )
    return wanted


class _Part:
    """The context or a part of it. An unknown attribute is kept, as upstream does, but with a UserWarning."""

    _KIND = ""
    _PRINTED: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            warnings.warn(
                f"{type(self).__name__} has no attribute {name!r}: it is kept, and has no effect",
                UserWarning,
                stacklevel=2,
            )
        object.__setattr__(self, name, value)

    def __str__(self) -> str:
        lines = [f"{name}: {getattr(self, name)}" for name in self._PRINTED]
        return ",\n".join([f"device_type: DeviceType.{self._KIND}", *lines]) + "."

    def __repr__(self) -> str:
        return str(self)


class CpuDeviceInfo(_Part):
    """The CPU part of a context.

    Attributes:
        precision_mode: ``"enforce_fp32"`` (the default) or ``"preferred_fp16"``.
        thread_num: Threads of one run; 0 (the default) leaves it to the library.
        inter_op_parallel_num: Operators that run at the same time; 0 (the default) leaves it to the
            library.
        thread_affinity_mode: 0: threads are not bound (the default), 1: big cores first, 2: middle cores
            first. The last two have no effect here, as a UserWarning of the build says. Another number is
            taken as 0, with a UserWarning.
        thread_affinity_core_list: Cores to bind the threads to, none by default; a copy.
    """

    _KIND = "kCPU"
    _PRINTED = (
        *("precision_mode", "thread_num", "inter_op_parallel_num"),
        *("thread_affinity_mode", "thread_affinity_core_list"),
    )

    precision_mode = _choice("cpu_precision_mode", "enforce_fp32", "enforce_fp32", "preferred_fp16")
    thread_num = _count("cpu_thread_num")
    inter_op_parallel_num = _count("cpu_inter_op_parallel_num")
    thread_affinity_mode = Option("cpu_thread_affinity_mode", 0, _affinity_mode)
    thread_affinity_core_list: Option[list[int]] = Option(
        "cpu_thread_affinity_core_list", [], lambda name, value: check_list(name, value, int)
    )


class GpuDeviceInfo(_Part):
    """The GPU part of a context.

    Attributes:
        precision_mode: ``"enforce_fp32"`` (the default) or ``"preferred_fp16"``.
        device_id: The index of the device, 0 by default.
        provider: The library that runs the model, such as ``"tensorrt"``; ``""`` by default.
        rank_id: This process's rank, from its launcher (such as Open MPI's ``mpirun``); 0 without one.
            A launcher's variable that is not a number is an InvalidInputError.
        group_size: Number of ranks, from the launcher; 1 without one.
    """

    _KIND = "kGPU"
    _PRINTED = ("precision_mode", "device_id", "rank_id", "group_size")

    precision_mode = _choice("gpu_precision_mode", "enforce_fp32", "enforce_fp32", "preferred_fp16")
    device_id = _count("gpu_device_id")
    provider = typed("gpu_provider", "", str)

    @property
    def rank_id(self) -> int:
        return 0 if (launched := from_launcher()) is None else launched.rank

    @property
    def group_size(self) -> int:
        return 1 if (launched := from_launcher()) is None else launched.size


class AscendDeviceInfo(_Part):
    """The Ascend part of a context.

    Attributes:
        precision_mode: How far precision may be lowered: ``"enforce_fp32"``, ``"preferred_fp32"``,
            ``"enforce_fp16"``, ``"enforce_origin"`` or ``"preferred_optimal"``. The default ``""``
            leaves it to the runtime and cannot be set.
        device_id: The index of the device, 0 by default.
        rank_id: This process's rank in the configuration's ``rank_table_file``, 0 by default.
        provider: The library that runs the model: ``"ge"`` or ``""`` (the default).
    """

    precision_mode = _choice(
        "ascend_precision_mode",
        "",
        *("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal"),
    )
    device_id = _count("ascend_device_id")
    rank_id = _count("ascend_rank_id")
    provider = typed("ascend_provider", "", str)

    def __str__(self) -> str:
        # Without line ends after device_id, as upstream prints it.
        return (
            "device_type: DeviceType.kAscend,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id}.provider: {self.provider}.rank_id: {self.rank_id}."
        )


class ParallelOptions(_Part):
    """The workers of a `ModelParallelRunner`.

    Attributes:
        workers_num: Number of workers; 0 (the default) leaves it to the library.
        device_ids: The devices of the workers in turn (worker i: ``device_ids[i % n]``); a copy.
    """

    workers_num = _count("workers_num", "Set parallel failed, ")
    device_ids: Option[list[int]] = Option("device_ids", [], _device_ids)

    def __init__(self) -> None:
        self._sections: Sections = {}
        self._config_path = ""

    @property
    def config_info(self) -> str:
        """The sections as text: ``section: key value``, a line for each further entry.

        It is set to ``dict[str, dict[str, str]]`` (else a TypeError). Setting replaces the sections that are
        named and keeps the others, as upstream does.
        """
        lines = (
            f"{section}: " + "".join(f"{key} {text}\n" for key, text in sorted(entries.items()))
            for section, entries in sorted(self._sections.items())
        )
        return "".join(lines).rstrip("\n")

    @config_info.setter
    def config_info(self, value: Sections) -> None:
        self._sections |= check_sections("config_info", value)

    @property
    def sections(self) -> Sections:
        """The data of `config_info`; a copy. Upstream has no such property."""
        return {section: dict(entries) for section, entries in self._sections.items()}

    @property
    def config_path(self) -> str:
        """The configuration file, ``""`` by default. Setting ``""`` changes nothing."""
        return self._config_path

    @config_path.setter
    def config_path(self, value: str) -> None:
        if check_type("config_path", value, str) and not os.path.exists(value):
            raise InvalidInputError(f"Set parallel failed, config_path does not exist! Got {value}")
        self._config_path = value or self._config_path

    def __str__(self) -> str:
        return (
            f"workers num: {self.workers_num},\n"
            f"config info: {self.config_info},\n"
            f"config file: {self.config_path}."
        )


def _part(cls: type[T]) -> T:
    """A read-only attribute, made when it is first read."""

    def read(context: object) -> T:
        made: T = context.__dict__.setdefault(f"_{cls.__name__}", cls())
        return made

    return property(read)  # type: ignore[return-value] # as a reader sees it


class Context(_Part):
    """Where and how a model is to run: a target, and a part for each kind of device.

    A wrong type is a TypeError, a wrong value an InvalidInputError. Setting an attribute that is not one of
    those here keeps the value and gives a UserWarning.

    Attributes:
        target: The devices to run on, of "cpu", "gpu" and "ascend" in any case; a copy, as it was set.
            ``["cpu"]`` by default, and again after it is set to anything that is false. The CPU is the
            backup of the others without being named.
        group_info_file: The file with the groups of ranks for distributed inference, ``""`` by
            default. Only MindSpore Lite's own package reads it.
        cpu, gpu, ascend, parallel: Settings for a kind of device, or for a `ModelParallelRunner`.
    """

    target = Option("target", ["cpu"], _target)
    group_info_file = typed("group_info_file", "", str)
    cpu = _part(CpuDeviceInfo)
    gpu = _part(GpuDeviceInfo)
    ascend = _part(AscendDeviceInfo)
    parallel = _part(ParallelOptions)

    @property
    def device_infos(self) -> list[str]:
        """The different targets in lower case, the accelerator first and the CPU last, as backup.

        An InvalidInputError if there are more than two: both accelerators and the CPU behind them.
        """
        names = dict.fromkeys(name.lower() for name in self.target)
        infos = [name for name in names if name != "cpu"] + ["cpu"]
        if len(infos) > 2:
            raise InvalidInputError(
                f"target: got {self.target}, which makes the device infos {infos}; "
                "at most two are supported, a device and the cpu as its backup"
            )
        return infos

    def __str__(self) -> str:
        return f"target: {self.target}."


def check_context(context: Context | None) -> Context:
    """The context, or that of the CPU for None; TypeError for anything else."""
    return Context() if context is None else check_type("context", context, Context)
