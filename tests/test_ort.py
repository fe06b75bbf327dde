"""Tests of mcinfer/ort: what a session says of its model, and what reaches the workers, without workers."""

import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from weakref import ref

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import parser
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer import errors as own
from mcinfer import ort
from mcinfer.cards import nvidia_smi
from mcinfer.config import Device, EngineOptions
from mcinfer.ort import errors, options, values
from mcinfer.ort import providers as chosen
from mcinfer.ort.__main__ import main
from mcinfer.ort.face import face
from mcinfer.ort.session import PlainSession
from mcinfer.specs import ELEMENT_TYPES, ModelDescription, TensorSpec, numpy_dtype
from tests.process.scripts import printed

IN_ONNXRUNTIME = [name for name in ELEMENT_TYPES if not name.startswith("complex")]
CPU, CUDA, AZURE = "CPUExecutionProvider", "CUDAExecutionProvider", "AzureExecutionProvider"


MODEL = """
<ir_version: 8, opset_import: ["": 17]>
m (float[n, 3] x, int64[n] i, string[n] s) => (float[n, 3] y, int64[n] j, string[n] t) {
    y = Neg(x)
    j = Neg(i)
    t = Identity(s)
}
"""


def spec(name: str, element_type: str = "float32", shape: tuple[Any, ...] = ("n", 3)) -> TensorSpec:
    return TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=shape)


def opened(model: bytes) -> Any:
    """A plain session, which does not change the model."""
    given = onnxruntime.SessionOptions()
    given.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    given.log_severity_level = 4
    return PlainSession(model, given, providers=[CPU], enable_fallback=0)


@pytest.fixture(scope="module")
def plain() -> Any:
    return opened(parser.parse_model(MODEL).SerializeToString())


# A face.


@pytest.mark.parametrize("element_type", IN_ONNXRUNTIME)
def test_face_has_inputs_and_outputs_of_every_type(element_type: str) -> None:
    shape = ("batch", 3, None)
    session = opened(face([spec("x", element_type, shape)], [spec("y", element_type, shape)]))
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, y.name) == ("x", "y")
    assert x.type == y.type == values.runtime_type(element_type)
    assert x.shape == y.shape == [*shape]


def test_face_says_of_itself_what_the_model_says() -> None:
    about = {
        "producer_name": "producer",
        "graph_name": "graph",
        "domain": "domain",
        "description": "what it is",
        "graph_description": "what its graph is",
        "version": "7",
    }
    described = ModelDescription(about=about, properties={"names": "{0: 'ü'}"})
    meta = opened(face([spec("x")], [spec("y")], described)).get_modelmeta()
    assert {name: str(getattr(meta, name)) for name in about} == about
    assert meta.custom_metadata_map == {"names": "{0: 'ü'}"}


# What was set in options.


def test_what_a_program_sets_reaches_the_workers_and_nothing_else() -> None:
    base = EngineOptions(threads=3, session_config={"a": "b"})
    passed = options.passed(ort.SessionOptions(), base, "/", cores=4)
    assert passed == options.Passed(engine=replace(base, describe=True))
    given = ort.SessionOptions()
    given.intra_op_num_threads = 2
    given.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    given.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    given.enable_mem_pattern = given.enable_cpu_mem_arena = False
    given.log_severity_level, given.logid = 3, "tag"
    given.add_session_config_entry("session.set_denormal_as_zero", "1")
    given.add_free_dimension_override_by_name("batch", 4)
    given.add_free_dimension_override_by_denotation("DATA_CHANNEL", 3)
    given.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32)))
    given.add_external_initializers_from_files_in_memory(["w.bin"], [b"abcd"], [3])
    base = EngineOptions(threads=1, session_config={"session.set_denormal_as_zero": "0", "a": "b"})
    passed = options.passed(given, base, "/folder", cores=4)
    assert passed.engine == EngineOptions(
        threads=2,
        inter_op_threads=4,
        session_config={"session.set_denormal_as_zero": "1", "a": "b"},
        session_options={
            "graph_optimization_level": "ORT_ENABLE_BASIC",
            "enable_mem_pattern": "0",
            "enable_cpu_mem_arena": "0",
            "log_severity_level": "3",
            "logid": "tag",
        },
        free_dimensions={"batch": 4},
        free_denotations={"DATA_CHANNEL": 3},
        variable_weights=["w"],
        describe=True,
    )
    assert np.array_equal(passed.weights["w"], np.ones(3, np.float32))
    assert passed.files == {"w.bin": b"abc"}


