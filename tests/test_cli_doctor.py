"""Tests of mcinfer/cli/doctor.py: single findings, ``mcinfer doctor``, and ``mcinfer devices``."""

import os
import platform
import pwd
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from onnxruntime.datasets import get_example

import mcinfer
from mcinfer.cards.nvidia_smi import Gpu
from mcinfer.cli import main
from mcinfer.cli.doctor import (
    Finding,
    examine,
    judge_gpus,
    judge_limit,
    look_at_cache,
    look_at_model,
    look_at_packages,
    look_at_runtime,
)
from mcinfer.cli.probes import (
    Driver,
    InstalledRuntime,
    core_siblings,
    gpu_order_doubt,
    gpus_and_driver,
    installed_runtime,
    mps_folder,
    numa_nodes,
    parse_core_list,
)
from mcinfer.machine import cpu_quota, format_core_list
from mcinfer.model_cache.cache import Cache
from tests.command_line import FLOAT, Capture, only_line, save

CORES = sorted(os.sched_getaffinity(0))
NO_LIMIT = resource.RLIM_INFINITY


def check(finding: Finding, state: str, *words: str) -> None:
    assert finding.state == state, finding
    for word in words:
        assert word in f"{finding.found} -> {finding.warning}{finding.problem}"


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


REQUIRES = (
    "numpy>=2.2",
    "psutil",
    'rich>=13; extra == "cli"',
    'typer>=0.16; extra == "cli"',
    'mcinfer[cli]; extra == "onnx"',
    'onnx>=1.17; extra == "onnx"',
)


def test_package_that_is_missing_or_old_is_a_problem_and_an_old_extra_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = SimpleNamespace(get_all=lambda _: ["cli", "onnx", "test"])
    own = SimpleNamespace(version="1.0", requires=REQUIRES, metadata=names)
    monkeypatch.setattr(metadata, "distribution", lambda _: own)

    def judged(**versions: str) -> Iterable[Finding]:
        monkeypatch.setattr("mcinfer.cli.doctor.version_of", versions.get)
        return look_at_packages()

    packages, extras = judged(numpy="2.10.1", psutil="5.9.8", rich="14")
    check(packages, "ok", "mcinfer 1.0, numpy 2.10.1, psutil 5.9.8")
    check(extras, "ok", "installed: none; not installed: cli, onnx")
    packages, extras = judged(numpy="1.26.4", rich="14", typer="0.16.0", onnx="1.9")
    check(packages, "problem", "psutil is missing", "pip install 'numpy>=2.2' 'psutil'")
    check(packages, "problem", "numpy 1.26.4")
    check(extras, "warning", "installed: cli", "too old: onnx 1.9", "pip install 'onnx>=1.17'")


PLAIN = InstalledRuntime(version="1.2", providers=("CPUExecutionProvider",))
CUDA = InstalledRuntime(version="1.2", providers=("CUDAExecutionProvider",), cuda="13.0")


REINSTALL = "pip uninstall onnxruntime onnxruntime-gpu, then pip install 'cuda-bindings>="


