"""The memory, processors and GPUs that this process may use, within the limits of its control groups.

Functions that read files take the root folder, which tests replace.
"""

import errno
import os
import re
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mcinfer.errors import spans

_ROOT = Path("/")

_GPU_FIELDS = "index,uuid,pci.bus_id,driver_version,compute_mode,memory.total,memory.free,name"

_EXCEEDS_LIMITS = 1 << 24 | 1 << 21  # CAP_SYS_RESOURCE and CAP_SYS_ADMIN (capabilities(7))

# Memory and processors.


def usable_memory(root: Path = _ROOT) -> int:
    """Bytes of memory: the machine's, or the tightest limit of this process's control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = memory_limit(root)
    return total if limit is None else min(total, limit)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the tightest control group allows (``memory.max``, cgroup-v2.rst), or None."""
    names = ("memory.max", "memory.limit_in_bytes")
    found = [_read(folder / name) for folder in _groups("memory", root) for name in names]
    limits = [int(text) for text in found if text.isdecimal()]
    return min((limit for limit in limits if limit), default=None)


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes of this process's control group the out-of-memory killer has ended; 0 if unknown.

    ``oom_kill`` in ``memory.events`` (cgroup-v2.rst), or in ``memory.oom_control`` of version 1.
    """
    names = ("memory.events", "memory.oom_control")
    texts = (_read(folder / name) for folder in _groups("memory", root) for name in names)
    found = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    return next((int(match[1]) for match in found if match), 0)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the tightest control group allows; None for no limit.

    ``docker run --cpus 1.5`` and a pod's ``limits.cpu`` are such quotas: they leave all cores visible
    (``cpu.max``, admin-guide/cgroup-v2.rst; version 1: scheduler/sched-bwc.rst).
    """
    given = []
    for folder in _groups("cpu", root):
        older = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        given += [_read(folder / "cpu.max").split(), older]
    # No limit is "max 100000", or a quota of -1 in version 1.
    limits = [pair for pair in given if len(pair) == 2 and all(map(str.isdecimal, pair))]
    return min((int(quota) / int(period) for quota, period in limits if int(period)), default=None)


def usable_cpus(root: Path = _ROOT) -> float:
    """CPUs' worth of time for this process: its cores, or the quota if that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return cores if quota is None else min(cores, quota)


def whole_cpus(root: Path = _ROOT) -> int:
    """How many threads can run all the time: `usable_cpus` rounded down, at least 1.

    One more thread would use up the quota before the end of each period, and then all threads stand still.
    """
    return max(1, int(usable_cpus(root)))


def task_limit(root: Path = _ROOT) -> tuple[int, int] | None:
    """Limit and number of threads of the group with the least room (``pids.max``, cgroup-v2.rst), or None."""
    names, folders = ("pids.max", "pids.current"), _groups("pids", root)
    pairs = [[_read(folder / name) for name in names] for folder in folders]
    limits = [(int(a), int(b)) for a, b in pairs if a.isdecimal() and b.isdecimal()]
    return min(limits, key=lambda limit: limit[0] - limit[1], default=None)


def user_task_limit(root: Path = _ROOT) -> tuple[int, int] | None:
    """Limit and number of threads of this user (RLIMIT_NPROC), or None if it is not limited.

    The kernel counts the threads of all processes of the real user, and lets root exceed the limit, as well
    as who may change such limits (getrlimit(2)).
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    match = re.search(r"^CapEff:\s*(\w+)", _read(root / "proc/self/status"), re.MULTILINE)
    exempt = match is not None and int(match[1], 16) & _EXCEEDS_LIMITS
    if most == resource.RLIM_INFINITY or os.getuid() == 0 or exempt:
        return None
    running = 0
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                running += (process / "task").stat().st_nlink - 2  # a folder has one for each in it
    return most, running


def check_tasks(count: int, root: Path = _ROOT) -> None:
    """Raise `OSError` unless so many threads, or processes, can be started; it names the limit.

    Limits of control groups above a container's own are not seen from inside.
    """
    # To count this user's threads takes some milliseconds; those of all users are a file (proc_loadavg(5)).
    everyone = re.search(r"/(\d+)", _read(root / "proc/loadavg"))
    is_far = everyone and int(everyone[1]) + count <= resource.getrlimit(resource.RLIMIT_NPROC)[0]
    for name, limit in (
        ("pids.max of this container (control group)", task_limit(root)),
        ("ulimit -u (RLIMIT_NPROC) of this user", None if is_far else user_task_limit(root)),
    ):
        if limit is not None and count > limit[0] - limit[1]:
            most, running = limit
            raise OSError(
                errno.EAGAIN,
                f"{count} threads are needed and {max(0, most - running)} are left: {name} is {most}",
            )


def _groups(controller: str, root: Path) -> list[Path]:
    """The folders of this process's control group and its parents, for versions 1 and 2."""
    top = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").split("\n"):
        match = re.fullmatch(r"\d+:([^:]*):(.*)", line)
        if match is None:
            continue
        if match[1] == "":
            mounts = [top]
        elif controller in match[1].split(","):
            mounts = [top / controller, top / match[1]]  # the former may be a link
        else:
            continue
        for mount in mounts:
            group = mount / match[2].lstrip("/")
            folders += [place for place in (group, *group.parents) if place.is_relative_to(mount)]
            folders.append(mount)  # in a container the path may be one of the host's
    return [*dict.fromkeys(folders)]


# Cores.


