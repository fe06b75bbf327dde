"""Tests of mcinfer/cards/slabs.py: where the weights of a model lie in a slab."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from mcinfer.cards.cuda import ALIGNMENT
from mcinfer.cards.dlpack import DlpackTensor
from mcinfer.cards.slabs import SlabLayout, layout
from mcinfer.engines.providers import runtime_values
from mcinfer.errors import BuildError
from tests.text_models import text_model

WEIGHTS: dict[str, NDArray[Any]] = {
    "second": np.arange(100, dtype=np.float32),
    "first": np.arange(33, dtype=np.float16).reshape(3, 11),
    "packed": np.zeros(7, np.int64),
}


def saved(folder: Path) -> Path:
    """A model whose weights lie in a file beside it, but for one that is small."""
    path = folder / "model.onnx"
    model = text_model("() => (float[] y) { y = Identity(second) }", {**WEIGHTS, "shape": [1, -1]})
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=60)
    return path


def content(slab: SlabLayout) -> bytes:
    memory = bytearray(slab.size)
    for one in slab.tensors:
        data = one.file.read_bytes()[one.file_offset : one.file_offset + one.size]
        memory[one.offset : one.offset + one.size] = data
    return bytes(memory)


def test_weights_beside_the_graph_lie_aligned_in_the_order_of_their_names(tmp_path: Path) -> None:
    slab = layout(saved(tmp_path))
    assert [one.name for one in slab.tensors] == ["first", "packed", "second"]
    assert [one.offset for one in slab.tensors] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert slab.size == 2 * ALIGNMENT + 400
    memory = content(slab)
    for one in slab.tensors:
        array = np.frombuffer(memory, one.element_type, int(np.prod(one.shape)), one.offset)
        np.testing.assert_array_equal(array.reshape(one.shape), WEIGHTS[one.name])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("offset", "100000", "'first' of 66 bytes does not lie at byte 100000"),
        ("length", "65", "'first' of 66 bytes does not lie"),
        ("offset", "-1", "external data with offset '-1'"),
        ("length", "7" * 30, "external data with length"),
    ],
)
def test_weight_that_is_not_where_the_graph_says_is_named(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    path = saved(tmp_path)
    model = onnx.load(path, load_external_data=False)
    [first] = [one for one in model.graph.initializer if one.name == "first"]
    [entry] = [one for one in first.external_data if one.key == key]
    entry.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BuildError, match=words):
        layout(path)


def test_weight_of_a_type_that_cannot_be_shared_is_left_to_each_session(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for one in model.graph.initializer:
        if one.name == "packed":
            one.data_type = TensorProto.COMPLEX64
    path.write_bytes(model.SerializeToString())
    assert [one.name for one in layout(path).tensors] == ["first", "second"]


def test_values_of_a_runtime_lack_those_of_types_that_it_refuses() -> None:
    memory = np.arange(64, dtype=np.uint8)
    tensors = {
        element_type: DlpackTensor(
            address=memory.ctypes.data,
            shape=(2,),
            element_type=element_type,
            device=None,
            owner=memory,
        )
        for element_type in ("complex64", "float32", "int8")
    }
    values = runtime_values(tensors, ort.OrtValue.from_dlpack)
    assert {*values} == {"float32", "int8"}
    assert all(value.data_ptr() == memory.ctypes.data for value in values.values())