def test_gpus_that_cannot_be_used_or_shared_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    two = "; cuda:1: H200; driver 580.65, up to CUDA 13.1; no MPS"
    for mode, runtime, cuda, mps, state, *words in (
        ("", CUDA, "13.1", None, "ok", two, "unless CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ("", None, "12.8", "/mps", "ok", "MPS runs, in /mps"),
        ("", CUDA, "", None, "ok", "driver 580.65; no MPS"),
        ("", CUDA, "12.8", None, "warning", "a driver that serves CUDA 13"),
        ("", PLAIN, "12.8", None, "warning", "no CUDAExecutionProvider", REINSTALL),
        ("Default", CUDA, "13.0", None, "ok", "cuda:1: H200, compute mode Default"),
        ("Exclusive", CUDA, "13.0", None, "warning", "process alone may use cuda:1: ", "or MPS"),
        ("Exclusive", CUDA, "13.0", "/mps", "ok"),
        ("Prohibited", CUDA, "13.0", "/mps", "warning", "cuda:1 may not be used: nvidia-smi"),
    ):
        first = Gpu(index=0, uuid="GPU-0", name="H200", driver="580.65")
        second = replace(first, index=1, compute_mode=mode)
        check(judge_gpus([first, second], Driver("580.65", cuda, mps), runtime), state, *words)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert not gpu_order_doubt(2)


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


@pytest.mark.thorough
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
    assert "34 descriptors are needed" in pool


NAMES = {
    "USER": "zaphod",
    "LOGNAME": "zaphod",
    "HOSTNAME": "heart-of-gold",
    "HOME": "/home/zaphod",
    "MCINFER_CACHE": "/home/zaphod/models",
    "XDG_RUNTIME_DIR": "/run/zaphod",
}


@pytest.mark.parametrize("cards", [True, False])
def test_report_is_a_block_with_versions_and_without_names_and_paths(
    cards: bool,
    nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    nvidia_smi(TWO_GPUS if cards else "echo zaphod has no driver >&2; exit 9")
    for name in [*os.environ]:  # of fixtures that last longer than a test
        if name.startswith("MCINFER_EMULATED"):
            monkeypatch.delenv(name)
    for name, value in NAMES.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "broken"  # its error has paths
    (folder / "openvino").mkdir(parents=True)
    (folder / "openvino" / "__init__.py").write_text("raise ImportError(__file__)\n", "utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--report"]) == 0
    first, *lines, last = (text := capsys.readouterr().out).splitlines()
    assert (first, last) == ("```text", "```")
    found = dict(line.split(": ", 1) for line in lines)
    assert found["mcinfer"].startswith(f"{mcinfer.__version__}, ")
    assert found["Python"].startswith(f"CPython {platform.python_version()}, ")
    assert f"numpy {np.__version__}, pyzmq {zmq.__version__}, " in found["packages"]
    assert found["libzmq"] == zmq.zmq_version()
    assert found["ONNX Runtime"] == str(installed_runtime()).removeprefix("onnxruntime ")
    assert found["OpenVINO"] == "cannot be imported"
    assert found["variables"] == "MCINFER_CACHE"
    if cards:
        assert found["cuda:1"] == "A1, 1.0 GiB, 0.5 GiB free, compute mode Default"
        assert found["driver"] == "580.65, up to CUDA 13.0, MPS does not run"
    else:
        assert found["cards"] == "nvidia-smi names none that can be used"
    user, host = pwd.getpwuid(os.getuid()), platform.node() or "localhost"
    for name in ("zaphod", "heart-of-gold", user.pw_name, host, user.pw_dir, str(tmp_path)):
        assert not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
    assert not re.search(r"(?<![\w.])/\w", text)  # a path
    assert main(["doctor", "--report", "model.onnx"]) == 2


@pytest.mark.thorough
def test_both_packages_of_the_runtime_are_one_too_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, state in (("onnxruntime", "ok"), ("onnxruntime-gpu", "warning")):
        folder = tmp_path / f"{name.replace('-', '_')}-1.32.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.32.0\n")
        runtime, *_ = look_at_runtime()
        check(runtime, state, "offers: ", *["pip uninstall both"] * (state == "warning"))


def test_model_is_said_to_share_its_weights_or_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    small, text = Path(get_example("mul_1.onnx")), tmp_path / "text.onnx"
    large = tmp_path / "large.onnx"
    shape: list[int | str] = ["n", 2100]
    ends = [("x", FLOAT, shape)], [("y", FLOAT, shape)]
    weights = {"w": np.ones((2100, 2100), np.float32)}
    save(large, [helper.make_node("MatMul", ["x", "w"], ["y"])], *ends, weights)
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


def test_cache_that_is_more_than_half_full_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    def fill(folder: Path, _: int) -> None:
        (folder / "weights.bin").write_bytes(bytes(600 << 10))

    cache.make({"model": "m"}, fill, wait=0).close()
    for limit, state in (("1M", "warning"), ("2M", "ok")):
        monkeypatch.setenv("MCINFER_CACHE_LIMIT", limit)
        advice = ["mcinfer cache clear"] * (state == "warning")
        (finding,) = look_at_cache()
        check(finding, state, " of at most ", *advice)
        assert ("more than half full" in finding.found) == (state == "warning")


