"""Pools in control groups with limits, as containers have: of memory, and of CPU time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from mcinfer.machine import format_core_list
from tests.process.models import AFFINE, FakeModel, OnnxModel
from tests.process.scripts import PREAMBLE, run
from tests.process.waiting import wait_until

CORES = sorted(os.sched_getaffinity(0))
PERIOD_US = 100_000
QUOTA_US = 150_000


def own_groups(controller: str) -> Iterator[Path]:
    """Where this process's control groups of a controller may be, of either version."""
    top = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield top / path.lstrip("/")
        elif controller in controllers.split(","):
            yield top / controller / path.lstrip("/")


def is_removed(group: Path) -> bool:
    with suppress(OSError):  # busy while a process of it is not quite gone
        group.rmdir()
    return not group.exists()


@contextmanager
def limited_group(controller: str, limit: Callable[[Path], None]) -> Iterator[Path]:
    """A control group that `limit` has set up; the test is skipped if none can be made here."""
    reasons = []
    for parent in own_groups(controller):
        path = parent / f"mcinfer-test-{os.getpid()}"
        with suppress(FileNotFoundError):
            path.rmdir()  # of a process that had this id before
        try:
            path.mkdir()
        except OSError as exc:
            reasons.append(str(exc))
            continue
        try:
            limit(path)
        except OSError as exc:
            path.rmdir()
            reasons.append(str(exc))
            continue
        yield path
        wait_until(partial(is_removed, path))
        return
    pytest.skip(f"no control group for {controller} can be made: {'; '.join(reasons)}")


# Memory.

MOST = 400 << 20

FULL = """
from pathlib import Path
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
for limits in (mcinfer.Limits(worker_memory_bytes=1 << 32), mcinfer.Limits()):
    with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never", limits=limits) as master:
        print(master.submit(X).exception(timeout=40.0))
"""


def set_limit(group: Path) -> None:
    names = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
    found = next((path for path in names if path.exists()), None)
    if found is None:
        raise FileNotFoundError(f"{group} takes no limit")
    found.write_text(f"{MOST}", encoding="ascii")


@pytest.mark.thorough
def test_errors_of_memory_name_the_limit_of_the_container(fake_model: FakeModel) -> None:
    model = fake_model(run=f"allocate:{2 * MOST}")
    with limited_group("memory", set_limit) as group:
        command = [sys.executable, "-c", PREAMBLE + FULL, str(model), str(group)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    died, failed = done.stdout.splitlines()
    killed = "killed by SIGKILL; the out-of-memory killer ended a process of this container"
    assert killed in died
    assert f"which may have {MOST} bytes of memory" in died
    assert "MemoryError: " in failed
    assert f"; its container (control group) may have {MOST} bytes in all" in failed


# CPU time: all cores are there, time is not.

LOOK = """
import json, os, sys
from pathlib import Path

group, model = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))

from mcinfer import EngineOptions, Master
from mcinfer.cli import main

def look(options):
    with Master(model, options=options) as master:
        pids = [worker.pid for worker in master.statistics().workers]
        cores = [sorted(os.sched_getaffinity(pid)) for pid in pids]
        return cores, [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]

main(["devices"])
print(json.dumps([look(EngineOptions(threads=threads)) for threads in (None, 1, 2)]))
"""


# Cores that are taken away from a running program, as `docker update --cpuset-cpus` does.

NARROWED = """
import logging
from pathlib import Path
logging.basicConfig(format="%(levelname)s %(message)s")

group, model, first, second = Path(sys.argv[1]), *sys.argv[2:]
(group / "cgroup.procs").write_text(str(os.getpid()))
options = mcinfer.EngineOptions(cores=[[int(first)], [int(second)]])
plan = {"equal": mcinfer.EngineOptions(), "chosen": options}

def cores(master):
    return [sorted(os.sched_getaffinity(worker.pid)) for worker in master.statistics().workers]

for name, options in plan.items():
    (group / "cpuset.cpus").write_text(f"{first},{second}")
    with mcinfer.Master(model, 2, engine="fake", options=options) as master:
        say(name, cores(master))
        (group / "cpuset.cpus").write_text(first)
        master.restart_workers()
        say(name, cores(master), master.health().state)
"""


def set_cores(group: Path) -> None:
    memory = group / "cpuset.mems"
    if (
        memory.exists() and not memory.read_text(encoding="ascii").strip()
    ):  # version 1 takes no task then
        memory.write_text((group.parent / "cpuset.mems").read_text(encoding="ascii"))
    (group / "cpuset.cpus").write_text(f"{CORES[0]},{CORES[1]}", encoding="ascii")


@pytest.mark.thorough
@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_workers_start_again_on_the_cores_that_the_container_has_left(
    fake_model: FakeModel,
) -> None:
    first, second, *_ = CORES
    with limited_group("cpuset", set_cores) as group:
        words = [str(group), str(fake_model()), str(first), str(second)]
        command = [sys.executable, "-c", PREAMBLE + NARROWED, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    expected = []
    for name in ("equal", "chosen"):
        expected += [f"{name} [[{first}], [{second}]]", f"{name} [[{first}], [{first}]] ready"]
    assert done.stdout.splitlines() == expected
    told = [f"planned for cores {second}, and {first} are allowed now: not pinned"] * 2
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert [line.split(": ", 1)[1] for line in warnings] == told


def set_quota(group: Path) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}", encoding="ascii")
    elif not (group / "cpu.cfs_quota_us").exists():
        raise FileNotFoundError(f"{group} takes no quota")
    else:
        (group / "cpu.cfs_period_us").write_text(f"{PERIOD_US}", encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(f"{QUOTA_US}", encoding="ascii")


@pytest.mark.thorough
@pytest.mark.skipif(len(CORES) < 2, reason="a quota below the number of cores takes two")
def test_workers_have_all_cores_and_the_threads_of_the_quota(
    onnx_model: OnnxModel,
) -> None:
    with limited_group("cpu", set_quota) as group:
        command = [sys.executable, "-c", LOOK, str(group), str(onnx_model(AFFINE))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    *told, looks = done.stdout.splitlines()
    unsaid, one, two = json.loads(looks)
    # One CPU and a half: one worker with one thread, on any of the cores.
    assert [cores for cores, _ in (unsaid, one, two)] == [[CORES]] * 3
    assert unsaid == one
    assert two[1] == [one[1][0] + 1]  # what the user says goes
    listed = format_core_list(CORES)
    assert told[0] == f"{len(CORES)} usable cores: {listed}; by default 1 worker"
    assert "  CPU quota: 1.5 CPUs, 1 thread at a time" in told
    assert told[-1] == f"worker 0: cpu:0, cores {listed}, 1 thread"


# Threads.

FEW_THREADS = """
from pathlib import Path
group = Path(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
for most in range(1, 200):
    (group / "pids.max").write_text(str(most))
    try:
        with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never") as master:
            say(master.predict(X)["y"].sum())
        break
    except mcinfer.BuildError as exc:
        say(exc)
"""


def check_limits_threads(group: Path) -> None:
    if not (group / "pids.max").exists():
        raise FileNotFoundError(f"{group} takes no limit")


@pytest.mark.thorough
def test_limit_on_threads_is_named_until_it_lets_the_pool_serve(fake_model: FakeModel) -> None:
    with limited_group("pids", check_limits_threads) as group:
        ended = run(FEW_THREADS, fake_model(), group)
    *refusals, answer = ended.out.splitlines()
    assert (ended.status, answer) == (0, "48.0"), ended
    assert len(refusals) >= 14  # four threads of the pool, and five for each worker
    for line in refusals:
        assert "pids.max of this container (control group) is" in line
