"""What looks at this machine, and has what it found judged.

What can be tried is tried: a limit that reads well says less than a pool that starts.
"""

import json
import os
import platform
import resource
import select
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic

import numpy as np
import psutil

from mcinfer.config import Timeouts, automatic_workers
from mcinfer.diagnosis.judging import (
    CacheFacts,
    Finding,
    judge_cache,
    judge_cache_settings,
    judge_container_threads,
    judge_cpus,
    judge_descriptors,
    judge_feature,
    judge_gpus,
    judge_maps,
    judge_memory,
    judge_overcommit,
    judge_platform,
    judge_pool,
    judge_runtime,
    judge_runtime_folder,
    judge_shared_memory,
    judge_threads,
    judge_tracing,
)
from mcinfer.diagnosis.packages import look_at_packages
from mcinfer.diagnosis.runtime import installed_runtime
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
from mcinfer.master import Master
from mcinfer.model_cache.cache import Cache, CacheUnusableError, make_folder
from mcinfer.model_cache.entries import opened_root, unusable
from mcinfer.runtime.folder import RuntimeFolder
from mcinfer.shm import descriptors
from mcinfer.shm.block import Block

_START_SECONDS = 30.0
_ANSWER_SECONDS = 10.0

_MODEL = {
    "inputs": [["x", "float32", ["batch", 4]]],
    "outputs": [["y", "float32", ["batch", 4], {"from": "x", "scale": 2, "add": 1}]],
}
"""Of the engine "fake": it needs no runtime, so what fails with it is not the runtime's fault."""


def examine() -> Iterator[Finding]:
    """All checks, each when it is asked for. The last one starts a pool of one worker, and ends it."""
    workers = automatic_workers(whole_cpus())
    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "platform": _look_at_platform,
        "kernel": _look_at_features,
        "open files": lambda: _look_at_descriptors(workers),
        "threads": lambda: _look_at_tasks(workers),
        "memory": _look_at_memory,
        "shared memory": _look_at_shared_memory,
        "CPU quota": _look_at_cpus,
        "ptrace scope": _look_at_tracing,
        "runtime folder": _look_at_runtime_folder,
        "cache": _look_at_cache,
        "packages": look_at_packages,
        "onnxruntime": _look_at_runtime,
        "pool": _look_at_pool,
    }
    for name, look in looks.items():
        try:
            yield from look()
        except OSError as exc:  # such as no descriptor to look with
            yield Finding(name, "problem", f"cannot be looked at: {exc}", "see the checks before")


def _look_at_platform() -> Iterator[Finding]:
    found = f"Python {platform.python_version()}, {platform.platform()}"
    yield judge_platform(platform.system(), found)


def _look_at_features() -> Iterator[Finding]:
    tried = (
        ("memfd_create with seals", "Linux 3.17 or newer", _try_memfd),
        ("pidfd_open", "Linux 5.3 or newer", _try_pidfd),
        ("descriptors over sockets", "AF_UNIX sockets with SCM_RIGHTS", _try_rights),
    )
    for name, needs, attempt in tried:
        failure = ""
        try:
            attempt()
        except (OSError, AttributeError) as exc:  # the latter: Python was built without it
            failure = str(exc)
        yield judge_feature(name, needs, failure)


def _try_memfd() -> None:
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
        descriptors.send(ours, b"1", [ours.fileno()])
        _, received = descriptors.receive(theirs, 1)
        descriptors.close_all(received)
        if not received:
            raise OSError("the descriptor did not arrive")


def _look_at_descriptors(workers: int) -> Iterator[Finding]:
    soft, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NOFILE))
    yield judge_descriptors(soft, hard, len(os.listdir("/proc/self/fd")), workers)


def _look_at_tasks(workers: int) -> Iterator[Finding]:
    most, hard = map(_limit, resource.getrlimit(resource.RLIMIT_NPROC))
    # The limit of a user does not bind root (getrlimit(2)).
    user = None if most is None or os.geteuid() == 0 else (most, _threads_of_user())
    cpus = whole_cpus()
    yield judge_threads(user, hard, workers, cpus)
    yield judge_container_threads(task_limit(), workers, cpus)


