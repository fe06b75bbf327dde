"""``mcinfer doctor``: whether this machine has what mcinfer needs.

What can be tried is tried: a limit that reads well says less than a pool that starts. ``look_at_`` functions
look at this machine; ``judge_`` functions are pure and say what that means. What is heavy is imported where
it is used: help is to come at once.
"""

import json
import os
import platform
import resource
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import Literal

import typer

from mcinfer.config import Timeouts, automatic_workers
from mcinfer.errors import EngineError, InvalidInputError, McinferError
from mcinfer.machine import (
    Gpu,
    cpu_quota,
    gpu_order_doubt,
    gpus,
    memory_limit,
    task_limit,
    usable_memory,
    whole_cpus,
)
from mcinfer.process import environment, import_path

_State = Literal["ok", "warning", "problem"]

_TASKS_OF_A_MASTER = 8
_TASKS_OF_A_WORKER = 8
"""Threads beside those of the runs, and some more: the main one, the watch over the master, ZeroMQ's two."""

_LIMIT_TO_ASK_FOR = 4096
"""Of descriptors or threads, where fewer would do for now."""

_TIMEOUTS = Timeouts(start=30.0, predict=10.0)
_IMPORT_SECONDS = 60.0
_ASK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers()]))
"""
_MODEL = {
    "inputs": [["x", "float32", ["batch", 4]]],
    "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
}
"""For the engine "fake", which needs no runtime: what fails with it is not the runtime's fault."""

_FOR_DEVELOPERS = ("test", "check", "examples", "docs")
"""Extras that only work on mcinfer itself asks for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Attributes:
        name: What was looked at.
        state: ``"warning"``: mcinfer works, but not as well as it could, or something beside it does not;
            ``"problem"``: no pool works, or none that has all of the CPU.
        found: What there is.
        advice: What to do; empty where all is well.
    """

    name: str
    state: _State
    found: str
    advice: str = ""


