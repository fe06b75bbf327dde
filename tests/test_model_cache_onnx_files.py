"""Tests of mcinfer/model_cache/onnx_files.py, with the package onnx as the other opinion."""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from google.protobuf.message import DecodeError  # comes with onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, parser

from mcinfer.errors import BuildError
from mcinfer.model_cache import LEAST_PREPARED_BYTES, is_large
from mcinfer.model_cache.onnx_files import (
    Initializer,
    OnnxFile,
    added_inputs,
    check_regular,
    chunks,
    declared_shapes,
    ir_weights,
    model_files,
    open_regular,
    scan,
    without_weights,
)
from mcinfer.model_cache.protobuf import encode_field as field

IR_VERSION = 8


def scanned(content: bytes) -> OnnxFile:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return scan(file.name)


def read(model: onnx.ModelProto) -> OnnxFile:
    return scanned(model.SerializeToString())


def tensor(name: str, *shape: int) -> TensorProto:
    return helper.make_tensor(
        name, TensorProto.FLOAT, shape, np.ones(shape, np.float32).tobytes(), raw=True
    )


def external(location: str) -> TensorProto:
    outside = TensorProto(name=location, data_type=TensorProto.FLOAT, dims=[2])
    outside.data_location = TensorProto.EXTERNAL
    outside.external_data.add(key="offset", value="0")
    outside.external_data.add(key="location", value=location)
    return outside


def proto(graph: onnx.GraphProto, **fields: Any) -> onnx.ModelProto:
    model: onnx.ModelProto = helper.make_model(
        graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", 17)], **fields
    )
    return model


def linear(*more: TensorProto, ir_version: int = IR_VERSION) -> onnx.ModelProto:
    """y = x * scale + bias, both initialisers; bias is an input too."""
    model: onnx.ModelProto = parser.parse_model(
        f"""<ir_version: {ir_version}, opset_import: ["": 17]>
        linear (float[n, 3] x, float bias) => (float[n, 3] y)
        {{ scaled = Mul(x, scale)  y = Add(scaled, bias) }}"""
    )
    model.graph.initializer.extend([tensor("scale", 1, 3), tensor("bias"), *more])
    return model


LINEAR = linear()
CONTENT: bytes = LINEAR.SerializeToString()


def test_no_more_is_read_than_a_file_had_at_first(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(bytes(range(200)) * 10_000)
    with open_regular(path) as (descriptor, info), path.open("ab") as file:
        read = 0
        for part in chunks(descriptor, info.st_size):
            file.write(bytes(1 << 20))
            file.flush()
            read += len(part)
    assert read == info.st_size < path.stat().st_size


def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {"": "a folder", "pipe": "a pipe", "link": "a device", "socket": "a socket"}
        for name, kind in kinds.items():
            path = tmp_path / name
            for use in (check_regular, scan):
                with pytest.raises(BuildError, match=f"{path}: got {kind}, expected a regular"):
                    use(path)
    with pytest.raises(BuildError, match="null"):
        check_regular("a\0b")
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "none")


def test_shapes_of_inputs_and_outputs_are_read_as_declared(tmp_path: Path) -> None:
    made = linear()
    value = helper.make_tensor_value_info
    made.graph.input.append(value("some", TensorProto.FLOAT, ["n", 3, None, "m"]))
    made.graph.input.append(value("any", TensorProto.FLOAT, None))
    made.graph.output.append(value("scalar", TensorProto.INT64, []))
    made.graph.output.append(value("odd", TensorProto.INT64, [-1, 0]))
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    inputs, outputs = declared_shapes(tmp_path / "model.onnx")
    assert inputs["some"] == ("n", 3, None, "m")
    assert (outputs["scalar"], outputs["odd"]) == ((), (None, 0))
    assert {"any", "scalar"}.isdisjoint(inputs)


