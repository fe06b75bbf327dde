"""Benchmarks of real ways in real processes."""

import os
import signal
import threading
from html import unescape
from pathlib import Path

import psutil
import pytest

from mcinfer.bench.inputs import InputOptions
from mcinfer.bench.load import write_request
from mcinfer.bench.pools import SplitBatches
from mcinfer.bench.report import OTHERS, OTHERS_BEFORE, Load, Report, dump, load
from mcinfer.bench.runner import Benchmark, BenchOptions, watched_machine
from mcinfer.bench.subject import Subject, WayFailedError
from mcinfer.bench.texts import BUSY_CORES
from mcinfer.bench.way import Setup
from mcinfer.errors import InvalidInputError
from mcinfer.sharding import Split
from tests.command_line import COMMAND
from tests.process.models import AFFINE, OnnxModel, rows
from tests.process.scripts import Program
from tests.process.waiting import is_alive, wait_until

ONE = Load(batch=2, clients=1)
RANDOM = InputOptions(files={}, archive=None, dims={})


MY_WAYS = """
import os, signal, sys, time
from mcinfer.bench.way import RunningWay

class Mine(RunningWay):
    text = "a way of one's own"
    def __init__(self, setup):
        self.setup = setup
        self.runs = 0
    def run(self, inputs):
        print("x" * 10000)  # it never fills a pipe that nothing reads
        time.sleep(0.001)
        self.runs += 1
        return inputs["x"] * 2 + 1
    def run_seconds(self):
        return self.runs, 0.0005 * self.runs
    def close(self):
        open("closed", "w").close()

class DiesInItsTurn(Mine):
    def run(self, inputs):
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)

class RefusesBatch(Mine):
    def run(self, inputs):
        if len(inputs["x"]) == 2:
            raise ValueError("two rows are too many")
        return super().run(inputs)

class DoesNotStart(Mine):
    def __init__(self, setup):
        raise OSError("no such thing as " + setup.devices[0])

class Hangs(Mine):
    def run(self, inputs):
        time.sleep(1000)

class LeavesChildren(Mine):
    def __init__(self, setup):
        super().__init__(setup)
        self.pid = os.fork()  # which holds all that this process has
        if not self.pid:
            time.sleep(1000)
        open("child", "w").write(str(self.pid))
    def run(self, inputs):
        os.kill(os.getpid(), signal.SIGKILL)

class SaysWhatIsNoAnswer(Mine):
    def __init__(self, setup):
        super().__init__(setup)
        os.write(int(sys.argv[1]), b"hello" + bytes([10]))
"""


@pytest.fixture
def ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with ways of one's own; what they write lies beside it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_ways.py"
    path.write_text(MY_WAYS, encoding="utf-8")
    return path


def measure(model: Path, *ways: str, **more: object) -> Report:
    settings = {"seconds": 0.05, "warmup": 0.0, "repeats": 2, **more}
    plan = BenchOptions(model=model, **{"devices": 2, "ways": ways, "inputs": RANDOM, **settings})  # type: ignore[arg-type]
    steps: list[float] = []
    benchmark = Benchmark(plan, lambda done, _: steps.append(done))
    report = benchmark.run(watched_machine())
    assert steps == sorted(steps)
    assert benchmark.done == benchmark.steps
    return report


@pytest.mark.thorough
def test_ways_and_pools_are_measured_under_each_load(onnx_model: OnnxModel, tmp_path: Path) -> None:
    ways = ("session", "pipe", "concurrent", "inline")
    settings = {"batches": (2,), "clients": (1,), "rates": (200.0,), "repeats": 1}
    report = measure(onnx_model(AFFINE), *ways, **settings)
    assert [w.error for w in report.ways] == [""] * len(report.ways)
    assert [w.name for w in report.ways] == [*ways]
    assert report.finished
    loads = report.loads
    assert [str(one) for one in loads] == [f"batch 2, {how}" for how in ("1 client", "200/s")]
    for way in report.ways:
        assert len(way.start_seconds) == len(way.memory) == 1
        assert min(way.start_seconds) > 0.01
        assert all(memory.pss >= memory.uss > 10_000_000 for memory in way.memory)
        for one in loads:
            measured = report.find(way.name, one)
            assert measured is not None
            assert [turn.failed for turn in measured.turns] == [0]
            assert all(turn.requests > 0 and turn.latencies for turn in measured.turns)
    # The sample has a process for itself, one for each worker, and multiprocessing's own.
    counts = {way.name: way.memory[-1].processes for way in report.ways}
    assert (counts["session"], counts["concurrent"]) == (1, 3)
    assert counts["pipe"] >= 3
    assert isinstance(report.machine[OTHERS], float)
    overheads = {m.way: m.turns[0].overhead for m in report.measurements if m.load == ONE}
    assert overheads["session"] is None
    assert all((overheads[way] or 0) > 0 for way in ("concurrent", "pipe"))
    (tmp_path / "report.json").write_bytes(dump(report))
    assert load(tmp_path / "report.json") == report


def test_failed_way_is_reported_and_the_others_go_on(onnx_model: OnnxModel, ways: Path) -> None:
    names = ("DoesNotStart", "DiesInItsTurn", "RefusesBatch", "Mine")
    report = measure(
        onnx_model(AFFINE), *(f"{ways}:{name}" for name in names), batches=(1, 2), count=2
    )
    errors = {way.name: way.error for way in report.ways}
    assert errors["DoesNotStart"].endswith("OSError: no such thing as cpu:0")
    assert "its process ended with status -9: last words" in errors["DiesInItsTurn"]
    assert errors["RefusesBatch"].endswith("ValueError: two rows are too many")
    assert errors["RefusesBatch"].startswith("batch 2, 1 client: ")
    assert errors["Mine"] == ""
    measured = {(m.way, m.load.batch): len(m.turns) for m in report.measurements}
    assert measured == {("RefusesBatch", 1): 2, ("Mine", 1): 2, ("Mine", 2): 2}
    mine = report.way("Mine")
    assert (mine.role, mine.text) == ("baseline", "a way of one's own")
    for turn in report.measurements[-1].turns:
        assert turn.requests == 2
        assert turn.run_seconds == pytest.approx(0.0005)
        assert turn.latency(0.0) >= 0.001
    assert (ways.parent / "closed").exists()