def doctor() -> None:
    """Check whether this machine has what mcinfer needs, and say what to do where it has not."""
    problems = 0
    for finding in examine():
        problems += finding.state == "problem"
        advice = f" -> {finding.advice}" if finding.advice else ""
        text = " ".join(f"{finding.name}: {finding.found}{advice}".split())
        print(f"{finding.state:8} {text}", flush=True)
    if problems:
        print(f"mcinfer: {_count(problems, 'problem')} found", file=sys.stderr)
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All checks, each when it is asked for. The last one starts a pool of one worker, and ends it."""
    cpus = whole_cpus()
    workers = automatic_workers(cpus)
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "platform": look_at_platform,
        "open files": partial(look_at_descriptors, workers),
        "threads": partial(look_at_threads, workers, cpus),
        "memory": look_at_memory,
        "CPU": look_at_cpus,
        "runtime folder": look_at_runtime_folder,
        "cache": look_at_cache,
        "packages": look_at_packages,
        "onnxruntime": look_at_runtime,
        "pool": look_at_pool,
    }
    for name, look in looks.items():
        try:
            yield from look()
        except ImportError as exc:
            yield Finding(name, "problem", str(exc), "pip install 'mcinfer[cli]'")
        except OSError as exc:  # such as no descriptor to look with
            yield Finding(name, "problem", f"cannot be looked at: {exc}", "see the checks before")


# The platform.


def look_at_platform() -> Iterator[Finding]:
    """Linux of any age: what of the kernel is needed is tried by itself."""
    found = f"Python {platform.python_version()}, {platform.platform()}"
    if platform.system() == "Linux":
        yield Finding("platform", "ok", found)
    else:
        yield Finding("platform", "problem", found, "mcinfer runs on Linux alone")
    for name, needs, attempt in (
        ("memfd_create with seals", "Linux 3.17 or newer", _try_memfd),
        ("pidfd_open", "Linux 5.3 or newer", _try_pidfd),
        ("descriptors over sockets", "AF_UNIX sockets with SCM_RIGHTS", _try_rights),
    ):
        try:
            attempt()
        except (OSError, AttributeError) as exc:  # the latter: Python was built without it
            advice = f"it takes {needs}, and a seccomp profile (of a container) that allows it"
            yield Finding(name, "problem", str(exc), advice)
        else:
            yield Finding(name, "ok", "works")


def _try_memfd() -> None:
    from mcinfer.shm.block import Block

    Block.create(0, resource.getpagesize()).close()


def _try_pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        select.select([fd], [], [], 0)
    finally:
        os.close(fd)


def _try_rights() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"1"], [ours.fileno()])
        _, received, _, _ = socket.recv_fds(theirs, 1, 1)
        for fd in received:
            os.close(fd)
        if not received:
            raise OSError("the descriptor did not arrive")


# Limits.


def look_at_descriptors(workers: int) -> Iterator[Finding]:
    """The open files of one process."""
    from mcinfer.runtime.connections import DESCRIPTORS_OF_A_WORKER, DESCRIPTORS_TO_OPEN

    needed = DESCRIPTORS_TO_OPEN + DESCRIPTORS_OF_A_WORKER * workers
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"starting {_count(workers, 'worker')}"
    advice = ("ulimit -n", "Docker: --ulimit nofile={0}, systemd: LimitNOFILE={0}")
    yield judge_limit("open files", limits, len(os.listdir("/proc/self/fd")), needed, what, advice)


def look_at_threads(workers: int, cpus: int) -> Iterator[Finding]:
    """The threads of this user, and of the container."""
    needed = _TASKS_OF_A_MASTER + _TASKS_OF_A_WORKER * workers + cpus
    what = f"a pool of {_count(workers, 'worker')}"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    # The limit of a user does not bind root (getrlimit(2)).
    limits = unlimited if os.geteuid() == 0 else resource.getrlimit(resource.RLIMIT_NPROC)
    used = 0 if limits[0] == resource.RLIM_INFINITY else _threads_of_user()
    advice = ("ulimit -u", "systemd: LimitNPROC={0}")
    yield judge_limit("threads of the user", limits, used, needed, what, advice)
    most, used = task_limit() or (resource.RLIM_INFINITY, 0)
    advice = ("", "Docker: --pids-limit {0}, systemd: TasksMax={0}")
    yield judge_limit("threads of the container", (most, most), used, needed, what, advice)


def _threads_of_user() -> int:
    import psutil

    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def judge_limit(
    name: str,
    limits: tuple[int, int],
    used: int,
    needed: int,
    what: str,
    advice: tuple[str, str],
) -> Finding:
    """A limit against what a pool takes; as much again is left to the program and its requests.

    Args:
        name: Of what it limits.
        limits: The soft and the hard one.
        used: Of the soft one.
        needed: By the pool.
        what: That needs it.
        advice: What raises the limit up to the hard one, and other ways, with ``{0}`` for the number.
    """
    soft, hard = (limit if limit != resource.RLIM_INFINITY else None for limit in limits)
    if soft is None:
        return Finding(name, "ok", "no limit")
    found = f"limit {soft}, {used} in use; {what} takes about {needed} more"
    if soft - used >= 2 * needed:
        return Finding(name, "ok", found)
    least = used + 2 * needed
    wanted = max(least, _LIMIT_TO_ASK_FOR)
    command, others = advice
    how = f"a higher limit, which takes root: {others.format(wanted)}"
    if command and (hard is None or hard >= least):
        how = f"{command} {min(wanted, hard or wanted)} ({others.format(wanted)})"
    return Finding(name, "problem" if soft - used < needed else "warning", found, how)


# Memory and processors.


def look_at_memory() -> Iterator[Finding]:
    """What a pool may take, and the kernel's ``vm.overcommit_memory`` (mm/overcommit-accounting.rst)."""
    import psutil

    memory = psutil.virtual_memory()
    yield judge_memory(memory.total, memory_limit(), usable_memory(), memory.available)
    mode = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    if mode == "2":
        found = "mode 2: memory that is reserved counts, and runtimes reserve more than they use"
        advice = "sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio"
        yield Finding("overcommit", "warning", found, advice)
    else:
        yield Finding("overcommit", "ok", f"mode {mode}: memory may be reserved that is not used")


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
    if free >= usable // 2:
        return Finding("memory", "ok", found)
    advice = "end what takes the memory, or have tensors take less: Limits(memory_bytes=…)"
    return Finding("memory", "warning", found, advice)


def look_at_cpus() -> Iterator[Finding]:
    """The quota of the CPU."""
    yield judge_cpus(len(os.sched_getaffinity(0)), cpu_quota())


def judge_cpus(cores: int, quota: float | None) -> Finding:
    """The cores that may be used, and the CPUs' worth of time that a quota leaves of them."""
    usable = _count(cores, "usable core")
    if quota is None or quota >= cores:
        return Finding("CPU quota", "ok", f"none below the {usable}")
    found = f"{quota:g} CPUs' worth of time on {usable}"
    if quota >= 1:
        found = f"{found}; pools have no more threads than that by default"
        return Finding("CPU quota", "ok", found)
    found = f"{found}: even a single thread stands still for a part of each period"
    advice = "a quota of 1 or more (Docker: --cpus, Kubernetes: limits.cpu)"
    return Finding("CPU quota", "warning", found, advice)


# Folders.


