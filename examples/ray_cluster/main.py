"""A data set through a model on several nodes of Ray, of which one is killed in the middle.

The nodes are Ray's own, all on this machine (`ray.cluster_utils.Cluster`). Each runs an actor with a master
of mcinfer's. Ray makes up for the node that dies: the result is complete, and equal to a plain session's.
"""

import argparse
import logging
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mcinfer.examples import encoder

# Ray reads these when it is imported. It listens on the loopback alone, and sends and keeps nothing.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
from ray.cluster_utils import Cluster

from mcinfer.ray import Predictor

Batch = dict[str, NDArray[Any]]

CPUS_OF_A_NODE = 2
"""One is for an actor. The other is free for tasks, and for an actor whose node died."""
STORE_BYTES = 100 << 20
"""Of each node's object store."""
BLOCK_ROWS = 500
SIDE = 32


class Embedder(Predictor):
    """A predictor that notes where it ran."""

    def __call__(self, batch: Mapping[str, Any]) -> Batch:
        """The batch's outputs and ids, and the node of each row."""
        answer = super().__call__(batch)
        node = ray.get_runtime_context().get_node_id()
        return {**answer, "node": np.full(len(answer["id"]), node)}


def images_of(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """One image for each id, float32[rows, 3, 32, 32]: always the same one."""
    places = np.arange(3 * SIDE * SIDE, dtype=np.float32)
    waves = np.sin(ids[:, None].astype(np.float32) * 0.01 + places * 0.37)
    return waves.reshape(-1, 3, SIDE, SIDE)


def with_images(batch: Batch) -> Batch:
    """Stands for the reading of images."""
    return {"id": batch["id"], "image": images_of(batch["id"])}


@contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster]:
    """A head without actors and so many nodes; no process of it is left behind."""
    with tempfile.TemporaryDirectory(prefix="mcr-", ignore_cleanup_errors=True) as place:
        os.environ["RAY_TMPDIR"] = place  # Ray notes its address in the folder `ray` there
        folder = os.path.join(place, "ray")
        common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={**common, "num_cpus": 0, "temp_dir": folder}
        )
        try:
            for _ in range(nodes):
                cluster.add_node(**common, num_cpus=CPUS_OF_A_NODE, temp_dir=folder)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def embed(cluster: Cluster, nodes: int, rows: int) -> tuple[list[Batch], str]:
    """All batches of the result, and the id of the node that was killed."""
    dataset = (
        ray.data.range(rows, override_num_blocks=max(1, rows // BLOCK_ROWS))
        .map_batches(with_images, batch_size=BLOCK_ROWS)
        .map_batches(
            Embedder,
            fn_constructor_args=(str(encoder()),),
            batch_size=BLOCK_ROWS,
            compute=ray.data.ActorPoolStrategy(size=nodes),
            num_cpus=1,
        )
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.wait_for_min_actors_s = (
        120  # else the first actor that is ready would take most of the data
    )
    victims = {node.node_id: node for node in cluster.worker_nodes}
    batches: list[Batch] = []
    done, killed = 0, ""
    for batch in dataset.iter_batches(batch_size=BLOCK_ROWS, prefetch_batches=0):
        batches.append({name: np.array(values) for name, values in batch.items()})
        done += len(batch["id"])
        if not killed and done >= rows // 5:
            killed = str(batch["node"][0])
            cluster.remove_node(victims[killed], allow_graceful=False)
            print(f"killed node {killed[:8]} after {done} of {rows} rows", flush=True)
    return batches, killed


def largest_difference(batches: Sequence[Batch]) -> float:
    """Between the result and a plain session's."""
    session = ort.InferenceSession(encoder(), providers=["CPUExecutionProvider"])
    differences = []
    for batch in batches:
        (expected,) = session.run(["embedding"], {"image": images_of(batch["id"])})
        differences.append(float(np.abs(batch["embedding"] - expected).max()))
    return max(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--nodes", type=int, default=3, help="how many, of two CPUs each (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=50_000, help="of the data set (%(default)s)")
    args = parser.parse_args(arguments)
    if args.nodes < 2 or args.rows < 10 * BLOCK_ROWS:
        parser.error(f"expected at least 2 nodes and {10 * BLOCK_ROWS} rows")
    with cluster_of(args.nodes) as cluster:
        print(f"{args.nodes} nodes with {CPUS_OF_A_NODE} CPUs each", flush=True)
        began = time.monotonic()
        batches, killed = embed(cluster, args.nodes, args.rows)
        seconds = time.monotonic() - began
    ids = np.sort(np.concatenate([batch["id"] for batch in batches]))
    for node, count in Counter(np.concatenate([b["node"] for b in batches]).tolist()).items():
        print(f"node {node[:8]}: {count} rows{' before it was killed' if node == killed else ''}")
    print(f"{len(ids)} rows in {seconds:.1f} s")
    if not np.array_equal(ids, np.arange(args.rows)):
        print("error: rows are missing, or came twice", file=sys.stderr)
        return 1
    difference = largest_difference(batches)
    print(f"Largest difference to one session = {difference:.2g}")
    if difference > 1e-4:
        print("error: the result is not that of one session", file=sys.stderr)
        return 1
    print("=========== success ===========")
    return 0


if __name__ == "__main__":
    sys.exit(main())
