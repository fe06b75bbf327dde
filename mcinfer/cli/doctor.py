"""``mcinfer doctor``: checks whether this machine has what mcinfer needs; ``mcinfer devices``: its devices.

What can be tried is tried: a pool that starts says more than a limit that reads well. The ``judge_``
functions are pure. Imports that take long are in the functions, so that ``--help`` comes at once.
"""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import Annotated, Any, NamedTuple

import typer

from mcinfer import machine
from mcinfer.cli.options import DevicesOption
from mcinfer.cli.progress import counted
from mcinfer.config import (
    CARD_KINDS,
    CoreShare,
    Device,
    Timeouts,
    automatic_workers,
    parse_devices,
    share_cores,
)
from mcinfer.errors import EngineError, InvalidInputError, McinferError
from mcinfer.machine import Gpu
from mcinfer.process import environment, import_path

_TASKS_OF_A_MASTER = 8
_TASKS_OF_A_WORKER = 8
"""Threads beside those of the runs: the main one, the watch over the master, ZeroMQ's two; and some spare."""

_LIMIT_TO_ASK_FOR = 4096
"""The limit of descriptors or threads to advise, where fewer would do for now."""

_TIMEOUTS = Timeouts(start=30.0, predict=10.0)
_PROGRAM_SECONDS = 300.0
_ASK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
cuda = getattr(onnxruntime, "cuda_version", "")
print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers(), cuda or ""]))
"""
_OPEN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import mcinfer.ort as ort
session = ort.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"])
print(json.dumps([session.prepared, session.why_plain]))
"""
_MODEL = {
    "inputs": [["x", "float32", ["batch", 4]]],
    "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
}
"""For the engine "fake", which needs no runtime: a failure with it is not the runtime's."""

_FOR_DEVELOPERS = ("test", "check", "examples", "docs")
"""Extras for work on mcinfer itself."""


class Finding(NamedTuple):
    """What one check has found.

    Attributes:
        name: What was looked at.
        found: The facts.
        warning: What to do if mcinfer works, but not as well as it could, or something beside it does not.
        problem: What to do if no pool works, or none that has all of the CPU.
    """

    name: str
    found: str
    warning: str = ""
    problem: str = ""

    @property
    def state(self) -> str:
        return "problem" if self.problem else "warning" if self.warning else "ok"


