"""Tests of mcinfer.ort with real workers: a session over two of them beside a plain one."""

import gc
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer import (
    ClosedError,
    EngineOptions,
    Master,
    McinferError,
    PredictError,
    ort,
)
from mcinfer.ort.session import PlainSession
from tests.process.models import OnnxModel
from tests.process.scripts import run_python
from tests.process.waiting import all_gone, pids, running, wait_until

CPU = ["CPUExecutionProvider"]
PATIENCE = 20.0

MODEL = """
<ir_version: 8, opset_import: ["": 17], producer_name: "tests", metadata_props: ["classes": "a b"]>
m (float[n, 3] x, float[n, 3] y, int64 turns) => (float[n, 3] sum, float[n, 3] product, int64 turned)
<int64 one = {1}, int64 zero = {0}> {
    sum = Add(x, y)
    product = Mul(x, y)
    turned = Loop <body = body (int64 i, bool go, int64 v) => (bool go_on, int64 v_next) {
        go_on = Identity(go)
        v_next = Add(v, one)
    }> (turns, , zero)
}
"""
"""Its runs take as long as they get turns; it is cut along n, which the test says."""

Feed = dict[str, NDArray[Any]]


def feed(rows: int = 4, turns: int = 1) -> Feed:
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    return {"x": x, "y": x[::-1] + 1, "turns": np.array(turns)}


def workers_of(session: Any) -> list[int]:
    return pids(session.master)


def called_back(session: Any, names: Any, inputs: Any) -> tuple[list[Any], Any, str]:
    """What the callback of an asynchronous run gets."""
    came: list[Any] = []
    done = threading.Event()

    def callback(*said: Any) -> None:
        came.extend(said)
        done.set()

    session.run_async(names, inputs, callback, "data")
    assert done.wait(PATIENCE)
    results, user_data, failure = came
    return results, user_data, failure


def bound(session: Any) -> Any:
    """A binding with all inputs."""
    binding = session.io_binding()
    for name, array in feed().items():
        binding.bind_cpu_input(name, np.ascontiguousarray(array))
    return binding


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import onnx

    path = tmp_path_factory.mktemp("ort") / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    return path


@pytest.fixture(scope="module")
def session(checked_together: ExitStack, model: Path) -> Any:
    given = ort.SessionOptions()
    given.intra_op_num_threads = 1
    axes = {"x": 0, "y": 0, "turns": None}
    joins = {"sum": 0, "product": 0, "turned": None}
    opened = checked_together.enter_context(
        ort.InferenceSession(
            model, given, CPU, devices=2, batch_axes=axes, output_axes=joins, verify="never"
        )
    )
    # Memory and threads that a session keeps.
    opened.run(None, feed(7), ort.RunOptions())
    called_back(opened, None, feed(7))
    return opened


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return PlainSession(model, providers=CPU)


def assert_same(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert type(one) is type(other) is np.ndarray
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


# What it says.


def test_session_says_of_its_model_what_a_plain_one_says(session: Any, plain: Any) -> None:
    assert isinstance(session, onnxruntime.InferenceSession)
    for method in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        said, wanted = (
            [(arg.name, arg.type, arg.shape) for arg in getattr(s, method)()]
            for s in (session, plain)
        )
        assert said == wanted
    for name in dir(plain.get_modelmeta()):
        if not name.startswith("_"):
            said, wanted = (getattr(s.get_modelmeta(), name) for s in (session, plain))
            assert said == wanted, name
    assert session.get_providers() == plain.get_providers()
    assert session.get_provider_options() == plain.get_provider_options()
    assert len(session.get_input_memory_infos()) == len(plain.get_input_memory_infos())
    assert session._model_path == plain._model_path
    assert session.get_session_options().intra_op_num_threads == 1
    assert session.end_profiling() == plain.end_profiling()
    assert len(workers_of(session)) == 2


# Runs.


@pytest.mark.parametrize(
    "names",
    [
        *(None, [], ["turned", "sum"], ("sum",), ["sum", "sum"]),
        *({"sum": 0}.keys(), np.array("sum", ndmin=1)),
    ],
)
def test_answers_are_those_of_a_plain_session(session: Any, plain: Any, names: Any) -> None:
    for rows in (1, 2, 7):
        inputs = feed(rows, turns=3)
        assert_same(session.run(names, inputs), plain.run(names, inputs))


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs.pop("y"),
        lambda inputs: inputs.update(z=inputs["x"]),
        lambda inputs: inputs.update(x=inputs["x"].astype(float)),
        lambda inputs: inputs.update(x=inputs["x"][0]),
        lambda inputs: inputs.update(x=inputs["x"][:, :2]),
        lambda inputs: inputs.update(turns=np.array([1, 2])),
    ],
)
def test_feed_that_a_plain_session_refuses_is_refused_with_its_class(
    session: Any, plain: Any, change: Callable[[Feed], object]
) -> None:
    inputs = feed()
    change(inputs)
    with pytest.raises(Exception) as wanted:  # noqa: PT011 whichever it is
        plain.run(None, inputs)
    with pytest.raises(wanted.type) as got:
        session.run(None, inputs)
    if wanted.type is not ValueError:
        assert isinstance(got.value, McinferError)
    assert_same(session.run(None, feed()), plain.run(None, feed()))


