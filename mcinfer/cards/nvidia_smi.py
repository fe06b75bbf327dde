"""The NVIDIA GPUs of this machine, as ``nvidia-smi`` lists them: CUDA is not loaded.

Functions that read files take the root folder, which tests replace.
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

_GPU_FIELDS = "index,uuid,pci.bus_id,driver_version,compute_mode,memory.total,memory.free,name"


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


def gpus(timeout: float = 10.0, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs that CUDA has for this process, at least one. ``nvidia-smi`` lists them; CUDA is not loaded.

    Raises:
        OSError: None was found; why. A `TimeoutError` if the driver takes more than `timeout` seconds.
    """
    query = ask(timeout, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
    found = []
    for gpu in parse_gpus(query):
        node = ""
        with suppress(OSError):  # sysfs-bus-pci; the number may be -1
            node = (root / "sys/bus/pci/devices" / gpu.bus_id / "numa_node").read_text("ascii")
        found.append(replace(gpu, node=int(node) if node.strip().isdecimal() else None))
    if not found:
        raise OSError("nvidia-smi names none")
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = tuple(found) if chosen is None else visible_gpus(found, chosen)
    if not visible:
        raise OSError(f"CUDA_VISIBLE_DEVICES={chosen!r} leaves none of {len(found)}")
    return visible


def ask(timeout: float, *arguments: str) -> str:
    """What ``nvidia-smi`` prints with these arguments; raises as `gpus`."""
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
