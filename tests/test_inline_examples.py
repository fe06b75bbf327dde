"""ONNX's own examples of operators: the prepared model says and computes what the model does, bit for bit."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, numpy_helper

from mcinfer.engines import _onnxruntime
from mcinfer.errors import BuildError
from tests.engine_requests import engine_request

CPU = ["CPUExecutionProvider"]

LEAST_EQUAL = 1400
"""How many examples must have been compared: the others have operators or types that ONNX Runtime lacks."""

UNPREPARED = {"test_loop16_seq_none"}
"""ONNX Runtime writes an optimised form of them that it refuses itself."""

Feeds = dict[str, Any]


def examples() -> Iterator[tuple[str, ModelProto, Feeds]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case import node

        cases = node.collect_testcases("")
    for case in cases:
        if case.model is not None and case.data_sets:
            names = [one.name for one in case.model.graph.input]
            values = [value_of(one) for one in case.data_sets[0][0]]
            yield case.name, case.model, dict(zip(names, values, strict=False))


def value_of(given: Any) -> Any:
    if isinstance(given, TensorProto):
        return numpy_helper.to_array(given)
    if isinstance(given, SequenceProto):
        return numpy_helper.to_list(given)
    return numpy_helper.to_optional(given) if isinstance(given, OptionalProto) else given


def described(session: Any) -> list[Any]:
    sides = (session.get_inputs, session.get_outputs, session.get_overridable_initializers)
    return [(arg.name, arg.type, arg.shape) for side in sides for arg in side()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if one is None or other is None:
        return one is other
    one, other = np.asarray(one), np.asarray(other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool((one == other).all()) if one.dtype == object else one.tobytes() == other.tobytes()


def opened(path: Path, *, prepared: bool = False) -> Any:
    options = onnxruntime.SessionOptions()
    if prepared:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(path, options, providers=CPU)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_prepared_models_say_and_compute_what_the_models_do(tmp_path: Path) -> None:
    different: list[str] = []
    unprepared: set[str] = set()
    equal = 0
    path = tmp_path / "model.onnx"
    request = engine_request(path)
    for name, model, feeds in examples():
        path.write_bytes(model.SerializeToString())
        try:
            plain = opened(path)
            wanted = plain.run(None, feeds)
        except Exception:  # noqa: S112 no kernel, or a type that cannot be fed
            continue
        with TemporaryDirectory(dir=tmp_path) as folder:
            try:
                _onnxruntime.prepare(request, folder)
            except BuildError:
                unprepared.add(name)
                continue
            session = opened(Path(folder) / "model.onnx", prepared=True)
            if described(session) == described(plain) and same(session.run(None, feeds), wanted):
                equal += 1
            else:
                different.append(name)
    assert not different
    assert unprepared <= UNPREPARED
    assert equal >= LEAST_EQUAL