def test_run_async_calls_back_with_results_and_lets_the_arrays_go(session: Any, plain: Any) -> None:
    inputs = feed()
    held = ref(inputs["x"])
    results, data, failure = called_back(session, None, inputs)
    del inputs
    assert (data, failure) == ("data", "")
    assert_same(results, plain.run(None, feed()))
    wait_until(lambda: held() is None)
    assert "has 3 rows" in called_back(session, None, feed() | {"x": feed(3)["x"]})[2]


@pytest.mark.parametrize("owns", [False, True])
def test_run_async_reads_values_that_the_program_has_let_go(session: Any, owns: bool) -> None:
    came: dict[int, Any] = {}
    all_came = threading.Event()

    def callback(results: list[Any], number: int, failure: str) -> None:
        came[number] = failure or results[0].sum()
        if len(came) == 8:
            all_came.set()

    def value(array: NDArray[Any]) -> Any:
        if not owns:  # its memory is the array's
            return ort.OrtValue.ortvalue_from_numpy(array)
        kept = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
        kept.update_inplace(array)
        return kept

    shape, turns = (9000, 3), np.array(1)
    for number in range(8):
        x, y = (value(np.full(shape, n, np.float32)) for n in (number, 0))
        session.run_async(["sum"], {"x": x, "y": y, "turns": turns}, callback, number)
        del x, y
        gc.collect()
        others = [np.full(shape, 7, np.float32) for _ in range(4)]
        del others
    assert all_came.wait(PATIENCE)
    assert came == {number: 27000 * number for number in range(8)}


ENDED = "Exiting due to terminate flag being set to true"


def test_terminate_ends_every_run_while_others_begin(session: Any, plain: Any) -> None:
    interval = sys.getswitchinterval()
    options = ort.RunOptions()
    options.logid = "long"
    ended: list[str] = []

    def run(turns: int) -> None:
        for _ in range(turns):
            with pytest.raises(native.Fail) as raised:
                session.run(None, feed(1, turns=2**62), options)
            ended.append(str(raised.value))

    threads = [threading.Thread(target=run, args=(50,), daemon=True) for _ in range(8)]
    sys.setswitchinterval(1e-5)  # more often, glibc before 2.41 may lose a wake-up (its bug 25847)
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: session.master.statistics().in_flight > 0)
        while any(thread.is_alive() for thread in threads):
            options.terminate = True
    finally:
        sys.setswitchinterval(interval)
        options.terminate = True
    assert len(ended) == 400
    assert all(ENDED in text for text in ended)
    wait_until(lambda: session.master.statistics().in_flight == 0)
    with pytest.raises(native.Fail):
        session.run(None, feed(), options)
    options.terminate = False
    assert_same(session.run(None, feed(), options), plain.run(None, feed()))


