"""A model that is cut over several processes, behind one master: answers, faults in every phase, ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from numpy.typing import NDArray

from mcinfer import (
    BuildError,
    EngineOptions,
    InvalidInputError,
    Limits,
    Master,
    Parallel,
    PredictError,
    PredictTimeoutError,
    RankDiedError,
    RestartPolicy,
    Timeouts,
)
from mcinfer.ranks.layouts import MAX_LAYOUTS
from tests.open_descriptors import descriptors
from tests.process.scripts import PREAMBLE, Program
from tests.process.waiting import all_gone, pids, running, states, stop, wait_until
from tests.sliced_models import save
from tests.text_models import normal_weights

LONG_ROWS = 16_384  # a run of a second or so, with weights of 512 x 512
WIDE = 1 << 18
Arrays = Mapping[str, NDArray[Any]]
Groups = Callable[..., Master]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the module: the slices of equal models are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCINFER_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        yield


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("ranks") / "mlp.onnx")


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its output is rows that the input `index` names: a run with an index out of range fails there."""
    ends = ["[lookup] y = Gather<axis=0>(h4, index)"]
    path, outputs = tmp_path_factory.mktemp("ranks") / "lookup.onnx", ["float[rows,32] y"]
    return write_chain(path, ends, outputs, more=", int64[rows] index")


@pytest.fixture(scope="module")
def shared(checked_together: ExitStack, mlp: Path) -> Groups:
    """The master of so many ranks for a layer, and stages, that tests share; by default of `mlp`."""

    @cache
    def start(tensor: int, pipeline: int, model: Path = mlp) -> Master:
        cut = Parallel(tensor=tensor, pipeline=pipeline)
        return checked_together.enter_context(Master(model, parallel=cut))

    return start


def write_mlp(path: Path, layers: int = 4, width: int = 32) -> Path:
    """Layers of relu(x @ w + b): float32[batch, width], with the weights in a file beside the model."""
    weights: dict[str, NDArray[Any]] = {}
    for n in range(layers):
        weights |= normal_weights(n, **{f"w{n}": (width, width), f"b{n}": (width,)})
    values = ["x", *(f"relu{n}" for n in range(1, layers)), "y"]
    body = "".join(
        f"product{n} = MatMul({values[n]}, w{n})  sum{n} = Add(product{n}, b{n})"
        f"  {values[n + 1]} = Relu(sum{n})\n"
        for n in range(layers)
    )
    text = f"(float[batch,{width}] x) => (float[batch,{width}] y) {{ {body} }}"
    return save(path, text, weights, external=True)


@cache
def whole(model: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def expected(model: Path, inputs: Arrays) -> Arrays:
    """What ONNX Runtime gives for the whole model."""
    session = whole(model)
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def assert_close(got: Arrays, wanted: Arrays) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def rows(count: int, width: int = 32, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def assert_serves(master: Master, model: Path, count: int = 2) -> None:
    given = {"x": rows(count)}
    assert_close(master.predict(given, timeout=120.0), expected(model, given))


# Answers.

CUTS = pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])


@CUTS
def test_many_requests_at_once_read_their_own_inputs(
    shared: Groups, mlp: Path, tensor: int, pipeline: int
) -> None:
    """Also of shapes beyond those that are kept."""
    master = shared(tensor, pipeline)
    counts = [*range(1, MAX_LAYOUTS + 5), 1, MAX_LAYOUTS]
    given = [{"x": rows(1 + seed % 4, seed=seed)} for seed in range(60)]
    given += [{"x": rows(count)} for count in counts for _ in range(2)]
    futures = [master.submit(inputs) for inputs in given]
    for inputs, future in zip(given, futures, strict=True):
        assert_close(future.result(timeout=60.0), expected(mlp, inputs))


@pytest.mark.thorough
def test_model_in_memory_is_cut(mlp: Path) -> None:
    content = onnx.load(mlp).SerializeToString()  # with its weights
    with Master(content, parallel=Parallel(tensor=2)) as master:
        assert_close(master.predict({"x": rows(2)}), expected(mlp, {"x": rows(2)}))


# Failing runs.


