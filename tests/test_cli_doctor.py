"""Tests of mcinfer/diagnosis/ and of mcinfer/cli/doctor.py: every verdict, and a real examination."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
from mcinfer.diagnosis.looking import examine
from mcinfer.diagnosis.packages import (
    Requirement,
    judge_extras,
    judge_packages,
    parse_requirements,
)
from mcinfer.diagnosis.runtime import Runtime, installed_runtime
from mcinfer.errors import EngineError
from mcinfer.machine import Gpu
from mcinfer.runtime import connections

GIB = 1 << 30
FOUR_WORKERS = connections.DESCRIPTORS_TO_OPEN + 4 * connections.DESCRIPTORS_OF_A_WORKER
THREADS = 8 + 4 * 8 + 16


def check(finding: Finding, state: str, *words: str) -> None:
    """Fail unless that is the verdict, these words are in it, and it has advice if it is no good."""
    assert finding.state == state, finding
    assert bool(finding.advice) is (state != "ok")
    for word in words:
        assert word in f"{finding.found} -> {finding.advice}"


# Verdicts.


def test_linux_alone_is_a_platform() -> None:
    check(judge_platform("Linux", "Python 3.11"), "ok", "Python 3.11")
    check(judge_platform("Darwin", "Python 3.11"), "problem", "runs on Linux alone")


def test_feature_that_fails_is_told_in_the_kernels_words() -> None:
    check(judge_feature("pidfd_open", "Linux 5.3", ""), "ok")
    failure = "[Errno 38] Function not implemented"
    check(judge_feature("pidfd_open", "Linux 5.3", failure), "problem", failure, "Linux 5.3")


@pytest.mark.parametrize(
    ("soft", "state"),
    [
        (None, "ok"),
        (100 + 2 * FOUR_WORKERS, "ok"),
        (100 + 2 * FOUR_WORKERS - 1, "warning"),
        (100 + FOUR_WORKERS, "warning"),
        (100 + FOUR_WORKERS - 1, "problem"),
    ],
)
def test_descriptors_should_do_for_a_pool_and_as_many_again(soft: int | None, state: str) -> None:
    finding = judge_descriptors(soft, 4096, 100, 4)
    check(finding, state, "4 workers", f"takes {FOUR_WORKERS} more", "4096 at most")


@pytest.mark.parametrize(
    ("hard", "advice"),
    [
        (None, "ulimit -n 4096 (Docker: --ulimit nofile=4096"),
        (10_000, "ulimit -n 4096 ("),
        (100 + 2 * FOUR_WORKERS, f"ulimit -n {100 + 2 * FOUR_WORKERS} ("),
        (100 + 2 * FOUR_WORKERS - 1, "a higher hard limit, which takes root: 4096 in /etc"),
    ],
)
def test_advice_on_a_limit_is_what_its_hard_limit_allows(hard: int | None, advice: str) -> None:
    assert judge_descriptors(30, hard, 100, 4).advice.startswith(advice)
    many = judge_descriptors(30, None, 100, 1000)
    assert int(many.advice.split()[2]) >= 100 + 2 * connections.DESCRIPTORS_OF_A_WORKER * 1000
    user = judge_threads((30, 20), hard, 1, 1).advice
    assert user.startswith("ulimit -u")
    assert "Docker" not in user


@pytest.mark.parametrize(
    ("most", "state"),
    [
        (100 + 2 * THREADS, "ok"),
        (100 + 2 * THREADS - 1, "warning"),
        (100 + THREADS, "warning"),
        (100 + THREADS - 1, "problem"),
    ],
)
def test_threads_should_do_for_a_pool_and_as_many_again(most: int, state: str) -> None:
    check(judge_container_threads((most, 100), 4, 16), state, f"about {THREADS}", "4 workers")
    check(judge_threads((most, 100), None, 4, 16), state, f"about {THREADS}")


def test_threads_without_a_limit_are_fine() -> None:
    check(judge_threads(None, None, 4, 16), "ok", "no limit")
    check(judge_container_threads(None, 4, 16), "ok", "no limit")


@pytest.mark.parametrize(
    ("limit", "available", "state", "found"),
    [
        (None, 32 * GIB, "ok", "64.0 GiB, all of the machine's; 32.0 GiB free"),
        (None, 31 * GIB, "warning", "Limits(memory_bytes=…)"),
        (1 << 62, 40 * GIB, "ok", "64.0 GiB, all of the machine's; 40.0 GiB free"),
        (8 * GIB, 16 * GIB, "ok", "8.0 GiB, a container's limit; 8.0 GiB free"),
        (8 * GIB, 3 * GIB, "warning", "8.0 GiB, a container's limit; 3.0 GiB free"),
    ],
)
def test_memory_should_be_half_free(
    limit: int | None, available: int, state: str, found: str
) -> None:
    total = 64 * GIB
    usable = min(total, limit or total)
    check(judge_memory(total, limit, usable, available), state, found)


def test_strict_overcommit_is_warned_of() -> None:
    check(judge_overcommit(0), "ok", "mode 0")
    check(judge_overcommit(1), "ok", "mode 1")
    check(judge_overcommit(2), "warning", "sysctl vm.overcommit_memory=0")


def test_shared_memory_may_be_small_or_missing() -> None:
    check(judge_shared_memory(64 << 20), "ok", "64 MiB; mcinfer does not use it")
    check(judge_shared_memory(None), "ok", "there is none; mcinfer does not use it")


@pytest.mark.parametrize(
    ("cores", "quota", "state", "found"),
    [
        (8, None, "ok", "none below the 8 usable cores"),
        (8, 8.0, "ok", "none below the 8 usable cores"),
        (1, 2.0, "ok", "none below the 1 usable core"),
        (8, 1.5, "ok", "1.5 CPUs' worth of time on 8 usable cores"),
        (8, 0.5, "warning", "limits.cpu"),
    ],
)
def test_quota_of_less_than_one_thread_is_warned_of(
    cores: int, quota: float | None, state: str, found: str
) -> None:
    check(judge_cpus(cores, quota), state, found)


@pytest.mark.parametrize(
    ("scope", "privileged", "state", "found"),
    [
        (None, False, "ok", "all processes of their user"),
        (0, False, "ok", "all processes of their user"),
        (1, False, "ok", "processes that they start"),
        (1, True, "ok", "as root"),
        (2, True, "ok", "as root"),
        (2, False, "warning", "ptrace_scope=1"),
        (3, False, "warning", "from the next boot on"),
        (3, True, "warning", "no process"),
    ],
)
def test_ptrace_scope_matters_where_debuggers_cannot_attach(
    scope: int | None, privileged: bool, state: str, found: str
) -> None:
    check(judge_tracing(scope, privileged=privileged), state, found)


def test_runtime_folder_should_be_where_the_session_wants_it() -> None:
    place = Path("/run/user/1000")
    check(judge_runtime_folder(place, None, ""), "ok", "/run/user/1000")
    check(judge_runtime_folder(place, "/run/user/1000", ""), "ok")
    elsewhere = judge_runtime_folder(Path("/other"), "/run/user/1000", "")
    check(elsewhere, "warning", "/other;", "XDG_RUNTIME_DIR, /run/user/1000, cannot be used")
    check(judge_runtime_folder(None, None, "no place"), "problem", "no place", "TMPDIR")


def cache(mode: int | None = 0o700, free: int = 90 * GIB) -> CacheFacts:
    return CacheFacts(folder=Path("/cache"), mode=mode, limit=50 * GIB, used=GIB, free=free)


def test_cache_should_have_a_folder_and_room() -> None:
    check(judge_cache(cache(), ""), "ok", "/cache, yours, mode 0700; 1.0 GiB of at most 50.0 GiB")
    check(judge_cache(cache(None), ""), "ok", "not made yet")
    check(judge_cache(cache(free=49 * GIB), ""), "ok")
    fills = "set MCINFER_CACHE_LIMIT to less than the 49.0 GiB"
    check(judge_cache(cache(free=48 * GIB), ""), "warning", "may fill the disk", fills)
    full = judge_cache(cache(free=0), "")
    check(full, "warning", "0 MiB of the disk free", "make room")
    assert "MCINFER_CACHE_LIMIT" not in full.advice
    check(judge_cache(None, "is writable by others"), "warning", "is writable by others")


def test_cache_limit_that_makes_no_sense_is_a_problem() -> None:
    check(judge_cache_settings("got 'lots'", wrong=True), "problem", "got 'lots'")
    check(judge_cache_settings("no home folder", wrong=False), "warning", "no home folder")


def test_pool_and_its_maps_are_judged_by_their_failures() -> None:
    check(judge_pool(0.25, 0.5, ""), "ok", "started (0.25 s)", "0.50 s in all")
    check(judge_pool(0.0, 30.0, "worker 0 has died"), "problem", "worker 0 has died")
    check(judge_maps(""), "ok")
    check(judge_maps("access denied"), "warning", "access denied")


# Packages.

NEEDED = [
    Requirement("numpy", "2.2", ""),
    Requirement("psutil", "5.9.8", ""),
    Requirement("rich", "13", "cli"),
    Requirement("typer", "0.16", "cli"),
    Requirement("onnx", "1.17", "onnx"),
    Requirement("pytest", "8.2", "test"),
]


def test_requirements_are_read_from_metadata() -> None:
    texts = ["numpy>=2.2", 'rich >= 13 ; extra == "cli"', "psutil", "a[b]>=1; sys_platform != 'x'"]
    assert parse_requirements(texts) == [
        Requirement("numpy", "2.2", ""),
        Requirement("rich", "13", "cli"),
        Requirement("psutil", "", ""),
    ]


def test_package_that_is_missing_or_old_is_a_problem() -> None:
    versions = {"numpy": "2.10.1", "psutil": "5.9.8"}
    finding = judge_packages("1.0", NEEDED, versions)
    check(finding, "ok", "mcinfer 1.0, numpy 2.10.1, psutil 5.9.8")
    missing = judge_packages("1.0", NEEDED, {"numpy": "2.10.1"})
    check(missing, "problem", "psutil is missing", "pip install 'psutil>=5.9.8'")
    old = judge_packages("1.0", NEEDED, {**versions, "numpy": "1.26.4"})
    check(old, "problem", "numpy 1.26.4", "pip install 'numpy>=2.2'")


@pytest.mark.parametrize("version", ["2.2", "2.2.0", "2.2rc1", "2.3 (numpy-other)", "3"])
def test_version_is_compared_by_its_numbers(version: str) -> None:
    check(judge_packages("1.0", NEEDED[:1], {"numpy": version}), "ok")


def test_what_is_not_installed_cannot_be_checked() -> None:
    check(judge_packages("", [], {}), "warning", "not installed")


def test_extras_are_there_in_whole_or_not() -> None:
    check(judge_extras(NEEDED, {"rich": "14"}), "ok", "installed: none; not installed: cli, onnx")
    there = {"rich": "14", "typer": "0.16.0"}
    check(judge_extras(NEEDED, there), "ok", "installed: cli; not installed: onnx")
    old = judge_extras(NEEDED, {**there, "onnx": "1.9"})
    check(old, "warning", "too old: onnx 1.9", "pip install 'onnx>=1.17'")


# The runtime, and GPUs.


def test_runtime_that_cannot_be_imported_is_a_problem() -> None:
    check(judge_runtime(Runtime(version="1.2", providers=("A", "B")), ""), "ok", "1.2 offers: A, B")
    check(judge_runtime(None, "no libfoo"), "problem", "no libfoo", "pip install")


def test_gpus_that_the_runtime_cannot_use_are_warned_of() -> None:
    plain = Runtime(version="1.2", providers=("CPUExecutionProvider",))
    cuda = Runtime(version="1.2", providers=("CUDAExecutionProvider",))
    two = [Gpu(index=i, uuid=f"GPU-{i}", name="H200") for i in range(2)]
    check(judge_gpus(two, "", "in odd order", cuda), "ok", "cuda:0: H200; cuda:1: H200; in odd")
    check(judge_gpus(two, "", "", None), "ok")
    check(judge_gpus(two, "", "", plain), "warning", "no CUDAExecutionProvider", "onnxruntime-gpu")
    check(judge_gpus((), "there is no nvidia-smi", "", plain), "ok", "there is no nvidia-smi")


def test_runtime_is_imported_and_its_failure_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installed_runtime()
    assert "CPUExecutionProvider" in found.providers
    (tmp_path / "onnxruntime.py").write_text("raise OSError('no libfoo')\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match="cannot be imported: OSError: no libfoo"):
        installed_runtime()


# The real thing.


def doctor(tmp_path: Path, prefix: str = "", **variables: str) -> tuple[int, list[str], str]:
    """Run the command in a process of its own: its status, its lines, and what it says of failure."""
    folders = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR"), str(tmp_path))
    done = subprocess.run(
        ["/bin/sh", "-c", f"{prefix} exec {sys.executable} -m mcinfer doctor"],
        env={**os.environ, **folders, **variables},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_doctor_finds_no_problem_where_tests_run(tmp_path: Path) -> None:
    status, lines, said = doctor(tmp_path, MCINFER_CACHE=str(tmp_path / "a" / "cache"))
    assert (status, said) == (0, ""), lines
    assert all(re.match(r"(ok     |warning)  \S.*: \S", line) for line in lines)
    names = [line[9:].partition(":")[0] for line in lines]
    assert names == [
        *("platform", "memfd_create with seals", "pidfd_open", "descriptors over sockets"),
        *("open files", "threads of the user", "threads of the container", "memory"),
        *("overcommit", "/dev/shm", "CPU quota", "ptrace scope", "runtime folder", "cache"),  # noqa: S108 a name
        *("packages", "extras", "onnxruntime", "GPUs", "memory maps", "pool"),
    ]
    assert re.fullmatch(
        r"ok       pool: 1 worker started \(\d+\.\d\d s\), answered and ended, \d+\.\d\d s in all",
        lines[-1],
    )
    assert [*tmp_path.iterdir()] == []  # nor of the cache, which could be made


def test_doctor_says_what_to_do_where_no_pool_can_start(tmp_path: Path) -> None:
    status, lines, said = doctor(tmp_path, "ulimit -n 30;", MCINFER_CACHE_LIMIT="lots")
    assert status == 1
    assert said == "mcinfer: 3 problems were found\n"
    files, cache_limit, pool = (line for line in lines if line.startswith("problem"))
    assert files.startswith("problem  open files: 30, 30 at most; ")
    assert " -> a higher hard limit" in files
    assert "MCINFER_CACHE_LIMIT: got 'lots', expected bytes" in cache_limit
    assert "38 descriptors are needed" in pool


def test_cache_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCINFER_CACHE", "/proc/place")
    finding = next(finding for finding in examine() if finding.name == "cache")
    check(finding, "warning", "/proc/place cannot be used: ", "a folder that can be made")