def test_terminate_ends_a_run_that_no_thread_has_begun_yet(session: Any) -> None:
    options, said = ort.RunOptions(), list[str]()
    for _ in range(8):
        endless = feed(1, turns=2**62)
        session.run_async(None, endless, lambda *came: said.append(came[2]), None, options)
        options.terminate = True
        options.terminate = False  # for the next run
    wait_until(lambda: len(said) == 8)
    assert all(ENDED in text for text in said)


def test_terminate_ends_what_learns_and_close_ends_runs_of_every_kind(
    onnx_model: OnnxModel, plain: Any, tmp_path: Path
) -> None:
    given = ort.SessionOptions()
    given.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    given.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(
        onnx_model(MODEL).read_bytes(), given, CPU, devices=2, batch_axes={"turns": None}
    )
    written = PlainSession(given.optimized_model_filepath, providers=CPU)
    assert_same(written.run(None, feed()), plain.run(None, feed()))
    endless, options, said = feed(turns=2**62), ort.RunOptions(), list[str]()
    with running(lambda: session.run(None, endless, options)) as terminated:
        wait_until(lambda: session.master.statistics().in_flight > 0)
        options.terminate = True
    assert isinstance(terminated.exception(), native.Fail)
    assert ENDED in str(terminated.exception())
    wait_until(lambda: session.master.statistics().in_flight == 0)
    assert not session.master.split.checked
    with (
        running(lambda: session.run(None, endless)) as first,
        running(lambda: session.run(None, endless, ort.RunOptions())) as second,
    ):
        session.run_async(None, endless, lambda *came: said.append(came[2]), None)
        wait_until(lambda: session.master.statistics().in_flight == 3)
        session.close()
    assert [type(ended.exception()) for ended in (first, second)] == [ClosedError] * 2
    wait_until(lambda: len(said) == 1)
    assert "closed" in said[0]
    with pytest.raises(ClosedError):
        session.run(None, feed(1), ort.RunOptions())


# Values and bindings.


def test_ort_values_go_in_and_come_out(session: Any, plain: Any) -> None:
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feed().items()}
    got, wanted = (s.run_with_ort_values(None, inputs) for s in (session, plain))
    assert_same([value.numpy() for value in got], [value.numpy() for value in wanted])
    assert_same(session.run(None, inputs), plain.run(None, inputs))
    feeds, fetches = native.OrtValueVector(), native.OrtValueVector()
    for value in inputs.values():
        feeds.push_back(value._get_c_value())
    host = ort.OrtDevice.make("cpu", 0)._get_c_device()
    names = ["product", "turned"]
    session.run_with_ortvaluevector(None, [*inputs], feeds, names, fetches, [host, host])
    assert_same([value.numpy() for value in fetches], plain.run(names, feed()))


@pytest.mark.parametrize("make", [lambda s: s.io_binding(), lambda s: onnxruntime.IOBinding(s)])
def test_bound_tensors_are_read_and_written_in_place(
    session: Any, plain: Any, make: Callable[[Any], Any]
) -> None:
    answers = []
    for each in (session, plain):
        binding, inputs = make(each), feed()
        x, y = np.ascontiguousarray(inputs["x"]), np.ascontiguousarray(inputs["y"])
        total, product = np.zeros_like(x), ort.OrtValue.ortvalue_from_numpy(np.zeros_like(x))
        binding.bind_cpu_input("x", x)
        binding.bind_input("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        binding.bind_ortvalue_input("turns", ort.OrtValue.ortvalue_from_numpy(inputs["turns"]))
        binding.bind_output("turned")
        binding.bind_output("sum", "cpu", 0, 1, total.shape, total.ctypes.data)
        binding.bind_ortvalue_output("product", product)
        for _ in range(2):
            each.run_with_iobinding(binding)
            answers.append([total.copy(), product.numpy().copy(), *binding.copy_outputs_to_cpu()])
            x += 1
        outputs = [value.numpy() for value in binding.get_outputs()]
        assert_same(outputs, binding.copy_outputs_to_cpu())
        binding.clear_binding_outputs()
        with pytest.raises((RuntimeError, native.InvalidArgument)):
            each.run_with_iobinding(binding)
    first, second, *wanted = answers
    assert_same(first, wanted[0])
    assert_same(second, wanted[1])


def double(shape: tuple[int, ...]) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape))


