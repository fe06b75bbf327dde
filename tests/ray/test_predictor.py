"""`mcinfer.ray.Predictor` outside of Ray, and what it makes of what Ray assigns."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcinfer import ClosedError, EngineOptions, InvalidInputError
from mcinfer.examples import encoder
from mcinfer.ray import Predictor, assigned_cards
from tests.process.scripts import printed
from tests.ray.conftest import IMAGES, fake_model


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictor]:
    with Predictor(encoder(), 2) as predictor:
        yield predictor


# Batches.


def test_batch_becomes_outputs_and_the_columns_that_are_no_inputs(
    predictor: Predictor, expected: NDArray[np.float32]
) -> None:
    images, names = IMAGES.copy(), np.array([f"image {i}" for i in range(24)])
    images.flags.writeable = False  # as Ray's object store has them
    answer = predictor({"name": names, "image": images})
    assert [*answer] == ["name", "embedding"]
    np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
    assert answer["name"] is names


def test_columns_to_keep_are_those_that_were_asked_for() -> None:
    with Predictor(encoder(), 1, keep=["image", "id"], outputs=["embedding"]) as predictor:
        answer = predictor({"id": np.arange(24), "name": np.arange(24), "image": IMAGES})
        assert [*answer] == ["image", "id", "embedding"]
        with pytest.raises(
            InvalidInputError, match=r"keep: got 'id', expected some of \['image'\]"
        ):
            predictor({"image": IMAGES})


def test_batch_of_no_rows_has_outputs_of_no_rows(predictor: Predictor) -> None:
    answer = predictor({"id": np.arange(0), "image": IMAGES[:0]})
    assert answer["embedding"].shape == (0, 64)


def _rows(*rows: object) -> NDArray[Any]:
    """A column of dtype object, as Ray makes of rows of several shapes."""
    column = np.empty(len(rows), object)
    column[:] = rows
    return column


def test_column_of_arrays_is_stacked(predictor: Predictor, expected: NDArray[np.float32]) -> None:
    sizes = _rows(*(np.zeros(i) for i in range(24)))  # a column to keep, which nothing changes
    answer = predictor({"image": _rows(*IMAGES), "sizes": sizes})
    np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
    assert answer["sizes"] is sizes


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"picture": IMAGES},
            r"batch: missing columns \['image'\] of the model's inputs, got \['picture'\]",
        ),
        ({"image": _rows(IMAGES[0], IMAGES[1, :, 1:])}, r"'image'.*\(3, 31, 32\), \(3, 32, 32\)"),
        ({"image": _rows("a", "b")}, "'image' has dtype object"),
        ({"image": IMAGES[:, :2]}, "image"),
        (
            {"image": IMAGES, "embedding": np.arange(24)},
            "column 'embedding' has the name of an output",
        ),
        ([IMAGES], "batch: got list, expected arrays by column"),
    ],
)
def test_batch_that_does_not_fit_is_named(
    predictor: Predictor, batch: dict[str, NDArray[Any]], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        predictor(batch)


def test_output_without_rows_is_named(tmp_path: Path) -> None:
    outputs = [
        ["y", "float32", ["n", 2], {"from": "x"}],
        ["total", "float32", [1, 2], {"from": "x"}],
    ]
    model = fake_model(tmp_path, outputs=outputs)
    options: dict[str, Any] = {"engine": "fake", "verify": "never", "batch_axes": {"x": None}}
    batch = {"x": np.ones((1, 2), np.float32), "id": np.arange(1)}
    with Predictor(model, 1, **options) as predictor:
        assert predictor(batch)["total"].shape == (1, 2)
    with (
        Predictor(model, 1, **options, outputs=["y"]) as predictor,
        pytest.raises(
            InvalidInputError, match=r"output 'y' has the shape \(1, 2\), expected a row"
        ),
    ):
        predictor({"id": np.arange(3), "x": np.ones((1, 2), np.float32)})


# Its life.


def test_predictor_starts_with_the_first_call_and_is_pickled_without_its_master() -> None:
    first = Predictor(encoder(), 1, keep=[])
    assert first._master is None
    assert [*first({"image": IMAGES, "id": np.arange(24)})] == ["embedding"]
    second = pickle.loads(pickle.dumps(first))  # noqa: S301
    assert second._master is None
    assert [*second({"image": IMAGES, "id": np.arange(24)})] == ["embedding"]
    first.close()
    first.close()
    second.close()
    with pytest.raises(ClosedError, match="the master is closed"):
        first({"image": IMAGES})


def test_predictor_outside_of_ray_does_not_start_ray() -> None:
    code = (
        "import ray, mcinfer.ray; from mcinfer.examples import encoder\n"
        "with mcinfer.ray.Predictor(encoder(), 1): print(ray.is_initialized())"
    )
    assert printed(code) == "False\n"


# GPUs.


@pytest.mark.parametrize(
    ("ids", "visible", "devices"),
    [
        ([], None, []),
        ([1, 0], None, ["cuda:0", "cuda:1"]),
        ([3], "3", ["cuda:0"]),
        (["2", "5"], "5,2", ["cuda:0", "cuda:1"]),
        (["6"], "4, 6", ["cuda:1"]),
        (["GPU-8a"], "GPU-77,GPU-8a", ["cuda:1"]),
    ],
)
def test_gpus_of_ray_are_counted_among_the_visible_ones(
    ids: list[int | str], visible: str | None, devices: list[str]
) -> None:
    assert assigned_cards(ids, visible) == devices


@pytest.mark.parametrize(("ids", "visible"), [([1], "0"), (["GPU-8a"], None), ([0], "")])
def test_gpu_that_this_process_cannot_see_is_named(
    ids: list[int | str], visible: str | None
) -> None:
    with pytest.raises(InvalidInputError, match=f"Ray assigned GPU {ids[0]}, which CUDA_VISIBLE"):
        assigned_cards(ids, visible)


# Cores.


def test_given_cores_are_used() -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    with Predictor(encoder(), options=EngineOptions(cores=[cores])) as predictor:
        assert predictor({"image": IMAGES})["embedding"].shape == (24, 64)