@CUTS
def test_run_that_fails_in_a_rank_fails_alone(
    shared: Groups, lookup: Path, tensor: int, pipeline: int
) -> None:
    good: Arrays = {"x": rows(3), "index": np.array([2, 0])}
    wrong: Arrays = {"x": rows(3), "index": np.array([7, 0])}
    wanted = expected(lookup, good)
    master = shared(tensor, pipeline, lookup)
    assert_close(master.predict(good), wanted)
    before = pids(master)
    for _ in range(3):
        futures = [master.submit(each) for each in (good, wrong, good)]
        text = r"rank 1 \(cpu:1, pid \d+\): .*lookup" if pipeline > 1 else "lookup"
        with pytest.raises((PredictError, InvalidInputError), match=text):
            futures[1].result(timeout=60.0)
        for future in (futures[0], futures[2]):
            assert_close(future.result(timeout=60.0), wanted)
    assert pids(master) == before


# Models and machines that cannot be.


def test_cache_that_cannot_be_used_is_an_error(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MCINFER_CACHE", str(file / "cache"))
    with pytest.raises(BuildError, match="its slices could not be made"):
        Master(mlp, parallel=Parallel(tensor=2)).start()


def test_slice_that_does_not_load_names_its_rank(mlp: Path) -> None:
    devices = ["cpu:0", "cuda:3"]
    with pytest.raises(BuildError, match=r"rank 1 \(cuda:3, pid \d+\).*CUDAExecutionProvider"):
        Master(mlp, devices=devices, parallel=Parallel(pipeline=2)).start()


# Replicas.


@pytest.mark.thorough
def test_replicas_share_the_weights_of_prepared_slices(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", layers=4, width=512)
    weights = 4 * 512 * 512 * 4 // 2  # of each rank
    inputs = {"x": rows(2, 512)}
    options = EngineOptions(prepare="always")
    cut = Parallel(tensor=2, replicas=2)
    with Master(model, parallel=cut, options=options, restart=RestartPolicy()) as master:
        for future in [master.submit(inputs) for _ in range(4)]:
            assert_close(future.result(timeout=60.0), expected(model, inputs))
        mapped = [_mapped(pid) for pid in pids(master)]
    for resident, proportional in mapped:
        assert resident >= weights
        assert proportional <= 0.6 * resident


def _mapped(pid: int) -> tuple[int, int]:
    """Bytes of the mapped weights of a process, resident and its proportional part of them."""
    maps = [
        item
        for item in psutil.Process(pid).memory_maps(grouped=False)
        if item.path.endswith("weights.bin")
    ]
    return sum(item.rss for item in maps), sum(item.pss for item in maps)


# Faults of ranks.


@contextmanager
def held_request(master: Master) -> Iterator["Future[Any]"]:
    """A request that runs: its group waits for the last rank, which is stopped."""
    stop(pids(master)[-1])
    with running(lambda: master.predict({"x": rows(2)}, timeout=300.0)) as answer:
        wait_until(lambda: "busy" in states(master))
        yield answer


def test_cut_model_answers_as_the_whole_one(shared: Groups, mlp: Path) -> None:
    master = shared(2, 2)
    for _ in range(3):  # the first shows how a batch is split
        assert_serves(master, mlp, 6)
    workers = master.statistics().workers
    assert [(w.index, w.rank) for w in workers] == [(rank, rank) for rank in range(4)]
    assert len({w.pid for w in workers}) == 4
    assert master.health().workers == 1


def test_pipeline_joins_requests_to_one_run_and_a_bad_one_fails_alone(mlp: Path) -> None:
    with Master(mlp, parallel=Parallel(pipeline=2), max_batch_size=8, max_delay=0.05) as master:
        before = pids(master)
        assert_serves(master, mlp)
        stop(before[1])  # the first stage begins runs, and none of them finishes
        futures = [master.submit({"x": rows(1)}) for _ in range(2)]
        wait_until(lambda: "busy" in states(master))
        futures += [master.submit({"x": rows(2)}) for _ in range(32)]  # at once one larger run
        os.kill(before[1], signal.SIGCONT)
        with pytest.raises(InvalidInputError):
            master.predict({"x": rows(2, 33)})
        for count, future in zip([1] * 2 + [2] * 32, futures, strict=True):
            assert_close(future.result(timeout=120.0), expected(mlp, {"x": rows(count)}))
        assert pids(master) == before


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (Parallel(tensor=2), 0),
        pytest.param(Parallel(pipeline=2), 1, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_rank_killed_in_a_run_restarts_its_group_and_the_request_is_answered(
    mlp: Path, parallel: Parallel, rank: int
) -> None:
    with Master(mlp, parallel=parallel) as master:
        before = pids(master)
        with held_request(master) as answer:
            os.kill(before[rank], signal.SIGKILL)
            assert_close(answer.result(timeout=240.0), expected(mlp, {"x": rows(2)}))
        assert not {*before} & {*pids(master)}
        assert all_gone(before)
        assert all(w.restarts == 1 for w in master.statistics().workers)


@pytest.mark.thorough
def test_request_that_loses_three_groups_names_the_rank_that_died(tmp_path: Path) -> None:
    wide = write_mlp(tmp_path / "wide.onnx", width=512)
    with Master(wide, parallel=Parallel(tensor=2)) as master:
        with running(lambda: master.predict({"x": rows(LONG_ROWS, 512)}, timeout=300.0)) as answer:
            wait_until(lambda: "busy" in states(master))
            for _ in range(3):
                killed = pids(master)
                os.kill(killed[1], signal.SIGKILL)
                wait_until(lambda killed=killed: not {*killed} & {*pids(master)})  # type: ignore[misc]
                wait_until(lambda: answer.done() or "busy" in states(master), timeout=120.0)
            with pytest.raises(
                RankDiedError, match=rf"rank 1 \(cpu:1, pid {killed[1]}\) killed by SIGK"
            ):
                answer.result(timeout=120.0)
        master.wait_ready(timeout=120.0)
        assert_close(master.predict({"x": rows(2, 512)}), expected(wide, {"x": rows(2, 512)}))


def test_ranks_end_with_a_master_that_is_killed(mlp: Path) -> None:
    text = """
with mcinfer.Master(sys.argv[1], parallel=mcinfer.Parallel(tensor=2)) as master:
    say_pids(master)
    signal.pause()
"""
    with Program(PREAMBLE + text, mlp) as program:
        left = program.pids()
        assert len(left) == 2
        program.send_signal(signal.SIGKILL)
        wait_until(lambda: all_gone(left))


def test_rank_killed_while_it_starts_is_started_once_more(mlp: Path) -> None:
    master = Master(mlp, parallel=Parallel(tensor=2))
    starting = threading.Thread(target=master.start)
    starting.start()
    try:
        wait_until(lambda: len(pids(master)) == 2)
        os.kill(pids(master)[1], signal.SIGKILL)
        starting.join(timeout=240.0)
        assert_serves(master, mlp)
        assert master.statistics().workers[0].restarts == 1
    finally:
        master.close()


# Outputs and shapes that only a run shows.


def write_chain(path: Path, ends: Sequence[str], outputs: Sequence[str], *, more: str = "") -> Path:
    """x float32["batch", 32], and more inputs, through four products, h1 to h4, then nodes as text."""
    weights = normal_weights(8, **{f"w{n}": (32, 32) for n in range(4)})
    if any("wide" in end for end in ends):
        weights["wide"] = np.ones((32, WIDE), np.float32)
    body = "h1 = MatMul(x, w0)  h2 = MatMul(h1, w1)  h3 = MatMul(h2, w2)  h4 = MatMul(h3, w3)"
    text = f"(float[batch,32] x{more}) => ({', '.join(outputs)}) {{ {body}  {'  '.join(ends)} }}"
    return save(path, text, weights)


@pytest.mark.thorough
def test_stage_with_more_outputs_than_messages_may_wait_answers(tmp_path: Path) -> None:
    names = [f"y{number}" for number in range(70)]
    model = write_chain(
        tmp_path / "many.onnx",
        [f"{name} = Identity(h4)" for name in names],
        [f"float[batch,{32}] {name}" for name in names],
    )
    with Master(model, parallel=Parallel(pipeline=2)) as master:
        for _ in range(3):
            assert_close(master.predict({"x": rows(3)}), expected(model, {"x": rows(3)}))


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """A model of which each of two stages makes one output of unknown shape."""
    ends = ["low = NonZero(h1)", "high = NonZero(h4)"]
    return write_chain(tmp_path / "apart.onnx", ends, ["int64[2,low] low", "int64[2,high] high"])


@pytest.mark.parametrize(
    "parallel",
    [Parallel(pipeline=2), pytest.param(Parallel(tensor=2), marks=pytest.mark.thorough)],
    ids=str,
)
def test_outputs_of_unknown_shapes_come_from_the_ranks_that_make_them_in_blocks_that_come_back(
    apart: Path, parallel: Parallel
) -> None:
    with Master(apart, parallel=parallel) as master:
        given = [{"x": rows(1 + number % 7, seed=number)} for number in range(21)]
        futures = [master.submit(each) for each in given]
        for each, future in zip(given, futures, strict=True):
            assert_close(future.result(timeout=60.0), expected(apart, each))
        del futures, future
        for _ in range(5):
            master.predict(given[2])
        before, size = len(descriptors()), master.statistics().memory_bytes
        for _ in range(30):
            master.predict(given[2])
        assert (len(descriptors()), master.statistics().memory_bytes) == (before, size)


def test_too_large_answers_of_several_ranks_fail_alone(apart: Path) -> None:
    limits = Limits(memory_bytes=2 << 20)
    with Master(apart, parallel=Parallel(pipeline=2), limits=limits) as master:
        before = pids(master)
        for _ in range(8):
            with pytest.raises(PredictError, match=r"low.* has 3200000 bytes, expected at most"):
                master.predict({"x": rows(6250)})
        given = {"x": rows(1500)}  # whose blocks are new ones
        assert_close(master.predict(given), expected(apart, given))
        assert pids(master) == before


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (Parallel(tensor=2), 1),
        *(pytest.param(Parallel(pipeline=2), rank, marks=pytest.mark.thorough) for rank in (0, 1)),
    ],
    ids=str,
)
def test_stopped_rank_costs_those_that_run_their_time_out_alone(
    mlp: Path, parallel: Parallel, rank: int
) -> None:
    timeouts = Timeouts(cancel_grace=0.2)
    with Master(mlp, parallel=parallel, timeouts=timeouts) as master:
        master.predict({"x": rows(2)})
        before = pids(master)
        stop(before[rank])
        wait_until(lambda: f"rank {rank} is stopped by a signal" in str(master.health()))
        with pytest.raises(PredictTimeoutError):
            master.predict({"x": rows(2)}, timeout=0.5)
        wait_until(lambda: all_gone(before))
        assert_close(master.predict({"x": rows(3)}), expected(mlp, {"x": rows(3)}))


def test_cancelled_requests_leave_the_group_in_step(shared: Groups, mlp: Path) -> None:
    master = shared(2, 2)
    before = pids(master)
    given = [{"x": rows(1 + number % 5, seed=number)} for number in range(60)]
    futures = [master.submit(each) for each in given]
    for future in futures[::3]:
        future.cancel()
    for number, (each, future) in enumerate(zip(given, futures, strict=True)):
        if number % 3:
            assert_close(future.result(timeout=60.0), expected(mlp, each))
    assert pids(master) == before


def test_log_has_the_stack_of_a_rank_that_crashed(
    mlp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Master(mlp, parallel=Parallel(tensor=2)) as master:
        crashed = pids(master)[1]
        os.kill(crashed, signal.SIGSEGV)
        wait_until(lambda: crashed not in pids(master))
    said = [record.getMessage() for record in caplog.records]
    [death] = [text for text in said if "where it was" in text]
    where = f"where it was:\nrank 1 (cpu:1, pid {crashed}):\nFatal Python error: Segmentation fault"
    assert where in death


@pytest.mark.thorough
def test_rank_that_has_grown_has_its_group_recycled(tmp_path: Path) -> None:
    path, outputs = tmp_path / "grown.onnx", [f"float[batch,{WIDE}] y"]
    model = write_chain(path, ["y = MatMul(h4, wide)"], outputs)
    parallel, options = Parallel(pipeline=2), EngineOptions(prepare="never")
    with Master(model, parallel=parallel, options=options) as master:
        sizes = [*map(own_bytes, pids(master))]
    assert sizes[1] > sizes[0] + (16 << 20)
    restart = RestartPolicy(max_memory_bytes=sizes[0] + (8 << 20), budget=0)
    with Master(model, parallel=parallel, options=options, restart=restart) as master:
        before = pids(master)
        wait_until(lambda: not {*before} & {*pids(master)})


def own_bytes(pid: int) -> int:
    """Resident and not shared (statm of proc(5))."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