SPACE = np.zeros(64)
"""Memory that outputs are bound to."""


@pytest.mark.parametrize(
    "bind",
    [
        lambda binding: binding.bind_ortvalue_output("sum", double((4, 3))),
        lambda b: b.bind_output("sum", "cpu", 0, np.float32, (4, 2), SPACE.ctypes.data),
        lambda b: (b.bind_output("sum"), b.bind_ortvalue_input("x", double((4, 3)))),
    ],
)
def test_bound_tensor_of_another_type_or_shape_is_the_error_of_a_plain_session(
    session: Any, plain: Any, bind: Callable[[Any], object]
) -> None:
    said = []
    for each in (plain, session):
        binding = bound(each)
        bind(binding)
        with pytest.raises(RuntimeError) as raised:
            each.run_with_iobinding(binding)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_binding_that_does_not_fit_is_refused(session: Any, plain: Any) -> None:
    binding = bound(session)
    with pytest.raises(RuntimeError, match="other"):
        binding.bind_cpu_input("other", np.zeros((1, 3), np.float32))
    small = ort.OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
    binding.bind_ortvalue_output("sum", small)
    with pytest.raises(RuntimeError, match="shape verification failed for output 'sum'"):
        session.run_with_iobinding(binding)
    binding.clear_binding_inputs()
    with pytest.raises(RuntimeError, match="missing"):
        session.run_with_iobinding(binding)
    with pytest.raises(ValueError, match="session that created it"):
        session.run_with_iobinding(plain.io_binding())


# A session's life.


def test_providers_are_set_anew_and_a_pickled_session_is_opened_again_from_its_path(
    onnx_model: OnnxModel, plain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = onnx_model(MODEL)
    monkeypatch.chdir(path.parent)
    given = ort.SessionOptions()
    given.add_free_dimension_override_by_name("n", 2)
    engine = EngineOptions(session_config={"session.set_denormal_as_zero": "1"})
    session = ort.InferenceSession(path.name, given, CPU, devices=1, options=engine)
    try:
        before = workers_of(session)
        with (
            pytest.warns(UserWarning, match="not in available provider names"),
            pytest.raises(RuntimeError, match="Unknown Provider Type: Mine"),
        ):
            session.set_providers(["Mine"])
        assert workers_of(session) == before
        session.set_providers(CPU)
        assert not set(workers_of(session)) & set(before)
        assert all_gone(before)
        assert session.get_inputs()[0].shape == [2, 3]
        pickled = pickle.dumps(session)
        monkeypatch.chdir(tmp_path.parent)
        with pickle.loads(pickled) as again:  # noqa: S301 our own
            assert workers_of(again) != workers_of(session)
            assert again.get_inputs()[0].shape == [2, 3]
            assert_same(again.run(None, feed(2)), session.run(None, feed(2)))
            assert_same(again.run(None, feed(2)), plain.run(None, feed(2)))
    finally:
        session.close()
    session.close()
    with pytest.raises(ClosedError):
        session.run(None, feed(2))


def test_model_in_the_runtimes_own_format_opens_from_its_bytes(
    model: Path, plain: Any, tmp_path: Path
) -> None:
    given = onnxruntime.SessionOptions()
    given.optimized_model_filepath = str(tmp_path / "model.ort")
    given.add_session_config_entry("session.save_model_format", "ORT")
    given.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    PlainSession(model, given, CPU)
    content = (tmp_path / "model.ort").read_bytes()
    with ort.InferenceSession(content, providers=CPU, devices=1) as session:
        assert_same(session.run(None, feed()), plain.run(None, feed()))
    with Master(content, 1) as master:
        assert_same([*master.predict(feed()).values()], plain.run(None, feed()))
    with pytest.raises(native.InvalidProtobuf, match="INVALID_PROTOBUF") as raised:
        ort.InferenceSession(b"no " + content, providers=CPU, devices=1)
    assert isinstance(raised.value, McinferError)


def test_session_that_is_let_go_ends_its_workers(onnx_model: OnnxModel) -> None:
    given = ort.SessionOptions()
    given.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.full(3, 5, np.float32)))
    text = (
        MODEL.split("m (")[0]
        + "m (float[n, k] x) => (float[n, k] y) <float[3] w = {1, 1, 1}> { y = Mul(x, w) }"
    )
    session = ort.InferenceSession(onnx_model(text).read_bytes(), given, devices=1)
    one = np.ones((1, 3), np.float32)
    options = ort.RunOptions()
    assert session.run(None, {"x": one}, options)[0].tolist() == [[5, 5, 5]]
    with pytest.raises(native.Fail, match="Mul node") as raised:
        session.run(None, {"x": np.ones((1, 4), np.float32)})
    assert isinstance(raised.value, PredictError)
    del raised  # whose traceback holds the session
    workers = workers_of(session)
    came = threading.Event()
    session.run_async(None, {"x": one}, lambda *_: came.set(), None, options)
    del session
    gc.collect()
    assert came.wait(PATIENCE)
    wait_until(lambda: all_gone(workers))


