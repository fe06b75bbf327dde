"""Groups of ranks: right answers, errors that name the rank, and ends that leave nothing behind."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest

from mcinfer.engines.base import Engine, RunCancelledError, Strings
from mcinfer.errors import (
    BuildError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    PredictError,
    RankDiedError,
)
from mcinfer.model_cache.cache import Cache
from mcinfer.process import LEFT_ALONE, ORPHANED
from mcinfer.ranks.engine import BUILD_FAILED, LeaderEngine, lead
from mcinfer.ranks.layouts import MAX_LAYOUTS
from tests.process.models import OnnxModel
from tests.process.rank_group import (
    Arrays,
    Bound,
    assert_close,
    expected,
    followers,
    group,
    request,
    rows,
    write_lookup,
    write_mlp,
)
from tests.process.scripts import Program
from tests.process.waiting import all_gone, running, stop, wait_until

STRINGS = """
<ir_version: 8, opset_import: ["": 17]>
texts (string[batch] x) => (string[batch] y) {
    a = Identity(x)
    y = Identity(a)
}
"""

STRINGS_BESIDE = """
<ir_version: 8, opset_import: ["": 17]>
texts (float[batch, 4] x, string[batch] s) => (float[batch, 4] y, string[batch] s) {
    a = Neg(x)
    y = Abs(a)
}
"""


Groups = Callable[[int, int], LeaderEngine]


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
    return write_lookup(tmp_path_factory.mktemp("ranks") / "lookup.onnx")


@pytest.fixture(scope="module")
def shared(checked_together: ExitStack, mlp: Path) -> Groups:
    """The group of so many ranks for a layer, and stages, that tests which break nothing share."""

    @cache
    def start(tensor: int, pipeline: int) -> LeaderEngine:
        return checked_together.enter_context(group(mlp, tensor, pipeline))[0]

    return start


@pytest.fixture(scope="module")
def shared_lookup(checked_together: ExitStack, lookup: Path) -> LeaderEngine:
    """The same for the other model, in two stages."""
    return checked_together.enter_context(group(lookup, 1, 2))[0]


def readable(engine: Engine, seconds: float = 0.0) -> bool:
    return bool(select.select([engine.fd], [], [], seconds)[0])


# Answers.


def assert_gives(engine: LeaderEngine, model: Path) -> None:
    assert [spec.name for spec in engine.spec.outputs] == ["y"]
    for count in (3, 1, 3):
        inputs = {"x": rows(count)}
        placed = Bound(engine, inputs, {"y": np.zeros((count, 32), np.float32)})
        for bound in (placed, Bound(engine, inputs)):
            for _ in range(3):
                assert_close(bound.execute(), expected(model, inputs))


@pytest.mark.parametrize(  # both at once: tests/process/test_ranks.py
    ("tensor", "pipeline"), [(2, 1), (1, 2)]
)
def test_a_group_gives_what_the_whole_model_gives(
    shared: Groups, mlp: Path, tensor: int, pipeline: int
) -> None:
    engine = shared(tensor, pipeline)
    assert not engine.prepared
    assert_gives(engine, mlp)


def test_many_runs_in_a_row_read_their_own_inputs(shared: Groups, mlp: Path) -> None:
    bound = [Bound(shared(2, 1), {"x": rows(2, seed=seed)}) for seed in range(5)]
    wanted = [expected(mlp, one.inputs) for one in bound]
    for _ in range(40):
        for one, outputs in zip(bound, wanted, strict=True):
            assert_close(one.execute(), outputs)


def test_outputs_whose_shape_only_a_run_shows_come_from_the_last_stage(
    shared_lookup: LeaderEngine, lookup: Path
) -> None:
    for count in (1, 4, 4, 2):
        inputs: Arrays = {"x": rows(3), "index": np.arange(count) % 3}
        assert_close(Bound(shared_lookup, inputs).execute(), expected(lookup, inputs))


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_layouts_beyond_the_limit_are_bound_anew(
    shared: Groups, mlp: Path, tensor: int, pipeline: int
) -> None:
    engine = shared(tensor, pipeline)
    first = Bound(engine, {"x": rows(1)}, {"y": np.zeros((1, 32), np.float32)})
    for count in range(1, MAX_LAYOUTS + 5):
        inputs = {"x": rows(count)}
        assert_close(Bound(engine, inputs).execute(), expected(mlp, inputs))
    assert_close(first.execute(), expected(mlp, first.inputs))


def test_layouts_are_bound_anew_while_runs_are_begun(mlp: Path) -> None:
    with group(mlp, 1, 2) as (engine, _):
        bound = [Bound(engine, {"x": rows(count)}) for count in range(1, MAX_LAYOUTS + 1)]
        begun = bound[:2]
        for one in begun:
            one.run.begin()
        late = Bound(engine, {"x": rows(MAX_LAYOUTS + 1)})
        late.run.begin()
        for one in (*begun, late):
            assert readable(engine, 50)
            assert_close(one.finish(), expected(mlp, one.inputs))
        assert not readable(engine)


def test_a_new_layout_is_bound_while_outputs_without_a_place_wait(
    shared: Groups, mlp: Path
) -> None:
    """The follower has sent one array to the leader, and cannot send another before it is taken."""
    engine = shared(1, 2)
    begun = [Bound(engine, {"x": rows(2, seed=seed)}) for seed in range(2)]
    for one in begun:
        one.run.begin()
    late = Bound(engine, {"x": rows(1000)})
    for one in begun:
        assert_close(one.finish(), expected(mlp, one.inputs))
    assert_close(late.execute(), expected(mlp, late.inputs))


def test_a_model_in_memory_is_cut(mlp: Path) -> None:
    fd = os.memfd_create("model")
    try:
        os.write(fd, onnx.load(mlp).SerializeToString())
        with group(Path(f"/proc/self/fd/{fd}"), 2) as (engine, _):
            bound = Bound(engine, {"x": rows(2)})
            assert_close(bound.execute(), expected(mlp, bound.inputs))
    finally:
        os.close(fd)


# Overlap.


def test_runs_are_begun_while_the_last_stage_is_busy(mlp: Path) -> None:
    with group(mlp, 1, 2) as (engine, others):
        bound = [
            Bound(engine, {"x": rows(2, seed=seed)}, {"y": np.zeros((2, 32), np.float32)})
            for seed in range(engine.depth + 1)
        ]
        *some, more = bound
        for _ in range(2):  # the first time, the ranks find the shapes and bind the lanes
            for one in some:
                one.run.begin()
            for one in some:
                one.finish()
        stop(others.pids[0])
        for one in some:
            one.run.begin()  # each runs its first stage
        assert not readable(engine)
        with pytest.raises(PredictError, match="expected one to be finished first"):
            more.run.begin()
        with pytest.raises(PredictError, match="not the oldest"):
            some[1].finish()
        os.kill(others.pids[0], signal.SIGCONT)
        for one in some:
            assert readable(engine, 50)
            assert_close(one.finish(), expected(mlp, one.inputs))
        assert not readable(engine)


def test_inputs_may_change_once_a_run_is_begun(shared: Groups, mlp: Path) -> None:
    engine = shared(2, 2)
    bound = Bound(engine, {"x": rows(2)}, {"y": np.zeros((2, 32), np.float32)})
    wanted = []
    for seed in range(engine.depth):
        bound.inputs["x"][...] = rows(2, seed=seed)
        wanted.append(expected(mlp, bound.inputs))
        bound.run.begin()
    bound.inputs["x"][...] = 0
    for one in wanted:
        assert_close(bound.finish(), one)


# Failing runs.


def test_a_run_that_fails_in_a_follower_names_it_and_fails_alone(
    shared_lookup: LeaderEngine, lookup: Path
) -> None:
    good = {"x": rows(3), "index": np.array([2, 0])}
    right = Bound(shared_lookup, good)
    wrong = Bound(shared_lookup, {**good, "index": np.array([7, 0])})
    wanted = expected(lookup, good)
    for _ in range(3):
        with pytest.raises((PredictError, InvalidInputError), match=r"rank 1 .*lookup"):
            wrong.execute()
        assert_close(right.execute(), wanted)
        for one in (right, wrong, right):  # these overlap
            one.run.begin()
        assert_close(right.finish(), wanted)
        with pytest.raises((PredictError, InvalidInputError), match="rank 1"):
            wrong.finish()
        assert_close(right.finish(), wanted)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_cancelled_run_ends_in_all_ranks(
    shared: Groups, mlp: Path, tensor: int, pipeline: int
) -> None:
    engine = shared(tensor, pipeline)
    bound = Bound(engine, {"x": rows(2)})
    for _ in range(3):
        engine.arm()
        engine.cancel()
        with pytest.raises(RunCancelledError):
            bound.execute()
        engine.arm()
        assert_close(bound.execute(), expected(mlp, bound.inputs))


def test_inputs_that_do_not_fit_are_refused(shared: Groups, mlp: Path) -> None:
    engine = shared(2, 1)
    with pytest.raises(InvalidInputError, match=r"'x'.*float32\[2, 31\].*expected x"):
        Bound(engine, {"x": rows(2, 31)})
    with pytest.raises(InvalidInputError, match="got string"):
        engine.bind([Strings(name="x", shape=(1,), values=("a",))], [])
    bound = Bound(engine, {"x": rows(2)})
    assert_close(bound.execute(), expected(mlp, bound.inputs))


# Models and machines that cannot be.


def test_replaceable_weights_are_refused(mlp: Path) -> None:
    with (
        followers(2, mlp) as others,
        pytest.raises(BuildError, match=r"variable_weights: got \['w0'\]"),
    ):
        lead(request(mlp, variable_weights=("w0",)), (2, 1), others.sockets)


def test_a_model_of_strings_is_refused(onnx_model: OnnxModel) -> None:
    between, beside = onnx_model(STRINGS), onnx_model(STRINGS_BESIDE)
    with followers(2, between) as others, pytest.raises(BuildError, match="such as strings"):
        lead(request(between), (1, 2), others.sockets)
    with (
        followers(2, beside) as others,
        pytest.raises(BuildError, match=r"^\['s'\] are strings"),
    ):
        lead(request(beside), (1, 2), others.sockets)


def test_a_cache_that_cannot_be_used_is_an_error(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MCINFER_CACHE", str(file / "cache"))
    with (
        followers(2, mlp) as others,
        pytest.raises(BuildError, match="its slices could not be made"),
    ):
        lead(request(mlp), (2, 1), others.sockets)


def test_a_slice_that_does_not_load_names_its_rank(mlp: Path) -> None:
    with followers(4, mlp, devices=("cpu:0", "cpu:0", "cuda:3", "cpu:0")) as others:
        pid = others.pids[1]
        with pytest.raises(
            BuildError, match=rf"rank 2 \(cuda:3, pid {pid}\).*CUDAExecutionProvider"
        ):
            lead(request(mlp), (2, 2), others.sockets)
        assert others.statuses() == [BUILD_FAILED] * 3


# Ends.


def test_a_rank_that_dies_at_the_start_is_named(mlp: Path) -> None:
    with followers(3, mlp) as others:
        others.processes[1].kill()
        with pytest.raises(RankDiedError, match="rank 2"):
            lead(request(mlp), (1, 3), others.sockets)
        assert others.statuses()[0] == ORPHANED


def test_a_rank_that_dies_while_the_slices_are_made_is_named(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", layers=5, width=48)
    with followers(2, model) as others:
        pid = others.pids[0]
        seen: list[int] = []

        def kill(_: object) -> None:
            if not seen:
                seen.append(pid)
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: all_gone([pid]))

        with pytest.raises(RankDiedError, match=rf"rank 1 \(cpu:0, pid {pid}\)"):
            lead(request(model), (2, 1), others.sockets, kill)
        assert seen == [pid]


def test_a_rank_that_dies_idle_ends_the_next_run_and_the_group(mlp: Path) -> None:
    with group(mlp, 2, 2) as (engine, others):
        bound = Bound(engine, {"x": rows(2)})
        bound.execute()
        others.processes[0].kill()
        others.processes[0].wait()
        with pytest.raises(RankDiedError, match=f"rank 1 .*{others.pids[0]}"):
            bound.execute()
        with pytest.raises((RankDiedError, ClosedError)):
            bound.execute()
        engine.close()
        assert {*others.statuses()[1:]} <= {0, LEFT_ALONE, ORPHANED}


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_rank_that_dies_in_a_run_ends_it(mlp: Path, tensor: int, pipeline: int) -> None:
    with group(mlp, tensor, pipeline) as (engine, others):
        bound = Bound(engine, {"x": rows(2)})
        bound.execute()
        stop(others.pids[0])
        with running(bound.execute) as outcome:
            os.kill(others.pids[0], signal.SIGKILL)
        with pytest.raises(
            RankDiedError, match=rf"rank 1 .*{others.pids[0]}\) was killed by SIGKILL"
        ):
            outcome.result(timeout=50)


def test_a_rank_that_hangs_is_a_time_out(mlp: Path) -> None:
    with group(mlp, 1, 2, timeout=5) as (engine, others):
        bound = Bound(engine, {"x": rows(2)})
        bound.execute()
        stop(others.pids[0])
        with pytest.raises(CollectiveTimeoutError, match="rank 1 "):
            bound.execute()


LEADER = """
import signal, sys
from pathlib import Path
from tests.process.rank_group import Bound, group, rows

