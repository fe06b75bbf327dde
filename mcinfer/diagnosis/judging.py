"""The pure part of each check: from what there is to a verdict, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcinfer.diagnosis.runtime import Runtime
from mcinfer.machine import Gpu
from mcinfer.runtime.connections import DESCRIPTORS_OF_A_WORKER, DESCRIPTORS_TO_OPEN

State = Literal["ok", "warning", "problem"]

_TASKS_OF_A_MASTER = 8
_TASKS_OF_A_WORKER = 8
"""Threads beside those of the runs, and some more: its main one, its watch over the master, ZeroMQ's two."""

_LIMIT_TO_ASK_FOR = 4096
"""Of descriptors or threads, where fewer would do for now."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Attributes:
        name: What was looked at.
        state: ``"ok"``; ``"warning"``: mcinfer works, but not as well as it could, or something beside it
            does not; ``"problem"``: no pool works, or none that has all of the CPU.
        found: What there is.
        advice: What to do; empty where all is well.
    """

    name: str
    state: State
    found: str
    advice: str = ""


# The platform.


def judge_platform(system: str, found: str) -> Finding:
    """Linux, of whatever age: what of the kernel is needed is tried by itself."""
    if system != "Linux":
        return Finding("platform", "problem", found, "mcinfer runs on Linux alone")
    return Finding("platform", "ok", found)


def judge_feature(name: str, needs: str, failure: str) -> Finding:
    """Something of the kernel's that no pool can do without; `failure` is empty if it works."""
    if not failure:
        return Finding(name, "ok", "works")
    advice = f"it takes {needs}, and a seccomp profile (of a container) that allows it"
    return Finding(name, "problem", failure, advice)


# Limits.


def judge_descriptors(soft: int | None, hard: int | None, used: int, workers: int) -> Finding:
    """The descriptors of one process against those that the start of so many workers takes."""
    needed = DESCRIPTORS_TO_OPEN + DESCRIPTORS_OF_A_WORKER * workers
    limits = f"{_limit_text(soft)}, {_limit_text(hard)} at most"
    found = f"{limits}; {used} open, starting {_workers(workers)} takes {needed} more"
    advice = _raised("ulimit -n", ("--ulimit nofile", "LimitNOFILE"), used + 2 * needed, hard)
    left = None if soft is None else soft - used - needed
    return _judge_room("open files", found, left, needed, advice)


def judge_threads(
    limit: tuple[int, int] | None, hard: int | None, workers: int, cpus: int
) -> Finding:
    """A user's limit of threads against those that a pool with all of the CPU takes.

    Args:
        limit: How many there may be, and how many there are; None if nothing limits them.
        hard: What the user may raise it to; None is no limit.
        workers: Of the pool.
        cpus: Threads of all its runs.
    """
    used = 0 if limit is None else limit[1]
    least = used + 2 * _threads_of_a_pool(workers, cpus)
    advice = _raised("ulimit -u", ("", "LimitNPROC"), least, hard)
    return _judge_tasks("threads of the user", limit, workers, cpus, advice)


def judge_container_threads(limit: tuple[int, int] | None, workers: int, cpus: int) -> Finding:
    """The same of its container's, which is another's to raise."""
    advice = "a higher pids.max (Docker: --pids-limit, systemd: TasksMax=)"
    return _judge_tasks("threads of the container", limit, workers, cpus, advice)


def _judge_tasks(
    name: str, limit: tuple[int, int] | None, workers: int, cpus: int, advice: str
) -> Finding:
    if limit is None:
        return Finding(name, "ok", "no limit")
    most, used = limit
    needed = _threads_of_a_pool(workers, cpus)
    found = (
        f"{most} at most; there are {used}, a pool of {_workers(workers)} takes about {needed} more"
    )
    return _judge_room(name, found, most - used - needed, needed, advice)


def _threads_of_a_pool(workers: int, cpus: int) -> int:
    return _TASKS_OF_A_MASTER + _TASKS_OF_A_WORKER * workers + cpus


