"""Tests of mcinfer/ranks/slicing/slicer.py and weights.py: slices of a model in any form."""

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mcinfer.errors import BuildError, InvalidInputError, ModelNotFoundError
from mcinfer.ranks.check_slices import check, difference, made_up_inputs, tolerance
from mcinfer.ranks.slicing import weights as weights_module
from mcinfer.ranks.slicing.plans import METADATA_KEY, REPORT_FILE, RankPlan, Segment
from mcinfer.ranks.slicing.segments import cut_segments
from mcinfer.ranks.slicing.slicer import slice_model, write_slices
from mcinfer.ranks.slicing.weights import SMALL_BYTES, DataFile, Recipe, Weights
from mcinfer.specs import ModelSpec, TensorSpec
from tests.command_line import files
from tests.pipeline_stages import run_whole
from tests.process.scripts import Ended, Program

WIDTH = 128
LAYERS = 4


def mlp() -> ModelProto:
    """Layers of a MatMul, a bias and Relu: x, float32[batch, 128]."""
    rng = np.random.default_rng(0)
    nodes, initializers, value = [], [], "x"
    for at in range(LAYERS):
        weight = rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH / 2)
        bias = rng.standard_normal(WIDTH)
        for name, array in ((f"w{at}", weight), (f"b{at}", bias)):
            initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        last = "y" if at == LAYERS - 1 else f"r{at}"
        nodes += [
            helper.make_node("MatMul", [value, f"w{at}"], [f"m{at}"], f"matmul{at}"),
            helper.make_node("Add", [f"m{at}", f"b{at}"], [f"a{at}"], f"add{at}"),
            helper.make_node("Relu", [f"a{at}"], [last], f"relu{at}"),
        ]
        value = last
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", WIDTH]) for n in "xy"]
    graph = helper.make_graph(nodes, "mlp", values[:1], values[1:], initializers)
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


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


