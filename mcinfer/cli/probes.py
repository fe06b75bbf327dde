"""What ``mcinfer doctor``, its report and ``mcinfer devices`` ask of this machine and its runtimes.

A runtime is asked in a child: a process keeps what it imports.
"""

import json
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcinfer.cards import nvidia_smi
from mcinfer.cards.nvidia_smi import Gpu
from mcinfer.errors import EngineError
from mcinfer.process import command, environment, import_path

_PROGRAM_SECONDS = 300.0
_SMI_SECONDS = 10.0
_ASK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
cuda = getattr(onnxruntime, "cuda_version", "")
print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers(), cuda or ""]))
"""
_ASK_OPENVINO = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["openvino_telemetry"] = None  # it would send an event
import openvino
core = openvino.Core()
names = [f"{name} ({core.get_property(name, 'FULL_DEVICE_NAME')})" for name in core.available_devices]
print(json.dumps([openvino.__version__, names]))
"""


@dataclass(frozen=True, slots=True)
class InstalledRuntime:
    """ONNX Runtime as it is installed; the libraries that its providers need may be missing all the same.

    Attributes:
        cuda: The version of CUDA that it was built with; empty for a build without.
    """

    version: str
    providers: Sequence[str]
    cuda: str = ""

    def __str__(self) -> str:
        build = f", built with CUDA {self.cuda}," if self.cuda else ""
        return f"onnxruntime {self.version}{build} offers: {', '.join(self.providers)}"

    @property
    def without_cuda(self) -> str:
        """The message where there are GPUs, and it cannot use them; else an empty text."""
        if "CUDAExecutionProvider" in self.providers:
            return ""
        return f"onnxruntime {self.version} has no CUDAExecutionProvider: it runs nothing on them"


def installed_runtime() -> InstalledRuntime:
    """ONNX Runtime.

    Raises:
        EngineError: It cannot be imported; has the last line of the error.
    """
    version, providers, cuda = answer(_ASK, "onnxruntime cannot be imported")
    return InstalledRuntime(version, providers, cuda)


def answer(code: str, failed: str, *arguments: str) -> list[Any]:
    """What a program prints as JSON; its first argument is the import path.

    Raises:
        EngineError: It did not end in time, or not well: `failed`, and its last line.
    """
    try:
        ran = subprocess.run(  # noqa: S603 nothing in it comes from outside
            command("-c", code, json.dumps(import_path()), *arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROGRAM_SECONDS,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as exc:
        raise EngineError(f"{failed}: {exc}") from exc
    try:
        answer: list[Any] = json.loads(ran.stdout)
    except ValueError:
        words = ran.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(words) if line.strip()), f"status {ran.returncode}")
        raise EngineError(f"{failed}: {last.strip()}") from None
    return answer


def installed_openvino() -> tuple[str, list[str]]:
    """OpenVINO's version and its devices; raises as `installed_runtime`."""
    version, names = answer(_ASK_OPENVINO, "openvino cannot be imported")
    return version, names


@dataclass(frozen=True, slots=True)
class Driver:
    """What serves the GPUs; its text is the driver's version, and whether MPS runs.

    Attributes:
        cuda: The newest version of CUDA that it serves; empty if it does not say.
        mps: The folder of an MPS daemon that runs.
    """

    version: str
    cuda: str = ""
    mps: str | None = None

    def __str__(self) -> str:
        serves = f", up to CUDA {self.cuda}" if self.cuda else ""
        mps = "no MPS: processes of one GPU take turns"
        if self.mps is not None:
            mps = f"MPS runs, in {self.mps}"
        return f"driver {self.version or 'unknown'}{serves}; {mps}"


def gpus_and_driver() -> tuple[Sequence[Gpu], Driver]:
    """The GPUs of this machine, at least one; raises as `mcinfer.cards.nvidia_smi.gpus` does."""
    found, match = nvidia_smi.gpus(), None
    with suppress(OSError):  # the cards are there, whatever becomes of a second question
        # No field of a query has it; it stands above every report of ``nvidia-smi -q``.
        report = nvidia_smi.ask(_SMI_SECONDS, "--query", "--display=COMPUTE")
        match = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d[\d.]*)", report)
    return found, Driver(found[0].driver, match[1] if match else "", mps_folder())


def mps_folder() -> str | None:
    """The folder of the MPS daemon that CUDA would use in this process; None if none answers.

    CUDA asks the same way, at its first call: it connects to the daemon's socket, and does without MPS if it
    cannot (nvidia-cuda-mps-control(1)).
    """
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108 its default
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.settimeout(1.0)
        try:
            daemon.connect(f"{folder}/control")
        except OSError:  # as for CUDA, whatever the reason
            return None
    return folder


def gpu_order_doubt(count: int) -> str:
    """A warning if the numbers of GPUs may not be CUDA's, which counts the fastest first.

    See the CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if count < 2 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ""
    return "numbered by bus; CUDA's order may be another one, unless CUDA_DEVICE_ORDER=PCI_BUS_ID"


def numa_nodes(root: Path = Path("/")) -> dict[int, tuple[int, ...]]:
    """By NUMA node, its cores that this process may use (``cpulist``); empty if the kernel knows none."""
    usable = os.sched_getaffinity(0)
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = parse_core_list((folder / "cpulist").read_text("ascii"))
        nodes[int(folder.name.removeprefix("node"))] = tuple(c for c in cores if c in usable)
    return dict(sorted(nodes.items()))


def parse_core_list(text: str) -> tuple[int, ...]:
    """Read the kernel's format of a list of cores, ``0-3,8`` (admin-guide/cputopology.rst)."""
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def core_siblings(root: Path = Path("/")) -> tuple[int, int]:
    """How many sockets and physical cores have this process's cores; (0, 0) if unknown (cputopology.rst)."""
    names = ("physical_package_id", "thread_siblings_list")
    cores = [root / f"sys/devices/system/cpu/cpu{i}/topology" for i in os.sched_getaffinity(0)]
    try:
        sockets, physical = ({(core / name).read_bytes() for core in cores} for name in names)
    except OSError:
        return 0, 0
    return len(sockets), len(physical)
