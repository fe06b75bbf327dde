"""mcinfer's own engines by name, and what each is called elsewhere: the one table of them."""

import os
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class EngineNames:
    """What an engine is called elsewhere; its own name is that of the module that it imports, too.

    Attributes:
        packages: The distributions that have the module: one of them is enough.
        endings: Of files that it loads.
        platform: What Triton calls it in a model's configuration; empty if the server does not offer it.
    """

    packages: tuple[str, ...]
    endings: tuple[str, ...]
    platform: str = ""

    @property
    def file(self) -> str:
        """The usual name of a model's file in a version's folder of a repository."""
        return f"model{self.endings[0]}"


DEFAULT_ENGINE = "onnxruntime"
"""The engine of a master that names none, and of files whose ending says nothing."""

ENGINES = {
    "onnxruntime": EngineNames(("onnxruntime", "onnxruntime-gpu"), (".onnx",), "onnxruntime_onnx"),
    "openvino": EngineNames(("openvino",), (".xml", ".onnx"), "openvino"),
    "mindspore": EngineNames(("mindspore",), (".mindir",)),
}

PACKAGES = tuple(name for names in ENGINES.values() for name in names.packages)


def engines_for(model: str | os.PathLike[str]) -> tuple[str, ...]:
    """The engines that load a file of this name's ending: those that are installed, or the first of all."""
    ending = os.path.splitext(model)[1]
    known = [name for name, engine in ENGINES.items() if ending in engine.endings] or [
        DEFAULT_ENGINE
    ]
    return tuple(name for name in known if find_spec(name) is not None) or (known[0],)