def doctor(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL]...", help="ONNX models to open in another process."),
    ] = None,
) -> None:
    """Check whether this machine has what mcinfer needs, and say what to do where it has not.

    Of each MODEL it says whether sessions in several processes share its weights, or why not.
    """
    problems = 0
    for finding in chain(examine(), map(look_at_model, models or ())):
        problems += bool(finding.problem)
        advice = finding.problem or finding.warning
        text = f"{finding.name}: {finding.found}{advice and ' -> '}{advice}"
        print(f"{finding.state:8} {' '.join(text.split())}", flush=True)
    if problems:
        print(f"mcinfer: {counted(problems, 'problem')} found", file=sys.stderr)
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All checks, each when it is asked for. The last one starts a pool of one worker, and ends it."""
    cpus = machine.whole_cpus()
    workers = automatic_workers(cpus)
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "platform": look_at_platform,
        "limits": partial(look_at_limits, workers, cpus),
        "memory": look_at_memory,
        "runtime folder": look_at_runtime_folder,
        "cache": look_at_cache,
        "packages": look_at_packages,
        "onnxruntime": look_at_runtime,
        "pool": look_at_pool,
    }
    for name, look in looks.items():
        try:
            yield from look()
        except ModuleNotFoundError as exc:
            yield Finding(name, str(exc), problem="pip install 'mcinfer[cli]'")
        except (ImportError, OSError) as exc:  # such as no descriptor to look with
            yield Finding(name, f"cannot be looked at: {exc}", problem="see the checks before")


def look_at_model(model: Path) -> Finding:
    """Whether an inline session of a model shares its weights, by opening one in another process."""
    from mcinfer.model_cache.onnx_files import LOOK_BYTES, looks_like, open_regular

    try:
        key, why = _answer(_OPEN, "it cannot be opened", str(model))
    except EngineError as exc:
        found = str(exc)
        with suppress(McinferError, OSError), open_regular(model) as (descriptor, _):
            if kind := looks_like(os.pread(descriptor, LOOK_BYTES, 0)):
                found = f"it is {kind}, no model"
        return Finding(str(model), found, problem="name an ONNX model that ONNX Runtime loads")
    if key:
        return Finding(str(model), f"inline sessions share one copy of its weights, entry {key}")
    return Finding(str(model), f"each session has its own copy of the weights: {why}")


# The devices.


def devices(devices: DevicesOption = None) -> None:
    """The cores and GPUs of this machine, and the cores of each worker of a pool."""
    cores, cpus = sorted(os.sched_getaffinity(0)), machine.whole_cpus()
    parsed = parse_devices(devices, cpus)
    shares = share_cores(parsed, cores, cpus=cpus, near=machine.cores_near(parsed))
    try:
        found, why = machine.gpus(), ""
    except OSError as exc:
        found, why = (), f"no GPU was found: {exc}"
    for share in shares.values():
        if isinstance(share, InvalidInputError):
            raise share
    for device in parsed:
        if device.kind in CARD_KINDS and device.index >= len(found):
            why = why or f"the last device that was found is {device.kind}:{len(found) - 1}"
            raise InvalidInputError(f"device {device} does not exist: {why}")
    default = counted(automatic_workers(cpus), "worker")
    print(
        f"{counted(len(cores), 'usable core')}: {machine.format_core_list(cores)}; by default {default}"
    )
    for line in (*_cpu_lines(cores), *_gpu_lines(found, why)):
        print(line)
    for index, device in enumerate(parsed):
        print(f"worker {index}: {_share_text(device, shares.get(index))}")


def _cpu_lines(cores: list[int]) -> list[str]:
    lines = []
    sockets, physical = machine.core_siblings()
    if physical:
        belong = "belongs" if len(cores) == 1 else "belong"
        place = f"{counted(physical, 'physical core')} of {counted(sockets, 'socket')}"
        lines.append(f"  {belong} to {place}")
    nodes = machine.numa_nodes().items()
    lines += [
        f"  NUMA node {node}: {machine.format_core_list(mine)}" for node, mine in nodes if mine
    ]
    return [*lines, f"  CPU quota: {quota_text(machine.cpu_quota(), len(cores))}"]


def quota_text(quota: float | None, cores: int) -> str:
    """A quota of CPUs' worth of time, and what is left by it of so many cores."""
    if quota is None:
        return "none"
    threads = counted(max(1, int(quota)), "thread")
    left = f"{threads} at a time" if quota < cores else "no fewer than there are cores"
    return f"{quota:g} CPUs, {left}"


def _gpu_lines(found: Sequence[Gpu], why: str) -> Iterator[str]:
    if not found:
        yield why
        return
    yield from map(str, found)
    yield f"  {software_text(found[0].driver, machine.driver_cuda_version(), machine.mps_folder())}"
    if doubt := machine.gpu_order_doubt(len(found)):
        yield f"  {doubt}"
    with suppress(EngineError):
        if text := installed_runtime().without_cuda:
            yield f"  {text}"


def _share_text(device: Device, share: CoreShare | InvalidInputError | None) -> str:
    if not isinstance(share, CoreShare):
        return f"{device}, not pinned to cores"
    cores = f"core{'s' if len(share.cores) > 1 else ''} {machine.format_core_list(share.cores)}"
    threads = counted(share.threads or len(share.cores), "thread")
    return f"{device}, {cores}{', shared' if share.shared else ''}, {threads}"


# The platform.


