"""``mcinfer doctor``: checks whether this machine has what mcinfer needs; ``mcinfer devices``: its devices.

What can be tried is tried: a pool that starts says more than a limit that reads well. Imports that take long
are in the functions, so that ``--help`` comes at once.
"""

import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import Annotated, NamedTuple

import typer

from mcinfer import machine
from mcinfer.cards.nvidia_smi import Gpu
from mcinfer.cli.options import DevicesOption
from mcinfer.cli.probes import (
    Driver,
    InstalledRuntime,
    answer,
    core_siblings,
    gpu_order_doubt,
    gpus_and_driver,
    installed_openvino,
    installed_runtime,
    numa_nodes,
)
from mcinfer.cli.progress import counted
from mcinfer.config import (
    CARD_KIND,
    CoreShare,
    Timeouts,
    automatic_workers,
    parse_devices,
    share_cores,
)
from mcinfer.engines.names import DEFAULT_ENGINE, ENGINES
from mcinfer.errors import EngineError, InvalidInputError, McinferError
from mcinfer.extras import install, version_of

_TASKS_OF_A_MASTER = 8
_TASKS_OF_A_WORKER = 8
"""Threads beside those of the runs: the main one, the watch over the master, ZeroMQ's two; and some spare."""

_LIMIT_TO_ASK_FOR = 4096
"""The limit of descriptors or threads to advise, where fewer would do for now."""

_TIMEOUTS = Timeouts(start=30.0, predict=10.0)
_OPEN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import mcinfer.ort as ort
session = ort.InferenceSession(sys.argv[2], providers=["CPUExecutionProvider"], prepare="wait")
print(json.dumps([session.prepared, session.why_plain]))
"""
_MODEL = {
    "inputs": [["x", "float32", ["batch", 4]]],
    "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
}
"""For the engine "fake", which needs no runtime: a failure with it is not the runtime's."""

_FOLDER_ADVICE = (
    "let XDG_RUNTIME_DIR or TMPDIR name a folder that you can write to, and others cannot"
)
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
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Print versions and facts to paste into a bug report instead; no names, no paths.",
        ),
    ] = False,
) -> None:
    """Check whether this machine has what mcinfer needs, and say what to do where it has not.

    Of each MODEL it says whether sessions in several processes share its weights, or why not.
    """
    if report:
        if models:
            raise typer.BadParameter("--report takes no MODEL")
        from mcinfer.cli.report import as_markdown

        print(as_markdown())
        return
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
    looks: dict[str, tuple[Callable[[], Iterator[Finding]], str]] = {
        "platform": (look_at_platform, ""),
        "limits": (partial(look_at_limits, automatic_workers(cpus), cpus), ""),
        "memory": (look_at_memory, ""),
        "runtime folder": (look_at_runtime_folder, _FOLDER_ADVICE),
        "cache": (look_at_cache, "set the variable to such a value, or unset it"),
        "packages": (look_at_packages, ""),
        "onnxruntime": (look_at_runtime, ""),
        "openvino": (look_at_openvino, ""),
        "pool": (
            look_at_pool,
            "mend the problems above; without any, the error itself says what to look for",
        ),
    }
    for name, (look, advice) in looks.items():
        try:
            yield from look()
        except ModuleNotFoundError as exc:
            yield Finding(name, str(exc), problem=install("cli"))
        except (ImportError, McinferError, OSError) as exc:  # such as no descriptor to look with
            found = str(exc) if advice else f"cannot be looked at: {exc}"
            yield Finding(name, found, problem=advice or "see the checks before")


