"""Tests of mcinfer/cli/: the commands, what they print, and their exit statuses."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import mcinfer
from mcinfer.cli import main
from mcinfer.cli.progress import Display
from mcinfer.prepared.cache import Cache, Held, entry_key

ROOT = Path(__file__).parents[1]
FLOAT = TensorProto.FLOAT
CORES = sorted(os.sched_getaffinity(0))

Capture = pytest.CaptureFixture[str]
Value = tuple[str, int, Sequence[int | str]]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [onnx.numpy_helper.from_array(a, name) for name, a in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.fixture
def double(tmp_path: Path) -> Path:
    return save(
        tmp_path / "double.onnx",
        [helper.make_node("Add", ["x", "x"], ["y"])],
        [("x", FLOAT, ["batch", 3])],
        [("y", FLOAT, ["batch", 3])],
    )


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, x=np.arange(15, dtype=np.float32).reshape(5, 3))
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_line(text: str) -> str:
    """The one line that a failure has to say."""
    (line,) = text.splitlines()
    assert line.startswith("mcinfer: ")
    return line


# What works.


def test_devices_shows_how_the_cores_are_shared_out(capsys: Capture) -> None:
    assert main(["devices", "--devices", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].startswith(f"{len(CORES)} usable cores; by default ")
    assert out.splitlines()[1:] == [f"worker 0: cpu:0, cores {CORES}"]


def test_devices_says_what_is_shared_and_what_is_no_cpu(capsys: Capture) -> None:
    assert main(["devices", "--devices", "cpu:0,cpu:0,cuda:1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"worker 0: cpu:0, cores {CORES}, shared",
        f"worker 1: cpu:0, cores {CORES}, shared",
        "worker 2: cuda:1, not a share of the CPU",
    ]


def test_inspect_says_what_a_model_takes_and_gives(double: Path, capsys: Capture) -> None:
    assert main(["inspect", str(double)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "inputs:",
        "  x: float32[batch, 3]",
        "outputs:",
        "  y: float32[batch, 3]",
        "batch: the symbol 'batch'; inputs that have it are split, others go whole",
        "runs on: CPUExecutionProvider",
    ]


@pytest.mark.parametrize(
    ("first", "text"), [(2, "batch: fixed; "), ("whatever_length", "batch: none is known; ")]
)
def test_inspect_says_what_is_split(
    tmp_path: Path, capsys: Capture, first: int | str, text: str
) -> None:
    model = save(
        tmp_path / "neg.onnx",
        [helper.make_node("Neg", ["x"], ["y"])],
        [("x", FLOAT, [first])],
        [("y", FLOAT, [first])],
    )
    assert main(["inspect", str(model)]) == 0
    assert f"\n{text}" in capsys.readouterr().out


@pytest.mark.parametrize("devices", [[], ["--devices", "2"], ["--devices", "cpu:0"]], ids=str)
def test_run_writes_what_the_model_gives(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, devices: list[str]
) -> None:
    output = tmp_path / "out.npz"
    arguments = ["run", str(double), "--input", str(batch), "--output", str(output), *devices]
    assert main(arguments) == 0
    assert capsys.readouterr() == ("y: float32[5, 3]\n", "")
    with np.load(output) as content:
        assert [*content] == ["y"]
        assert np.array_equal(content["y"], 2 * np.arange(15, dtype=np.float32).reshape(5, 3))
    assert files(tmp_path) == ["double.onnx", "in.npz", "out.npz"]


def test_module_runs_as_the_command_does(double: Path, batch: Path, tmp_path: Path) -> None:
    where = ["--input", str(batch), "--output", "out.npz"]
    run = subprocess.run(
        [sys.executable, "-m", "mcinfer", "run", str(double), *where, "--devices", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "y: float32[5, 3]\n", "")
    with np.load(tmp_path / "out.npz") as content:
        assert content["y"].shape == (5, 3)


def test_outputs_of_any_name_and_strings_can_be_written(tmp_path: Path, capsys: Capture) -> None:
    names = ["file", "args", "allow_pickle", "/layer/0"]
    model = save(
        tmp_path / "names.onnx",
        [helper.make_node("Neg", ["x"], [name]) for name in names]
        + [helper.make_node("Identity", ["s"], ["text"])],
        [("x", FLOAT, ["batch"]), ("s", TensorProto.STRING, ["batch"])],
        [(name, FLOAT, ["batch"]) for name in names] + [("text", TensorProto.STRING, ["batch"])],
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=np.array([1, 2], np.float32), s=np.array(["ü", "bc"]))
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "text: string[2]"
    with np.load(output, allow_pickle=False) as content:
        assert [*content] == [*names, "text"]
        assert content["file"].tolist() == [-1, -2]
        assert content["text"].tolist() == ["ü", "bc"]


def test_output_is_a_file_like_any_other(double: Path, batch: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    mask = os.umask(0o027)
    try:
        arguments = ["run", str(double), "--input", str(batch), "--output", str(output)]
        assert main([*arguments, "--devices", "1"]) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE(output.stat().st_mode) == 0o640


def test_version_is_the_packages(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mcinfer {mcinfer.__version__}\n"


# Wrong usage: status 2.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["inspect"], "model"),
        (["run", "m.onnx"], "--input, --output"),
        (["run", "m.onnx", "--input", "x"], "--output"),
        (["run", "m.onnx", "--input", "x", "--output", "y", "--timeout", "soon"], "--timeout"),
        (["devices", "more"], "more"),
        (["cache"], "COMMAND"),
        (["cache", "burn"], "invalid choice: 'burn'"),
        (["cache", "prepare"], "model"),
        (["cache", "list", "more"], "more"),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(
    arguments: list[str], text: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: mcinfer")
    assert text in err.splitlines()[-1]


# Failures: status 1, one line.


def test_device_that_there_is_not_is_a_failure(capsys: Capture) -> None:
    assert main(["devices", f"--devices=cpu:{len(CORES)}"]) == 1
    assert f"device cpu:{len(CORES)} does not exist" in only_line(capsys.readouterr().err)


def test_missing_output_folder_is_told_before_the_work(tmp_path: Path, capsys: Capture) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros(3, np.float32))
    output = tmp_path / "none" / "y.npz"
    arguments = ["--input", str(tmp_path / "x.npz"), "--output", str(output)]
    assert main(["run", str(tmp_path / "no-model-either.onnx"), *arguments]) == 1
    assert f"no folder {tmp_path / 'none'}" in only_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--devices=0", "devices: got 0, expected a number from 1 to 1024"),
        ("--devices=", "devices: got '', expected a device such as 'cpu:0'"),
        ("--devices=cpu", "devices: got 'cpu'"),
        ("--devices=cpu:0,", "devices: got ''"),
        ("--devices=-1", "devices: got '-1'"),
        ("--timeout=-1", "got -1.0, expected seconds, 0 or more"),
        ("--timeout=soon", "could not convert string to float: 'soon'"),
    ],
)
def test_values_that_cannot_be_are_wrong_usage(option: str, text: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "model.onnx", "--input", "x.npz", "--output", "y.npz", option])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_model_that_is_not_there_is_named(tmp_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(tmp_path / "none.onnx")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    line = only_line(err)
    assert "worker 0 (cpu:0" in line
    assert f"{tmp_path}/none.onnx" in line


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.ones(3))
    return file.getvalue()


def npz(**arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **arrays)
    return file.getvalue()


def broken_inside() -> bytes:
    """A compressed archive with bits of its data turned over."""
    file = io.BytesIO()
    np.savez_compressed(file, x=np.random.default_rng(1).random(1000))
    data = bytearray(file.getvalue())
    data[100:200] = bytes(100)
    return bytes(data)


def enormous() -> bytes:
    """An array that says it is of petabytes."""
    header = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(header, shape)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (npy, "holds one array, expected an .npz file"),
        (lambda: b"", "is not an .npz file"),
        (lambda: b"hello", "is not an .npz file"),
        (lambda: b"PK\x03\x04 cut off", "is not an .npz file"),
        (lambda: npz(x=np.ones(1000))[:-100], "is not an .npz file"),
        (lambda: npz(x=np.array([None])), "is not an .npz file: Object arrays"),
        (broken_inside, "is not an .npz file"),
        (enormous, "is not an .npz file"),
    ],
    ids=["npy", "empty", "text", "zip?", "cut off", "pickle", "broken inside", "enormous"],
)
def test_input_that_is_no_npz_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: Capture, make: Callable[[], bytes], text: str
) -> None:
    source = tmp_path / "in.npz"
    source.write_bytes(make())
    output = tmp_path / "out.npz"
    # There is no such model, and it does not come to that.
    assert main(["run", "none.onnx", "--input", str(source), "--output", str(output)]) == 1
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"mcinfer: --input: {source} {text}")
    assert files(tmp_path) == ["in.npz"]


def test_input_that_is_not_there_is_named(tmp_path: Path, capsys: Capture) -> None:
    source = str(tmp_path / "none.npz")
    assert main(["run", "none.onnx", "--input", source, "--output", "out.npz"]) == 1
    assert only_line(capsys.readouterr().err).endswith(f"No such file or directory: '{source}'")


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"q": np.ones((2, 3), np.float32)}, "inputs: unknown ['q'], missing ['x']"),
        ({"x": np.ones((2, 3))}, "input 'x' has dtype float64, expected float32"),
        ({"x": np.ones((2, 4), np.float32)}, "input 'x' has size 4 in dimension 1, expected 3"),
    ],
    ids=["name", "dtype", "shape"],
)
def test_input_that_does_not_fit_the_model_leaves_the_old_output(
    double: Path, tmp_path: Path, capsys: Capture, arrays: dict[str, NDArray[Any]], text: str
) -> None:
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    source.write_bytes(npz(**arrays))
    output.write_bytes(b"of an earlier run")
    arguments = ["run", str(double), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert text in only_line(err)
    assert output.read_bytes() == b"of an earlier run"
    assert files(tmp_path) == ["double.onnx", "in.npz", "out.npz"]


def test_run_that_fails_says_so_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    model = save(
        tmp_path / "gather.onnx",
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", TensorProto.INT64, ["batch"])],
        [("y", FLOAT, ["batch"])],
        {"table": np.ones(3, np.float32)},
    )
    source, output = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, i=np.array([0, 99]))
    arguments = ["run", str(model), "--input", str(source), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    assert "Gather" in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["gather.onnx", "in.npz"]


@pytest.mark.parametrize("where", ["none/out.npz", "folder"])
def test_output_that_cannot_be_written_is_named_and_nothing_is_left(
    double: Path, batch: Path, tmp_path: Path, capsys: Capture, where: str
) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    output = tmp_path / where
    arguments = ["run", str(double), "--input", str(batch), "--output", str(output)]
    assert main([*arguments, "--devices", "1"]) == 1
    assert where.partition("/")[0] in only_line(capsys.readouterr().err)
    assert files(tmp_path) == ["double.onnx", "folder", "in.npz"]
    assert files(tmp_path / "folder") == ["full"]


def test_reader_that_has_enough_gets_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-m", "mcinfer", "devices"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (1, "")


def test_output_stream_that_is_full_is_a_failure() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "mcinfer", "devices"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=30,
        )
    assert run.returncode == 1
    assert "No space left on device" in only_line(run.stderr)


# The cache of prepared models.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    return Cache.default()


def made(cache: Cache, name: str, *, size: int = 0, about: str | None = None) -> Held:
    """An entry of that many bytes for a model of that name."""

    def fill(folder: Path, _lock: int) -> None:
        text = json.dumps({"name": name}) if about is None else about
        (folder / "about.json").write_text(text, encoding="utf-8")
        (folder / "weights.bin").write_bytes(bytes(size))

    facts = {"model": name, "engine": "onnxruntime 1.2"}
    return cache.make(entry_key(facts), facts, fill, wait=0)


def listed(capsys: Capture) -> list[str]:
    assert main(["cache", "list"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_empty_cache_is_said_to_be_empty(cache: Cache, capsys: Capture) -> None:
    assert listed(capsys) == [
        f"the cache is empty: nothing of at most 53687.1 MB in {cache.folder}"
    ]
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr() == ("freed 0.0 MB\n", "")
    assert not cache.folder.exists()


def test_list_has_a_line_for_each_entry_and_the_total(cache: Cache, capsys: Capture) -> None:
    made(cache, "first.onnx", size=3_000_000).close()
    with closing(made(cache, "second.onnx", size=1_000_000)) as held:
        *lines, total = listed(capsys)
    entries = cache.entries()
    for line, info, model in zip(lines, entries, ("first.onnx", "second.onnx"), strict=True):
        used = datetime.fromtimestamp(info.used_at).strftime("%Y-%m-%dT%H:%M")
        use = "in use" if info.key == held.key else "not in use"
        expected = [info.key[:12], f"{info.bytes / 1e6:.1f} MB", used, use, model]
        assert re.split("  +", line) == [*expected, "onnxruntime 1.2"]
    size = sum(info.bytes for info in entries) / 1e6
    assert total == f"2 entries, {size:.1f} MB of at most 53687.1 MB in {cache.folder}"


@pytest.mark.parametrize("about", ["", "[]", "{}", "[" * 100_000, "\0"], ids=len)
def test_entry_that_does_not_say_what_it_is_for_is_listed_all_the_same(
    cache: Cache, capsys: Capture, about: str
) -> None:
    made(cache, "any.onnx", about=about).close()
    line, _ = listed(capsys)
    assert line.endswith("  ?  onnxruntime 1.2")


def test_any_models_name_is_one_line(cache: Cache, capsys: Capture) -> None:
    made(cache, "a\nb\udc80\x1b[31mü.onnx").close()
    line, _ = listed(capsys)
    assert "  a?b??[31mü.onnx  " in line


def test_model_that_cannot_be_prepared_is_listed_as_such(cache: Cache, capsys: Capture) -> None:
    def fill(folder: Path, _lock: int) -> None:
        (folder / "failure.txt").write_text("no", encoding="utf-8")

    facts = {"model": "bad"}
    cache.make(entry_key(facts), facts, fill, wait=0).close()
    line, _ = listed(capsys)
    assert line.endswith("  ?  ?, cannot be prepared")


def test_clear_leaves_what_is_in_use_and_says_so(cache: Cache, capsys: Capture) -> None:
    made(cache, "first.onnx", size=3_000_000).close()
    with closing(made(cache, "second.onnx")) as held:
        assert main(["cache", "clear"]) == 0
        assert [info.key for info in cache.entries()] == [held.key]
    assert capsys.readouterr() == ("freed 3.0 MB; left because they are in use: 1 entry\n", "")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "freed 0.0 MB\n"
    assert cache.entries() == []


@pytest.mark.parametrize("command", ["list", "clear"])
def test_cache_that_others_may_write_to_is_refused(
    cache: Cache, capsys: Capture, command: str
) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(0o777)
    assert main(["cache", command]) == 1
    line = only_line(capsys.readouterr().err)
    assert line == f"mcinfer: the cache {cache.folder} is writable by others (mode 0777)"


@pytest.mark.parametrize("command", [["list"], ["clear"], ["prepare", "model.onnx"]])
def test_limit_of_another_form_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: list[str]
) -> None:
    monkeypatch.setenv("MCINFER_CACHE_LIMIT", "much")
    assert main(["cache", *command]) == 1
    assert "MCINFER_CACHE_LIMIT: got 'much'" in only_line(capsys.readouterr().err)


def test_progress_is_a_line_each_two_seconds_at_most() -> None:
    log = io.StringIO()
    display = Display(log, "model.onnx")
    assert not display.called
    for tick in range(20):
        display({"seconds": tick / 2, "written": tick * 10_000_000, "bytes": 123_456_789})
    assert display.called
    assert log.getvalue().splitlines() == [
        f"preparing model.onnx (123.5 MB): {seconds} s, {20 * seconds}.0 MB written"
        for seconds in (2, 4, 6, 8)
    ]
