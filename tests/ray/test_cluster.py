"""Actors of Ray, Ray Data and Ray Serve with `mcinfer.ray`."""

import http.client
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from numpy.typing import NDArray

import mcinfer.ray
from mcinfer import InvalidInputError
from mcinfer.examples import encoder
from mcinfer.ray import Actor, Predictor
from tests.process.waiting import all_gone, is_alive
from tests.ray.conftest import CPUS, IMAGES, fake_model, pids, wait_until
from tests.text_models import text_model

MakeActor = Callable[..., Any]

CORES = sorted(os.sched_getaffinity(0))


def logged(logs: Path) -> str:
    """What Ray's processes wrote to their error output."""
    return "\n".join(
        path.read_text("utf-8", "replace") for path in sorted(logs.glob("worker-*.err"))
    )


# Ray Data.


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("given", "how"),
    [("path", {"concurrency": 2}), ("reference", {"compute": ray.data.ActorPoolStrategy(size=2)})],
)
def test_dataset_passes_through_predictors(
    expected: NDArray[np.float32], given: str, how: dict[str, Any]
) -> None:
    model = ray.put(Path(encoder()).read_bytes()) if given == "reference" else encoder()
    items = [{"id": i, "image": image} for i, image in enumerate(IMAGES)]
    dataset = ray.data.from_items(items, override_num_blocks=3).map_batches(
        Predictor,
        fn_constructor_args=(model,),
        batch_size=8,
        num_cpus=1,
        **how,
    )
    rows = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == [*range(24)]
    assert {*rows[0]} == {"id", "embedding"}
    np.testing.assert_allclose([row["embedding"] for row in rows], expected, atol=1e-5)


def test_actor_without_a_batch_warns_where_no_cpu_is_left_to_read_one(
    cluster: Path, actor: MakeActor
) -> None:
    actor(ray.remote(Predictor), encoder(), of_ray={"num_cpus": CPUS})
    wait_until(lambda: "the cluster has no CPU free. Ray Data's" in logged(cluster))


# Actors.


def test_actor_answers_and_tells_its_health(
    actor: MakeActor, expected: NDArray[np.float32]
) -> None:
    one = actor(Actor, encoder())
    answer = ray.get(one.predict.remote({"image": IMAGES}), timeout=60)
    np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
    assert ray.get(one.health.remote(), timeout=60).state == "ready"
    with pytest.raises(InvalidInputError, match=r"missing \['image'\]"):
        ray.get(one.predict.remote({"picture": IMAGES}), timeout=60)


def test_actor_is_asked_for_its_health_during_a_run(actor: MakeActor, tmp_path: Path) -> None:
    model = fake_model(tmp_path, when={"-1": "sleep:3600"})
    one = actor(Actor, model, engine="fake", verify="never")
    ray.get(one.health.remote(), timeout=60)
    slow = one.predict.remote({"x": np.full((1, 2), -1, np.float32)}, timeout=300.0)
    wait_until(lambda: ray.get(one.statistics.remote(), timeout=60).workers[0].state == "busy")
    assert ray.get(one.health.remote(), timeout=60).state == "ready"
    ready, _ = ray.wait([slow], timeout=0)
    assert not ready


def test_actors_share_all_cores(actor: MakeActor) -> None:
    for one in [actor(Actor, encoder(), devices=2, of_ray={"num_cpus": 2}) for _ in range(2)]:
        assert [psutil.Process(pid).cpu_affinity() for pid in pids(one)] == [CORES] * 2


def test_model_is_cut_over_the_cpus_of_an_actor(actor: MakeActor, tmp_path: Path) -> None:
    path, _ = products_model(tmp_path / "small.onnx", side=64, layers=2)
    cut = mcinfer.Parallel(tensor=2)
    whole, ranks = actor(Actor, path), actor(Actor, path, parallel=cut, of_ray={"num_cpus": 2})
    x = {"x": np.random.default_rng(3).random((4, 64), np.float32)}
    first, second = ray.get([one.predict.remote(x) for one in (whole, ranks)], timeout=120)
    np.testing.assert_allclose(first["y"], second["y"], atol=1e-4)
    assert len(pids(ranks)) == 2


def test_inline_actor_has_no_worker(actor: MakeActor) -> None:
    inline, other = actor(Actor, encoder(), devices="inline"), actor(Actor, encoder())
    (own,) = pids(inline)
    assert not psutil.Process(own).children()
    first, second = ray.get([one.predict.remote([IMAGES]) for one in (inline, other)], timeout=60)
    np.testing.assert_allclose(first["embedding"], second["embedding"], atol=1e-5)


def test_actor_that_starts_again_serves(actor: MakeActor) -> None:
    one = actor(Actor, encoder(), of_ray={"max_restarts": 1, "max_task_retries": 1})
    (first,) = map(psutil.Process, pids(one))
    psutil.Process(first.ppid()).kill()
    (second,) = pids(one)
    assert second != first.pid
    wait_until(lambda: not is_alive(first.pid))