def _raised(command: str, options: tuple[str, str], least: int, hard: int | None) -> str:
    """How to have a higher limit.

    Args:
        command: That raises it, up to the hard limit.
        options: Docker's and systemd's; empty where there is none.
        least: That would do.
        hard: None is no limit.
    """
    wanted = max(least, _LIMIT_TO_ASK_FOR)
    names = zip(("Docker", "systemd"), options, strict=True)
    elsewhere = ", ".join(f"{who}: {option}={wanted}" for who, option in names if option)
    if hard is None or hard >= least:
        return f"{command} {wanted if hard is None else min(wanted, hard)} ({elsewhere})"
    return f"a higher hard limit, which takes root: {wanted} in /etc/security/limits.conf ({elsewhere})"


def _judge_room(name: str, found: str, left: int | None, needed: int, advice: str) -> Finding:
    """By what a pool leaves of a limit: the program has needs of its own, and requests take some too."""
    if left is None or left >= needed:
        return Finding(name, "ok", found)
    return Finding(name, "problem" if left < 0 else "warning", found, advice)


# Memory.


def judge_memory(total: int, limit: int | None, usable: int, available: int) -> Finding:
    """Bytes: the machine's, the control group's limit, the less of both, and what nobody uses now.

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


def judge_overcommit(mode: int | None) -> Finding:
    """The kernel's ``vm.overcommit_memory`` (mm/overcommit-accounting.rst)."""
    if mode != 2:
        return Finding("overcommit", "ok", f"mode {mode}: memory may be reserved that is not used")
    advice = "sysctl vm.overcommit_memory=0, or a higher vm.overcommit_ratio"
    found = "mode 2: memory that is reserved counts, and runtimes reserve more than they use"
    return Finding("overcommit", "warning", found, advice)


def judge_shared_memory(size: int | None) -> Finding:
    """``/dev/shm``, known from other libraries for being too small in containers."""
    found = "there is none" if size is None else _size(size)
    return Finding("/dev/shm", "ok", f"{found}; mcinfer does not use it")  # noqa: S108 a name


# Processors and debuggers.


def judge_cpus(cores: int, quota: float | None) -> Finding:
    """The cores that may be used, and the CPUs' worth of time that a quota leaves of them."""
    usable = "1 usable core" if cores == 1 else f"{cores} usable cores"
    if quota is None or quota >= cores:
        return Finding("CPU quota", "ok", f"none below the {usable}")
    found = f"{quota:g} CPUs' worth of time on {usable}"
    if quota >= 1:
        return Finding(
            "CPU quota", "ok", f"{found}; pools have no more threads than that by default"
        )
    found = f"{found}: even a single thread stands still for a part of each period"
    advice = "a quota of 1 or more (Docker: --cpus, Kubernetes: limits.cpu)"
    return Finding("CPU quota", "warning", found, advice)


def judge_tracing(scope: int | None, *, privileged: bool) -> Finding:
    """Yama's ``ptrace_scope`` (admin-guide/LSM/Yama.rst): who may attach to whose processes.

    py-spy (process_vm_readv(2)) and gdb attach. mcinfer does not, nor does it take that to read another
    process's maps (proc_pid_smaps(5)).
    """
    if not scope:
        return Finding("ptrace scope", "ok", "py-spy and gdb reach all processes of their user")
    if scope < 3 and privileged:
        return Finding("ptrace scope", "ok", f"{scope}: py-spy and gdb reach all processes as root")
    if scope == 1:
        found = "1: py-spy and gdb reach the processes that they start; as root, all"
        return Finding("ptrace scope", "ok", found)
    found = "2: py-spy and gdb reach processes as root alone"
    advice = "to look into workers that hang: sysctl kernel.yama.ptrace_scope=1"
    if scope >= 3:
        found, advice = (
            f"{scope}: py-spy and gdb reach no process",
            f"{advice}, from the next boot on",
        )
    return Finding("ptrace scope", "warning", f"{found}; mcinfer itself needs neither", advice)


# The runtime, and GPUs.


def judge_runtime(runtime: Runtime | None, failure: str) -> Finding:
    """ONNX Runtime as a worker would import it, or why it cannot be imported."""
    if runtime is None:
        advice = "pip install --force-reinstall onnxruntime (or onnxruntime-gpu, not both)"
        return Finding("onnxruntime", "problem", failure, advice)
    return Finding("onnxruntime", "ok", str(runtime))