def look_at_platform() -> Iterator[Finding]:
    found = f"Python {platform.python_version()}, {platform.platform()}"
    advice = "" if platform.system() == "Linux" else "mcinfer runs on Linux alone"
    yield Finding("platform", found, problem=advice)
    from mcinfer.shm.block import Block

    needed: dict[str, tuple[str, Callable[[], None]]] = {
        "memfd_create with seals": (
            "Linux 3.17 or newer",
            lambda: Block.create(0, resource.getpagesize()).close(),
        ),
        "pidfd_open": ("Linux 5.3 or newer", lambda: os.close(os.pidfd_open(os.getpid()))),
    }
    for name, (needs, attempt) in needed.items():
        found, advice = "works", ""
        try:
            attempt()
        except (OSError, AttributeError) as exc:  # the latter: Python was built without it
            found = str(exc)
            advice = f"it takes {needs}, and a seccomp profile (of a container) that allows it"
        yield Finding(name, found, problem=advice)


# Limits.


def look_at_limits(workers: int, cpus: int) -> Iterator[Finding]:
    """The open files of a process, and the threads of this user and of the container."""
    import psutil

    from mcinfer.runtime.connections import DESCRIPTORS_TO_OPEN
    from mcinfer.runtime.worker_process import WorkerProcess

    pool = counted(workers, "worker")
    needed = DESCRIPTORS_TO_OPEN + WorkerProcess.descriptors * workers
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    others = "Docker: --ulimit nofile={0}, systemd: LimitNOFILE={0}"
    yield judge_limit("open files", limits, used, needed, f"starting {pool}", "ulimit -n", others)

    needed = _TASKS_OF_A_MASTER + _TASKS_OF_A_WORKER * workers + cpus
    limits, used = (resource.RLIM_INFINITY, resource.RLIM_INFINITY), 0
    if os.geteuid() != 0:  # the limit of a user does not bind root (getrlimit(2))
        limits = resource.getrlimit(resource.RLIMIT_NPROC)
        for process in psutil.process_iter(["uids", "num_threads"]):
            mine = process.info["uids"] and process.info["uids"].real == os.getuid()
            used += process.info["num_threads"] or 0 if mine else 0
    others = "systemd: LimitNPROC={0}"
    name = "threads of the user"
    yield judge_limit(name, limits, used, needed, f"a pool of {pool}", "ulimit -u", others)
    most, used = machine.task_limit() or (resource.RLIM_INFINITY, 0)
    others = "Docker: --pids-limit {0}, systemd: TasksMax={0}"
    name = "threads of the container"
    yield judge_limit(name, (most, most), used, needed, f"a pool of {pool}", "", others)


def judge_limit(
    name: str,
    limits: tuple[int, int],
    used: int,
    needed: int,
    what: str,
    command: str,
    others: str,
) -> Finding:
    """Compare a soft and a hard limit with the need of a pool; as much again is for the program and requests.

    `command` raises the soft limit up to the hard one; `others` are other ways, with ``{0}`` for the number.
    """
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in limits)
    if soft == sys.maxsize:
        return Finding(name, "no limit")
    found = f"limit {soft}, {used} in use; {what} takes about {needed} more"
    least = used + 2 * needed
    wanted = max(least, _LIMIT_TO_ASK_FOR)
    advice = f"a higher limit, which takes root: {others.format(wanted)}"
    if command and hard >= least:
        advice = f"{command} {min(wanted, hard)} ({others.format(wanted)})"
    if soft - used < needed:
        return Finding(name, found, problem=advice)
    return Finding(name, found, warning=advice if soft < least else "")


# Memory and processors.


def look_at_memory() -> Iterator[Finding]:
    """Memory, ``vm.overcommit_memory`` (the kernel's mm/overcommit-accounting.rst), and the CPU quota."""
    import psutil

    memory = psutil.virtual_memory()
    yield judge_memory(
        memory.total, machine.memory_limit(), machine.usable_memory(), memory.available
    )
    mode = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    found, advice = f"mode {mode}: memory may be reserved that is not used", ""
    if mode == "2":
        found = "mode 2: memory that is reserved counts, and runtimes reserve more than they use"
        advice = "sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio"
    yield Finding("overcommit", found, advice)
    yield judge_cpus(len(os.sched_getaffinity(0)), machine.cpu_quota())


