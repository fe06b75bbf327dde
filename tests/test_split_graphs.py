"""Random functions (tests/split_models.py), graphs that exporters write, and graphs once answered wrongly."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from mcinfer.engines._onnxruntime import _spec
from mcinfer.errors import PredictError
from mcinfer.specs import ModelSpec
from tests.split_models import Array, Arrays, Model, check_functions, compare

FUNCTIONS = 200

Shapes = dict[str, tuple[int, ...]]


def test_split_gives_what_the_whole_gives() -> None:
    counts, findings = check_functions(range(FUNCTIONS), seed=7)
    assert findings == []
    # It must be able to fail: functions of each kind, and requests in pieces.
    assert counts["undecided"] < FUNCTIONS / 10
    assert min(counts["split"], counts["whole"]) > FUNCTIONS / 4
    assert counts["in_pieces"] > FUNCTIONS
    assert counts["answered"] > FUNCTIONS * 5


def open_session(model: onnx.ModelProto) -> Any:
    """A session of one thread, which says nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def model_of(session: Any) -> Model:
    """A model whose runs are a session's."""
    spec = ModelSpec(
        inputs=tuple(_spec(one, "input") for one in session.get_inputs()),
        outputs=tuple(_spec(one, "output") for one in session.get_outputs()),
    )
    names = [[one.name for one in specs] for specs in (spec.inputs, spec.outputs)]

    def run(*arrays: Array) -> Arrays:
        try:
            answers = session.run(names[1], dict(zip(names[0], arrays, strict=True)))
        except Exception as exc:  # the runtime's own classes
            raise PredictError(str(exc)) from exc
        return dict(zip(names[1], answers, strict=True))

    return Model(spec, run)


def numbers(count: int) -> str:
    return ", ".join(f"{math.sin(7 * i):.3f}" for i in range(count))


FOUND: dict[str, tuple[str, Sequence[Shapes], bool]] = {
    **{
        f"exporter's names {', '.join(names)}": (
            f"(float[{names[0]}, 3, {names[1]}] x) => (float[{names[2]}, {names[3]}] y)"
            "{ y = ReduceMean <axes = [1], keepdims = 0> (x) }",
            [{"x": (count, 3, 7)}, {"x": (4, 3, 6)}, {"x": (5, 3, 9)}],
            True,
        )
        for names, count in (
            (("unk__214", "unk__215", "unk__216", "unk__217"), 5),
            (("?", "?", "?", "?"), 2),
        )
    },
    "any rank": (
        "(float[] x) => (float[] y) { y = Relu(x) }",
        [{"x": shape} for shape in ((4, 3), (5, 3), (6, 2, 2), (4, 3))],
        True,
    ),
    "time of a recurrent model": (
        f"""(float[sequence_length, 2] x) => (float[sequence_length, 3] y, float[1, 3] last)
        <float[1, 12, 2] w = {{{numbers(24)}}}, float[1, 12, 3] r = {{{numbers(36)}}},
         int64[1] one = {{1}}, int64[1] zero = {{0}}> {{
            wide = Unsqueeze(x, one)
            states, h, c = LSTM <hidden_size = 3> (wide, w, r)
            flat = Squeeze(states, one)
            y = Squeeze(flat, one)
            last = Squeeze(h, zero)
        }}""",
        [{"x": (6, 2)}] * 3,
        False,
    ),
    "one row for all, then one for each": (
        "(float[?,3] x, float[?,3] w) => (float[?,3] y) { y = Add(x, w) }",
        [{"x": (4, 3), "w": (1, 3)}, {"x": (2, 3), "w": (2, 3)}, {"x": (4, 3), "w": (4, 3)}],
        False,
    ),
    "one time for all, then one for each": (
        "(float[batch,3] x, float[steps] t) => (float[batch,3] y) <int64[1] last = {1}>"
        "{ u = Unsqueeze(t, last) y = Add(x, u) }",
        [{"x": (4, 3), "t": (1,)}, {"x": (2, 3), "t": (2,)}, {"x": (5, 3), "t": (5,)}],
        False,
    ),
    "one frame, then several, stacked in front of the rows": (
        "(float[frames,batch,3] x) => (float[n,3] y) <int64[2] shape = {-1, 3}>"
        "{ y = Reshape(x, shape) }",
        [{"x": (1, 4, 3)}, {"x": (3, 4, 3)}, {"x": (2, 5, 3)}],
        False,
    ),
    "a first dimension of 1 beside rows along another axis, which mix": (
        "(float[1,N,3] x, float[1,3] w) => (float[1,N,3] y) <int64 axis = {1}>"
        "{ c = CumSum(x, axis) y = Add(c, w) }",
        [{"x": (1, 4, 3), "w": (1, 3)}, {"x": (1, 5, 3), "w": (1, 3)}],
        False,
    ),
    "likewise, where an output has no rows": (
        "(float[1,batch,3] x, float[1,3] w) => (float[1,batch,3] y, float[1,3] z)"
        "{ y = Relu(x) z = Neg(w) }",
        [{"x": (1, 4, 3), "w": (1, 3)}, {"x": (1, 5, 3), "w": (1, 3)}],
        True,
    ),
    "a batch's name for sizes that differ": (
        "(float[n,batch,3] x, float[batch,3] w) => (float[n,batch,3] y, float[batch,3] z)"
        "{ y = Relu(x) z = Neg(w) }",
        [{"x": (4, 7, 3), "w": (6, 3)}, {"x": (5, 8, 3), "w": (6, 3)}],
        True,
    ),
    "a symbol of two sizes, as Paddle's exporter writes it": (
        "(float[n,3,n] x) => (float[n,3,n] y) { y = Relu(x) }",
        [{"x": (4, 3, 7)}, {"x": (5, 3, 7)}],
        True,
    ),
    "a table that is as long as the batch by chance": (
        "(float[?,4] x, float[?,4] w) => (float[?,4] y)"
        "{ mean = ReduceMean <axes = [0], keepdims = 1> (w) y = Add(x, mean) }",
        [{"x": (rows, 4), "w": (length, 4)} for rows, length in ((4, 4), (6, 4), (5, 5), (4, 4))],
        True,
    ),
}
"""By what it shows: the graph, requests, and whether they are split in the end."""


@pytest.mark.parametrize("name", [*FOUND])
def test_graph_is_answered_as_by_one_session(name: str) -> None:
    text, requests, splits = FOUND[name]
    session = open_session(
        parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> found {text}')
    )
    model = model_of(session)
    rng = np.random.default_rng(0)
    outcome = compare(
        model,
        [[rng.standard_normal(shape, np.float32) for shape in one.values()] for one in requests],
    )
    assert outcome.wrong == outcome.raised == []
    assert outcome.answered == len(requests)
    assert model.splitter.state.splits is splits
    assert model.split_runs > 0 or not splits