def test_weights_beside_an_ir_are_found_and_make_its_size(tmp_path: Path) -> None:
    ir, weights = tmp_path / "model.xml", tmp_path / "model.bin"
    ir.write_text("<net/>")
    assert ir_weights(ir) == ()
    assert not is_large(ir, None)
    with weights.open("wb") as file:
        file.truncate(LEAST_PREPARED_BYTES)
    assert ir_weights(ir) == ("model.bin",)
    assert ir_weights(tmp_path / "model.onnx") == ()
    assert model_files(ir) == [ir, weights]
    assert is_large(ir, None)


def test_contents_of_the_main_graph_and_their_writer_are_found() -> None:
    made = linear()
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    made.producer_name, made.producer_version = "writer", "1.2"
    value = helper.make_tensor_value_info
    made.graph.output.append(value("all", TensorProto.FLOAT, None))
    made.graph.input.append(onnx.ValueInfoProto(name="untyped"))
    made.graph.value_info.append(value("inside", TensorProto.FLOAT, None))
    made.graph.input.append(value("any", TensorProto.FLOAT, None))
    found = read(made)
    assert (found.ir_version, found.producer) == (IR_VERSION, "writer 1.2")
    assert found.opsets == {"ai.onnx": 17, "com.microsoft": 1}
    assert found.inputs == {"x", "bias", "untyped", "any"}
    assert found.unranked == {"any", "all"}  # that have no known rank: they are no scalars
    assert found.initializers == {
        "scale": Initializer(name="scale", onnx_type=TensorProto.FLOAT, shape=(1, 3)),
        "bias": Initializer(name="bias", onnx_type=TensorProto.FLOAT, shape=()),
    }
    assert found.external == ()
    assert read(linear()).producer == ""


def test_all_forms_that_protobuf_allows_are_read() -> None:
    packed = field(1, bytes([3, 0x80, 0x01]))
    one_by_one = bytes([1 << 3, 3, 1 << 3, 0x80, 0x01])
    for dims in (packed, one_by_one):
        model = scanned(field(7, field(5, dims + field(8, b"w"))))
        assert model.initializers["w"].shape == (3, 128)
    unknown = bytes([9 << 3 | 1, *range(8), 9 << 3 | 5, *range(4), 9 << 3, 0xFF, 1])
    unknown += field(9, b"?")
    assert scanned(unknown + CONTENT + unknown + field(7, unknown)) == scanned(CONTENT)
    inside = external("left over where the data is inside")
    inside.data_location = TensorProto.DEFAULT
    assert read(linear(inside)).external == ()
    # Graphs are merged, and the last version counts.
    other = helper.make_graph([], "other", [], [], [tensor("more", 2), external("w.bin")])
    later = onnx.ModelProto(ir_version=9, graph=other)
    model = scanned(CONTENT + later.SerializeToString())
    assert model.ir_version == 9
    assert [*model.initializers] == ["scale", "bias", "more", "w.bin"]
    assert (model.inputs, model.external) == ({"x", "bias"}, ("w.bin",))


def test_weights_of_gigabytes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    size = 1 << 33  # a hole in the file; protobuf itself allows 2 GB
    sizes = [bytes([size + more >> 7 * i & 0x7F | 0x80 for i in range(5)]) for more in (0, 7, 14)]
    raw, initializer, graph = (
        bytes([number << 3 | 2]) + length + b"\0"
        for number, length in zip((9, 5, 7), sizes, strict=True)
    )
    path.write_bytes(graph + initializer + raw)
    os.truncate(path, path.stat().st_size + size)
    with path.open("ab") as file:
        file.write(CONTENT)
    assert [*scan(path).initializers] == ["", "scale", "bias"]


def in_attribute(**attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("Some", ["x"], ["y"], **attributes)
    return proto(helper.make_graph([node], "g", [], []))


def sparse(values: TensorProto, indices: TensorProto) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[9])


def with_sparse(values: TensorProto, indices: TensorProto) -> onnx.ModelProto:
    graph = helper.make_graph([], "g", [], [])
    graph.sparse_initializer.append(sparse(values, indices))
    return proto(graph)


def function(**fields: Any) -> onnx.ModelProto:
    made = onnx.FunctionProto(name="f", domain="d", **fields)
    return proto(LINEAR.graph, functions=[made])