def test_relative_paths_are_those_of_the_folder_in_which_they_were_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = "session.model_external_initializers_file_folder_path"
    given = ort.SessionOptions()
    given.optimized_model_filepath = "optimised.onnx"
    given.add_session_config_entry(folder, "data")
    base = EngineOptions(custom_operators=["./a.so", "b.so", "/c.so"], session_config={folder: "d"})
    passed = options.passed(given, base, "/first", cores=1)
    assert passed.optimised == "/first/optimised.onnx"
    assert passed.engine.session_config[folder] == "/first/data"
    assert passed.engine.custom_operators == ("/first/./a.so", "b.so", "/c.so")

    class Options:
        """Loads no library, as there is none to load."""

        def register_custom_ops_library(self, path: object) -> None: ...

    options.note_calls(Options)
    noted = Options()
    monkeypatch.chdir(tmp_path)
    noted.register_custom_ops_library(Path("libraries", "a.so"))
    monkeypatch.chdir("/")
    assert options.calls(noted) == [
        ("register_custom_ops_library", (str(tmp_path / "libraries" / "a.so"),))
    ]


def test_options_of_a_running_program_can_be_pickled_and_made_again() -> None:
    given = ort.SessionOptions()
    given.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    given.add_session_config_entry("a.b", "c")
    given.add_external_initializers(["w"], [ort.OrtValue.ortvalue_from_numpy(np.arange(3.0))])
    again = pickle.loads(pickle.dumps(given))  # noqa: S301 our own
    assert again.graph_optimization_level == given.graph_optimization_level
    assert again.get_session_config_entry("a.b") == "c"
    first, second = (options.passed(o, EngineOptions(), "/", 1) for o in (given, again))
    assert first.engine == second.engine
    assert np.array_equal(first.weights["w"], second.weights["w"])


@pytest.mark.parametrize(
    ("set_one", "words"),
    [
        (lambda given: setattr(given, "enable_profiling", True), "enable_profiling: got"),
        (
            lambda given: given.set_provider_selection_policy(
                ort.OrtExecutionProviderDevicePolicy.PREFER_CPU
            ),
            r"set_provider_selection_policy\(\)",
        ),
    ],
)
def test_option_that_cannot_act_in_workers_is_refused_by_its_name(
    set_one: Callable[[Any], object], words: str
) -> None:
    given = ort.SessionOptions()
    set_one(given)
    with pytest.raises(errors.Unsupported, match=rf"^SessionOptions\.{words}"):
        options.passed(given, EngineOptions(), "/", 1)


def test_run_options_are_refused_by_the_name_of_what_cannot_act() -> None:
    given = ort.RunOptions()
    given.log_severity_level, given.logid, given.only_execute_path_to_fetches = 1, "tag", True
    given.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    options.check_run_options(given)
    given.add_run_config_entry("qnn.htp_perf_mode", "burst")
    with pytest.raises(errors.Unsupported, match=r"^RunOptions\.add_run_config_entry\('qnn"):
        options.check_run_options(given)


MADE_BEFORE = """
import numpy as np, onnxruntime
before, of_a_run = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
weight = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(1, 28, np.float32))
before.add_initializer("w", weight)
from onnx import parser
from mcinfer import ort
model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> m (float[n] x) => (float[n] y)'
    "<float[1] w = {1}> { y = Mul(x, w) }").SerializeToString()
feed = {"x": np.ones(1, np.float32)}
plain = ort.session.PlainSession(model, before, providers=["CPUExecutionProvider"])
for given in (before, plain.get_session_options()):
    given.add_session_config_entry("session.set_denormal_as_zero", "1")
    session = ort.InferenceSession(model, given, prepare="always")
    print(*session.run(None, feed)[0])
    try:
        ort.InferenceSession(model, given, devices=1)
    except NotImplementedError as exc:
        print(exc)
of_a_run.add_run_config_entry("gpu_graph_id", "0")
try:
    ort.options.check_run_options(of_a_run)
except NotImplementedError as exc:
    print(exc)
"""


