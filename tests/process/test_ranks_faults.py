"""Groups of ranks at their limits: many outputs, shapes that only a run shows, faults of one rank alone."""

import json
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcinfer import EngineOptions, Master, Parallel, RestartPolicy
from mcinfer.engines.base import Buffer
from mcinfer.errors import PredictError, ProtocolError
from mcinfer.process import LEFT_ALONE
from mcinfer.protocol import Build, BuildFinish, Preparing
from mcinfer.ranks import engine as ranks
from mcinfer.ranks.collectives import join
from mcinfer.ranks.collectives.rendezvous import meet
from mcinfer.ranks.messages import Channel, Hello
from mcinfer.worker import server
from tests import test_serving
from tests.engine_tensors import buffer
from tests.process.rank_group import (
    Bound,
    assert_close,
    expected,
    followers,
    group,
    rows,
    write_mlp,
)
from tests.process.waiting import pids, stop, wait_until

WIDTH = 32
WIDE = 1 << 19
SECONDS = 20.0
"""For a collective: a group that waits for itself fails soon."""
X = ("x", "float32", (4, WIDTH), 0, 0)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for the module: the slices of equal models are made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCINFER_CACHE", str(tmp_path_factory.mktemp("ranks") / "cache"))
        yield


def write_chain(
    path: Path,
    ends: Sequence[tuple[str, str, str]],
    outputs: Mapping[str, tuple[int, Sequence[int | str]]],
) -> Path:
    """x float32["batch", 32] through four products, h1 to h4; `ends` are (operator, input, output)."""
    random = np.random.default_rng(3)
    nodes = [
        helper.make_node("MatMul", [f"h{layer}" if layer else "x", f"w{layer}"], [f"h{layer + 1}"])
        for layer in range(4)
    ]
    weights = [
        numpy_helper.from_array(random.normal(0, 0.2, (WIDTH, WIDTH)).astype(np.float32), f"w{n}")
        for n in range(4)
    ]
    for kind, source, target in ends:
        further = [f"wide{target}"] if kind == "MatMul" else []
        nodes.append(helper.make_node(kind, [source, *further], [target]))
        weights += [
            numpy_helper.from_array(np.ones((WIDTH, WIDE), np.float32), name) for name in further
        ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])
    made = [helper.make_tensor_value_info(name, *about) for name, about in outputs.items()]
    graph = helper.make_graph(nodes, path.stem, [x], made, weights)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), str(path))
    return path


def test_stage_with_more_outputs_than_messages_may_wait_answers(tmp_path: Path) -> None:
    names = [f"y{number}" for number in range(70)]
    model = write_chain(
        tmp_path / "many.onnx",
        [("Identity", "h4", name) for name in names],
        {name: (TensorProto.FLOAT, ["batch", WIDTH]) for name in names},
    )
    with group(model, pipeline=2, timeout=SECONDS) as (engine, _):
        outputs = {name: np.empty((3, WIDTH), np.float32) for name in names}
        run = Bound(engine, {"x": rows(3)}, outputs)
        for _ in range(2):
            assert_close(run.execute(), expected(model, run.inputs))


def test_layouts_are_bound_while_outputs_of_unknown_shapes_wait_to_be_taken(tmp_path: Path) -> None:
    names = {"low": "h1", "high": "h4"}  # made in both stages
    model = write_chain(
        tmp_path / "unknown.onnx",
        [("NonZero", source, name) for name, source in names.items()],
        {name: (TensorProto.INT64, [2, name]) for name in names},
    )
    with group(model, pipeline=2, timeout=SECONDS) as (engine, _):
        for turn in range(3):
            runs = []
            for count in range(engine.depth):
                run = Bound(engine, {"x": rows(1 + count + turn * engine.depth)})
                run.run.begin()
                runs.append(run)
            for run in runs:
                assert_close(run.finish(), expected(model, run.inputs))


def test_layout_that_one_rank_cannot_make_leaves_the_group_usable(tmp_path: Path) -> None:
    model = write_mlp(tmp_path / "mlp.onnx")
    with group(model, pipeline=2, timeout=SECONDS) as (engine, _):
        y = np.empty((4, WIDTH), np.float32)
        shape = (1 << 41, WIDTH)  # 256 TiB, which rank 0 alone needs
        huge = Buffer(name="x", element_type="float32", shape=shape, address=0, size=1 << 48)
        for _ in range(2):
            with pytest.raises(PredictError, match=r"rank 0: .*allocate"):
                engine.bind([huge], [buffer("y", y)])
            run = Bound(engine, {"x": rows(4)}, {"y": y})
            assert_close(run.execute(), expected(model, run.inputs))


# The worker of rank 0.


def served(monkeypatch: pytest.MonkeyPatch, sockets: Sequence[int]) -> test_serving.Peer:
    """The master's side of a worker that has these sockets to its followers."""
    monkeypatch.setattr(test_serving, "serve", partial(server.serve, followers=sockets))
    return test_serving.Peer()


