"""Tests of mcinfer/ranks/slicing/slicer.py and weights.py: slices of a model in any form."""

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mcinfer.errors import BuildError, InvalidInputError, ModelNotFoundError
from mcinfer.ranks.check_slices import check, difference, made_up_inputs, tolerance
from mcinfer.ranks.slicing import weights as weights_module
from mcinfer.ranks.slicing.plans import METADATA_KEY, REPORT_FILE, RankPlan, Segment
from mcinfer.ranks.slicing.segments import cut_segments
from mcinfer.ranks.slicing.slicer import slice_model, write_slices
from mcinfer.ranks.slicing.weights import DataFile, Recipe, Weights
from mcinfer.specs import ModelSpec, TensorSpec
from tests.command_line import files
from tests.process.scripts import Program
from tests.text_models import normal_weights, text_model

WIDTH = 128
LAYERS = 4


def mlp(*, quantised: bool = False, output: str = "y") -> ModelProto:
    """Layers of a MatMul, a bias and Relu: x, float32[batch, 128]; each may have an input of eight bits."""
    weights: dict[str, Any] = {"step": np.float32(4 / 127), "zero": np.int8(0)} if quantised else {}
    rng = np.random.default_rng(0)
    values = ["x", *(f"r{at}" for at in range(LAYERS - 1)), "y"]
    body = []
    for at, (x, made) in enumerate(pairwise(values)):
        weights[f"w{at}"] = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        weights[f"w{at}"] *= 2**0.5
        weights[f"b{at}"] = rng.standard_normal(WIDTH).astype(np.float32)
        if quantised:
            body += [f"q{at} = QuantizeLinear({x}, step, zero)"]
            body += [f"d{at} = DequantizeLinear(q{at}, step, zero)"]
            x = f"d{at}"
        body += [f"m{at} = MatMul({x}, w{at})", f"a{at} = Add(m{at}, b{at})"]
        body += [f"{made} = Relu(a{at})"]
    kind = "float"
    if output != "y":
        body += [f"{output} = QuantizeLinear(y, step, zero)"]
        kind = "int8"
    text = f"(float[batch,{WIDTH}] x) => ({kind}[batch,{WIDTH}] {output}) {{ {' '.join(body)} }}"
    return text_model(text, weights, opset=21)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(mlp(), tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slices"


def saved(model: ModelProto, folder: Path, **how: Any) -> Path:
    onnx.save(model, folder / "mlp.onnx", **how)
    return folder / "mlp.onnx"


def about(folder: Path, rank: int) -> dict[str, Any]:
    """The metadata property of a slice."""
    model = onnx.load(folder / f"model{rank}.onnx", load_external_data=False)
    (entry,) = (entry for entry in model.metadata_props if entry.key == METADATA_KEY)
    content: dict[str, Any] = json.loads(entry.value)
    return content


# What is written.


def test_each_rank_has_a_file_its_weights_and_its_place(model: Path, folder: Path) -> None:
    report = slice_model(model, folder, tensor=2, pipeline=2)
    expected = [f"model{rank}.{suffix}" for rank in range(4) for suffix in ("data", "onnx")]
    assert files(folder) == [*expected, REPORT_FILE]
    (sent,) = about(folder, 0)["sends"]
    for rank in range(4):
        place = about(folder, rank)
        assert place["rank"] == rank
        assert (place["version"], place["tensor"], place["pipeline"]) == (1, 2, 2)
        assert place["inputs"] == [["x", "float32", ["batch", WIDTH]]]
        assert place["outputs"] == [["y", "float32", ["batch", WIDTH]]]
        assert place["sends"] == ({sent: [rank + 2]} if rank < 2 else {})
        assert place["receives"] == ({sent: rank - 2} if rank >= 2 else {})
        slice_ = onnx.load(folder / f"model{rank}.onnx", load_external_data=False)
        for tensor in slice_.graph.initializer:
            large = len(numpy_helper.to_array(tensor, str(folder)).tobytes()) > 1024
            assert (tensor.data_location == TensorProto.EXTERNAL) == large
    assert report.check.state == "passed"
    assert 0 <= report.check.difference["y"] <= report.check.tolerance["y"] == 1e-5


def test_report_says_what_was_cut_and_what_it_costs(model: Path, tmp_path: Path) -> None:
    report = slice_model(model, tmp_path / "tensor", tensor=2, check=False)
    written = json.loads((tmp_path / "tensor" / REPORT_FILE).read_text())
    assert written == json.loads(json.dumps(report.as_json()))
    whole = sum(array.nbytes for array in map(numpy_helper.to_array, mlp().graph.initializer))
    assert report.weight_bytes == whole
    (stage,) = report.stages
    assert {weight.name for weight in stage.sharded} >= {f"w{at}" for at in range(LAYERS)}
    for rank in report.ranks:
        assert whole / 2 <= rank.weight_bytes <= 0.6 * whole
    assert stage.collectives
    assert stage.collective_bytes == len(stage.collectives) * WIDTH * 4  # with a batch of 1
    assert (report.check.state, report.check.reason) == ("left out", "not asked for")
    report = slice_model(model, tmp_path / "pipeline", pipeline=2, check=False)
    first, second = report.ranks
    assert first.weight_bytes == second.weight_bytes == whole / 2
    assert (first.bytes_received, second.bytes_received) == (0, WIDTH * 4)
    assert [*first.sends.values()] == [(1,)]
    assert [*second.receives.values()] == [0]


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_file_of_a_slice_has_the_same_segments(
    model: Path, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """What the slicer writes itself, and what is cut out of the files that it writes for others."""
    written(model, tmp_path / "files", tensor=tensor, pipeline=pipeline)
    written(model, tmp_path / "segments", tensor=tensor, pipeline=pipeline, segments=True)
    for rank in range(tensor * pipeline):
        direct = tmp_path / "segments" / f"rank{rank}"
        read = tmp_path / f"read{rank}"
        read.mkdir()
        plan = cut_segments(tmp_path / "files" / f"model{rank}.onnx", read)
        assert RankPlan.read(direct) == plan
        assert files(direct) == files(read)
        for step in plan.steps:
            if isinstance(step, Segment):
                one, other = (
                    onnx.load(folder / step.file, load_external_data=False)
                    for folder in (direct, read)
                )
                assert one.graph.node == other.graph.node
                assert one.graph.input == other.graph.input
                assert one.graph.output == other.graph.output
                assert one.graph.initializer == other.graph.initializer
        contents = [tmp_path / form / f"model{rank}.data" for form in ("files", "segments")]
        assert contents[0].read_bytes() == contents[1].read_bytes()


# Forms that a model's weights have.


def test_weights_in_another_file_are_copied_from_there(tmp_path: Path, folder: Path) -> None:
    outside = {"save_as_external_data": True, "location": "all.bin", "size_threshold": 0}
    model = saved(mlp(), tmp_path, **outside)
    slice_model(model, folder, tensor=2, pipeline=2)
    os.unlink(tmp_path / "all.bin")
    for rank in range(4):
        onnx.load(folder / f"model{rank}.onnx")


def test_large_constant_nodes_are_weights(tmp_path: Path, folder: Path) -> None:
    whole = mlp()
    for tensor in whole.graph.initializer:
        whole.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    whole.graph.ClearField("initializer")
    report = slice_model(saved(whole, tmp_path), folder, tensor=2, pipeline=2, check=False)
    assert report.weight_bytes >= LAYERS * WIDTH * WIDTH * 4
    assert max(rank.weight_bytes for rank in report.ranks) <= 0.3 * report.weight_bytes


def test_weights_of_subgraphs_come_along(tmp_path: Path, folder: Path) -> None:
    """Those of one branch lie in the model, those of the other in a file beside it."""
    whole = text_model(
        f"""(float[batch,{WIDTH}] x, bool flag) => (float[batch,{WIDTH}] z) {{
            m = MatMul(x, w)  y = Relu(m)
            z = If(flag) <
                then_branch = t () => (float[batch,{WIDTH}] p) {{ p = MatMul(y, inner) }},
                else_branch = e () => (float[batch,{WIDTH}] q) {{ q = MatMul(y, inner) }}>
        }}""",
        {"w": (WIDTH, WIDTH)},
    )
    for seed, branch in enumerate(a.g for a in whole.graph.node[-1].attribute):
        array = normal_weights(seed, inner=(WIDTH, WIDTH))["inner"]
        tensor = branch.initializer.add()
        tensor.CopyFrom(numpy_helper.from_array(array, "inner"))
        if seed:
            (tmp_path / "inner.bin").write_bytes(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="inner.bin")
    assert slice_model(saved(whole, tmp_path), folder, pipeline=2).check.state == "passed"


CUT_LARGE = """
import resource, sys
from mcinfer.ranks.slicing.slicer import slice_model

def kibibytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

limit = (kibibytes("VmData:") << 10) + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
slice_model(sys.argv[1], sys.argv[2], tensor=2, pipeline=2, check=False)
"""


def test_model_larger_than_memory_is_cut(tmp_path: Path, folder: Path) -> None:
    """A weight alone is larger than the memory that the process may still take."""
    width, layers, size = 3072, 4, 3072 * 3072 * 4
    body = "a = MatMul(x, w0)  b = MatMul(a, w1)  c = MatMul(b, w2)  y = MatMul(c, w3)"
    whole = text_model(f"(float[batch,{width}] x) => (float[batch,{width}] y) {{ {body} }}")
    for at in range(layers):
        tensor = whole.graph.initializer.add(name=f"w{at}", data_type=1, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "sparse.bin"), ("offset", at * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(text))
    model = tmp_path / "large.onnx"
    model.write_bytes(whole.SerializeToString())
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.truncate(layers * size)
        file.seek(size - 4)
        file.write(np.float32(7).tobytes())
    with Program(CUT_LARGE, model, folder, 32 << 20) as program:
        done = program.wait()
    assert done.status == 0, done.err
    report = json.loads((folder / REPORT_FILE).read_text())
    assert report["weight_bytes"] == layers * size
    assert all(rank["weight_bytes"] == layers * size // 4 for rank in report["ranks"])
    last = np.fromfile(folder / "model1.data", np.float32)
    assert np.count_nonzero(last) == 1


@st.composite
def selections(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]]:
    """A shape, an axis, and ranges along it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.sets(st.integers(0, shape[axis]), min_size=2)) if shape[axis] else {0})
    ranges = draw(st.permutations([*pairwise(edges)][::2]))
    return shape, axis, tuple(ranges)


@settings(max_examples=25)
@given(selections(), st.integers(1, 64), st.sampled_from(["float32", "uint8", "complex128"]))
def test_any_part_of_a_weight_is_written_in_pieces(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], int, tuple[tuple[int, int], ...]],
    piece: int,
    dtype: str,
) -> None:
    (shape, axis, ranges), tmp_path = case, tmp_path_factory.mktemp("cut")
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    tensor = numpy_helper.from_array(array, "w")
    expected = np.concatenate([array.take(range(*limits), axis) for limits in ranges], axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "_PIECE_BYTES", piece)
        patch.setattr(weights_module, "_LEAST_OUTSIDE_BYTES", 100)
        with Weights(saved(mlp(), tmp_path)) as weights, DataFile(tmp_path / "data") as file:
            recipe = Recipe(name="part", source=tensor, axis=axis, ranges=ranges)
            part = weights.write(recipe, file)
    found = numpy_helper.to_array(part, str(tmp_path))
    assert part.name == "part"
    assert (part.data_location == TensorProto.EXTERNAL) == (expected.nbytes > 100)
    np.testing.assert_array_equal(found, expected)


def test_elements_of_half_a_byte_are_cut_only_at_bytes(tmp_path: Path) -> None:
    packed = TensorProto(name="w", data_type=TensorProto.UINT4, dims=[4, 3], raw_data=bytes(6))
    first = Recipe(name="part", source=packed, axis=0, ranges=((0, 1),))
    with Weights(saved(mlp(), tmp_path)) as weights, DataFile(tmp_path / "data") as file:
        with pytest.raises(BuildError, match=r"'w' .* cannot be cut along axis 0"):
            weights.write(first, file)
        packed.dims[:] = [6, 2]
        part = weights.write(first, file)
        assert (part.dims, part.raw_data) == ([1, 2], bytes(1))


# What is refused, and what is left then.


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ({}, "tensor, pipeline: got 1 and 1, expected at least 2 ranks"),
        ({"tensor": 0}, "tensor: got 0, expected an int of at least 1"),
        ({"pipeline": 13}, "pipeline: got 13 stages, but the model can be cut into 12 at most"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(
    model: Path, folder: Path, ranks: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        slice_model(model, folder, **ranks)
    assert files(folder.parent) == ["mlp.onnx"]


def test_file_that_is_no_model_is_refused(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "text.onnx"
    for content in (b"", b"this is no model", mlp().SerializeToString()[:-100]):
        path.write_bytes(content)
        with pytest.raises(BuildError, match=r"text\.onnx: .*expected an ONNX model"):
            slice_model(path, folder, pipeline=2)
    path.unlink()
    with pytest.raises(ModelNotFoundError, match=r"text\.onnx"):
        slice_model(path, folder, pipeline=2)
    assert files(tmp_path) == []


def test_external_data_that_are_missing_or_short_are_named(tmp_path: Path, folder: Path) -> None:
    model = saved(mlp(), tmp_path, save_as_external_data=True, location="all.bin")
    data = tmp_path / "all.bin"
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(BuildError, match=r"needs bytes \d+ to \d+ of 'all\.bin', which has \d+"):
        slice_model(model, folder, pipeline=2)
    data.unlink()
    with pytest.raises(BuildError, match=r"all\.bin cannot be read: No such file"):
        slice_model(model, folder, pipeline=2)
    assert files(tmp_path) == ["mlp.onnx"]


def test_slice_is_not_cut_again(model: Path, folder: Path, tmp_path: Path) -> None:
    slice_model(model, folder, tensor=2, check=False)
    with pytest.raises(InvalidInputError, match="got a slice of a model"):
        slice_model(folder / "model0.onnx", tmp_path / "again", pipeline=2)
    foreign = onnx.load(folder / "model0.onnx")
    foreign.ClearField("metadata_props")
    onnx.save(foreign, tmp_path / "foreign.onnx")
    with pytest.raises(InvalidInputError, match=r"with the collective .*AllReduce"):
        slice_model(tmp_path / "foreign.onnx", tmp_path / "again", pipeline=2)


def test_folder_with_slices_is_replaced_only_if_forced(model: Path, folder: Path) -> None:
    folder.mkdir()
    slice_model(model, folder, pipeline=2, check=False)
    with pytest.raises(InvalidInputError, match="has slices already, expected a new folder"):
        slice_model(model, folder, pipeline=3, check=False)
    assert len(files(folder)) == 5
    slice_model(model, folder, pipeline=3, check=False, force=True)
    assert len(files(folder)) == 7
    assert files(folder.parent) == ["mlp.onnx", "slices"]


def test_folder_with_other_files_is_never_replaced(model: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(InvalidInputError, match=r"not all in it is slices: 'thesis\.txt'"):
        slice_model(model, folder, pipeline=2, force=True)
    assert files(folder) == ["thesis.txt"]
    with pytest.raises(InvalidInputError, match=r"mlp\.onnx is there and is no folder"):
        slice_model(model, model, pipeline=2, force=True)
    for place in (folder / "deep" / "er", model / "slices", model / "deep" / "er"):
        with pytest.raises(InvalidInputError, match=f"folder: there is no folder {place.parent}$"):
            slice_model(model, place, pipeline=2)
    with pytest.raises(InvalidInputError, match="folder: got /, expected a folder in another one"):
        slice_model(model, "/", pipeline=2, force=True)


@pytest.mark.parametrize("phase", ["slicing", "checking"])
def test_interrupt_leaves_what_was_there(model: Path, folder: Path, phase: str) -> None:
    slice_model(model, folder, pipeline=2, check=False)

    def interrupt(state: Mapping[str, Any]) -> None:
        if state["phase"] == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slice_model(model, folder, pipeline=3, force=True, progress=interrupt)
    assert files(folder.parent) == ["mlp.onnx", "slices"]
    assert len(files(folder)) == 5


# The check.


def test_model_too_large_for_the_check_is_not_checked(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcinfer.ranks.slicing.slicer.usable_memory", lambda: 1000)
    report = slice_model(model, folder, pipeline=2)
    assert report.check.state == "left out"
    assert report.check.reason == (
        f"the weights twice are {2 * report.weight_bytes} bytes, and 1000 bytes of memory are usable"
    )


def written(
    model: Path, folder: Path, *, tensor: int = 1, pipeline: int = 1, segments: bool = False
) -> None:
    folder.mkdir()
    write_slices(model, folder, tensor=tensor, pipeline=pipeline, segments=segments)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "segments"), [(2, 1, False), (1, 2, False), (1, 2, True)]
)
def test_wrong_weight_is_found(
    model: Path, folder: Path, tensor: int, pipeline: int, segments: bool
) -> None:
    written(model, folder, tensor=tensor, pipeline=pipeline, segments=segments)
    assert check(lambda _: None, str(model), str(folder))["difference"].keys() == {"y"}
    differs(model, folder, 1.01, r"output 'y' differs by .* expected at most 1e-05")


def test_quantised_model_is_compared_as_it_is_written(tmp_path: Path, folder: Path) -> None:
    """The runtime's optimisations quantise weights too, and others in slices than in the whole model."""
    path = saved(mlp(quantised=True, output="zq"), tmp_path)
    report = slice_model(path, folder, tensor=2)
    assert report.check.state == "passed"
    assert report.check.tolerance["zq"] == 4 / 2**7
    assert any(stage.sharded for stage in report.stages)


def differs(path: Path, folder: Path, factor: float, text: str) -> None:
    """Fail unless slices whose second stage has other weights are refused."""
    data = folder / "model1.data"
    data.write_bytes((np.fromfile(data, np.float32) * np.float32(factor)).tobytes())
    with pytest.raises(BuildError, match=text):
        check(lambda _: None, str(path), str(folder))


def test_coarsest_quantisation_of_all_slices_is_allowed_for_up_to_a_tenth(
    tmp_path: Path, folder: Path
) -> None:
    whole = mlp(quantised=True)
    coarse = helper.make_tensor("coarse", TensorProto.INT4, [], [0])
    wide = numpy_helper.from_array(np.array(4 / 7, np.float32), "wide")
    whole.graph.initializer.extend([coarse, wide])
    for node in whole.graph.node:
        if node.output[0] in (f"q{LAYERS - 1}", f"d{LAYERS - 1}"):
            node.input[1:] = ["wide", "coarse"]
    path = saved(whole, tmp_path)
    report = slice_model(path, folder, pipeline=2)
    assert report.check.tolerance["y"] == 0.1
    differs(path, folder, 1.5, r"at most 1e-01; .*QuantizeLinear\) quantises to 4 bits")


def test_slice_that_cannot_be_loaded_is_named(model: Path, folder: Path) -> None:
    written(model, folder, pipeline=2)
    (folder / "model1.data").unlink()
    with pytest.raises(BuildError, match=r"the slices do not run: .*model1\.data"):
        check(lambda _: None, str(model), str(folder))
    (folder / "model1.onnx").write_bytes(b"nothing")
    with pytest.raises(BuildError, match=r"model1\.onnx"):
        check(lambda _: None, str(model), str(folder))
    assert not [*folder.glob("segments-*")]


def test_model_that_takes_no_made_up_inputs_is_not_checked(tmp_path: Path, folder: Path) -> None:
    whole = text_model(
        """(float[batch,128] x, int64[1] n) => (float[size] z)
        { m = MatMul(x, w)  y = Relu(m)  z = Reshape(y, n) }""",  # with n of 0 or 1 it fails
        {"w": (WIDTH, WIDTH)},
    )
    report = slice_model(saved(whole, tmp_path), folder, pipeline=2)
    assert report.check.state == "left out"
    assert report.check.reason.startswith("no made-up inputs fit the model: ")


def test_random_numbers_are_drawn_by_one_rank_of_a_pipeline_alone(
    tmp_path: Path, folder: Path
) -> None:
    whole = text_model(
        """(float[batch,128] x) => (float[batch,128] z)
        { m = MatMul(x, w)  y = Relu(m)  [noise] noise = RandomNormalLike(y)  z = Add(y, noise) }""",
        {"w": (WIDTH, WIDTH)},
    )
    path = saved(whole, tmp_path)
    with pytest.raises(InvalidInputError, match=r"node 'noise' .* draws random numbers"):
        slice_model(path, folder, tensor=2, pipeline=2)
    report = slice_model(path, folder, pipeline=2)
    assert report.check.state == "left out"
    assert report.check.reason.startswith("node 'noise' (RandomNormalLike) draws random numbers")


def test_made_up_inputs_fit_the_model() -> None:
    kinds = {"float32": (None, "side", "side"), "int64": ("batch", 3), "bool": (), "object": (2,)}
    inputs = tuple(
        TensorSpec(name=kind, dtype=np.dtype(kind), shape=shape) for kind, shape in kinds.items()
    )
    arrays = made_up_inputs(ModelSpec(inputs=inputs, outputs=()), 2, 8)
    assert [array.shape for array in arrays] == [(2, 8, 8), (2, 3), (), (2,)]
    assert [array.dtype.name for array in arrays] == [*kinds]
    assert {*arrays[1].ravel().tolist()} <= {0, 1}
    assert np.abs(arrays[0]).max() > 1


def test_difference_is_relative_to_the_largest_magnitude() -> None:
    one = np.array([0, 100, -200], np.float32)
    assert difference(one, one + np.float32(2)) == 0.01
    assert difference(one, one) == 0
    assert difference(one, one[:2]) == float("inf")
    assert difference(one, one.astype(np.float64)) == float("inf")
    assert difference(np.zeros(2), np.ones(2)) == float("inf")
    assert difference(np.array(["a"], object), np.array(["b"], object)) == float("inf")
    odd = np.array([np.nan, np.inf, 1.0])
    assert difference(odd, odd) == 0
    assert difference(odd, np.array([np.nan, -np.inf, 1.0])) == float("inf")
    assert difference(np.ones(3), odd) == float("inf")


def test_tolerance_depends_on_the_type() -> None:
    kinds = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "int64", "string")
    assert [*map(tolerance, kinds)] == [1e-10, 1e-5, 2e-2, 2e-2, 2e-2, 0, 0]