W = external("w")
NESTED = in_attribute(bodies=[in_attribute(body=linear(W).graph).graph, LINEAR.graph])

PLACES: dict[str, onnx.ModelProto] = {
    "initializer": linear(W),
    "sparse values": with_sparse(W, tensor("i", 2)),
    "sparse indices": with_sparse(tensor("v", 2), W),
    "constant": in_attribute(value=W),
    "constants": in_attribute(values=[tensor("v", 2), W]),
    "sparse constant": in_attribute(value=sparse(W, tensor("i", 2))),
    "sparse constants": in_attribute(values=[sparse(W, tensor("i", 2))]),
    "subgraphs of subgraphs": NESTED,
    "function": function(node=[helper.make_node("Constant", [], ["y"], value=W)]),
    "default of a function": function(attribute_proto=[helper.make_attribute("value", W)]),
}


@pytest.mark.parametrize("model", PLACES.values(), ids=PLACES.keys())
def test_external_data_is_found_and_counted_wherever_a_tensor_may_be(
    model: onnx.ModelProto,
) -> None:
    found = read(model)
    assert (found.external, found.external_bytes) == (("w",), 8)
    assert ("w" in found.initializers) == (found.constants == 0)


def nested(graphs: int) -> bytes:
    """So many graphs within each other, the innermost with external data."""
    content = field(5, external("w").SerializeToString())
    for _ in range(graphs - 1):
        content = field(1, field(5, field(6, content)))
    return field(7, content)


def test_graphs_may_lie_within_each_other_as_deep_as_protobuf_allows() -> None:
    assert scanned(nested(33)).external == ("w",)
    onnx.load_model_from_string(nested(33))
    with pytest.raises(BuildError, match="more than 100 messages within each other"):
        scanned(nested(35))
    with pytest.raises(DecodeError):
        onnx.load_model_from_string(nested(35))
    with pytest.raises(BuildError, match="more than 100 messages within each other"):
        scanned(nested(5000))


NOT_UTF8 = field(8, b"\xff")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"\x3a\x80", "a number cut short"),
        (b"\x3a\x05\x00", "a field of 5 bytes where 1 are left"),
        (b"\x3a" + b"\xff" * 9 + b"\x01", "a field of 18446744073709551615 bytes where 0"),
        (b"\x0b", "wire type 3"),
        (field(7, field(5, NOT_UTF8)), "a name that is not UTF-8"),
        (field(7, field(5, b"\x08" + b"\xff" * 9 + b"\x01")), "a negative size"),
        (field(7, field(5, field(1, b"\x01" * 1001))), "more than 1000 dimensions"),
        (b"PK\x03\x04 a zip file, say", "a zip archive"),
    ],
)
def test_what_is_no_model_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "some.onnx"
    path.write_bytes(content)
    with pytest.raises(BuildError) as caught:
        scan(path)
    assert str(caught.value).startswith(f"{path}: got ")
    assert found in str(caught.value)


RICH: bytes = NESTED.SerializeToString() + CONTENT


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_model_or_refused(content: bytes) -> None:
    for bytes_ in (content, field(7, content), field(7, field(1, field(5, content)))):
        with suppress(BuildError):
            scanned(bytes_)


@settings(max_examples=100)
@given(flips=st.lists(st.tuples(st.integers(0, len(RICH) - 1), st.integers(1, 255)), max_size=4))
def test_damaged_model_is_refused_or_read_as_protobuf_reads_it_with_and_without_weights(
    flips: list[tuple[int, int]],
) -> None:
    content = bytearray(RICH)
    for place, bits in flips:
        content[place] ^= bits
    try:
        graph = onnx.load_model_from_string(bytes(content)).graph
    except DecodeError:
        with suppress(BuildError):
            scanned(bytes(content))
        return
    with suppress(BuildError):
        found = scanned(bytes(content))
        assert found.inputs == {value.name for value in graph.input}
        shapes = {known.name: tuple(known.dims) for known in graph.initializer}
        assert {name: known.shape for name, known in found.initializers.items()} == shapes
    with suppress(BuildError, DecodeError):
        stripped = parsed_without_weights(bytes(content), 1 << 20)[0].graph
        assert [n.op_type for n in stripped.node] == [n.op_type for n in graph.node]
        data = [{t.name: t.raw_data for t in g.initializer} for g in (stripped, graph)]
        assert data[0] == data[1]