def look_at_model(model: Path) -> Finding:
    """Whether an inline session of a model shares its weights, by opening one in another process."""
    from mcinfer.model_cache.onnx_files import looks_like

    try:
        key, why = answer(_OPEN, "it cannot be opened", str(model))
    except EngineError as exc:
        found = str(exc)
        if kind := looks_like(model):
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
    shares = share_cores(parsed, cores, cpus=cpus)
    found: Sequence[Gpu] = ()
    try:
        found, driver = gpus_and_driver()
        why, remarks = "", [str(driver), gpu_order_doubt(len(found))]
        with suppress(EngineError):
            remarks.append(installed_runtime().without_cuda)
        lines = [*map(str, found), *(f"  {text}" for text in remarks if text)]
    except OSError as exc:
        why = f"no GPU was found: {exc}"
        lines = [why]
    for device in parsed:
        if device.kind == CARD_KIND and device.index >= len(found):
            why = why or f"the last device that was found is {device.kind}:{len(found) - 1}"
            raise InvalidInputError(f"device {device} does not exist: {why}")
    listed = machine.format_core_list(cores)
    default = counted(automatic_workers(cpus), "worker")
    print(f"{counted(len(cores), 'usable core')}: {listed}; by default {default}")
    sockets, physical = core_siblings()
    if physical:
        belong = "belongs" if len(cores) == 1 else "belong"
        print(f"  {belong} to {counted(physical, 'physical core')} of {counted(sockets, 'socket')}")
    for node, mine in numa_nodes().items():
        if mine:
            print(f"  NUMA node {node}: {machine.format_core_list(mine)}")
    print(f"  CPU quota: {quota_text(machine.cpu_quota(), len(cores))}", *lines, sep="\n")
    for index, device in enumerate(parsed):
        place = "not pinned to cores"
        own = shares.get(index)
        if isinstance(own, CoreShare):
            cores_text = f"core{'s' if len(own.cores) > 1 else ''}"
            shared = ", shared" if own.shared else ""
            threads = counted(own.threads or len(own.cores), "thread")
            place = f"{cores_text} {machine.format_core_list(own.cores)}{shared}, {threads}"
        print(f"worker {index}: {device}, {place}")


