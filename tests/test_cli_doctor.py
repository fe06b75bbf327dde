"""Tests of mcinfer/cli/doctor.py: single findings, and the whole command."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.datasets import get_example

from mcinfer.cli.doctor import (
    Finding,
    InstalledRuntime,
    examine,
    installed_runtime,
    judge_cache,
    judge_cpus,
    judge_gpus,
    judge_limit,
    judge_memory,
    judge_packages,
    look_at_model,
)
from mcinfer.errors import EngineError
from mcinfer.machine import Gpu

GIB = 1 << 30
NO_LIMIT = resource.RLIM_INFINITY


def check(finding: Finding, state: str, *words: str) -> None:
    assert finding.state == state, finding
    for word in words:
        assert word in f"{finding.found} -> {finding.warning}{finding.problem}"


def save_matmul(path: Path, *, width: int) -> None:
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", width]) for n in "xy"]
    weights = numpy_helper.from_array(np.ones((width, width), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "g", sides[:1], sides[1:], [weights])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opset), path)


@pytest.mark.parametrize(
    ("soft", "hard", "state", "advice"),
    [
        (NO_LIMIT, NO_LIMIT, "ok", ""),
        (200, 200, "ok", ""),
        (199, 10_000, "warning", "ulimit -n 4096 (Docker: 4096)"),
        (150, 300, "warning", "ulimit -n 300 (Docker: 4096)"),
        (149, 199, "problem", "a higher limit, which takes root: Docker: 4096"),
    ],
)
def test_limits_should_allow_two_pools(soft: int, hard: int, state: str, advice: str) -> None:
    found = judge_limit("files", (soft, hard), 100, 50, "a pool", "ulimit -n", "Docker: {0}")
    assert (found.state, found.warning + found.problem) == (state, advice)


def test_memory_should_be_half_free() -> None:
    total, limit = 64 * GIB, 8 * GIB
    free = "64.0 GiB, all of the machine's; 32.0 GiB free"
    check(judge_memory(total, None, total, 32 * GIB), "ok", free)
    check(judge_memory(total, 1 << 62, total, 31 * GIB), "warning", "Limits(memory_bytes=…)")
    free = "8.0 GiB, a container's limit; 8.0 GiB free"
    check(judge_memory(total, limit, limit, 16 * GIB), "ok", free)


def test_quota_of_less_than_one_thread_is_a_warning() -> None:
    check(judge_cpus(8, 8.0), "ok", "none below the 8 usable cores")
    check(judge_cpus(8, 1.0), "ok", "1 CPUs' worth of time on 8 usable cores")
    check(judge_cpus(8, 0.5), "warning", "limits.cpu")


def test_cache_should_have_room() -> None:
    def judged(free: int, mode: int | None = 0o700) -> Finding:
        return judge_cache(Path("/cache"), mode, 50 * GIB, GIB, free)

    check(judged(49 * GIB), "ok", "/cache, yours, mode 0700; 1.0 GiB of at most 50.0 GiB")
    check(judged(90 * GIB, None), "ok", "not made yet")
    check(judged(48 * GIB), "warning", "set MCINFER_CACHE_LIMIT to less than the 49.0 GiB")
    check(judged(0), "warning", "0 MiB of the disk free", "make room")


REQUIRES = (
    "numpy>=2.2",
    "psutil",
    'rich>=13; extra == "cli"',
    'typer>=0.16; extra == "cli"',
    'mcinfer[cli]; extra == "onnx"',
    'onnx>=1.17; extra == "onnx"',
)


def test_package_that_is_missing_or_old_is_a_problem_and_an_old_extra_a_warning() -> None:
    def judged(**versions: str) -> list[Finding]:
        return [*judge_packages("1.0", REQUIRES, ["cli", "onnx"], versions.get)]

    packages, extras = judged(numpy="2.10.1", psutil="5.9.8", rich="14")
    check(packages, "ok", "mcinfer 1.0, numpy 2.10.1, psutil 5.9.8")
    check(extras, "ok", "installed: none; not installed: cli, onnx")
    packages, extras = judged(numpy="1.26.4", rich="14", typer="0.16.0", onnx="1.9")
    check(packages, "problem", "psutil is missing", "pip install 'numpy>=2.2' 'psutil'")
    check(packages, "problem", "numpy 1.26.4")
    check(extras, "warning", "installed: cli", "too old: onnx 1.9", "pip install 'onnx>=1.17'")


def test_gpus_that_the_runtime_cannot_use_are_a_warning() -> None:
    plain = InstalledRuntime(version="1.2", providers=("CPUExecutionProvider",))
    cuda = InstalledRuntime(version="1.2", providers=("CUDAExecutionProvider",), cuda="13.0")
    assert "built with CUDA 13.0, offers: CUDA" in str(cuda)
    two = [Gpu(index=i, uuid=f"GPU-{i}", name="H200", driver="580.65") for i in range(2)]
    found = "cuda:0: H200; cuda:1: H200; driver 580.65, up to CUDA 13.1; no MPS"
    check(judge_gpus(two, "in odd order", cuda, "13.1", None), "ok", found, "; in odd order")
    check(judge_gpus(two, "", None, "12.8", Path("/mps")), "ok", "MPS runs, in /mps")
    check(judge_gpus(two, "", cuda, "", None), "ok", "driver 580.65; no MPS")
    check(judge_gpus(two, "", cuda, "12.8", None), "warning", "a driver that serves CUDA 13")
    words = ("no CUDAExecutionProvider", "'mcinfer[gpu]'")
    check(judge_gpus(two, "", plain, "12.8", None), "warning", *words)


def test_gpu_that_one_process_alone_may_use_is_a_warning_without_mps() -> None:
    cuda = InstalledRuntime(version="1.2", providers=("CUDAExecutionProvider",), cuda="13.0")

    def judged(mode: str, mps: Path | None = None) -> Finding:
        default = Gpu(index=0, uuid="GPU-0", name="H200", compute_mode="Default")
        other = Gpu(index=1, uuid="GPU-1", name="H200", compute_mode=mode)
        return judge_gpus([default, other], "", cuda, "13.0", mps)

    check(judged("Default"), "ok", "cuda:1: H200, compute mode Default")
    check(judged("Exclusive_Process"), "warning", "one process alone may use cuda:1: ", "or MPS")
    check(judged("Exclusive_Process", Path("/mps")), "ok")
    check(judged("Prohibited", Path("/mps")), "warning", "cuda:1 may not be used: nvidia-smi")


def test_failed_import_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CPUExecutionProvider" in installed_runtime().providers
    (tmp_path / "onnxruntime.py").write_text("raise OSError('no libfoo')\n", encoding="ascii")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError, match="cannot be imported: OSError: no libfoo"):
        installed_runtime()


def doctor(tmp_path: Path, prefix: str = "", **variables: str) -> tuple[int, list[str], str]:
    """The status, the lines and the standard error of the command in a process of its own."""
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
        *("platform", "memfd_create with seals", "pidfd_open"),
        *("open files", "threads of the user", "threads of the container", "memory"),
        *("overcommit", "CPU quota", "runtime folder", "cache", "packages", "extras"),
        *("onnxruntime", "GPUs", "pool"),
    ]
    assert "1 worker started" in lines[-1]
    assert [*tmp_path.iterdir()] == []  # the cache could be made, but is not


def test_doctor_says_what_to_do_where_no_pool_can_start(tmp_path: Path) -> None:
    status, lines, said = doctor(tmp_path, "ulimit -n 30;", MCINFER_CACHE_LIMIT="lots")
    assert (status, said) == (1, "mcinfer: 3 problems found\n")
    files, cache_limit, pool = (line for line in lines if line.startswith("problem"))
    assert files.startswith("problem  open files: limit 30, ")
    assert " -> a higher limit" in files
    assert "MCINFER_CACHE_LIMIT: got 'lots', expected bytes" in cache_limit
    assert "38 descriptors are needed" in pool


def test_model_is_said_to_share_its_weights_or_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    small, text = Path(get_example("mul_1.onnx")), tmp_path / "text.onnx"
    large = tmp_path / "large.onnx"
    save_matmul(large, width=2100)
    text.write_text("no model")
    check(look_at_model(small), "ok", "its own copy of the weights: it has less than 16 MiB")
    check(look_at_model(large), "ok", "inline sessions share one copy of its weights, entry ")
    check(look_at_model(text), "problem", "it is text, no model")
    missing = look_at_model(tmp_path / "missing.onnx")
    check(missing, "problem", "it cannot be opened: ", "NO_SUCHFILE")


def test_unusable_folders_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_to_all))
    monkeypatch.setenv("MCINFER_CACHE", "/proc/place")
    found = {}
    for finding in examine():
        found[finding.name] = finding
        if finding.name == "cache":
            break
    check(found["runtime folder"], "warning", f"XDG_RUNTIME_DIR, {open_to_all}, cannot be used")
    check(found["cache"], "warning", "/proc/place cannot be used: ", "a folder that can be made")
