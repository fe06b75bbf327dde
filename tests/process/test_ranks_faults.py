"""Groups of ranks at their limits: many outputs, shapes that only a run shows, faults of one rank alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mcinfer.engines.base import Buffer
from mcinfer.errors import PredictError
from tests.process.rank_group import Bound, assert_close, buffer, expected, group, rows, write_mlp

WIDTH = 32
SECONDS = 20.0
"""For a collective: a group that waits for itself fails soon."""


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
    nodes += [helper.make_node(kind, [source], [target]) for kind, source, target in ends]
    weights = [
        numpy_helper.from_array(random.normal(0, 0.2, (WIDTH, WIDTH)).astype(np.float32), f"w{n}")
        for n in range(4)
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