def run_pipeline(
    folder: Path, stages: int, inputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Run the slices of a pipeline from their files, one after another."""
    made = dict(inputs)
    for rank in range(stages):
        path = folder / f"model{rank}.onnx"
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        given = {value.name: made[value.name] for value in session.get_inputs()}
        made |= zip(names, session.run(names, given), strict=True)
    return made


def check_pipeline(model: Path, folder: Path, stages: int) -> None:
    inputs = {"x": np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)}
    made = run_pipeline(folder, stages, inputs)
    for name, array in run_whole(onnx.load(model), inputs).items():
        np.testing.assert_allclose(made[name], array, rtol=1e-6, atol=1e-6)


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


def test_report_says_what_was_cut_and_what_it_costs(model: Path, folder: Path) -> None:
    report = slice_model(model, folder, tensor=2, check=False)
    assert json.loads((folder / REPORT_FILE).read_text()) == json.loads(
        json.dumps(report.as_json())
    )
    whole = sum(array.nbytes for array in map(numpy_helper.to_array, mlp().graph.initializer))
    assert report.weight_bytes == whole
    (stage,) = report.stages
    assert {weight.name for weight in stage.sharded} >= {f"w{at}" for at in range(LAYERS)}
    for rank in report.ranks:
        assert whole / 2 <= rank.weight_bytes <= 0.6 * whole
    assert stage.collectives
    assert stage.collective_bytes == len(stage.collectives) * WIDTH * 4  # with a batch of 1
    assert (report.check.state, report.check.reason) == ("left out", "not asked for")


def test_report_of_a_pipeline_has_the_bytes_between_stages(model: Path, folder: Path) -> None:
    report = slice_model(model, folder, pipeline=2, check=False)
    first, second = report.ranks
    assert first.weight_bytes == second.weight_bytes == report.weight_bytes / 2
    assert (first.bytes_received, second.bytes_received) == (0, WIDTH * 4)
    assert [*first.sends.values()] == [(1,)]
    assert [*second.receives.values()] == [0]
    check_pipeline(model, folder, 2)


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


def test_weights_in_fields_of_their_type_are_copied(tmp_path: Path, folder: Path) -> None:
    whole = mlp()
    for tensor in whole.graph.initializer:
        array = numpy_helper.to_array(tensor)
        typed = helper.make_tensor(tensor.name, TensorProto.FLOAT, array.shape, array.ravel())
        assert typed.float_data
        tensor.CopyFrom(typed)
    slice_model(saved(whole, tmp_path), folder, tensor=2, pipeline=2)


def test_large_constant_nodes_are_weights(tmp_path: Path, folder: Path) -> None:
    whole = mlp()
    nodes = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in whole.graph.initializer
    ]
    nodes += whole.graph.node
    whole.graph.ClearField("initializer")
    whole.graph.ClearField("node")
    whole.graph.node.extend(nodes)
    report = slice_model(saved(whole, tmp_path), folder, tensor=2, pipeline=2)
    assert report.weight_bytes >= LAYERS * WIDTH * WIDTH * 4
    assert max(rank.weight_bytes for rank in report.ranks) <= 0.3 * report.weight_bytes


def test_weights_of_subgraphs_come_along(tmp_path: Path, folder: Path) -> None:
    whole = mlp()
    branches = {}
    for seed, name in enumerate(("then_branch", "else_branch")):
        array = np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        branches[name] = helper.make_graph(
            [helper.make_node("MatMul", ["y", "inner"], [f"z{seed}"])],
            name,
            [],
            [helper.make_tensor_value_info(f"z{seed}", TensorProto.FLOAT, ["batch", WIDTH])],
            [numpy_helper.from_array(array, "inner")],
        )
    whole.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    whole.graph.node.append(helper.make_node("If", ["flag"], ["z"], **branches))
    whole.graph.output[0].name = "z"
    model = saved(whole, tmp_path, save_as_external_data=True, location="all.bin")
    loaded = onnx.load(model, load_external_data=False)
    inner = [a.g.initializer[0] for a in loaded.graph.node[-1].attribute]
    for tensor, branch in zip(inner, (a.g for a in whole.graph.node[-1].attribute), strict=True):
        content = (
            branch.initializer[0].raw_data or numpy_helper.to_array(tensor, str(tmp_path)).tobytes()
        )
        path = tmp_path / f"{branch.name}.bin"
        path.write_bytes(content)
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=path.name)
    model.write_bytes(loaded.SerializeToString())
    slice_model(model, folder, pipeline=2)


def test_model_that_is_reached_through_a_link_is_cut(
    model: Path, tmp_path: Path, folder: Path
) -> None:
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    slice_model(link, folder, pipeline=2, check=False)
    check_pipeline(model, folder, 2)


def python(code: str, *arguments: object) -> Ended:
    with Program(code, *arguments) as program:
        return program.wait()


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
    whole = mlp()
    whole.graph.ClearField("initializer")
    whole.graph.ClearField("node")
    value = "x"
    for at in range(layers):
        out = "y" if at == layers - 1 else f"m{at}"
        whole.graph.node.append(helper.make_node("MatMul", [value, f"w{at}"], [out]))
        tensor = TensorProto(name=f"w{at}", data_type=TensorProto.FLOAT, dims=[width, width])
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "sparse.bin"), ("offset", at * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(text))
        whole.graph.initializer.append(tensor)
        value = out
    for described in (*whole.graph.input, *whole.graph.output):
        described.type.tensor_type.shape.dim[1].dim_value = width
    model = tmp_path / "large.onnx"
    model.write_bytes(whole.SerializeToString())
    with (tmp_path / "sparse.bin").open("wb") as file:
        file.truncate(layers * size)
        file.seek(size - 4)
        file.write(np.float32(7).tobytes())
    done = python(CUT_LARGE, model, folder, 32 << 20)
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


@settings(max_examples=50)
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


def test_output_that_is_declared_twice_is_refused(tmp_path: Path, folder: Path) -> None:
    whole = mlp()
    whole.graph.output.append(whole.graph.output[0])
    with pytest.raises(BuildError, match=r"declares the outputs \['y'\] more than once"):
        slice_model(saved(whole, tmp_path), folder, tensor=2)


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


def test_weight_in_the_model_is_taken_whatever_its_external_data_say(
    tmp_path: Path, folder: Path
) -> None:
    whole = mlp()
    for tensor in whole.graph.initializer:
        array = numpy_helper.to_array(tensor)
        kind = tensor.data_type
        tensor.CopyFrom(helper.make_tensor(tensor.name, kind, array.shape, array.flatten()))
        tensor.external_data.add(key="location", value="gone.bin")
    assert slice_model(saved(whole, tmp_path), folder, tensor=2).check.state == "passed"


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_link_of_another_user_is_not_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    theirs = tmp_path / "theirs"
    theirs.symlink_to("mine")
    os.chown(theirs, 12345, -1, follow_symlinks=False)
    for place in (theirs, theirs / "slices"):
        text = f"folder: {theirs} is a link of another user"
        with pytest.raises(InvalidInputError, match=text):
            slice_model(model, place, pipeline=2, check=False)
    assert files(tmp_path / "mine") == []


def test_folder_at_the_end_of_a_link_of_mine_is_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far/slices")
    slice_model(model, tmp_path / "near", pipeline=2)
    assert len(files(tmp_path / "far" / "slices")) == 5
    assert files(tmp_path / "far") == ["slices"]


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


CUT_WITHOUT_SPACE = """
import resource, sys
from mcinfer.ranks.slicing.slicer import slice_model

resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
slice_model(sys.argv[1], sys.argv[2], pipeline=2)
"""


def test_disk_without_space_leaves_nothing(model: Path, folder: Path) -> None:
    done = python(CUT_WITHOUT_SPACE, model, folder)
    assert done.err.splitlines()[-1].startswith("OSError: [Errno 27] File too large")
    assert files(folder.parent) == ["mlp.onnx"]


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


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_wrong_weight_is_found(
    model: Path, folder: Path, tensor: int, pipeline: int, segments: bool
) -> None:
    written(model, folder, tensor=tensor, pipeline=pipeline, segments=segments)
    assert check(lambda _: None, str(model), str(folder))["difference"].keys() == {"y"}
    data = folder / "model1.data"
    content = np.fromfile(data, np.float32)
    content *= 1.01
    data.write_bytes(content.tobytes())
    with pytest.raises(BuildError, match=r"output 'y' differs by .* expected at most 1e-05"):
        check(lambda _: None, str(model), str(folder))


def quantised(*, output: str = "y") -> ModelProto:
    """The layers of `mlp`, each with an input of eight bits."""
    whole = mlp()
    nodes = [*whole.graph.node]
    del whole.graph.node[:]
    step, zero = (np.array(4 / 127, np.float32), np.array(0, np.int8))
    whole.graph.initializer.extend(
        [numpy_helper.from_array(step, "step"), numpy_helper.from_array(zero, "zero")]
    )

    def rounded(given: str, to: str) -> list[NodeProto]:
        return [
            helper.make_node("QuantizeLinear", [given, "step", "zero"], [f"{to}q"]),
            helper.make_node("DequantizeLinear", [f"{to}q", "step", "zero"], [to]),
        ]

    for at, node in enumerate(nodes):
        if node.op_type == "MatMul":
            whole.graph.node.extend(rounded(node.input[0], f"d{at}"))
            node.input[0] = f"d{at}"
        whole.graph.node.append(node)
    if output != "y":
        whole.graph.node.extend(rounded("y", output.removesuffix("q")))
        whole.graph.output[0].CopyFrom(
            helper.make_tensor_value_info(output, TensorProto.INT8, ["batch", WIDTH])
        )
    return whole


@pytest.mark.parametrize("output", ["y", "zq"])
def test_quantised_model_is_compared_as_it_is_written(
    tmp_path: Path, folder: Path, output: str
) -> None:
    """The runtime's optimisations quantise weights too, and others in slices than in the whole model."""
    path = saved(quantised(output=output), tmp_path)
    report = slice_model(path, folder, tensor=2)
    assert report.check.state == "passed"
    assert report.check.tolerance[output] == 4 / 2**7
    assert any(stage.sharded for stage in report.stages)


def test_coarsest_quantisation_of_all_slices_is_allowed_for_up_to_a_tenth(
    tmp_path: Path, folder: Path
) -> None:
    whole = quantised()
    whole.graph.initializer.extend(
        [
            helper.make_tensor("coarse", TensorProto.INT4, [], [0]),
            numpy_helper.from_array(np.array(4 / 7, np.float32), "wide"),
        ]
    )
    last = [node for node in whole.graph.node if node.op_type.endswith("QuantizeLinear")][-1].output
    for node in whole.graph.node:
        if {*last} & {*node.input, *node.output} and "uantize" in node.op_type:
            node.input[1:] = ["wide", "coarse"]
    path = saved(whole, tmp_path)
    report = slice_model(path, folder, pipeline=2)
    assert report.check.tolerance["y"] == 0.1
    data = folder / "model1.data"
    data.write_bytes((np.fromfile(data, np.float32) * 1.5).tobytes())
    with pytest.raises(BuildError, match=r"at most 1e-01; .*QuantizeLinear\) quantises to 4 bits"):
        check(lambda _: None, str(path), str(folder))


def test_quantised_model_that_differs_is_refused_with_the_node(
    tmp_path: Path, folder: Path
) -> None:
    path = saved(quantised(), tmp_path)
    written(path, folder, pipeline=2)
    data = folder / "model1.data"
    data.write_bytes((np.fromfile(data, np.float32) * 2).tobytes())
    with pytest.raises(BuildError, match=r"at most 3e-02; .*QuantizeLinear\) quantises to 8 bits"):
        check(lambda _: None, str(path), str(folder))


def test_slice_that_is_wrong_only_in_a_later_run_is_found(model: Path, folder: Path) -> None:
    """It adds a random number that is 0 in its first five runs, and 1 in the sixth."""
    more = helper.make_tensor_value_info("more", TensorProto.FLOAT, [1])

    def draw(seed: int) -> list[NodeProto]:
        uniform = helper.make_node(
            "RandomUniform", [], ["u"], shape=[1], high=2.0, seed=float(seed)
        )
        return [uniform, helper.make_node("Floor", ["u"], ["more"])]

    def drawn(seed: int) -> list[float]:
        graph = helper.make_graph(draw(seed), "draw", [], [more])
        alone = helper.make_model(graph, opset_imports=whole.opset_import, ir_version=8)
        session = ort.InferenceSession(alone.SerializeToString())
        return [session.run(None, {})[0][0] for _ in range(6)]

    whole = onnx.load(model, load_external_data=False)
    seed = next(seed for seed in range(10_000) if drawn(seed) == [0, 0, 0, 0, 0, 1])
    written(model, folder, pipeline=2)
    late = onnx.load(folder / "model1.onnx", load_external_data=False)
    for node in late.graph.node:
        node.output[:] = ["first" if name == "y" else name for name in node.output]
    late.graph.node.extend([*draw(seed), helper.make_node("Add", ["first", "more"], ["y"])])
    onnx.save(late, folder / "model1.onnx")
    with pytest.raises(BuildError, match="output 'y' differs by"):
        check(lambda _: None, str(model), str(folder))


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
    whole = mlp()
    whole.graph.input.append(helper.make_tensor_value_info("n", TensorProto.INT64, [1]))
    cut = helper.make_node("Reshape", ["y", "n"], ["z"])  # with n of 0 or 1 it fails
    whole.graph.node.append(cut)
    whole.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["size"]))
    report = slice_model(saved(whole, tmp_path), folder, pipeline=2)
    assert report.check.state == "left out"
    assert report.check.reason.startswith("no made-up inputs fit the model: ")


def test_random_numbers_are_drawn_by_one_rank_of_a_pipeline_alone(
    tmp_path: Path, folder: Path
) -> None:
    whole = mlp()
    whole.graph.node.extend(
        [
            helper.make_node("RandomNormalLike", ["y"], ["noise"], name="noise"),
            helper.make_node("Add", ["y", "noise"], ["z"]),
        ]
    )
    whole.graph.output[0].name = "z"
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


def test_small_tensors_are_small_enough_for_shapes() -> None:
    assert SMALL_BYTES >= 1024 * 8
