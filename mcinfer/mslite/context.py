"""`Context`: where a model is to run, and how, as MindSpore Lite has it.

Names, defaults and error texts are those of its Python API (``mindspore_lite.Context``). Nothing here
looks at the machine: the values are kept, and whoever builds a model reads them.
"""

import os
import warnings
from collections.abc import Callable
from typing import Generic, Self, TypeVar, overload

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._checks import check_list, check_not_negative, check_sections, check_type

TARGETS = ("cpu", "gpu", "ascend")
"""The kinds of device that a context can name."""

T = TypeVar("T")


class Option(Generic[T]):
    """An attribute with a default, checked when it is set."""

    def __init__(self, name: str, default: T, check: Callable[[str, T], None]) -> None:
        self._name = name  # as the error texts call it
        self._default = default
        self._check = check

    def __set_name__(self, owner: type, attribute: str) -> None:
        self._attribute = attribute

    @overload
    def __get__(self, part: None, owner: type) -> Self: ...

    @overload
    def __get__(self, part: object, owner: type) -> T: ...

    def __get__(self, part: object | None, owner: type) -> Self | T:
        if part is None:
            return self
        value: T = part.__dict__.get(self._attribute, self._default)
        return value

    def __set__(self, part: object, value: T) -> None:
        self._check(self._name, value)
        part.__dict__[self._attribute] = value


def _count(name: str, *, failed: str = "") -> Option[int]:
    """0 by default, and never less."""

    def check(name: str, value: int) -> None:
        check_not_negative(name, value, failed=failed)

    return Option(name, 0, check)


def _text(name: str) -> Option[str]:
    """Any text, empty by default."""
    return Option(name, "", lambda name, value: check_type(name, value, str))


def _choice(name: str, default: str, choices: tuple[str, ...]) -> Option[str]:
    """One of a few texts."""

    def check(name: str, value: str) -> None:
        check_type(name, value, str)
        if value not in choices:
            raise InvalidInputError(f"{name} must be in [{', '.join(choices)}], but got {value}.")

    return Option(name, default, check)


def _launched(variable: str, default: int) -> int:
    """A number that Open MPI's ``mpirun`` put in the environment, or the default."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else default


class _Part:
    """What the context and its parts share: the repr, and a word about unknown attributes.

    Upstream takes any attribute name in silence, so that a misspelt option does nothing. Here the
    value is kept as well, for programs that rely on that, and a UserWarning names the attribute.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            warnings.warn(
                f"{type(self).__name__} has no attribute {name!r}: it is kept, and has no effect",
                UserWarning,
                stacklevel=2,
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return str(self)


class CpuDeviceInfo(_Part):
    """The CPU part of a context. A wrong type is a TypeError, a wrong value an InvalidInputError.

    Attributes:
        precision_mode: ``"enforce_fp32"`` (the default) or ``"preferred_fp16"``.
        thread_num: Threads of one run; 0 (the default) leaves it to the library.
        inter_op_parallel_num: Operators that run at the same time; 0 (the default) leaves it to the
            library.
    """

    precision_mode = _choice(
        "cpu_precision_mode", "enforce_fp32", ("enforce_fp32", "preferred_fp16")
    )
    thread_num = _count("cpu_thread_num")
    inter_op_parallel_num = _count("cpu_inter_op_parallel_num")

    def __init__(self) -> None:
        self._thread_affinity_mode = 0
        self._thread_affinity_core_list: list[int] = []

    @property
    def thread_affinity_mode(self) -> int:
        """0: threads are not bound (the default), 1: big cores first, 2: middle cores first.

        Another number is taken as 0, with a UserWarning.

        Raises:
            TypeError: Set to something other than an int.
        """
        return self._thread_affinity_mode

    @thread_affinity_mode.setter
    def thread_affinity_mode(self, value: int) -> None:
        check_type("cpu_thread_affinity_mode", value, int)
        if value not in (0, 1, 2):
            warnings.warn(
                f"cpu_thread_affinity_mode must be 0, 1 or 2, but got {value}: 0 is used",
                UserWarning,
                stacklevel=3,
            )
            value = 0
        self._thread_affinity_mode = value

    @property
    def thread_affinity_core_list(self) -> list[int]:
        """Cores to bind the threads to, none by default; a copy.

        Raises:
            TypeError: Set to something other than a list of int.
        """
        return list(self._thread_affinity_core_list)

    @thread_affinity_core_list.setter
    def thread_affinity_core_list(self, value: list[int]) -> None:
        check_list("cpu_thread_affinity_core_list", value, int)
        self._thread_affinity_core_list = list(value)

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kCPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"thread_num: {self.thread_num},\n"
            f"inter_op_parallel_num: {self.inter_op_parallel_num},\n"
            f"thread_affinity_mode: {self.thread_affinity_mode},\n"
            f"thread_affinity_core_list: {self.thread_affinity_core_list}."
        )