def test_options_of_before_the_import_stay_unknown_whatever_is_called_later() -> None:
    refused = "Options: got such that were not made by this program after mcinfer.ort was imported"
    first, why, second, why_again, why_not_run = printed(MADE_BEFORE).splitlines()
    assert (first, second) == ("28.0", "28.0")
    assert why.startswith(f"Session{refused}")
    assert why_again == why
    assert why_not_run.startswith(f"Run{refused}")


def test_first_size_of_a_free_dimension_counts_as_in_the_runtime() -> None:
    for sizes in ((2, 3), (3, 2)):
        given = ort.SessionOptions()
        for size in sizes:
            given.add_free_dimension_override_by_name("n", size)
        model = parser.parse_model(MODEL).SerializeToString()
        session = PlainSession(model, given, providers=[CPU])
        size = session.get_inputs()[0].shape[0]
        assert options.passed(given, EngineOptions(), "/", 1).engine.free_dimensions == {"n": size}


def test_notes_of_calls_go_with_the_options() -> None:
    given = ort.SessionOptions()
    value = ort.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    given.add_initializer("w", value)
    assert [name for name, _ in options.calls(given)] == ["add_initializer"]
    gone = ref(value)
    del given, value
    gc.collect()
    assert gone() is None


# Providers.


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An ONNX Runtime for cards, on a machine with as many as the test appends."""
    found: list[str] = []

    def gpus() -> tuple[Any, ...]:
        if not found:
            raise OSError("nvidia-smi is not installed")
        return tuple(type("Gpu", (), {"index": int(one.removeprefix("cuda:"))})() for one in found)

    monkeypatch.setattr(nvidia_smi, "gpus", gpus)
    available = ["TensorrtExecutionProvider", CUDA, AZURE, CPU]
    monkeypatch.setattr(native, "get_available_providers", lambda: available)
    return found


@pytest.mark.parametrize(
    "providers",
    [None, [], [CPU], [AZURE, CPU], [AZURE], [CPU, AZURE], [(CPU, {})]],
)
def test_cpu_means_its_automatic_shares(providers: Any) -> None:
    assert chosen.choose(providers, None) == chosen.ProviderDevices()


def test_number_of_devices_means_devices_of_the_provider(cards: list[str]) -> None:
    cards += ["cuda:0", "cuda:1", "cuda:3"]
    choice = chosen.choose([CUDA, CPU], None)
    assert choice.places(2) == ["cuda:0", "cuda:1"]
    assert choice.places(["cuda:3"]) == ["cuda:3"]
    assert chosen.choose([CPU], None).places(2) == 2
    with pytest.raises(own.InvalidInputError, match=r"^devices: got 4 with cuda, expected 1 to 3"):
        choice.places(4)


def test_provider_that_is_not_here_is_passed_over_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'DmlExecutionProvider' is not in available provider"):
        assert chosen.choose(["DmlExecutionProvider", CPU], None) == chosen.ProviderDevices()


def test_provider_that_nothing_has_is_unknown() -> None:
    with (
        pytest.warns(UserWarning, match="'Mine' is not in available"),
        pytest.raises(RuntimeError, match=r"^Unknown Provider Type: Mine"),
    ):
        chosen.choose(["Mine", CPU], None)


def test_options_of_a_provider_reach_it() -> None:
    given: dict[str, Any] = {"arena_extend_strategy": "kSameAsRequested", "n": 3}
    expected = chosen.ProviderDevices(options={**given, "n": "3"})
    assert chosen.choose([(CPU, given)], None) == expected
    assert chosen.choose([CPU], [given]) == expected


@pytest.mark.parametrize("providers", [None, [CUDA], [CUDA, CPU]])
def test_provider_of_cards_means_all_cards(cards: list[str], providers: Any) -> None:
    cards += ["cuda:0", "cuda:2"]
    choice = chosen.choose(providers, None)
    assert (choice.devices, choice.provider) == (["cuda:0", "cuda:2"], "cuda")
    assert choice.may_fall_back == (providers != [CUDA])


def test_device_id_means_one_card(cards: list[str]) -> None:
    cards += ["cuda:0", "cuda:1"]
    choice = chosen.choose([(CUDA, {"device_id": 1, "use_tf32": 0}), CPU], None)
    assert choice == chosen.ProviderDevices(
        devices=["cuda:1"], provider="cuda", options={"use_tf32": "0"}, may_fall_back=True
    )


@pytest.mark.usefixtures("cards")
def test_without_a_card_the_cpu_does_if_it_is_listed() -> None:
    with pytest.warns(UserWarning, match="has no card here, so the session runs on the CPU"):
        assert chosen.choose([CUDA, CPU], None) == chosen.ProviderDevices()
    assert chosen.choose(None, None) == chosen.ProviderDevices()
    assert chosen.choose([CUDA], None).devices == [
        "cuda:0"
    ]  # where the worker says what is missing


def test_tensorrt_is_a_provider_of_the_same_cards(cards: list[str]) -> None:
    cards.append("cuda:0")
    choice = chosen.choose(["TensorrtExecutionProvider", CUDA, CPU], None)
    assert (choice.devices, choice.provider) == (["cuda:0"], "tensorrt")


def test_provider_without_a_device_of_mcinfers_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = ["OpenVINOExecutionProvider", CPU]
    monkeypatch.setattr(native, "get_available_providers", lambda: available)
    with pytest.raises(errors.Unsupported, match=r"^providers: got 'OpenVINOExecutionProvider'"):
        chosen.choose(["OpenVINOExecutionProvider", CPU], None)


# What a feed may hold: what a plain session takes, and nothing else.

SPECS = {"x": spec("x"), "i": spec("i", "int64", ("n",)), "s": spec("s", "string", ("n",))}


FED: list[tuple[str, Any]] = [
    ("x", np.ones((1, 3), np.float32)),
    ("x", np.ones((3, 1), np.float32).T),
    ("x", np.ones((1, 3))),
    ("x", np.ones((1, 3), np.int32)),
    ("x", np.ones(3, np.float32)),
    ("x", np.ones((1, 4), np.float32)),
    ("x", np.float32(3)),
    ("x", [[1.0, 2.0, 3.0]]),
    ("x", [[1, 2, 3]]),
    ("x", [[1.0], [2.0, 3.0]]),
    ("x", None),
    ("x", "text"),
    ("x", onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((1, 3), np.float32))),
    ("x", onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((1, 3)))),
    ("i", np.array([2])),
    ("i", np.array([2], np.int32)),
    ("i", [2]),
    ("i", np.array([True])),
    ("s", np.array(["ä"])),
    ("s", np.array(["ä", ""], object)[:1]),
    ("s", np.array([b"ab"], object)),
    ("s", np.array([b"a\0b\0"], np.void)),
    ("s", np.array([1.5], object)),
    ("s", np.array([1])),
    ("s", ["ä"]),
    ("s", np.array([b"\xff"])),
]


@pytest.mark.parametrize(("name", "value"), FED)
def test_value_of_a_feed_is_taken_or_refused_as_by_a_plain_session(
    plain: Any, name: str, value: Any
) -> None:
    rest: dict[str, Any] = {
        "x": np.ones((1, 3), np.float32),
        "i": np.array([1]),
        "s": np.array(["s"]),
    }
    try:
        (wanted,) = plain.run([{"x": "y", "i": "j", "s": "t"}[name]], {**rest, name: value})
    except Exception as refused:
        # For a value that is no tensor, plain sessions have RuntimeError and others.
        with pytest.raises((errors.InvalidValue, type(refused))):
            values.fed(value, SPECS[name])
    else:
        got: Any = values.fed(value, SPECS[name])
        assert got.shape == wanted.shape
        assert np.array_equal(got if name == "s" else -got, wanted)


def test_arrays_that_a_plain_session_misreads_are_taken_by_their_values() -> None:
    swapped = np.arange(3, dtype=">f4").reshape(1, 3)  # a plain session does not swap the bytes
    taken: Any = values.fed(swapped, SPECS["x"])
    assert np.array_equal(taken, swapped)
    taken = values.fed(
        np.array([b"ab", b"c"]), SPECS["s"]
    )  # and reads beyond the end without a zero
    assert taken.tolist() == ["ab", "c"]


SEQUENCE = """<ir_version: 8, opset_import: ["": 17]>
m (seq(float[n]) x) => (float[n] y) { y = ConcatFromSequence<axis=0>(x) }"""


def test_inline_session_takes_arrays_that_a_plain_one_misreads_by_their_values() -> None:
    session = ort.InferenceSession(parser.parse_model(MODEL).SerializeToString(), providers=[CPU])
    swapped = np.arange(3, dtype=">f4").reshape(1, 3)
    given = {"x": swapped, "i": np.array([1], ">i8"), "s": np.array(["ä"], ">U1")}
    y, j, t = session.run(None, given)
    assert (y.tolist(), j.tolist(), t.tolist()) == ([[0, -1, -2]], [-1], ["ä"])
    assert session.run(["t"], given | {"s": np.array([b"ab", b"c"])})[0].tolist() == ["ab", "c"]
    came: list[Any] = []
    done = threading.Event()

    def callback(*said: Any) -> None:
        came.extend(said)
        done.set()

    session.run_async(["y"], given, callback, None)
    assert done.wait(20)
    assert came[0][0].tolist() == [[0, -1, -2]]
    binding = session.io_binding()
    for name, array in given.items():
        if name != "s":
            binding.bind_cpu_input(name, array)
    binding.bind_output("y")
    value = ort.OrtValue.ortvalue_from_numpy(swapped)
    assert value.numpy().tolist() == [[0, 1, 2]]
    value.update_inplace(swapped + 1)
    assert value.numpy().tolist() == [[1, 2, 3]]
    model = parser.parse_model(SEQUENCE).SerializeToString()
    items = [np.ones(1, np.float32), swapped[0]]
    for arrays in (items, items[::-1]):
        (joined,) = ort.InferenceSession(model, providers=[CPU]).run(None, {"x": arrays})
        assert sorted(joined.tolist()) == [0, 1, 1, 2]


# The runtime's values.


@pytest.mark.parametrize(
    "element_type", [n for n in IN_ONNXRUNTIME if n not in ("string", "int4", "uint4")]
)
def test_value_has_the_elements_of_an_array_and_keeps_its_memory(element_type: str) -> None:
    one = spec("y", element_type, ("n",))
    array: NDArray[Any] = np.arange(5).astype(one.dtype)
    value = values.value_of(array, one)
    assert value.data_type() == values.runtime_type(element_type)
    expected = array.tobytes()
    del array
    gc.collect()
    filler = [np.full(5, 7).astype(one.dtype) for _ in range(100)]
    found: Any = values.tensor_of(value, one)
    assert found.tobytes() == expected
    del filler


def test_array_over_a_value_keeps_what_owns_its_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    held = ref(array)
    tensor = values.fed(ort.OrtValue.ortvalue_from_numpy(array), SPECS["x"])
    del array
    gc.collect()
    assert held() is not None
    assert np.array_equal(cast(Any, tensor), np.arange(6).reshape(2, 3))
    del tensor
    gc.collect()
    assert held() is None


def test_value_of_strings_of_nothing_and_of_one_number() -> None:
    texts = np.array([["ä", ""], ["b", "c\0d"]], object)
    value = values.value_of(texts, spec("t", "string", (2, 2)))
    assert value.data_type() == "tensor(string)"
    assert np.array_equal(value.numpy(), texts)
    empty = values.value_of(np.zeros((0, 3), np.float32), spec("y"))
    assert values.tensor_of(empty, spec("y")).shape == (0, 3)
    number = values.value_of(np.array(7, np.float32), spec("y", shape=()))
    assert number.numpy().shape == ()


def test_outputs_are_left_on_the_first_card_if_cupy_has_their_types() -> None:
    card = Device("cuda", 1)
    assert values.outputs_on([None, card], [spec("y")]) == "cuda:1"
    assert values.outputs_on([None], [spec("y")]) == "host"
    for element_type in ("bfloat16", "string", "float8_e5m2"):
        assert values.outputs_on([card], [spec("y"), spec("z", element_type)]) == "host"
    other = ort.OrtDevice.make("dml", 0)._get_c_device()
    with pytest.raises(errors.Unsupported, match=r"^x: got a device of type \d"):
        values.card_of(other, "x")


# Errors.


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("FAIL", "Fail"),
        ("INVALID_ARGUMENT", "InvalidArgument"),
        ("NO_SUCHFILE", "NoSuchFile"),
        ("RUNTIME_EXCEPTION", "RuntimeException"),
        ("INVALID_PROTOBUF", "InvalidProtobuf"),
        ("INVALID_GRAPH", "InvalidGraph"),
        ("NOT_IMPLEMENTED", "NotImplemented"),
        ("MODEL_LOADED", "Fail"),
    ],
)
def test_error_of_a_worker_is_the_runtimes_error_of_its_word(word: str, kind: str) -> None:
    text = f"worker 0 (cpu:0, pid 7): onnxruntime: [ONNXRuntimeError] : 7 : {word} : why"
    found = errors.native_error(own.BuildError(text))
    assert isinstance(found, getattr(native, kind))
    assert isinstance(found, own.McinferError)
    assert str(found) == text
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 our own
    assert type(again) is type(found)
    assert str(again) == text


def test_error_without_the_runtimes_word_is_caught_by_each_class_that_it_may_be() -> None:
    found = errors.native_error(own.PredictError("Non-zero status code returned while running Add"))
    assert isinstance(found, own.PredictError)
    for kind in (native.Fail, native.RuntimeException, native.InvalidArgument):
        assert isinstance(found, kind)
    died = own.WorkerDiedError("worker 0 was killed")
    assert errors.native_error(died) is died


# In the place of onnxruntime.


def test_every_public_name_of_onnxruntime_is_here() -> None:
    for name in dir(onnxruntime):
        if not name.startswith("_") and name != "InferenceSession":
            assert getattr(ort, name) is getattr(onnxruntime, name)
            assert name in dir(ort)
    assert issubclass(ort.InferenceSession, onnxruntime.InferenceSession)
    with pytest.raises(AttributeError):
        _ = ort.no_such_name


def test_installed_session_is_in_the_place_of_the_plain_one_until_it_is_uninstalled() -> None:
    collection: Any = onnxruntime.capi.onnxruntime_inference_collection
    ort.install(devices=1)
    try:
        ort.install()
        assert onnxruntime.InferenceSession is ort.InferenceSession
        assert collection.InferenceSession is ort.InferenceSession
        from onnxruntime import InferenceSession

        assert InferenceSession is ort.InferenceSession
    finally:
        ort.uninstall()
        ort.uninstall()
    assert onnxruntime.InferenceSession is PlainSession
    assert collection.InferenceSession is PlainSession


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"path_or_bytes": 3}, TypeError),
        ({"sess_options": "fast"}, TypeError),
        ({"providers": [3]}, ValueError),
        ({"disabled_optimizers": ["ConstantFolding"]}, errors.Unsupported),
        ({"devises": 2}, own.InvalidInputError),
        ({"options": 3}, own.InvalidInputError),
        ({"engine": "fake"}, own.InvalidInputError),
        ({"path_or_bytes": "/no/such/model.onnx"}, native.NoSuchFile),
    ],
)
def test_argument_that_does_not_fit_is_refused_before_a_worker_starts(
    given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ort.InferenceSession(**{"path_or_bytes": b"", "devices": 1, **given})


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["no/such/program.py"], 2, "no/such/program.py': [Errno 2] No such file or directory\n"),
        (["--devices", "x", "program.py"], 2, "devices: got 'x'"),
        (["--prepare", "soon", "program.py"], 2, "argument --prepare: invalid choice: 'soon'"),
        (["--prepare", "wait", "--devices", "1", "program.py"], 2, "not allowed with argument"),
        (["--unknown", "program.py"], 2, "unrecognized arguments: --unknown"),
        ([], 2, "required: PROGRAM\n"),
    ],
)
def test_program_that_there_is_not_is_said_as_python_says_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == status
    assert said in capsys.readouterr().err
    assert onnxruntime.InferenceSession is PlainSession