def _threads_of_user() -> int:
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def _look_at_memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield judge_memory(memory.total, memory_limit(), usable_memory(), memory.available)
    yield judge_overcommit(_read_number("/proc/sys/vm/overcommit_memory"))


def _look_at_shared_memory() -> Iterator[Finding]:
    size = None
    with suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total  # noqa: S108 nothing is written there
    yield judge_shared_memory(size)


def _look_at_cpus() -> Iterator[Finding]:
    yield judge_cpus(len(os.sched_getaffinity(0)), cpu_quota())


def _look_at_tracing() -> Iterator[Finding]:
    scope = _read_number("/proc/sys/kernel/yama/ptrace_scope")
    yield judge_tracing(scope, privileged=os.geteuid() == 0)


def _look_at_runtime_folder() -> Iterator[Finding]:
    wanted = os.environ.get("XDG_RUNTIME_DIR")
    try:
        with RuntimeFolder() as folder:
            place = folder.place
    except OSError as exc:
        yield judge_runtime_folder(None, wanted, str(exc))
        return
    yield judge_runtime_folder(place, wanted, "")


def _look_at_cache() -> Iterator[Finding]:
    try:
        cache = Cache.default()
    except (InvalidInputError, CacheUnusableError) as exc:
        yield judge_cache_settings(str(exc), wrong=isinstance(exc, InvalidInputError))
        return
    try:
        there = cache.folder.exists()
        with _made(cache):
            facts = CacheFacts(
                folder=cache.folder,
                mode=cache.folder.stat().st_mode & 0o7777 if there else None,
                limit=cache.limit_bytes,
                used=sum(info.bytes for info in cache.entries()),
                free=shutil.disk_usage(cache.folder).free,
            )
    except (CacheUnusableError, OSError) as exc:
        yield judge_cache(None, str(exc))
    else:
        yield judge_cache(facts, "")


@contextmanager
def _made(cache: Cache) -> Iterator[None]:
    """Have the cache's folder as if a model were prepared, and something written there; removed again."""
    missing = [path for path in (cache.folder, *cache.folder.parents) if not path.exists()]
    try:
        with unusable(cache.folder):
            make_folder(cache.folder)
            with opened_root(cache.folder) as folder, TemporaryFile(dir=folder):
                pass
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # it was not made, or somebody has begun to use it
                path.rmdir()


def _look_at_runtime() -> Iterator[Finding]:
    runtime, failure, why = None, "", ""
    found: tuple[Gpu, ...] = ()
    try:
        runtime = installed_runtime()
    except EngineError as exc:
        failure = str(exc)
    yield judge_runtime(runtime, failure)
    try:
        found = gpus()
    except OSError as exc:
        why = str(exc)
    yield judge_gpus(found, why, gpu_order_doubt(len(found)), runtime)


def _look_at_pool() -> Iterator[Finding]:
    """Start a worker, ask it something, look at its memory as ``mcinfer bench`` does, and end it."""
    timeouts = Timeouts(start=_START_SECONDS, predict=_ANSWER_SECONDS)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    maps: Finding | None = None
    ready = 0.0
    start = monotonic()
    try:
        with TemporaryDirectory(prefix="mcinfer-doctor-") as folder:
            model = Path(folder) / "model.json"
            model.write_text(json.dumps(_MODEL), encoding="utf-8")
            with Master(model, 1, engine="fake", timeouts=timeouts) as master:
                ready = monotonic() - start
                answer = master.predict({"x": rows})["y"]
                maps = _look_at_maps(master.statistics().workers[0].pid)
            right = np.array_equal(answer, 2 * rows + 1)
            failure = "" if right else f"the answer is wrong: {answer.tolist()}"
    except (McinferError, OSError) as exc:
        failure = str(exc)
    if maps is not None:
        yield maps
    yield judge_pool(ready, monotonic() - start, failure)


def _look_at_maps(pid: int | None) -> Finding:
    failure = ""
    try:
        psutil.Process(pid).memory_full_info()
    except (psutil.Error, OSError) as exc:
        failure = str(exc)
    return judge_maps(failure)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _read_number(path: str) -> int | None:
    """The number in a file of the kernel's; None if there is none."""
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
