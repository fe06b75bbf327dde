"""What a configuration says of weights: which may be replaced, and with which processes they are shared.

The keys are those of MindSpore Lite, in section ``[ascend_context]`` there and here, whatever the device.
"""

import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.mslite._arguments import input_arrays
from mcinfer.mslite._checks import check_elements, check_list
from mcinfer.mslite._configuration import Entries, Sections
from mcinfer.mslite.tensor import Tensor
from mcinfer.specs import TensorSpec

_SECTION = "ascend_context"
_VARIABLE = "variable_weights_file"
_PIDS = "shareable_weight_pid_list"
_HANDLE = "shareable_weight_mem_handle"

_MAX_DIGITS = 10

VARIABLE_ENTRIES: Entries = frozenset({(_SECTION, _VARIABLE)})
SHARING_ENTRIES: Entries = frozenset({(_SECTION, _PIDS), (_SECTION, _HANDLE)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """With whom a model's weights are shared.

    Attributes:
        pids: Processes that may have them; None where they are not given away.
        handle: Of the owner that they come from; None where they are the model's own.
    """

    pids: tuple[int, ...] | None = None
    handle: int | None = None


def variable_weights(sections: Sections) -> tuple[str, ...]:
    """Names of the weights that may be replaced: the lines of the file that the configuration names.

    Raises:
        InvalidInputError: It cannot be read, or names none, or one twice.
    """
    path = sections.get(_SECTION, {}).get(_VARIABLE)
    if path is None:
        return ()
    try:
        with open(path, encoding="utf-8") as file:
            names = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"{_VARIABLE}: {path} does not load: {exc}") from exc
    names = [name for name in names if name]
    if not names or len({*names}) < len(names):
        raise InvalidInputError(
            f"{_VARIABLE}: {path} has {len(names)} names, {len({*names})} different ones; expected "
            "different names of weights, one in a line"
        )
    return tuple(names)


def weight_sharing(sections: Sections) -> Sharing:
    """With whom the configuration says that weights are shared.

    Raises:
        InvalidInputError: An entry does not fit.
        BuildError: It says both that they are given away and that they come from another process.
    """
    entries = sections.get(_SECTION, {})
    pids, handle = entries.get(_PIDS), entries.get(_HANDLE)
    if pids is not None and handle is not None:
        raise BuildError(f"{_PIDS} and {_HANDLE}: got both, expected one of them")
    listed = re.findall(r"\d+", pids or "", re.ASCII)
    strange = pids is not None and not re.fullmatch(r"[\d\s,]*", pids, re.ASCII)
    if strange or any(len(digits) > _MAX_DIGITS for digits in listed):
        raise InvalidInputError(
            f"{_PIDS}: got {reprlib.repr(pids)}, expected process ids, '123, 456'"
        )
    if handle is not None and not re.fullmatch(r"\d{1,19}", handle.strip(), re.ASCII):
        raise InvalidInputError(
            f"{_HANDLE}: got {handle!r}, expected the number that get_model_info gave its owner"
        )
    return Sharing(
        pids=None if pids is None else tuple(map(int, listed)),
        handle=None if handle is None else int(handle),
    )


def check_same(facts: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that weights which another process shares are those of the model that is built here.

    Args:
        facts: What they were prepared from.
        here: What this process would prepare them from.

    Raises:
        BuildError: They differ: says in what.
    """
    for name, what in (
        ("model", "another model: its content is not that of this model's files"),
        ("device", "another device"),
        ("engine", "another engine or version"),
        ("cpu", "a CPU of other abilities"),
    ):
        if facts.get(name) != here[name]:
            detail = "" if name == "model" else f": {facts.get(name)}, here {here[name]}"
            raise BuildError(f"{_HANDLE}: the owner's weights are for {what}{detail}")
    if {**facts} != {**here}:
        raise BuildError(f"{_HANDLE}: the owner built its model with other options")


def given_tensors(weights: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """What a user gave for new weights, in one list.

    Raises:
        TypeError: Not a list of lists of Tensor.
    """
    check_list("weights", weights, list)
    for tensors in weights:
        check_elements("weights element", [*tensors], Tensor)
    return [tensor for tensors in weights for tensor in tensors]


def named_weights(given: Sequence[Tensor], specs: Sequence[TensorSpec]) -> dict[str, NDArray[Any]]:
    """New weights by name: by the tensors' own names, by position where they have none.

    Raises:
        InvalidInputError: Not as many as can be replaced, an unknown name, one twice, or no data.
    """
    names = [spec.name for spec in specs]
    if not names:
        raise InvalidInputError(
            f"no weight of this model was made replaceable when it was built ({_VARIABLE})"
        )
    if len(given) != len(names):
        raise InvalidInputError(
            f"weights: got {len(given)} tensors, expected {len(names)}: {names}"
        )
    chosen = [tensor.name or name for tensor, name in zip(given, names, strict=True)]
    if sorted(chosen) != sorted(names):
        raise InvalidInputError(f"weights: got the names {chosen}, expected each of {names} once")
    return dict(zip(chosen, input_arrays(given), strict=True))


def current_pid() -> int:
    """This process's id as the outermost namespace that ``/proc`` shows has it (proc_pid_status(5)).

    In a container whose ``/proc`` is its own that is the id in there: the owner's may be another.
    """
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("NSpid:"):
                return int(line.split()[1])
    return os.getpid()
