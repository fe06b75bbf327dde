"""What a benchmark ran on, and what it ran: for its report."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from mcinfer.bench.report import Model
from mcinfer.errors import McinferError
from mcinfer.model_cache.onnx_files import scan
from mcinfer.specs import ModelSpec

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "numpy", "pyzmq", "msgpack")


def machine() -> dict[str, str | int | float]:
    """Processor, cores, memory, load and versions; no names, no paths."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: number for name, number in versions.items() if number},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def describe_model(path: Path, spec: ModelSpec) -> Model:
    """The model for the report."""
    return Model(
        name=path.name,
        bytes=_model_bytes(path),
        inputs=tuple(map(str, spec.inputs)),
        outputs=tuple(map(str, spec.outputs)),
    )


def _model_bytes(path: Path) -> int:
    """Of the file, and of the files beside it that hold its weights."""
    files = [path]
    try:
        files += [path.parent / name for name in scan(path).external]
        return sum(file.stat().st_size for file in files)
    except (McinferError, OSError):  # no ONNX file, or it is a folder
        return path.stat().st_size