def quota_text(quota: float | None, cores: int) -> str:
    """A quota of CPUs' worth of time, and what is left by it of so many cores."""
    if quota is None:
        return "none"
    threads = counted(max(1, int(quota)), "thread")
    left = f"{threads} at a time" if quota < cores else "no fewer than there are cores"
    return f"{quota:g} CPUs, {left}"


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
    from mcinfer.runtime.connections import DESCRIPTORS_TO_OPEN
    from mcinfer.runtime.worker_process import WorkerProcess

    pool, no_limit = counted(workers, "worker"), resource.RLIM_INFINITY
    users, used = (no_limit, no_limit), 0
    if own := machine.user_task_limit():
        users, used = resource.getrlimit(resource.RLIMIT_NPROC), own[1]
    most, running = machine.task_limit() or (no_limit, 0)
    tasks = _TASKS_OF_A_MASTER + _TASKS_OF_A_WORKER * workers + cpus
    yield judge_limit(
        "open files",
        resource.getrlimit(resource.RLIMIT_NOFILE),
        len(os.listdir("/proc/self/fd")),
        DESCRIPTORS_TO_OPEN + WorkerProcess.descriptors * workers,
        f"starting {pool}",
        "ulimit -n",
        "Docker: --ulimit nofile={0}, systemd: LimitNOFILE={0}",
    )
    for name, limits, count, raising, others in (
        ("user", users, used, "ulimit -u", "systemd: LimitNPROC={0}"),
        ("container", (most,) * 2, running, "", "Docker: --pids-limit {0}, systemd: TasksMax={0}"),
    ):
        what = f"a pool of {pool}"
        yield judge_limit(f"threads of the {name}", limits, count, tasks, what, raising, others)


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
    """Memory, ``vm.overcommit_memory`` (the kernel's mm/overcommit-accounting.rst), and the CPU quota.

    The pages of a memfd are charged to the control group that touched them first (``shmem`` of
    ``memory.stat``, admin-guide/cgroup-v2.rst).
    """
    import psutil

    memory, limit, usable = psutil.virtual_memory(), machine.memory_limit(), machine.usable_memory()
    whose = "a container's limit"
    if limit is None or limit >= memory.total:
        whose = "all of the machine's"
    free = min(memory.available, usable)
    found = (
        f"{_size(usable)}, {whose}; {_size(free)} free. A pool's tensors may take half, in memfds, "
        "which count as any other memory does"
    )
    advice = "end what takes the memory, or have tensors take less: Limits(memory_bytes=…)"
    yield Finding("memory", found, advice if free < usable // 2 else "")

    mode = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    what, advice = "memory may be reserved that is not used", ""
    if mode == "2":
        what = "memory that is reserved counts, and runtimes reserve more than they use"
        advice = "sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio"
    yield Finding("overcommit", f"mode {mode}: {what}", advice)

    cores, quota = len(os.sched_getaffinity(0)), machine.cpu_quota()
    usable_cores = counted(cores, "usable core")
    found, advice = f"none below the {usable_cores}", ""
    if quota is not None and quota < cores:
        found = f"{quota:g} CPUs' worth of time on {usable_cores}"
        if quota >= 1:
            found += "; pools have no more threads than that by default"
        else:
            found += ": even a single thread stands still for a part of each period"
            advice = "a quota of 1 or more (Docker: --cpus, Kubernetes: limits.cpu)"
    yield Finding("CPU quota", found, advice)


# Folders.


def look_at_runtime_folder() -> Iterator[Finding]:
    """The folder of a pool's socket; ``$XDG_RUNTIME_DIR`` is the first choice."""
    from mcinfer.runtime.transport import runtime_folder

    with runtime_folder() as folder:
        found, advice = str(folder.place), ""
    wanted = os.environ.get("XDG_RUNTIME_DIR")
    if wanted and Path(found) != Path(wanted):
        found, advice = f"{found}; XDG_RUNTIME_DIR, {wanted}, cannot be used", _FOLDER_ADVICE
    yield Finding("runtime folder", found, advice)


def look_at_cache() -> Iterator[Finding]:
    """The folder of prepared models; if it cannot be used, models are loaded as they are."""
    from mcinfer.model_cache.cache import Cache, CacheUnusableError, unusable
    from mcinfer.private import check_own

    missing: list[Path] = []  # made as for the first model, and removed again
    try:
        cache = Cache.default()
        path = cache.folder
        mode = path.stat().st_mode & 0o7777 if path.exists() else None
        missing += [folder for folder in (path, *path.parents) if not folder.exists()]
        with unusable(path):
            check_own(path, make=0o700)
            TemporaryFile(dir=path).close()
        used = sum(info.bytes for info in cache.entries())
        limit, free = cache.limit_bytes, shutil.disk_usage(path).free
        room = f"{_size(used)} of at most {_size(limit)}, {_size(free)} of the disk free"
        state = "not made yet" if mode is None else f"yours, mode {mode:04o}"
        found, advice = f"{path}, {state}; {room}", ""
        if 2 * used > limit:
            found += ": more than half full"
            advice = "remove what is not used (mcinfer cache clear), or raise MCINFER_CACHE_LIMIT"
        if not free:
            advice = "make room there, or let MCINFER_CACHE name a folder on a disk with room"
        elif used + free < limit:
            found += ": prepared models may fill the disk"
            left = f"the {_size(used + free)} that are left for it"
            advice = f"set MCINFER_CACHE_LIMIT to less than {left}"
        yield Finding("cache", found, advice)
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


# Packages, the runtime, GPUs.


def look_at_packages() -> Iterator[Finding]:
    """The packages that nothing works without; which extras are installed, and what of them is too old."""
    try:
        own = metadata.distribution("mcinfer")
    except metadata.PackageNotFoundError:
        found = "mcinfer is not installed, so which packages it needs is not known"
        yield Finding(
            "packages", found, "pip install mcinfer, or pip install --editable its folder"
        )
        return
    from packaging.requirements import Requirement

    extras = [e for e in own.metadata.get_all("Provides-Extra") or () if e not in _FOR_DEVELOPERS]
    parsed = [r for r in map(Requirement, own.requires or ()) if r.name != "mcinfer"]
    versions = {r.name: version_of(r.name) for r in parsed}

    def wanted(extra: str) -> list[Requirement]:
        return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": extra})]

    def is_met(r: Requirement) -> bool:
        version = versions[r.name]
        return version is not None and r.specifier.contains(version, prereleases=True)

    def advice(unmet: Iterable[Requirement]) -> str:
        words = "".join(f" '{r.name}{r.specifier}'" for r in unmet)
        return words and f"pip install{words}"

    needed = wanted("")
    known = [f"{r.name} {versions[r.name] or 'is missing'}" for r in needed]
    amiss = [r for r in needed if not is_met(r)]
    yield Finding("packages", ", ".join([f"mcinfer {own.version}", *known]), problem=advice(amiss))
    lacking = {
        extra: [r for r in wanted(extra) if r not in needed and not is_met(r)] for extra in extras
    }
    there, absent = (
        ", ".join(e for e in extras if bool(lacking[e]) is unmet) or "none"
        for unmet in (False, True)
    )
    old = {r.name: r for unmet in lacking.values() for r in unmet if versions[r.name]}
    text = f"installed: {there}; not installed: {absent}"
    if old:
        text += f"; too old: {', '.join(f'{name} {versions[name]}' for name in old)}"
    yield Finding("extras", text, advice(old.values()))


_KEEP_ONE = "onnxruntime and onnxruntime-gpu are one folder: pip uninstall both, then install one"


def look_at_runtime() -> Iterator[Finding]:
    """ONNX Runtime as a worker would import it, and the GPUs that it can use."""
    runtime = None
    others = [e for e in ENGINES if e != DEFAULT_ENGINE and find_spec(e) is not None]
    try:
        if others and find_spec("onnxruntime") is None:
            yield Finding("onnxruntime", f"not installed; the engine {others[0]} is")
        else:
            runtime = installed_runtime()
            found = str(runtime).removeprefix("onnxruntime ")
            both = all(
                any(metadata.distributions(name=name)) for name in ENGINES[DEFAULT_ENGINE].packages
            )
            yield Finding("onnxruntime", found, _KEEP_ONE if both else "")
    except EngineError as exc:
        advice = (
            f"{install('cpu', anew=True)}, or {install('gpu', anew=True)} for NVIDIA GPUs, not both; "
            "before that pip uninstall onnxruntime onnxruntime-gpu, if one is broken"
        )
        yield Finding("onnxruntime", str(exc), problem=advice)
    try:
        yield judge_gpus(*gpus_and_driver(), runtime)
    except OSError as exc:
        yield Finding("GPUs", f"none was found: {exc}")


def look_at_openvino() -> Iterator[Finding]:
    """OpenVINO as a worker would import it, and its devices; nothing where it is not installed."""
    if find_spec("openvino") is None:
        return
    try:
        version, names = installed_openvino()
        yield Finding("openvino", f"{version} has: {', '.join(names)}")
    except EngineError as exc:
        advice = "pip install --force-reinstall openvino, or pip uninstall openvino"
        yield Finding("openvino", str(exc), warning=advice)


def judge_gpus(gpus: Sequence[Gpu], driver: Driver, runtime: InstalledRuntime | None) -> Finding:
    """The GPUs, and whether the runtime can use them."""
    doubt = gpu_order_doubt(len(gpus))
    text = "; ".join(filter(None, [*map(str, gpus), str(driver), doubt]))
    if runtime is not None and runtime.without_cuda:
        both = "pip uninstall onnxruntime onnxruntime-gpu"  # which share a folder
        advice = f"to use them: {both}, then {install('gpu', anew=True)}"
        return Finding("GPUs", f"{text}; {runtime.without_cuda}", advice)
    advice, cure = "", "nvidia-smi --compute-mode=DEFAULT, which takes root"
    served, built = (
        int(version.partition(".")[0] or 0)
        for version in (driver.cuda, runtime.cuda if runtime else "")
    )
    prohibited, exclusive = (
        ", ".join(f"cuda:{gpu.index}" for gpu in gpus if gpu.compute_mode.startswith(mode))
        for mode in ("Prohibited", "Exclusive")
    )
    if 0 < served < built:
        advice = f"a driver that serves CUDA {built}, as onnxruntime was built with it"
    elif prohibited:
        advice = f"{prohibited} may not be used: {cure}"
    elif exclusive and driver.mps is None:
        advice = f"one process alone may use {exclusive}: {cure}, or MPS"
    return Finding("GPUs", text, advice)


# The pool.


def look_at_pool() -> Iterator[Finding]:
    """Start a worker, run a request on it, and end it."""
    from mcinfer.master import Master

    start = monotonic()
    with Master(json.dumps(_MODEL).encode(), 1, engine="fake", timeouts=_TIMEOUTS) as master:
        ready = monotonic() - start
        answer = master.predict({"x": [[1.0, 2.0, 3.0, 4.0]]})["y"].tolist()
    if answer != [[3.0, 5.0, 7.0, 9.0]]:
        raise EngineError(f"the answer is wrong: {answer}")
    seconds = monotonic() - start
    text = f"1 worker started ({ready:.2f} s), answered and ended, {seconds:.2f} s in all"
    yield Finding("pool", text)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