with group(Path(sys.argv[1]), 2, watch=False) as (engine, others):
    Bound(engine, {"x": rows(2)}).execute()
    print("pids", *others.pids, flush=True)
    signal.pause()
"""


def test_a_follower_ends_with_its_leader(mlp: Path) -> None:
    with Program(LEADER, mlp) as leader:
        pids = leader.pids()
        assert len(pids) == 1
        os.kill(leader.pid, signal.SIGKILL)
        wait_until(lambda: all_gone(pids))


# Replicas.


def test_groups_that_start_at_once_make_the_slices_once(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    start = threading.Barrier(2)

    def run() -> None:
        start.wait()
        with group(mlp, 2) as (engine, _):
            bound = Bound(engine, {"x": rows(2)})
            assert_close(bound.execute(), expected(mlp, bound.inputs))

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(run) for _ in range(2)]:
            outcome.result(timeout=50)
    (entry,) = Cache.default().entries()
    assert (entry.facts["tensor"], entry.facts["pipeline"]) == (2, 1)


@pytest.mark.thorough
def test_replicas_share_the_weights_of_prepared_slices(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx", layers=4, width=512)
    weights = 4 * 512 * 512 * 4 // 2  # of each rank
    inputs = {"x": rows(2, 512)}
    with (
        group(model, 2, prepare="always") as (one, first),
        group(model, 2, prepare="always") as (two, second),
    ):
        for engine in (one, two):
            assert_close(Bound(engine, inputs).execute(), expected(model, inputs))
        assert one.prepared == two.prepared != ""
        mapped = [_mapped(pid) for pid in (first.pids[0], second.pids[0])]
        one.close()
        assert first.statuses() == [0]
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
