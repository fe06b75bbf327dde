"""Ray's actors with mcinfer and with a plain session: throughput over one and two nodes, memory on one.

    python benchmarks/ray_nodes.py [--rows 1600] [--rounds 3] [--write docs/ray.md]

The nodes are Ray's, on this machine. An actor of either kind has one CPU and one thread: with mcinfer a
worker that is pinned to a core of its own, else a session in the actor. The rows are in the object store
before the time begins, and the time is that from the first run's begin to the last one's end, by the clock of
the machine, which all processes share; so it leaves out the starts of actors.

Ray gives its processes a low priority (niceness 15). On a busy machine, other programs would decide what is
measured, so here all ways have the usual priority. The CPU time of a row depends little on other programs.
"""

import argparse
import os
import runpy
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

# Ray reads these when it is imported. It listens on the loopback alone, and sends and keeps nothing.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_worker_niceness", "0")

# What the models need lies there.
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples" / "sd_dual_core"))

import ray
from measuring import Series, write_page
from rank_collectives import markdown, spread
from ray.cluster_utils import Cluster
from weight_models import SIDE, products_model
from worker_memory import process_memory

from mcinfer import EngineOptions
from mcinfer.bench.load import rotated
from mcinfer.bench.runner import machine
from mcinfer.bench.texts import machine_text
from mcinfer.ray import Actor, Predictor

Batch = dict[str, Any]

BATCH = 16
SIZE = 128
"""Of the images, in pixels."""
COUNTS = (1, 2, 4)
"""Of actors whose memory is measured."""
NODES = 2
CPUS = 4
"""Of a node: for actors, and for Ray Data's tasks."""
FIRST = "first"
"""A resource that the first node has alone."""
RUNS = 3
"""Of each actor, before its memory is measured."""
_SECONDS = 300.0
MEGABYTE = 1e6

MCINFER = "`mcinfer.ray.Predictor`"
FREE = "the same, not pinned"
PLAIN = "plain session in the actor"


class TimedPredictor(Predictor):
    """Tells with each row when its run began and ended, on which node, and what CPU time it took."""

    def __call__(self, batch: Mapping[str, Any]) -> Batch:
        """A batch's outputs."""
        run = Run([worker.pid for worker in self.statistics().workers if worker.pid])
        return run.columns(super().__call__(batch)["probabilities"])


class TimedSession:
    """What one would write without mcinfer, likewise."""

    def __init__(self, model: str) -> None:
        """Open the session."""
        self._session = plain_session(model)

    def __call__(self, batch: Batch) -> Batch:
        """A batch's outputs."""
        run = Run([])
        (answer,) = self._session.run(None, {"image": batch["image"]})
        return run.columns(answer)


def plain_session(model: str) -> Any:
    """A session with one thread."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Run:
    """The run of a batch, which begins now, in this process and its workers."""

    def __init__(self, workers: Sequence[int]) -> None:
        """Read the clocks."""
        self._processes = [psutil.Process(pid) for pid in (os.getpid(), *workers)]
        self._cpu = self._cpu_seconds()
        self._began = time.monotonic()

    def _cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def columns(self, answer: Any) -> Batch:
        """The columns that are measured with. The run ends."""
        ended = time.monotonic()
        columns = {
            "began": self._began,
            "ended": ended,
            "cpu": (self._cpu_seconds() - self._cpu) / len(answer),
            "node": ray.get_runtime_context().get_node_id(),
        }
        return {
            **{name: np.full(len(answer), value) for name, value in columns.items()},
            "class": answer.argmax(axis=1),
        }


class PlainActor:
    """A session in an actor, for its memory."""

    def __init__(self, model: str) -> None:
        """Open the session."""
        self._session = plain_session(model)

    def predict(self, inputs: Batch) -> Batch:
        """All outputs."""
        return {"y": self._session.run(None, inputs)[0]}

    def pid(self) -> int:
        """This process."""
        return os.getpid()


@contextmanager
def cluster(folder: str) -> Iterator[None]:
    """A head that runs no actor, and the nodes."""
    common = {"object_store_memory": 300 << 20, "include_dashboard": False, "temp_dir": folder}
    started = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0})
    try:
        for number in range(NODES):
            resources = {} if number else {FIRST: max(COUNTS)}
            started.add_node(**common, num_cpus=CPUS, resources=resources)
        ray.init(address=started.address, log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.wait_for_min_actors_s = int(_SECONDS)
        yield
    finally:
        ray.shutdown()
        started.shutdown()


# Throughput.


Rates = dict[tuple[str, int], tuple[Series, Series]]
"""By way and number of nodes: rows a second, and milliseconds of CPU time a row."""


def throughput(model: str, rows: int, rounds: int) -> Rates:
    """All ways in turns."""
    images = np.random.default_rng(1).random((rows, SIZE, SIZE, 3), dtype=np.float32)
    blocks = [{"image": images[i : i + BATCH]} for i in range(0, rows, BATCH)]
    dataset = ray.data.from_blocks([_block(one) for one in blocks]).materialize()
    cores = EngineOptions(cores=[sorted(os.sched_getaffinity(0))], threads=1)
    kinds: dict[str, tuple[type, dict[str, Any]]] = {
        MCINFER: (TimedPredictor, {}),
        FREE: (TimedPredictor, {"options": cores}),
        PLAIN: (TimedSession, {}),
    }
    ways = [(name, nodes) for name in kinds for nodes in (1, NODES)]
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for number in range(rounds):
        for name, nodes in rotated(ways, number):
            kind, named = kinds[name]
            rate, cpu = _rate(dataset, kind, {"model": model, **named}, nodes)
            print(
                f"round {number + 1}: {name}, {nodes} nodes: {rate:.1f} rows/s, {cpu:.2f} ms of CPU a row",
                flush=True,
            )
            rates.setdefault((name, nodes), []).append((rate, cpu))
    return {
        way: (Series(tuple(rate for rate, _ in found)), Series(tuple(cpu for _, cpu in found)))
        for way, found in rates.items()
    }


def _block(batch: Batch) -> Any:
    from ray.data.block import BlockAccessor

    return BlockAccessor.batch_to_arrow_block(batch)


def _rate(dataset: Any, kind: type, arguments: dict[str, Any], nodes: int) -> tuple[float, float]:
    done = dataset.map_batches(
        kind,
        fn_constructor_kwargs=arguments,
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=nodes),
        num_cpus=1,
    ).materialize()
    columns = done.to_pandas()
    found = columns["node"].nunique()
    if found != nodes:
        raise SystemExit(f"the actors ran on {found} nodes, expected {nodes}")
    seconds = columns["ended"].max() - columns["began"].min()
    return float(len(columns) / seconds), float(columns["cpu"].mean() * 1000)


# Memory.


def memory(model: str) -> dict[tuple[str, int], float]:
    """Bytes (PSS) of all processes of so many actors on one node, by way and number."""
    found: dict[tuple[str, int], float] = {}
    for name, kind in ((MCINFER, Actor), (PLAIN, ray.remote(PlainActor))):
        for count in COUNTS:
            options = kind.options(num_cpus=1, resources={FIRST: 1})
            actors = [options.remote(model) for _ in range(count)]
            try:
                found[name, count] = _memory(actors)
            finally:
                _kill(actors)
            print(f"{name}, {count} actors: {found[name, count] / MEGABYTE:.0f} MB", flush=True)
    return found


def _memory(actors: Sequence[Any]) -> float:
    x = np.random.default_rng(2).random((8, SIDE), dtype=np.float32)
    for _ in range(RUNS):
        ray.get([one.predict.remote({"x": x}) for one in actors], timeout=_SECONDS)
    return float(sum(process_memory(pid).pss for one in actors for pid in _processes(one)))


def _processes(actor: Any) -> list[int]:
    """The actor's process, and its workers."""
    if not hasattr(actor, "statistics"):
        return [ray.get(actor.pid.remote(), timeout=_SECONDS)]
    pids = [w.pid for w in ray.get(actor.statistics.remote(), timeout=_SECONDS).workers]
    return [psutil.Process(pids[0]).ppid(), *pids]