def judge_memory(total: int, limit: int | None, usable: int, available: int) -> Finding:
    """Bytes: the machine's, the control group's limit, the less of both, and what is free.

    The pages of a memfd are charged to the control group that touched them first (``shmem`` of
    ``memory.stat``, admin-guide/cgroup-v2.rst).
    """
    whose = "all of the machine's" if limit is None or limit >= total else "a container's limit"
    free = min(available, usable)
    found = (
        f"{_size(usable)}, {whose}; {_size(free)} free. A pool's tensors may take half, in memfds, "
        "which count as any other memory does"
    )
    advice = "end what takes the memory, or have tensors take less: Limits(memory_bytes=…)"
    return Finding("memory", found, advice if free < usable // 2 else "")


def judge_cpus(cores: int, quota: float | None) -> Finding:
    """The usable cores, and a quota in CPUs' worth of time."""
    usable = counted(cores, "usable core")
    if quota is None or quota >= cores:
        return Finding("CPU quota", f"none below the {usable}")
    found = f"{quota:g} CPUs' worth of time on {usable}"
    if quota >= 1:
        return Finding("CPU quota", f"{found}; pools have no more threads than that by default")
    found = f"{found}: even a single thread stands still for a part of each period"
    return Finding(
        "CPU quota", found, "a quota of 1 or more (Docker: --cpus, Kubernetes: limits.cpu)"
    )


# Folders.


def look_at_runtime_folder() -> Iterator[Finding]:
    """The folder of a pool's socket; ``$XDG_RUNTIME_DIR`` is the first choice."""
    from mcinfer.runtime.transport import RuntimeFolder

    wanted = os.environ.get("XDG_RUNTIME_DIR")
    advice = "let XDG_RUNTIME_DIR or TMPDIR name a folder that you can write to, and others cannot"
    try:
        with RuntimeFolder() as folder:
            place = folder.place
    except OSError as exc:
        yield Finding("runtime folder", str(exc), problem=advice)
        return
    if not wanted or place == Path(wanted):
        yield Finding("runtime folder", str(place))
    else:
        found = f"{place}; XDG_RUNTIME_DIR, {wanted}, cannot be used"
        yield Finding("runtime folder", found, advice)


def look_at_cache() -> Iterator[Finding]:
    """The folder of prepared models; if it cannot be used, models are loaded as they are."""
    from mcinfer.model_cache.cache import Cache, CacheUnusableError, unusable
    from mcinfer.private import opened_folder

    missing: list[Path] = []  # made as for the first model, and removed again
    try:
        cache = Cache.default()
        path = cache.folder
        mode = path.stat().st_mode & 0o7777 if path.exists() else None
        missing += [folder for folder in (path, *path.parents) if not folder.exists()]
        with (
            unusable(path),
            opened_folder(path, own=True, make=0o700) as folder,
            TemporaryFile(dir=folder),
        ):
            pass
        used = sum(info.bytes for info in cache.entries())
        yield judge_cache(path, mode, cache.limit_bytes, used, shutil.disk_usage(path).free)
    except InvalidInputError as exc:
        advice = "set the variable to such a value, or unset it"
        yield Finding("cache", str(exc), problem=advice)
    except (CacheUnusableError, OSError) as exc:
        advice = (
            "let MCINFER_CACHE name a folder that can be made, has room, and that you alone can change; "
            "without it each worker has the weights of a large model for itself"
        )
        yield Finding("cache", str(exc), advice)
    finally:
        for folder in missing:
            with suppress(OSError):  # it was not made, or it is in use by now
                folder.rmdir()


def judge_cache(folder: Path, mode: int | None, limit: int, used: int, free: int) -> Finding:
    """The folder, its mode (None: not made yet), and bytes: its limit, its content, the disk's free ones."""
    state = "not made yet" if mode is None else f"yours, mode {mode:04o}"
    found = f"{folder}, {state}; {_size(used)} of at most {_size(limit)}, {_size(free)} of the disk free"
    advice = ""
    if not free:
        advice = "make room there, or let MCINFER_CACHE name a folder on a disk with room"
    elif used + free < limit:
        found = f"{found}: prepared models may fill the disk"
        advice = (
            f"set MCINFER_CACHE_LIMIT to less than the {_size(used + free)} that are left for it"
        )
    return Finding("cache", found, advice)


# Packages, the runtime, GPUs.


def look_at_packages() -> Iterator[Finding]:
    """The packages that mcinfer and its extras need, as its own metadata names them."""
    try:
        own = metadata.distribution("mcinfer")
    except metadata.PackageNotFoundError:
        found = "mcinfer is not installed, so which packages it needs is not known"
        advice = "pip install mcinfer, or pip install --editable its folder"
        yield Finding("packages", found, advice)
        return
    versions = {each.name: each.version for each in metadata.distributions()}
    extras = own.metadata.get_all("Provides-Extra") or []
    extras = [name for name in extras if name not in _FOR_DEVELOPERS]
    yield from judge_packages(own.version, own.requires or [], extras, versions.get)


def judge_packages(
    own: str, requires: Sequence[str], extras: Sequence[str], installed: Callable[[str], str | None]
) -> Iterator[Finding]:
    """The packages that nothing works without; which extras are installed, and what of them is too old.

    `requires` are the requirements of mcinfer and its extras (PEP 508); `installed` gives versions.
    """
    from packaging.requirements import Requirement

    parsed = [r for r in map(Requirement, requires) if r.name != "mcinfer"]
    versions = {r.name: installed(r.name) for r in parsed}

    def wanted(extra: str) -> list[Requirement]:
        return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": extra})]

    def unmet(requirements: Sequence[Requirement]) -> list[Requirement]:
        found = [(r, versions[r.name]) for r in requirements]
        return [r for r, v in found if v is None or not r.specifier.contains(v, prereleases=True)]

    def advice(requirements: Sequence[Requirement]) -> str:
        words = [f" '{r.name}{r.specifier}'" for r in requirements]
        return f"pip install{''.join(words)}" if words else ""

    needed = wanted("")
    known = [f"{r.name} {versions[r.name] or 'is missing'}" for r in needed]
    text = ", ".join([f"mcinfer {own}", *known])
    yield Finding("packages", text, problem=advice(unmet(needed)))
    amiss = {extra: unmet([r for r in wanted(extra) if r not in needed]) for extra in extras}
    there = ", ".join(extra for extra in extras if not amiss[extra])
    absent = ", ".join(extra for extra in extras if amiss[extra])
    old = {r.name: r for rs in amiss.values() for r in rs if versions[r.name]}
    text = f"installed: {there or 'none'}; not installed: {absent or 'none'}"
    if old:
        text += f"; too old: {', '.join(f'{name} {versions[name]}' for name in old)}"
    yield Finding("extras", text, advice([*old.values()]))


class InstalledRuntime(NamedTuple):
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
    """ONNX Runtime, imported in a child: a process keeps what it imports.

    `EngineError`: it cannot be imported; has the last line of the error.
    """
    version, providers, cuda = _answer(_ASK, "onnxruntime cannot be imported")
    return InstalledRuntime(version, providers, cuda)


def _answer(code: str, failed: str, *arguments: str) -> list[Any]:
    """What a program prints as JSON; its first argument is the import path.

    Raises:
        EngineError: It did not end in time, or not well: `failed`, and its last line.
    """
    try:
        ran = subprocess.run(  # noqa: S603 nothing in it comes from outside
            [sys.executable, "-P", "-c", code, json.dumps(import_path()), *arguments],
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


def look_at_runtime() -> Iterator[Finding]:
    """ONNX Runtime as a worker would import it, and the GPUs that it can use."""
    runtime = None
    try:
        runtime = installed_runtime()
        yield Finding("onnxruntime", str(runtime).removeprefix("onnxruntime "))
    except EngineError as exc:
        advice = (
            "pip install 'mcinfer[cpu]', or 'mcinfer[gpu]' for NVIDIA GPUs, not both; "
            "before that pip uninstall onnxruntime onnxruntime-gpu, if one is broken"
        )
        yield Finding("onnxruntime", str(exc), problem=advice)
    try:
        found, cuda = machine.gpus(), machine.driver_cuda_version()
    except OSError as exc:
        yield Finding("GPUs", f"none was found: {exc}")
    else:
        yield judge_gpus(
            found, machine.gpu_order_doubt(len(found)), runtime, cuda, machine.mps_folder()
        )


def judge_gpus(
    found: Sequence[Gpu], order: str, runtime: InstalledRuntime | None, cuda: str, mps: Path | None
) -> Finding:
    """The GPUs, and whether the runtime can use them.

    `order` is a doubt about their order, or an empty text; `cuda` the newest version that the driver serves,
    empty if unknown; `mps` the folder of a daemon that runs.
    """
    software = software_text(found[0].driver, cuda, mps)
    text = "; ".join(filter(None, [*map(str, found), software, order]))
    if runtime is not None and runtime.without_cuda:
        advice = "to use them: pip uninstall onnxruntime, then pip install 'mcinfer[gpu]'"
        return Finding("GPUs", f"{text}; {runtime.without_cuda}", advice)
    advice, mode = "", "nvidia-smi --compute-mode=DEFAULT, which takes root"
    served, built = (
        int(version.partition(".")[0] or 0) for version in (cuda, runtime.cuda if runtime else "")
    )
    if 0 < served < built:
        advice = f"a driver that serves CUDA {built}, as onnxruntime was built with it"
    elif names := _in_mode(found, "Prohibited"):
        advice = f"{names} may not be used: {mode}"
    elif mps is None and (names := _in_mode(found, "Exclusive")):
        advice = f"one process alone may use {names}: {mode}, or MPS"
    return Finding("GPUs", text, advice)


def _in_mode(found: Sequence[Gpu], mode: str) -> str:
    return ", ".join(f"cuda:{gpu.index}" for gpu in found if gpu.compute_mode.startswith(mode))


def software_text(driver: str, cuda: str, mps: Path | None) -> str:
    """What serves the GPUs: the driver, the newest CUDA that it serves, and the MPS daemon's folder."""
    serves = f", up to CUDA {cuda}" if cuda else ""
    shares = "no MPS: processes of one GPU take turns" if mps is None else f"MPS runs, in {mps}"
    return f"driver {driver or 'unknown'}{serves}; {shares}"


# The pool.


def look_at_pool() -> Iterator[Finding]:
    """Start a worker, run a request on it, and end it."""
    from mcinfer.master import Master

    start = monotonic()
    try:
        model = json.dumps(_MODEL).encode()
        with Master(model, 1, engine="fake", timeouts=_TIMEOUTS) as master:
            ready = monotonic() - start
            answer = master.predict({"x": [[1.0, 2.0, 3.0, 4.0]]})["y"].tolist()
        if answer != [[3.0, 5.0, 7.0, 9.0]]:
            raise EngineError(f"the answer is wrong: {answer}")
    except (McinferError, OSError) as exc:
        advice = "mend the problems above; without any, the error itself says what to look for"
        yield Finding("pool", str(exc), problem=advice)
    else:
        seconds = monotonic() - start
        text = f"1 worker started ({ready:.2f} s), answered and ended, {seconds:.2f} s in all"
        yield Finding("pool", text)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