# The devices.


needs_no_quota = pytest.mark.skipif(
    (cpu_quota() or len(CORES)) < len(CORES), reason="a CPU quota leaves fewer threads than cores"
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes a program of that name; no other is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
        path.chmod(0o755)

    return write


TWO_GPUS = """
[ $1 = --query ] && echo "CUDA Version : 13.0"
for i in 0 1; do echo "$i, GPU-$i, 0:0$i:00.0, 580.65, Default, 1024, 512, A$i"; done
"""


@needs_no_quota
def test_each_worker_has_a_line(nvidia_smi: Callable[[str], None], capsys: Capture) -> None:
    nvidia_smi(TWO_GPUS)
    several = "s" if len(CORES) > 1 else ""
    assert main(["devices", "--devices", "cpu:0,cpu:0,cuda:1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{len(CORES)} usable core")
    assert f": {format_core_list(CORES)}; by default " in first
    cores, threads = f"core{several} {format_core_list(CORES)}", f"{len(CORES)} thread{several}"
    assert lines[-3:] == [
        f"worker 0: cpu:0, {cores}, shared, {threads}",
        f"worker 1: cpu:0, {cores}, shared, {threads}",
        "worker 2: cuda:1, not pinned to cores",
    ]


def test_device_that_does_not_exist_is_a_failure(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    nvidia_smi(TWO_GPUS)
    for device, visible, why in (
        (f"cpu:{len(CORES)}", "", ""),
        ("cuda:2", "0,1", ": the last device that was found is cuda:1"),
        ("cuda:2", "1", ": the last device that was found is cuda:0"),
        ("cuda:2", "", ": no GPU was found: CUDA_VISIBLE_DEVICES='' leaves none of 2"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert main(["devices", f"--devices=cpu:0,{device}"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert f"device {device} does not exist{why}" in only_line(err)


def test_sockets_and_cores_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4})
    for core, files in {0: ("0", "0,2"), 1: ("0", "1,3"), 2: ("0", "0,2")}.items():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        for name, text in zip(("physical_package_id", "thread_siblings_list"), files, strict=True):
            (folder / name).write_text(text)
    assert core_siblings(tmp_path) == (0, 0)  # of core 4 nothing is known
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert core_siblings(tmp_path) == (1, 2)


def test_nodes_have_the_usable_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 9, 10})
    for node, cores in ((0, "0-3,8-9"), (1, "4-7,10"), (2, ""), (10, "11\n")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores, encoding="ascii")
    found = {0: (0, 1, 9), 1: (10,), 2: (), 10: ()}
    assert [*numa_nodes(tmp_path).items()] == [*found.items()]


@given(st.sets(st.integers(0, 300)))
def test_list_of_cores_can_be_read_again(cores: set[int]) -> None:
    assert parse_core_list(format_core_list([*cores])) == tuple(sorted(cores))


@pytest.mark.parametrize(
    ("report", "version"),
    [
        ("Driver Version : 580.65.06\nCUDA Version : 13.0\nAttached GPUs : 1", "13.0"),
        ("CUDA UMD Version        : 13.1", "13.1"),
        ("CUDA Version : N/A", ""),
    ],
)
def test_newest_cuda_of_a_driver_stands_above_its_reports(
    report: str, version: str, nvidia_smi: Callable[[str], None]
) -> None:
    nvidia_smi(f"[ $1 = --query ] && echo '{report}'\necho 0, GPU-a, 0, 580, , , , A")
    assert gpus_and_driver()[1].cuda == version


def test_mps_runs_where_its_daemon_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_folder() is None
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "control"))
        assert mps_folder() is None
        daemon.listen()
        assert mps_folder() == str(tmp_path)
    assert mps_folder() is None  # its file is there all the same