def test_operators_are_counted_wherever_a_node_may_be() -> None:
    gelu = helper.make_node("Gelu", [], [], domain="com.microsoft")
    inner = helper.make_graph([helper.make_node("Mul", [], []), gelu], "inner", [], [])
    node = helper.make_node("If", [], [], domain="ai.onnx", then_branch=inner, bodies=[inner])
    model = proto(helper.make_graph([node], "g", [], []))
    model.functions.add(name="f", domain="d", node=[helper.make_node("Mul", [], [])])
    model.graph.node.add(op_type="f", domain="d")
    found = read(model)
    assert found.operators.most_common() == [
        (("ai.onnx", "Mul"), 3),
        (("com.microsoft", "Gelu"), 2),
        (("ai.onnx", "If"), 1),
        (("d", "f"), 1),
    ]


def drawing(nodes: str, weights: str = "", functions: str = "") -> str:
    """What is found of a model with these nodes."""
    header = '<ir_version: 8, opset_import: ["": 17, "own": 1]>'
    graph = f"g (float[2] x) => (float[2] y) <{weights}> {{ {nodes} }}"
    return read(parser.parse_model(f"{header} {graph} {functions}")).random


def test_nodes_that_draw_random_numbers_are_found_wherever_they_are() -> None:
    plain, noise = "[plain] y = Relu(x) ", "[noise] y = RandomNormalLike(x) "
    unnamed = "y = RandomUniform<shape = [2], seed = 3.0>() "
    inner = f"<then_branch = b () => (float[2] y) {{ {noise} }}>"
    function = f'<opset_import: ["": 17], domain: "own"> f (x) => (y) {{ {noise} }}'
    found = "node 'noise' (RandomNormalLike)"
    assert drawing(plain) == ""
    assert drawing(plain + noise) == found
    assert drawing(plain + unnamed) == "a node RandomUniform"
    assert drawing(noise + unnamed) == found
    assert drawing(f"y = If{inner}(c)") == found
    assert drawing(plain, functions=function) == found
    assert drawing("y = own.RandomNormalLike(x)") == ""
    for call in ("Bernoulli<seed = 1.0>(x)", "com.microsoft.BiasDropout(x, b, , half, train)"):
        assert drawing(f"y = {call}") != ""


def test_dropout_draws_only_where_it_may_be_in_training() -> None:
    dropout = "[drop] y = Dropout<seed = 1>"
    draws = "node 'drop' (Dropout)"
    assert drawing(f"{dropout}(x)") == drawing(f'{dropout}(x, ratio, "")') == ""
    assert drawing(f"{dropout}(x, ratio, says)") == draws


def test_bytes_of_weights_are_what_their_shapes_say() -> None:
    types = TensorProto
    weights = [
        external("w"),  # two floats
        TensorProto(name="a", data_type=types.INT4, dims=[3]),
        TensorProto(name="b", data_type=types.BFLOAT16, dims=[5, 2]),
        TensorProto(name="s", data_type=types.STRING, dims=[9]),
        TensorProto(name="unknown", data_type=99, dims=[9]),
    ]
    found = read(linear(*weights))
    assert len(found.initializers) == 2 + len(weights)
    assert found.weight_bytes == 12 + 4 + 8 + 2 + 20
    assert found.external_bytes == 8
    assert found.external == ("w",)
    vast = [TensorProto(name=f"v{i}", data_type=types.FLOAT, dims=[1 << 62] * 900) for i in (1, 2)]
    assert 1 << 60 < read(linear(*vast)).weight_bytes < 1 << 65