def look_at_runtime_folder() -> Iterator[Finding]:
    """Where a pool makes its socket; ``$XDG_RUNTIME_DIR`` is the first choice."""
    from mcinfer.runtime.folder import RuntimeFolder

    wanted = os.environ.get("XDG_RUNTIME_DIR")
    advice = "let XDG_RUNTIME_DIR or TMPDIR name a folder that you can write to, and others cannot"
    try:
        with RuntimeFolder() as folder:
            place = folder.place
    except OSError as exc:
        yield Finding("runtime folder", "problem", str(exc), advice)
        return
    if wanted and place != Path(wanted):
        found = f"{place}; XDG_RUNTIME_DIR, {wanted}, cannot be used"
        yield Finding("runtime folder", "warning", found, advice)
    else:
        yield Finding("runtime folder", "ok", str(place))


def look_at_cache() -> Iterator[Finding]:
    """The folder of prepared models; if it cannot be used, models are loaded as they are."""
    from mcinfer.model_cache.cache import Cache, CacheUnusableError

    try:
        cache = Cache.default()
        mode = cache.folder.stat().st_mode & 0o7777 if cache.folder.exists() else None
        with _made(cache.folder):
            used = sum(info.bytes for info in cache.entries())
            free = shutil.disk_usage(cache.folder).free
    except InvalidInputError as exc:
        advice = "set the variable to such a value, or unset it"
        yield Finding("cache", "problem", str(exc), advice)
    except (CacheUnusableError, OSError) as exc:
        advice = (
            "let MCINFER_CACHE name a folder that can be made, has room, and that you alone can change; "
            "without it each worker has the weights of a large model for itself"
        )
        yield Finding("cache", "warning", str(exc), advice)
    else:
        yield judge_cache(cache.folder, mode, cache.limit_bytes, used, free)


@contextmanager
def _made(path: Path) -> Iterator[None]:
    """Have a cache's folder as if a model were prepared, with something written there; removed again."""
    from mcinfer.model_cache.cache import make_folder
    from mcinfer.model_cache.entries import opened_root, unusable

    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        with unusable(path):
            make_folder(path)
            with opened_root(path) as folder, TemporaryFile(dir=folder):
                pass
        yield
    finally:
        for folder in missing:
            with suppress(OSError):  # it was not made, or it is in use by now
                folder.rmdir()


def judge_cache(folder: Path, mode: int | None, limit: int, used: int, free: int) -> Finding:
    """The folder and its mode (None: not made yet), and bytes: that it may take, has, and the disk has."""
    state = "not made yet" if mode is None else f"yours, mode {mode:04o}"
    found = f"{folder}, {state}; {_size(used)} of at most {_size(limit)}, {_size(free)} of the disk free"
    if not free:
        advice = "make room there, or let MCINFER_CACHE name a folder on a disk with room"
        return Finding("cache", "warning", found, advice)
    if used + free < limit:
        advice = (
            f"set MCINFER_CACHE_LIMIT to less than the {_size(used + free)} that are left for it"
        )
        return Finding("cache", "warning", f"{found}: prepared models may fill the disk", advice)
    return Finding("cache", "ok", found)


# Packages, the runtime, GPUs.


def look_at_packages() -> Iterator[Finding]:
    """The packages that mcinfer and its extras need, as its own metadata names them."""
    try:
        own = metadata.distribution("mcinfer")
    except metadata.PackageNotFoundError:
        found = "mcinfer is not installed, so which packages it needs is not known"
        advice = "pip install mcinfer, or pip install --editable its folder"
        yield Finding("packages", "warning", found, advice)
        return
    modules = metadata.packages_distributions()

    def installed(package: str) -> str | None:
        # The same modules may come in another package: onnxruntime is in onnxruntime-gpu.
        for name in (package, *modules.get(package, ())):
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return None

    extras = own.metadata.get_all("Provides-Extra") or []
    extras = [name for name in extras if name not in _FOR_DEVELOPERS]
    yield from judge_packages(own.version, own.requires or [], extras, installed)