class GpuDeviceInfo(_Part):
    """The GPU part of a context. A wrong type is a TypeError, a wrong value an InvalidInputError.

    Attributes:
        precision_mode: ``"enforce_fp32"`` (the default) or ``"preferred_fp16"``.
        device_id: The index of the device, 0 by default.
        provider: What runs the model, such as ``"tensorrt"``; ``""`` by default.
    """

    precision_mode = _choice(
        "gpu_precision_mode", "enforce_fp32", ("enforce_fp32", "preferred_fp16")
    )
    device_id = _count("gpu_device_id")
    provider = _text("gpu_provider")

    @property
    def rank_id(self) -> int:
        """This process's rank, from Open MPI's ``OMPI_COMM_WORLD_RANK``; 0 without a launcher."""
        return _launched("OMPI_COMM_WORLD_RANK", 0)

    @property
    def group_size(self) -> int:
        """How many processes there are, from ``OMPI_COMM_WORLD_SIZE``; 1 without a launcher."""
        return _launched("OMPI_COMM_WORLD_SIZE", 1)

    def __str__(self) -> str:
        return (
            "device_type: DeviceType.kGPU,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id},\n"
            f"rank_id: {self.rank_id},\n"
            f"group_size: {self.group_size}."
        )


class AscendDeviceInfo(_Part):
    """The Ascend part of a context. A wrong type is a TypeError, a wrong value an InvalidInputError.

    Attributes:
        precision_mode: How far precision may be lowered: ``"enforce_fp32"``, ``"preferred_fp32"``,
            ``"enforce_fp16"``, ``"enforce_origin"`` or ``"preferred_optimal"``. By default it is
            ``""``, which leaves it to the runtime and cannot be set.
        device_id: The index of the device, 0 by default.
        rank_id: This process's rank among those that run a model together, 0 by default.
        provider: What runs the model: ``"ge"`` or ``""`` (the default).
    """

    precision_mode = _choice(
        "ascend_precision_mode",
        "",
        ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal"),
    )
    device_id = _count("ascend_device_id")
    rank_id = _count("ascend_rank_id")
    provider = _text("ascend_provider")

    def __str__(self) -> str:
        # Without line ends after device_id, as upstream prints it.
        return (
            "device_type: DeviceType.kAscend,\n"
            f"precision_mode: {self.precision_mode},\n"
            f"device_id: {self.device_id}.provider: {self.provider}.rank_id: {self.rank_id}."
        )


