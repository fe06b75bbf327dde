"""Groups of ranks behind a master: right answers, errors that name the rank, and models that cannot be."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest

from mcinfer import (
    BuildError,
    EngineOptions,
    InvalidInputError,
    Master,
    Parallel,
    PredictError,
    RestartPolicy,
)
from mcinfer.model_cache.cache import Cache
from mcinfer.ranks.layouts import MAX_LAYOUTS
from tests.process.rank_group import Arrays, assert_close, expected, rows, write_lookup, write_mlp
from tests.process.waiting import pids
from tests.sliced_models import save

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
    return write_lookup(tmp_path_factory.mktemp("ranks") / "lookup.onnx")


@pytest.fixture(scope="module")
def shared(checked_together: ExitStack, mlp: Path) -> Groups:
    """The master of so many ranks for a layer, and stages, that tests share; by default of `mlp`."""

    @cache
    def start(tensor: int, pipeline: int, model: Path = mlp) -> Master:
        cut = Parallel(tensor=tensor, pipeline=pipeline)
        return checked_together.enter_context(Master(model, parallel=cut))

    return start


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


def test_requests_that_are_joined_get_their_own_rows(mlp: Path) -> None:
    """Of a layer's parts; those of a pipeline are joined in test_ranks.py."""
    with Master(mlp, parallel=Parallel(tensor=2), max_batch_size=64, max_delay=0.01) as master:
        given = [{"x": rows(1 + 5 * seed % 64, seed=seed)} for seed in range(80)]
        futures = [master.submit(inputs) for inputs in given]
        for inputs, future in zip(given, futures, strict=True):
            assert_close(future.result(timeout=60.0), expected(mlp, inputs))
        assert master.statistics().batch_sizes.total > len(given)


def test_model_in_memory_is_cut(mlp: Path) -> None:
    content = onnx.load(mlp).SerializeToString()  # with its weights
    with Master(content, parallel=Parallel(tensor=2)) as master:
        assert_close(master.predict({"x": rows(2)}), expected(mlp, {"x": rows(2)}))


# Failing runs.


def test_inputs_that_do_not_fit_fail_alone(shared: Groups, mlp: Path) -> None:
    master = shared(2, 1)
    before = pids(master)
    with pytest.raises(InvalidInputError):
        master.predict({"x": rows(2, 31)})
    assert_close(master.predict({"x": rows(2)}), expected(mlp, {"x": rows(2)}))
    assert pids(master) == before


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


@CUTS
def test_run_with_new_shapes_that_fails_in_a_rank_fails_alone(
    shared: Groups, lookup: Path, tensor: int, pipeline: int
) -> None:
    master = shared(tensor, pipeline, lookup)
    before = pids(master)
    for count in range(11, 16):  # no test before this one had as many rows
        wrong: Arrays = {"x": rows(count), "index": np.full(2 * count, 99)}
        with pytest.raises((PredictError, InvalidInputError), match="lookup"):
            master.predict(wrong, timeout=60.0)
        good: Arrays = {"x": rows(count), "index": np.arange(3) % count}
        assert_close(master.predict(good, timeout=60.0), expected(lookup, good))
    assert pids(master) == before


# Models and machines that cannot be.


def test_models_of_strings_are_refused(tmp_path: Path) -> None:
    # A model of strings alone cannot be cut: tests/test_ranks_slicing_pipeline.py.
    text = """(float[batch, 4] x, string[batch] s) => (float[batch, 4] y, string[batch] s)
    { a = Neg(x)  y = Abs(a) }"""
    with pytest.raises(BuildError, match=r"\['s'\] are strings"):
        Master(save(tmp_path / "texts.onnx", text), parallel=Parallel(pipeline=2)).start()


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


def test_groups_that_start_at_once_make_the_slices_once(
    mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    with Master(mlp, parallel=Parallel(tensor=2, replicas=2)) as master:
        assert_close(master.predict({"x": rows(2)}), expected(mlp, {"x": rows(2)}))
    (entry,) = Cache.default().entries()
    assert (entry.facts["tensor"], entry.facts["pipeline"]) == (2, 1)


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