def test_suffix_makes_initializers_overridable_and_leaves_the_rest_as_it_is() -> None:
    content = CONTENT + added_inputs(scanned(CONTENT), ["scale", "bias"])
    model = onnx.load_model_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == ["x", "bias", "scale"]
    added = model.graph.input.pop()
    assert added == helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1, 3])
    assert model == LINEAR

    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    overridable = session.get_overridable_initializers()
    assert {(value.name, *value.shape) for value in overridable} == {("scale", 1, 3), ("bias",)}
    x = np.array([[1, 2, 3]], np.float32)
    [plain] = session.run(None, {"x": x})
    [overridden] = session.run(None, {"x": x, "scale": np.full((1, 3), 10, np.float32)})
    assert plain.tolist() == [[2, 3, 4]]
    assert overridden.tolist() == [[11, 21, 31]]


def test_names_that_cannot_be_replaced_are_refused() -> None:
    words = TensorProto(name="words", data_type=TensorProto.STRING, dims=[1], string_data=[b"a"])
    old = linear(ir_version=3)
    for model, names, text in (
        (
            LINEAR,
            ["scael", "bias", "q"],
            r"\['scael', 'q'\], expected .* such as \['scale', 'bias'\]",
        ),
        (LINEAR, ["x"], r"got \['x'\], expected .* such as"),
        (old, ["scale"], "IR version 3, expected 4 or more: convert the model"),
        (linear(words), ["words", "scale"], r"\['words'\] of strings, expected .* of numbers"),
    ):
        with pytest.raises(BuildError, match=text):
            added_inputs(read(model), names)
    assert added_inputs(read(LINEAR), ["bias"]) == added_inputs(read(old), []) == b""


def parsed_without_weights(content: bytes, least_bytes: int) -> tuple[onnx.ModelProto, str]:
    """The model without its large weights, and the name of its file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        stripped = without_weights(file.name, least_bytes)
        return onnx.load_model_from_string(stripped), os.path.basename(file.name)


def test_large_weights_are_left_out_and_their_places_are_named() -> None:
    model = onnx.load_model_from_string(RICH)
    model.graph.initializer.extend([tensor("large", 16, 16), tensor("small", 2, 2)])
    content = model.SerializeToString()
    stripped, name = parsed_without_weights(content, 1024)
    (stub,) = (t for t in stripped.graph.initializer if t.name == "large")
    place = {entry.key: entry.value for entry in stub.external_data}
    assert (place["location"], stub.data_location) == (name, TensorProto.EXTERNAL)
    first = int(place["offset"])
    assert content[first : first + int(place["length"])] == np.ones(256, np.float32).tobytes()
    stub.CopyFrom(tensor("large", 16, 16))
    assert stripped == model


@pytest.mark.parametrize(
    ("body", "node"),
    [
        ("where = NonZero(x) y = Transpose(where)", "NonZero"),
        ("k = Cast <to = 7> (x) first = Slice(k, zero, one) y, at = TopK(x, first)", "TopK"),
        (
            "top = ReduceMax <keepdims = 0> (x) end = Cast <to = 7> (top) y = Range(none, end, step)",
            "Range",
        ),
        ("n = Cast <to = 7> (x) y = Expand(one, n)", "Expand"),
        ("y = other.Own(x)", "Own"),
        ("n = Shape(x) more = Add(n, one) wide = Expand(x, n) y = Slice(wide, zero, more)", ""),
        ("y = Reshape(x, shape)", ""),
        ("n = Shape(x) ones = ConstantOfShape(n) y = NonZero(ones)", ""),
    ],
)
def test_node_whose_result_is_as_large_as_its_data_say_is_found(
    tmp_path: Path, body: str, node: str
) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17, "other": 1]> g (float[n] x) => (float[m] y)'
        " <int64[1] zero = {0}, int64[1] one = {1}, int64[1] shape = {-1},"
        " int64 none = {0}, int64 step = {1}>"
        f"{{ {body} }}"
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    found = scan(path).ragged
    assert (f"({node})" in found or found == f"a node {node}") if node else not found