@contextmanager
def answering(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Iterator[tuple[test_serving.Peer, int]]:
    """The master's side of a leader that has its model and a block, and the pid of its follower."""
    model = write_mlp(folder / "mlp.onnx")
    with (
        followers(2, model) as others,
        closing(served(monkeypatch, [os.dup(others.sockets[0].fileno())])) as peer,
    ):
        peer.send(build(model, 2))
        while not isinstance(peer.receive(), BuildFinish):
            continue
        peer.attach(0)
        yield peer, others.pids[0]


def build(model: Path, pipeline: int) -> Build:
    return Build(
        model=str(model),
        engine="onnxruntime",
        device="cpu:0",
        threads=1,
        options=EngineOptions(prepare="never"),
        token=test_serving.BUILD_TOKEN,
        pipeline=pipeline,
    )


def test_rank_that_leaves_during_the_build_ends_the_group_and_is_no_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(served(monkeypatch, [theirs.detach()])) as peer:
        with closing(Channel(ours)) as channel:
            channel.send(Hello(rank=1, pid=os.getpid(), device="cpu:1"))
            peer.send(build(write_mlp(tmp_path / "mlp.onnx"), 2))
        assert peer.finish() == LEFT_ALONE
        assert all(isinstance(said, Preparing) for said in peer.last_words())


def test_last_stage_that_is_stopped_while_no_rank_waits_for_it_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_LONGEST_SILENCE", 1.0)
    monkeypatch.setattr(ranks, "lead", partial(ranks.lead, timeout=1.0))
    with answering(monkeypatch, tmp_path) as (peer, follower):
        peer.ask([X])
        stop(follower)
        peer.predict([X])
        assert peer.finish() == LEFT_ALONE
    caplog.clear()  # the error in a record holds the engine


def test_cancellation_that_came_too_late_does_not_cancel_the_same_shard_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    lead = ranks.lead

    def noted(*arguments: Any) -> ranks.LeaderEngine:
        engines.append(lead(*arguments))
        return engines[0]

    monkeypatch.setattr(ranks, "lead", noted)
    with answering(monkeypatch, tmp_path) as (peer, follower):
        peer.ask([X])
        stop(follower)
        begun = peer.predict([X])
        wait_until(lambda: engines[0]._begun)
        peer.cancels.send(begun, 0)
        wait_until(lambda: not select.select([peer.listening.fd], [], [], 0)[0])
        os.kill(follower, signal.SIGCONT)
        peer.answer(begun)
        peer.requests -= 1
        assert peer.ask([X]).request == begun
    engines.clear()


# A group of a master.


def test_log_has_the_stack_of_a_rank_that_crashed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Master(write_mlp(tmp_path / "mlp.onnx"), parallel=Parallel(tensor=2)) as master:
        crashed = pids(master)[1]
        os.kill(crashed, signal.SIGSEGV)
        wait_until(lambda: crashed not in pids(master))
    said = [record.getMessage() for record in caplog.records]
    [death] = [text for text in said if "where it was" in text]
    where = f"where it was:\nrank 1 (cpu:1, pid {crashed}):\nFatal Python error: Segmentation fault"
    assert where in death


def test_ranks_that_end_when_they_are_asked_are_no_deaths_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcinfer.master")
    with Master(write_mlp(tmp_path / "mlp.onnx"), parallel=Parallel(tensor=4)) as master:
        leader = pids(master)[0]
    [end] = [r.getMessage() for r in caplog.records if "exited" in r.getMessage()]
    pool = "mlp.onnx on cpu:0, cpu:1, cpu:2, cpu:3"
    assert end == f"{pool}: group 0 of 4 ranks (cpu:0, pid {leader}) exited with status 0"


def test_rank_that_has_grown_has_its_group_recycled(tmp_path: Path) -> None:
    model = write_chain(
        tmp_path / "grown.onnx",
        [("MatMul", "h4", "y")],
        {"y": (TensorProto.FLOAT, ["batch", WIDE])},
    )
    parallel, options = Parallel(pipeline=2), EngineOptions(prepare="never")
    with Master(model, parallel=parallel, options=options) as master:
        sizes = [*map(own_bytes, pids(master))]
    assert sizes[1] > sizes[0] + (32 << 20)
    restart = RestartPolicy(max_memory_bytes=sizes[0] + (16 << 20), budget=0)
    with Master(model, parallel=parallel, options=options, restart=restart) as master:
        before = pids(master)
        wait_until(lambda: not {*before} & {*pids(master)})


def own_bytes(pid: int) -> int:
    """Resident and not shared (statm of proc(5))."""
    resident, shared = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


# Ranks that were started apart.


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_number_that_no_rank_has_is_refused(rank: int) -> None:
    key = f"{os.getpid()} {rank}"

    def call() -> None:
        (end,) = meet(key, 1, 2, SECONDS)
        with end:
            end.send(json.dumps({"rank": rank, "size": 2}).encode())

    caller = threading.Thread(target=call)
    caller.start()
    with pytest.raises(ProtocolError, match=rf"pid {os.getpid()} says it is rank {rank} of 2"):
        join(key, 0, 2, timeout=SECONDS)
    caller.join()
