"""From the execution providers that a program names to mcinfer's devices."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import check_and_normalize_provider_args

from mcinfer.errors import InvalidInputError
from mcinfer.ort.errors import Unsupported

if TYPE_CHECKING:  # inline sessions take the names below alone
    from mcinfer.config import ProviderKind

CPU = "CPUExecutionProvider"
_CARDS: "dict[str, ProviderKind]" = {
    "TensorrtExecutionProvider": "tensorrt",
    "CUDAExecutionProvider": "cuda",
}
NOTHING_HERE = "AzureExecutionProvider"
"""A provider of the usual packages, for nodes that call a service: it leaves all others to the next one."""

_DEVICE_ID = "device_id"


class UnknownProviderError(Unsupported):
    """No version of ONNX Runtime has a provider of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderDevices:
    """Where the sessions of the workers run.

    Attributes:
        devices: All that the provider may use, as `mcinfer.Master` takes them; None is the whole CPU.
        provider: The provider on the devices, in mcinfer's words; None is the devices' own.
        options: The provider's options.
        may_fall_back: Whether the CPU will do where a card's provider cannot be used.
    """

    devices: list[str] | None = None
    provider: "ProviderKind | None" = None
    options: dict[str, str] = field(default_factory=dict)
    may_fall_back: bool = False

    def places(self, wanted: Any) -> Any:
        """The devices for the `devices` of a session: a number means so many of the provider's."""
        if type(wanted) is not int or self.devices is None:
            return wanted
        if not 0 < wanted <= len(self.devices):
            raise InvalidInputError(
                f"devices: got {wanted} with {self.provider}, expected 1 to {len(self.devices)}: "
                f"{self.devices}"
            )
        return self.devices[:wanted]


def choose(
    providers: Sequence[Any] | None, provider_options: Sequence[dict[Any, Any]] | None
) -> ProviderDevices:
    """The devices for a program's providers, by ONNX Runtime's rules.

    The first provider that this ONNX Runtime has counts; it warns of the others. Without any, it is the
    card's if there is one. A card's provider means all cards of the machine, or that of ``device_id``.

    Raises:
        UnknownProviderError: No ONNX Runtime has such a provider.
        Unsupported: mcinfer has no devices for the provider.
        ValueError: The arguments have another form.
    """
    available = native.get_available_providers()
    names, options = check_and_normalize_provider_args(providers, provider_options, available)
    unknown = [name for name in names if name not in (*available, *native.get_all_providers())]
    if unknown:
        raise UnknownProviderError(f"Unknown Provider Type: {unknown[0]}")
    wanted = [(n, o) for n, o in zip(names, options, strict=True) if n in available]
    if not names:
        wanted = [(name, {}) for name in ("CUDAExecutionProvider", CPU) if name in available]
    falls_back = not names or any(name == CPU for name, _ in wanted)
    for name, given in wanted:
        if name == CPU:
            return ProviderDevices(options=given)
        if name in _CARDS:
            found = _on_cards(name, given, falls_back, warns=bool(names))
            if found is not None:
                return found
        elif name != NOTHING_HERE:
            raise Unsupported(
                f"providers: got {name!r}, for which mcinfer has no devices; expected {CPU!r} or some of "
                f"{[*_CARDS]}"
            )
    return ProviderDevices()


def _on_cards(
    name: str, options: dict[str, str], falls_back: bool, *, warns: bool
) -> ProviderDevices | None:
    """The choice of a card's provider; None if there is no card, and the CPU will do."""
    index = options.get(_DEVICE_ID)
    if index is not None:
        devices = [f"cuda:{index}"]
    else:
        from mcinfer.cards.nvidia_smi import gpus  # which inline sessions do not need

        try:
            devices = [f"cuda:{gpu.index}" for gpu in gpus()]
            why = "there is none"
        except OSError as exc:
            devices, why = [], str(exc)
        if not devices and falls_back:
            if warns:
                warnings.warn(
                    f"providers: {name} has no card here, so the session runs on the CPU: {why}",
                    stacklevel=2,
                )
            return None
    return ProviderDevices(
        devices=devices or ["cuda:0"],  # whose error says what is missing
        provider=_CARDS[name],
        options={key: text for key, text in options.items() if key != _DEVICE_ID},
        may_fall_back=falls_back,
    )