def test_task_has_workers_for_its_cpus_and_is_told_of_actors(cluster: Path) -> None:
    predictor = Predictor(encoder())

    def task() -> tuple[int, int]:
        rows = len(predictor({"image": IMAGES})["embedding"])
        try:
            return rows, len(predictor.statistics().workers)
        finally:
            predictor.close()

    remote = ray.remote(task).options(num_cpus=1).remote()
    assert ray.get(remote, timeout=60) == (24, 1)
    wait_until(lambda: "Give map_batches the class (Predictor, fn" in logged(cluster))


def test_actor_with_gpus_takes_those(actor: MakeActor) -> None:
    one = actor(Actor, encoder(), of_ray={"num_gpus": 2})
    with pytest.raises(ray.exceptions.RayActorError, match="cuda:1"):
        ray.get(one.health.remote(), timeout=120)


@pytest.mark.parametrize("way", ["ray.kill", "SIGKILL"])
def test_actor_that_is_killed_leaves_no_worker(actor: MakeActor, way: str) -> None:
    one = actor(Actor, encoder(), devices=2, of_ray={"num_cpus": 2})
    workers = pids(one)
    assert len(workers) == 2
    assert all(map(is_alive, workers))
    (parent,) = {psutil.Process(pid).ppid() for pid in workers}
    if way == "ray.kill":
        ray.kill(one)
    else:
        os.kill(parent, signal.SIGKILL)
    wait_until(lambda: all_gone([parent, *workers]))


# Weights.


def test_actors_of_a_node_map_one_copy_of_the_weights(
    actor: MakeActor, tmp_path: Path, folders: Path
) -> None:
    path, size = products_model(tmp_path / "large.onnx", side=2048, layers=16)
    options = mcinfer.EngineOptions(prepare="wait")
    actors = [actor(Actor, path, options=options) for _ in range(3)]
    x = {"x": np.ones((1, 2048), np.float32)}
    answers = ray.get([one.predict.remote(x) for one in actors], timeout=120)
    np.testing.assert_array_equal(answers[0]["y"], answers[2]["y"])
    workers = [pid for one in actors for pid in pids(one)]
    assert len(workers) == 3
    mapped = [_weight_files(pid, folders) for pid in workers]
    assert mapped[0]
    assert mapped[0] == mapped[1] == mapped[2]
    pss = [_pss(pid) for pid in workers]
    assert sum(pss) < 2 * size


def products_model(path: Path, side: int, layers: int) -> tuple[Path, int]:
    """A model of square products, and the bytes of its weights."""
    values = ["x", *(f"h{n}" for n in range(1, layers)), "y"]
    body = " ".join(f"{values[n + 1]} = MatMul({values[n]}, w{n})" for n in range(layers))
    text = f"(float[batch, {side}] x) => (float[batch, {side}] y) {{ {body} }}"
    weights = {f"w{n}": (side, side) for n in range(layers)}
    path.write_bytes(text_model(text, weights).SerializeToString())
    return path, layers * side * side * 4


def _weight_files(pid: int, folder: Path) -> set[str]:
    """The files of the model cache that a process has mapped, by inode and name (proc_pid_maps(5))."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {" ".join(line.split()[4:]) for line in lines if str(folder / "cache") in line}


def _pss(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


# Ray Serve.


@pytest.mark.usefixtures("cluster")
def test_deployment_answers_handles_and_http(expected: NDArray[np.float32]) -> None:
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        app = mcinfer.ray.deployment(
            encoder(), max_batch_size=4, serve_options={"ray_actor_options": {"num_cpus": 2}}
        )
        handle = serve.run(app)
        answers = [handle.remote({"image": IMAGES[i : i + 2]}) for i in range(0, 24, 2)]
        found = np.concatenate([one.result(timeout_s=60)["embedding"] for one in answers])
        np.testing.assert_allclose(found, expected, atol=1e-5)
        whole = handle.predict.remote({"image": IMAGES}, shards=2).result(timeout_s=60)
        np.testing.assert_allclose(whole["embedding"], expected, atol=1e-5)
        with pytest.raises(InvalidInputError, match=r"missing \['image'\]"):
            handle.remote({"picture": IMAGES}).result(timeout_s=60)
        status, content = _post(port, {"inputs": {"image": IMAGES[:3].tolist()}})
        assert status == 200
        np.testing.assert_allclose(content["outputs"]["embedding"], expected[:3], atol=1e-5)
        for body, words in BAD:
            status, content = _post(port, body)
            assert status == 400, content
            assert re.search(words, content["error"])
    finally:
        serve.shutdown()


BAD = [
    (b"{", "body: got 1 bytes that are no JSON"),
    (b"[" * 100_000 + b"]" * 100_000, "body: got 200000 bytes that are no JSON.*recursion"),
    ([1], "body: expected JSON such as"),
    ({"inputs": {"picture": []}}, r"inputs: unknown \['picture'\], missing \['image'\]"),
    ({"inputs": {"image": [["a"]]}}, "input 'image' has dtype <U1, expected float32"),
    ({"inputs": {"image": [[1], [1, 2]]}}, "input 'image' is not an array"),
    ({"inputs": {"image": [[1.0]]}}, "image"),
    ({"inputs": {}}, r"missing \['image'\]"),
]


def _post(port: int, body: object) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/", body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()