def judge_packages(
    own: str, requires: Sequence[str], extras: Sequence[str], installed: Callable[[str], str | None]
) -> Iterator[Finding]:
    """The packages that nothing works without; of those of extras, what is there and what is too old.

    Args:
        own: The version of mcinfer.
        requires: Its requirements and those of its extras (PEP 508).
        extras: Their names.
        installed: Gives the version of a package; None if it is not installed.
    """
    from packaging.requirements import Requirement

    def wanted(extra: str) -> list[Requirement]:
        return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": extra})]

    def is_met(requirement: Requirement) -> bool:
        version = versions[requirement.name]
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    def advice(requirements: Sequence[Requirement]) -> str:
        return " ".join(["pip install", *(f"'{r.name}{r.specifier}'" for r in requirements)])

    parsed = [r for r in map(Requirement, requires) if r.name != "mcinfer"]
    versions = {r.name: installed(r.name) for r in parsed}
    needed = wanted("")
    known = [f"{r.name} {versions[r.name] or 'is missing'}" for r in needed]
    amiss = [r for r in needed if not is_met(r)]
    state: _State = "problem" if amiss else "ok"
    text = ", ".join([f"mcinfer {own}", *known])
    yield Finding("packages", state, text, advice(amiss) if amiss else "")

    there: list[str] = []
    absent: list[str] = []
    old: list[Requirement] = []
    for extra in extras:
        more = [r for r in wanted(extra) if r not in needed]
        (there if all(map(is_met, more)) else absent).append(extra)
        old += [r for r in more if versions[r.name] and not is_met(r) and r not in old]
    text = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    if old:
        text += f"; too old: {', '.join(f'{r.name} {versions[r.name]}' for r in old)}"
    yield Finding("extras", "warning" if old else "ok", text, advice(old) if old else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """ONNX Runtime as it is installed.

    Attributes:
        version: As it says itself.
        providers: That it was built with; what they need may be missing all the same.
    """

    version: str
    providers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.version} offers: {', '.join(self.providers)}"

    @property
    def has_cuda(self) -> bool:
        """Whether it can run anything on GPUs."""
        return "CUDAExecutionProvider" in self.providers

    @property
    def without_cuda(self) -> str:
        """What to say where there are GPUs, and it cannot."""
        return f"onnxruntime {self.version} has no CUDAExecutionProvider: it runs nothing on them"


def installed_runtime() -> Runtime:
    """ONNX Runtime, imported in a child: a process keeps what it imports.

    Raises:
        EngineError: It cannot be imported: why, in its own last line.
    """
    try:
        ran = subprocess.run(  # noqa: S603 nothing in it comes from outside
            [sys.executable, "-P", "-c", _ASK, json.dumps(import_path())],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise EngineError(f"onnxruntime was not imported in {_IMPORT_SECONDS:g} s") from exc
    except OSError as exc:
        raise EngineError(f"no process can be started to import onnxruntime: {exc}") from exc
    try:
        version, providers = json.loads(ran.stdout)
    except ValueError:
        words = ran.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(words) if line.strip()), f"status {ran.returncode}")
        raise EngineError(f"onnxruntime cannot be imported: {last.strip()}") from None
    return Runtime(version=version, providers=tuple(providers))


def look_at_runtime() -> Iterator[Finding]:
    """ONNX Runtime as a worker would import it, and the GPUs that it can use."""
    runtime = None
    try:
        runtime = installed_runtime()
        yield Finding("onnxruntime", "ok", str(runtime))
    except EngineError as exc:
        advice = "pip install --force-reinstall onnxruntime (or onnxruntime-gpu, not both)"
        yield Finding("onnxruntime", "problem", str(exc), advice)
    try:
        found = gpus()
    except OSError as exc:
        yield Finding("GPUs", "ok", f"none was found: {exc}")
    else:
        yield judge_gpus(found, gpu_order_doubt(len(found)), runtime)


def judge_gpus(found: Sequence[Gpu], order: str, runtime: Runtime | None) -> Finding:
    """The GPUs, and what is to be said of their numbers, against what the runtime can use."""
    text = "; ".join([*map(str, found), *([order] if order else [])])
    if runtime is None or runtime.has_cuda or not found:
        return Finding("GPUs", "ok", text or "none was found")
    advice = "to use them: pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    return Finding("GPUs", "warning", f"{text}; {runtime.without_cuda}", advice)


# The real thing.


def look_at_pool() -> Iterator[Finding]:
    """Start a worker, ask it something, and end it."""
    from mcinfer.master import Master

    start = monotonic()
    try:
        with TemporaryDirectory(prefix="mcinfer-doctor-") as folder:
            model = Path(folder) / "model.json"
            model.write_text(json.dumps(_MODEL), encoding="utf-8")
            with Master(model, 1, engine="fake", timeouts=_TIMEOUTS) as master:
                ready = monotonic() - start
                answer = master.predict({"x": [[1.0, 2.0, 3.0, 4.0]]})["y"].tolist()
        if answer != [[3.0, 5.0, 7.0, 9.0]]:
            raise EngineError(f"the answer is wrong: {answer}")
    except (McinferError, OSError) as exc:
        advice = "put right what is amiss above; if nothing is, its own words say what to look for"
        yield Finding("pool", "problem", str(exc), advice)
    else:
        seconds = monotonic() - start
        found = f"1 worker started ({ready:.2f} s), answered and ended, {seconds:.2f} s in all"
        yield Finding("pool", "ok", found)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