class ParallelOptions(_Part):
    """What a `ModelParallelRunner` is to be made of.

    Attributes:
        workers_num: How many workers; 0 (the default) leaves it to the library. Another type is a
            TypeError, a negative number an InvalidInputError.
    """

    workers_num = _count("workers_num", failed="Set parallel failed, ")

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, str]] = {}
        self._config_path = ""
        self._device_ids: list[int] = []

    @property
    def config_info(self) -> str:
        """The sections as text: ``section: key value``, a line for each further entry.

        It is set to ``dict[str, dict[str, str]]``, read back as text, and `sections` has the data.
        Setting replaces the sections that are named and keeps the others, as upstream does.

        Raises:
            TypeError: Set to something other than a dict of str to dict of str to str.
        """
        lines = (
            f"{section}: " + "".join(f"{key} {text}\n" for key, text in sorted(entries.items()))
            for section, entries in sorted(self._sections.items())
        )
        return "".join(lines).rstrip("\n")

    @config_info.setter
    def config_info(self, value: dict[str, dict[str, str]]) -> None:
        check_sections("config_info", value)
        self._sections |= {section: dict(entries) for section, entries in value.items()}

    @property
    def sections(self) -> dict[str, dict[str, str]]:
        """What `config_info` was set to, as data; a copy. Upstream has no such property."""
        return {section: dict(entries) for section, entries in self._sections.items()}

    @property
    def config_path(self) -> str:
        """The configuration file, ``""`` by default. Setting ``""`` changes nothing.

        Raises:
            TypeError: Set to something other than a str.
            InvalidInputError: Set to a path where there is nothing.
        """
        return self._config_path

    @config_path.setter
    def config_path(self, value: str) -> None:
        check_type("config_path", value, str)
        if not value:
            return
        if not os.path.exists(value):
            raise InvalidInputError(f"Set parallel failed, config_path does not exist! Got {value}")
        self._config_path = value

    @property
    def device_ids(self) -> list[int]:
        """The devices of the workers in turn (worker i: ``device_ids[i % n]``); a copy.

        Raises:
            TypeError: Set to something other than a list of int.
            InvalidInputError: Set to a list with a negative number.
        """
        return list(self._device_ids)

    @device_ids.setter
    def device_ids(self, value: list[int]) -> None:
        check_list("device_ids", value, int)
        if any(index < 0 for index in value):
            raise InvalidInputError(
                f"Set parallel failed, device_ids contain a negative number. Got {value}"
            )
        self._device_ids = list(value)

    def __str__(self) -> str:
        return (
            f"workers num: {self.workers_num},\n"
            f"config info: {self.config_info},\n"
            f"config file: {self.config_path}."
        )


class Context(_Part):
    """Where a model is to run, and how: a target, and a part for each kind of device.

    Setting an attribute that is not one of those here keeps the value and gives a UserWarning.

    Attributes:
        group_info_file: The file with the groups of ranks for distributed inference, ``""`` by
            default. Something other than a str is a TypeError.
    """

    group_info_file = _text("group_info_file")

    def __init__(self) -> None:
        self._target = ["cpu"]
        self._cpu = CpuDeviceInfo()
        self._gpu = GpuDeviceInfo()
        self._ascend = AscendDeviceInfo()
        self._parallel = ParallelOptions()

    @property
    def cpu(self) -> CpuDeviceInfo:
        """Settings for the CPU."""
        return self._cpu

    @property
    def gpu(self) -> GpuDeviceInfo:
        """Settings for a GPU."""
        return self._gpu

    @property
    def ascend(self) -> AscendDeviceInfo:
        """Settings for an Ascend device."""
        return self._ascend

    @property
    def parallel(self) -> ParallelOptions:
        """Settings for a `ModelParallelRunner`."""
        return self._parallel

    @property
    def target(self) -> list[str]:
        """The devices to run on, of "cpu", "gpu" and "ascend" in any case; a copy, as it was set.

        ``["cpu"]`` by default, and again after it is set to anything that is false. The CPU is the
        backup of the others without being named; `device_infos` is what that comes to.

        Raises:
            TypeError: Set to something other than a list of str.
            InvalidInputError: Set to a list with another name.
        """
        return list(self._target)

    @target.setter
    def target(self, value: list[str] | None) -> None:
        wanted = value or ["cpu"]
        check_list("target", wanted, str)
        for name in wanted:
            if name.lower() not in TARGETS:
                raise InvalidInputError(
                    f"target elements must be in {[*TARGETS]}, but got {name.lower()}."
                )
        self._target = list(wanted)

    @property
    def device_infos(self) -> list[str]:
        """The different targets in lower case, the accelerator first and the CPU last, as backup.

        The target's own order does not matter to it: ``["cpu", "gpu"]`` is ``["gpu", "cpu"]``.

        Raises:
            InvalidInputError: There are more than two: both accelerators and the CPU behind them.
        """
        names = dict.fromkeys(name.lower() for name in self._target)
        infos = [name for name in names if name != "cpu"] + ["cpu"]
        if len(infos) > 2:
            raise InvalidInputError(
                f"target: got {self._target}, which makes the device infos {infos}; "
                "at most two are supported, a device and the cpu as its backup"
            )
        return infos

    def __str__(self) -> str:
        return f"target: {self._target}."