def judge_gpus(gpus: Sequence[Gpu], failure: str, order: str, runtime: Runtime | None) -> Finding:
    """The GPUs, or why there are none, against what the runtime can use.

    Args:
        gpus: That CUDA has for this process.
        failure: Why there are none.
        order: What is to be said of their numbers; empty if nothing is.
        runtime: None if it cannot be imported.
    """
    if not gpus:
        return Finding("GPUs", "ok", f"none was found: {failure}")
    found = "; ".join([*map(str, gpus), *([order] if order else [])])
    if runtime is None or runtime.has_cuda:
        return Finding("GPUs", "ok", found)
    advice = "to use them: pip uninstall onnxruntime, then pip install onnxruntime-gpu"
    return Finding("GPUs", "warning", f"{found}; {runtime.without_cuda}", advice)


# Folders.


def judge_runtime_folder(place: Path | None, wanted: str | None, failure: str) -> Finding:
    """Where a pool makes its socket.

    Args:
        place: The folder that will do; None if there is none.
        wanted: ``$XDG_RUNTIME_DIR``, the first choice.
        failure: Why there is no place.
    """
    advice = "let XDG_RUNTIME_DIR or TMPDIR name a folder that you can write to, and others cannot"
    if place is None:
        return Finding("runtime folder", "problem", failure, advice)
    found = str(place)
    if wanted and not place.is_relative_to(wanted):
        found = f"{found}; XDG_RUNTIME_DIR, {wanted}, cannot be used"
        return Finding("runtime folder", "warning", found, advice)
    return Finding("runtime folder", "ok", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What the folder of prepared models is like, which no one else can change.

    Attributes:
        folder: Where it is, or will be.
        mode: Its permissions; None while there is none.
        limit: Bytes of the disk that it may take.
        used: Of them, taken.
        free: Bytes of the disk that nobody uses.
    """

    folder: Path
    mode: int | None
    limit: int
    used: int
    free: int


def judge_cache_settings(failure: str, *, wrong: bool) -> Finding:
    """What is wrong with the environment variables that name the cache and its limit.

    Args:
        failure: In the words of `mcinfer.model_cache.cache.Cache.default`.
        wrong: Whether large models cannot be loaded at all; else it is as with a folder that cannot be used.
    """
    if wrong:
        return Finding("cache", "problem", failure, "set the variable to such a value, or unset it")
    return judge_cache(None, failure)


def judge_cache(facts: CacheFacts | None, failure: str) -> Finding:
    """The folder of prepared models, or why it cannot be used: then models are loaded as they are."""
    advice = (
        "let MCINFER_CACHE name a folder that can be made, has room, and that you alone can change; "
        "without it each worker has the weights of a large model for itself"
    )
    if facts is None:
        return Finding("cache", "warning", failure, advice)
    state = "not made yet" if facts.mode is None else f"yours, mode {facts.mode:04o}"
    found = (
        f"{facts.folder}, {state}; {_size(facts.used)} of at most {_size(facts.limit)}, "
        f"{_size(facts.free)} of the disk free"
    )
    if not facts.free:
        advice = "make room there, or let MCINFER_CACHE name a folder on a disk with room"
        return Finding("cache", "warning", found, advice)
    room = facts.used + facts.free
    if room < facts.limit:
        advice = f"set MCINFER_CACHE_LIMIT to less than the {_size(room)} that are left for it"
        return Finding("cache", "warning", f"{found}: prepared models may fill the disk", advice)
    return Finding("cache", "ok", found)


# The real thing.


def judge_maps(failure: str) -> Finding:
    """Whether a worker's memory maps can be read, which shared memory is measured by."""
    if not failure:
        return Finding("memory maps", "ok", "those of workers can be read")
    advice = "mcinfer bench and other tools show no PSS and USS; workers do not need it"
    return Finding("memory maps", "warning", failure, advice)


def judge_pool(ready: float, seconds: float, failure: str) -> Finding:
    """How a pool of one worker did: seconds until it was ready, and until it had ended."""
    if failure:
        advice = "put right what is amiss above; if nothing is, its own words say what to look for"
        return Finding("pool", "problem", failure, advice)
    found = f"1 worker started ({ready:.2f} s), answered and ended, {seconds:.2f} s in all"
    return Finding("pool", "ok", found)


def _limit_text(limit: int | None) -> str:
    return "no limit" if limit is None else str(limit)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