@pytest.mark.parametrize(
    ("way", "timeout", "error"),
    [
        ("Hangs", 0.3, r"turn was not done within 0\.3 s"),
        ("LeavesChildren", 30, "its process ended with status -9"),
        ("SaysWhatIsNoAnswer", 30, "sent something else than an answer"),
    ],
)
def test_way_that_goes_wrong_is_ended_with_its_children(
    way: str, timeout: float, error: str, onnx_model: OnnxModel, tmp_path: Path, ways: Path
) -> None:
    setup = Setup(
        model=str(onnx_model(AFFINE)),
        cores=2,
        devices=("cpu:0", "cpu:1"),
        split=Split(inputs={"x": 0}, outputs={"y": 0}, known="declared"),
    )
    write_request(tmp_path / "2.request", rows(2))
    with Subject(f"{ways}:{way}", setup, {2: tmp_path / "2.request"}) as subject:

        def use() -> None:
            subject.start(30)
            subject.turn(ONE, count=1, timeout=timeout)

        with pytest.raises(WayFailedError, match=error):
            use()
        assert not subject.alive
        with pytest.raises(WayFailedError, match="its process has ended"):
            subject.memory()
    child = ways.parent / "child"
    if child.exists():
        wait_until(lambda: not is_alive(int(child.read_text(encoding="utf-8"))))


def test_ctrl_c_while_a_way_starts_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Thread", Interrupted)
    split = Split(inputs={}, outputs={}, known="unknown")
    subject = Subject("session", Setup(model="gone.onnx", cores=1, split=split), {})
    before = {*psutil.Process().children()}  # of pools that several tests ask
    with pytest.raises(KeyboardInterrupt), subject:
        subject.start(30.0)
    assert {*psutil.Process().children()} <= before


@pytest.mark.thorough
def test_fixed_batch_is_measured_in_pieces_if_the_axes_are_given(onnx_model: OnnxModel) -> None:
    fixed = onnx_model(AFFINE.replace("[batch, 4]", "[2, 4]"))
    ways = ("pipe-each", "sharded", "batched")
    axes = {"batch_axes": {"x": 0}, "output_axes": {"y": 0}}
    report = measure(fixed, *ways, batches=(2, 6), count=2, repeats=1, **axes)
    assert {way.name: way.error for way in report.ways} == dict.fromkeys(ways, "")
    assert len(report.measurements) == 2 * len(ways)
    assert report.way("sharded").text == f"{SplitBatches.text}, those of 2 rows whole"
    assert report.way("batched").text.endswith(
        ", not joined: each run takes 2 of the rows, no more"
    )
    assert report.settings.arrays["6"] == {"x": ("float32", (6, 4))}
    assert report.settings.batch_axes == {"x": 0}
    with pytest.raises(InvalidInputError, match=r"expected 1: .* is not known: .*--batch-axis"):
        measure(fixed, *ways, batches=(2,))


def test_killed_benchmark_leaves_no_process(onnx_model: OnnxModel, runtime_dir: Path) -> None:
    ways = ("--against", "pipe", "--modes", "concurrent")
    options = ("--duration", "60", "--repeat", "1", "--concurrency", "1", *ways)
    with Program(COMMAND, "bench", onnx_model(AFFINE), *options) as program:
        process = psutil.Process(program.pid)
        # Two ways, two workers, and two children of "pipe".
        wait_until(lambda: len(process.children(recursive=True)) >= 2 + 2 + 2, timeout=40)
        started = [child.pid for child in process.children(recursive=True)]
        os.kill(program.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), timeout=20)
    assert [*runtime_dir.iterdir()] == []


BUSY = "while True: pass"


def test_busy_machine_has_no_verdict_and_the_exit_status_says_so(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    """Another program uses a core, as in /proc/stat; the same in the terminal, the file and the page."""
    model, files = (
        onnx_model(AFFINE),
        ("--json", tmp_path / "x.json", "--html", tmp_path / "x.html"),
    )
    short = ("--duration", "0.1", "--repeat", "2", "--concurrency", "1", "--warmup", "0")
    ways = ("--against", "session", "--modes", "inline", *short)
    with Program(BUSY), Program(COMMAND, "bench", model, *ways, *files) as program:
        done = program.wait()
    made = load(tmp_path / "x.json")
    assert done.status == 1
    assert float(made.machine[OTHERS]) > BUSY_CORES
    assert float(made.machine[OTHERS_BEFORE]) > BUSY_CORES
    first, *_, last = done.err.splitlines()
    assert first.startswith("mcinfer: there will be no verdict. The machine was busy: ")
    assert last == f"mcinfer: {made.verdict}"
    assert made.verdict.startswith("No verdict. The machine was busy: other programs used ")
    assert done.out.splitlines()[-1] == made.verdict
    page = unescape((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert f"<h1>{made.verdict}</h1>" in page
    for text in (done.out, page):
        assert "Use mcinfer" not in text
        assert "import mcinfer" not in text
    assert {m.way for m in made.measurements} == {"session", "inline"}  # the figures are there
