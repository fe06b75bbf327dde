"""Rules against ONNX's own examples of their operators: each input is cut along each axis that can be."""

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as pybind11_state

from mcinfer.ranks.slicing import rules
from mcinfer.ranks.slicing.graphs import Graph, View, infer, operator
from mcinfer.ranks.slicing.placements import REPLICATED, Sharded
from mcinfer.ranks.slicing.tensor import slices_of
from tests.lockstep import Arrays, models_of, run_slices, run_whole

RANKS = (2, 3, 4, 5, 11)
UNSUPPORTED = tuple(
    getattr(pybind11_state, name)
    for name in ("Fail", "InvalidArgument", "InvalidGraph", "NotImplemented", "RuntimeException")
)
"""What ONNX Runtime raises for examples that it cannot run."""

DATA = {"Gather", "Where"}
"""Operators whose inputs of integers are data, not shapes and axes."""

NOT_SHOWN = {"Cast", "Conv", "Pad", "Resize", "SimplifiedLayerNormalization", "Tile"}
"""ONNX has no example of these whose axes the ranks divide; other tests of slicing have some."""

SAMPLE = {
    name.lower(): name
    for name in (
        *("Add", "Attention", "Concat", "ConvTranspose", "Dropout", "Einsum", "Expand", "Flatten"),
        *("Gather", "Gemm", "GroupNormalization", "LayerNormalization", "MatMul", "ReduceSum"),
        *(
            "Reshape",
            "RotaryEmbedding",
            "Shape",
            "Slice",
            "Softmax",
            "Split",
            "Squeeze",
            "Transpose",
        ),
    )
} | {"batch_normalization": "BatchNormalization"}
"""An operator of each rule, by ONNX's module of its examples."""

Examples = dict[str, list[tuple[ModelProto, Arrays]]]


def examples(modules: Sequence[str] = ()) -> Examples:
    """Models of one node, by operator, with inputs; shapes and axes are constants in them.

    Args:
        modules: Only these, which takes a tenth of the time; without, all of ONNX's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case import node as source

        for module in modules:
            import_module(f"{source.__name__}.{module}")
        cases = source._NodeTestCases if modules else source.collect_testcases("")
    found: Examples = {}
    for case in cases:
        model = case.model
        if model is None or not case.data_sets or len(model.graph.node) != 1:
            continue
        arrays = case.data_sets[0][0]
        if all(isinstance(array, np.ndarray) and array.dtype.isbuiltin == 1 for array in arrays):
            feeds = dict(zip([x.name for x in model.graph.input], arrays, strict=False))
            name = operator(model.graph.node[0])
            if name not in DATA:
                _fix_shapes(model, feeds)
            found.setdefault(name, []).append((model, feeds))
    return found


def _fix_shapes(model: ModelProto, feeds: Arrays) -> None:
    names = list(model.graph.node[0].input)
    for x in list(model.graph.input):
        array = feeds[x.name]
        if names.index(x.name) and array.ndim <= 1 and array.dtype in (np.int32, np.int64):
            model.graph.initializer.append(numpy_helper.from_array(feeds.pop(x.name), x.name))
            model.graph.input.remove(x)


def cuts(graph: Graph, ranks: int) -> Iterator[rules.Choice]:
    view = View(graph, 0, ranks)
    for index, name in enumerate(view.inputs):
        for axis, size in enumerate(graph.dims(name) or ()):
            if not isinstance(size, int) or not size or size % ranks:
                continue
            for blocks in ((size,), (size // 2,) * 2) if size % (2 * ranks) == 0 else ((size,),):
                forms = [(REPLICATED,)] * len(view.inputs)
                choice = rules.cut(view, index, Sharded(axis, blocks), forms)
                if isinstance(choice, rules.Choice):
                    yield choice


def close(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    tolerance = 1e-3 if expected.dtype == np.float16 else 1e-5
    return got.dtype == expected.dtype and np.allclose(
        got.astype(np.float64), expected.astype(np.float64), tolerance, tolerance, equal_nan=True
    )


def rule_of(name: str) -> object:
    return (
        rules.RULES[name] if name not in rules.LABELS else (rules.RULES[name], rules.LABELS[name])
    )


def test_node_on_parts_gives_what_it_gives_on_the_whole() -> None:
    """The first example of an operator of each rule that can be cut."""
    shown = {name for name in rules.RULES if "::" not in name} - NOT_SHOWN
    assert {*map(rule_of, SAMPLE.values())} == {*map(rule_of, shown)}
    found = examples([*SAMPLE])
    for name in SAMPLE.values():
        assert any(tried(*example, (2, 3)) for example in found[name]), name


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_all_examples_of_all_operators_give_the_same_on_parts() -> None:
    found = examples()
    names = {name for name in rules.RULES if "::" not in name} - NOT_SHOWN
    assert {n for n in names if not sum(tried(*example, RANKS) for example in found[n])} == set()


def tried(model: ModelProto, feeds: Arrays, sizes: Sequence[int]) -> int:
    """How many ways to cut an example for so many ranks are right."""
    try:
        whole = run_whole(model, feeds)
    except UNSUPPORTED:
        return 0
    graph, count = Graph(model, infer(model)), 0
    for ranks in sizes:
        for choice in cuts(graph, ranks):
            slices = slices_of(graph, ranks, [choice])
            for got in run_slices(models_of(slices), feeds):
                right = all(close(got[key], value) for key, value in whole.items())
                assert right, (model.graph.name, ranks, choice)
            count += 1
    return count