# Programs.

PROGRAM = """
import atexit
import sys
import numpy
import onnxruntime

def say_where():  # as Python's own main module, this one is there until the end
    print(sys.modules["__main__"].say_where is say_where)


if __name__ == "__main__":
    atexit.register(say_where)
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    x = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    total, = session.run(["sum"], {"x": x, "y": x, "turns": numpy.array(1)})
    print(type(session).__module__, len(sys.argv), sys.path[0], __file__, total.tolist())
    if sys.argv[2:] == ["raise"]:
        endless = {"x": x, "y": x, "turns": numpy.array(2**62)}
        session.run_async(None, endless, lambda *_: None, None)  # does not keep the program
        raise KeyError("of the program")
    sys.exit(7)
"""


def test_unchanged_program_runs_over_workers_and_ends_as_it_does_alone(
    model: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ours = run_python(
        *("-m", "mcinfer", "ort", "--devices", "1", program.name, str(model)), cwd=tmp_path
    )
    told = f"mcinfer.ort.session 2 {tmp_path} {program} [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]"
    assert (ours.stdout.splitlines(), ours.returncode) == ([told, "True"], 7)
    assert "Error" not in ours.stderr
    runner = ("-m", "mcinfer.ort", "--devices", "1")
    as_module = run_python(*runner, "-m", "program", str(model), "raise", cwd=tmp_path)
    assert as_module.returncode == 1
    said, at_exit = as_module.stdout.splitlines()
    assert said.startswith("mcinfer.ort.session 3 ")
    assert at_exit == "True"
    first, *_, last = as_module.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "KeyError: 'of the program'")
    assert "mcinfer" not in as_module.stderr.replace(str(tmp_path), "")


FORKED = """
import os, signal, sys
import mcinfer.ort
child = os.fork()
if not child:
    sys.exit(7)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(20)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_child_that_a_program_forks_ends_though_the_runtime_would_wait_for_its_telemetry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    assert run_python("-c", FORKED, cwd=tmp_path).stdout == "7\n"


MODULE = ("-m", "mcinfer.ort")
SCRIPT = (str(Path(sys.executable).with_name("mcinfer")), "ort")


@pytest.mark.parametrize(
    ("launch", "arguments"),
    [
        (MODULE, ("broken.py",)),
        (SCRIPT, ("-m", "failing", "1")),
    ],
)
def test_program_that_fails_says_what_it_says_alone(
    tmp_path: Path, launch: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    (tmp_path / "broken.py").write_text("x = = 3\n")
    (tmp_path / "failing.py").write_text("import sys\nraise KeyError(sys.argv, sys.path[0])\n")
    ours = run_python(*launch, *arguments, cwd=tmp_path)
    alone = run_python(*arguments, cwd=tmp_path)
    runpy = '  File "<frozen runpy>"'  # Python shows how it runs a module
    wanted = [line for line in alone.stderr.splitlines() if not line.startswith(runpy)]
    assert (ours.stderr.splitlines(), ours.returncode) == (wanted, 1)