def cpu_model(root: Path = _ROOT) -> str:
    """What the kernel calls the processor, or the architecture where it has no name (proc_cpuinfo(5))."""
    match = re.search(r"^model name\s*:\s*(.*\S)", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else os.uname().machine


def numa_nodes(root: Path = _ROOT) -> dict[int, tuple[int, ...]]:
    """By NUMA node, its cores that this process may use (``cpulist``); empty if the kernel knows none."""
    usable = os.sched_getaffinity(0)
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cores = parse_core_list(_read(folder / "cpulist"))
        nodes[int(folder.name.removeprefix("node"))] = tuple(c for c in cores if c in usable)
    return dict(sorted(nodes.items()))


def parse_core_list(text: str) -> tuple[int, ...]:
    """Read the kernel's format of a list of cores, ``0-3,8`` (admin-guide/cputopology.rst)."""
    cores: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def format_core_list(cores: Sequence[int]) -> str:
    """The cores in the kernel's format, ascending: ``0-3,8``."""
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans(cores))


# GPUs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU, by its index in ``cuda:index``; None or an empty text is what the driver does not say.

    Attributes:
        bus_id: Its place on the PCI bus, as sysfs writes it: ``0000:3b:00.0``.
        driver: The driver's version.
        compute_mode: ``Default`` lets any number of processes use it, ``Exclusive_Process`` one alone (that
            of MPS, if MPS runs), ``Prohibited`` none.
        node: The NUMA node that it is attached to.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None = None
    free_bytes: int | None = None
    bus_id: str = ""
    driver: str = ""
    compute_mode: str = ""
    node: int | None = None

    def __str__(self) -> str:
        sizes = ((self.memory_bytes, ""), (self.free_bytes, " free"))
        known = [f"{size / 2**30:.1f} GiB{what}" for size, what in sizes if size is not None]
        mode = f"compute mode {self.compute_mode}" if self.compute_mode else ""
        node = "" if self.node is None else f"NUMA node {self.node}"
        return f"cuda:{self.index}: {', '.join(filter(None, [self.name, *known, mode, node]))}"


def gpus(timeout: float = 10.0, root: Path = _ROOT) -> tuple[Gpu, ...]:
    """The GPUs that CUDA has for this process, at least one. ``nvidia-smi`` lists them; CUDA is not loaded.

    Raises:
        OSError: None was found; why. A `TimeoutError` if the driver takes more than `timeout` seconds.
    """
    query = nvidia_smi(timeout, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    found = []
    for gpu in parse_gpus(query):
        place = root / "sys/bus/pci/devices" / gpu.bus_id
        node = _read(place / "numa_node") if gpu.bus_id else ""  # sysfs-bus-pci; may be -1
        found.append(replace(gpu, node=int(node) if node.isdecimal() else None))
    if not found:
        raise OSError("nvidia-smi names none")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = tuple(found) if chosen is None else visible_gpus(found, chosen)
    if not visible:
        raise OSError(f"CUDA_VISIBLE_DEVICES={chosen!r} leaves none of {len(found)}")
    return visible


def nvidia_smi(timeout: float, *arguments: str) -> str:
    """What ``nvidia-smi`` prints with these arguments; raises as `gpus`."""
    import subprocess  # not at every worker's start

    try:
        done = subprocess.run(  # noqa: S603 constants
            ("nvidia-smi", *arguments),  # noqa: S607 it lies in no fixed place
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as exc:
        raise FileNotFoundError("there is no nvidia-smi") from exc
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError(f"nvidia-smi gave no answer in {timeout:g} s") from exc
    if done.returncode:
        words = (done.stderr or done.stdout).decode(errors="replace")
        raise OSError(f"nvidia-smi: {' '.join(words.split()) or f'status {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def visible_gpus(found: Sequence[Gpu], chosen: str) -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order and numbered by it.

    The first word that names no GPU ends the list (CUDA C++ Programming Guide, "CUDA Environment
    Variables"). A part of a GPU (MIG) is not in `found`, and keeps its name.
    """
    visible: list[Gpu] = []
    for word in map(str.strip, chosen.split(",")):
        if word.startswith("MIG-"):
            driver = found[0].driver if found else ""
            called = [Gpu(index=0, uuid=word, name=word, driver=driver)]
        else:
            called = [
                gpu
                for gpu in found
                if (word.startswith("GPU-") and gpu.uuid.startswith(word))
                or (word.isdecimal() and int(word) == gpu.index)
            ]
        if len(called) != 1:
            break
        visible.append(replace(called[0], index=len(visible)))
    return tuple(visible)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the output of ``nvidia-smi``: a line for each GPU, memory in MiB. Other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", 7)]  # a name may contain a comma
        if len(fields) != 8 or not fields[0].isdecimal():
            continue
        total, free = (int(size) << 20 if size.isdecimal() else None for size in fields[5:7])
        bus, driver, mode = ("" if text.startswith("[") else text for text in fields[2:5])
        domain, _, place = bus.lower().partition(":")  # sysfs writes the domain with four digits
        found.append(
            Gpu(
                index=int(fields[0]),
                uuid=fields[1],
                name=fields[7],
                memory_bytes=total,
                free_bytes=free,
                bus_id=f"{domain[-4:]}:{place}" if place else "",
                driver=driver,
                compute_mode=mode,
            )
        )
    return tuple(found)


def _read(path: Path) -> str:
    """A file's text, stripped; empty if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes()).strip()  # paths may have any bytes
    except (OSError, ValueError):
        return ""