def _kill(actors: Sequence[Any]) -> None:
    processes = [psutil.Process(pid) for one in actors for pid in _processes(one)]
    for one in actors:
        ray.kill(one)
    _, left = psutil.wait_procs(processes, timeout=60.0)
    if left:
        raise SystemExit(f"left behind: {left}")


# The page.


def tables(rates: Rates, sizes: Mapping[tuple[str, int], float], weights: int) -> dict[str, str]:
    """By the page's marks."""
    nodes = sorted({count for _, count in rates})
    counts = sorted({count for _, count in sizes})
    setting = f"Measured by `benchmarks/ray_nodes.py`: {', '.join(machine_texts())}."
    return {
        "ray throughput": markdown(
            " | ".join(
                [
                    "rows a second",
                    *(f"{n} node{'s' * (n > 1)}" for n in nodes),
                    "gain",
                    "ms of CPU a row, 1 node",
                ]
            ),
            [
                [
                    way,
                    *(spread(rates[way, n][0], "{:.1f}".format) for n in nodes),
                    f"{rates[way, NODES][0].middle / rates[way, 1][0].middle:.2f}",
                    spread(rates[way, 1][1], "{:.2f}".format),
                ]
                for way in (MCINFER, FREE, PLAIN)
            ],
        )
        + f"\n\n{setting}",
        "ray memory": markdown(
            " | ".join(["PSS in MB", *(f"{n} actor{'s' * (n > 1)}" for n in counts)]),
            [
                [way, *(f"{sizes[way, n] / MEGABYTE:.0f}" for n in counts)]
                for way in (MCINFER, PLAIN)
            ],
        )
        + f"\n\nThe weights have {weights / MEGABYTE:.0f} MB. {setting}",
    }


def machine_texts() -> list[str]:
    """The machine, and what runs on it."""
    facts = {**machine(), "ray": ray.__version__}
    return [machine_text(name, value) for name, value in facts.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1600, help="of the data set (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way (%(default)s)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the page to put the tables into"
    )
    options = parser.parse_args(arguments)
    build = runpy.run_path(str(ROOT / "examples" / "quick_start" / "build_mobilenet.py"))
    with tempfile.TemporaryDirectory(prefix="mcr-", ignore_cleanup_errors=True) as folder:
        os.environ["MCINFER_CACHE"] = str(Path(folder) / "cache")  # not the user's
        os.environ["RAY_TMPDIR"] = folder  # Ray notes its address in the folder `ray` there
        classifier = Path(folder) / "mobilenet.onnx"
        build["build_mobilenet"](classifier, batch=None, size=SIZE)
        large = products_model(Path(folder) / "products.onnx")
        # A folder of Ray's own: all may write there, and so the model cache would not use it.
        with cluster(str(Path(folder) / "ray")):
            rates = throughput(str(classifier), options.rows, options.rounds)
            sizes = memory(str(large.path))
    parts = tables(rates, sizes, large.weight_bytes)
    for text in parts.values():
        print(f"\n{text}")
    if options.write is not None:
        write_page(options.write, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
