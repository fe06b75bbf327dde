"""``mcinfer doctor --report``: what a bug report has to say about this machine, ready to paste.

No names of users or machines and no paths are in it: a report is public. So errors are not quoted either, and
of the variables it has the names alone.
"""

import json
import os
import platform
import resource
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mcinfer import __version__, machine
from mcinfer.cli import probes
from mcinfer.engines.names import PACKAGES
from mcinfer.errors import EngineError
from mcinfer.extras import version_of

_PACKAGES = (
    *("numpy", "pyzmq", "msgpack", "psutil"),
    *PACKAGES,
    *("onnx", "ml_dtypes", "cuda-bindings", "cupy-cuda12x", "cupy-cuda13x"),
    *("diffusers", "torch", "mpi4py", "ray"),
    *("typer", "rich", "uvicorn", "uvloop", "grpcio", "protobuf"),
    *("prometheus_client", "opentelemetry-api"),
)
_BROKEN = "cannot be imported"
_ASK_LIBZMQ = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import zmq
print(json.dumps([zmq.zmq_version()]))
"""


def as_markdown() -> str:
    """A fenced block of Markdown with a fact on each line."""
    return "\n".join(["```text", *(f"{name}: {fact}" for name, fact in facts()), "```"])


def facts() -> Iterator[tuple[str, str]]:
    """What is installed, then the machine; each fact is one line of text."""
    yield "mcinfer", f"{__version__}, {_kind_of_install()}"
    yield "Python", _python()
    versions = ((name, version_of(name)) for name in _PACKAGES)
    yield "packages", ", ".join(f"{name} {version}" for name, version in versions if version)
    yield "libzmq", _libzmq()
    yield "ONNX Runtime", _runtime()
    if find_spec("openvino") is not None:
        yield "OpenVINO", _openvino()
    yield "system", _system()
    yield "CPU", f"{machine.cpu_model()}, {_cores()}"
    yield "memory", _memory()
    yield "control groups", _control_groups()
    yield "open files", " of at most ".join(map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE)))
    yield from _cards()
    set_ones = sorted(name for name in os.environ if name.startswith("MCINFER_"))
    yield "variables", ", ".join(set_ones) or "none of MCINFER_*"


def _kind_of_install() -> str:
    """How this package was installed: ``direct_url.json`` (PEP 610) says so, unless it came from an index."""
    try:
        own = metadata.distribution("mcinfer")
    except metadata.PackageNotFoundError:
        return "not installed"
    source = json.loads(own.read_text("direct_url.json") or "{}")
    folder, kind = Path(str(own.locate_file(""))), "installed from an index"
    if source.get("dir_info", {}).get("editable"):
        folder, kind = Path(unquote(urlsplit(source["url"]).path)), "an editable install"
    elif source:
        kind = f"installed from a {'folder' if 'dir_info' in source else 'file'}"
    here = Path(__file__).resolve().parents[2] == folder.resolve()
    return kind if here and own.read_text("RECORD") else "run from its folder"


def _python() -> str:
    gil = "free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else "with the GIL"
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{version}, {gil}, built by {platform.python_compiler()}"


def _libzmq() -> str:
    try:
        return str(*probes.answer(_ASK_LIBZMQ, _BROKEN))
    except EngineError:
        return _BROKEN


def _runtime() -> str:
    try:
        return str(probes.installed_runtime()).removeprefix("onnxruntime ")
    except EngineError:
        return _BROKEN


def _openvino() -> str:
    try:
        version, names = probes.installed_openvino()
    except EngineError:
        return _BROKEN
    return f"{version} has: {', '.join(names)}"


def _system() -> str:
    name = platform.system()
    with suppress(OSError, KeyError):  # a system without /etc/os-release
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    libc = " ".join(platform.libc_ver()).strip() or "unknown"
    return f"{name}, {platform.machine()}, kernel {platform.release()}, libc {libc}"


def _cores() -> str:
    import psutil

    usable = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable"
    return f"{usable}, {psutil.cpu_count(logical=False) or 'unknown'} physical ones"


def _memory() -> str:
    usable, mode = machine.usable_memory(), Path("/proc/sys/vm/overcommit_memory")
    text = f"{_gib(usable)} usable"
    with suppress(OSError):
        text += f", overcommit mode {mode.read_text(encoding='ascii').strip()}"
    return text


def _control_groups() -> str:
    quota, memory, tasks = machine.cpu_quota(), machine.memory_limit(), machine.task_limit()
    limits = [
        "" if quota is None else f"{quota:g} CPUs",
        "" if memory is None or memory > machine.usable_memory() else f"{_gib(memory)} of memory",
        "" if tasks is None else f"{tasks[0]} threads",
    ]
    return ", ".join(filter(None, limits)) or "no limits that can be seen"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _limit(value: int) -> str:
    return "any number" if value == resource.RLIM_INFINITY else str(value)


def _cards() -> Iterator[tuple[str, str]]:
    try:
        cards, driver = probes.gpus_and_driver()
    except FileNotFoundError:
        yield "cards", "there is no nvidia-smi"
    except OSError:
        yield "cards", "nvidia-smi names none that can be used"
    else:
        yield from ((f"cuda:{card.index}", str(card).partition(": ")[2]) for card in cards)
        mps = "runs" if driver.mps is not None else "does not run"
        yield "driver", f"{driver.version}, up to CUDA {driver.cuda or 'unknown'}, MPS {mps}"
