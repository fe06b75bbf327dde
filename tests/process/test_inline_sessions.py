"""Tests of inline sessions: ONNX Runtime's own in this process, on a prepared model that processes share."""

import copy
import gc
import logging
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import run
from typing import Any
from weakref import ref

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as native

from mcinfer import ClosedError, InvalidInputError, ort
from mcinfer.model_cache.cache import Cache
from mcinfer.ort.session import PlainSession
from tests.process.waiting import wait_until
from tests.text_models import text_model

CPU = ["CPUExecutionProvider"]
PATIENCE = 60.0
WIDTH = 2100  # its square has more bytes than the least size of a model that is prepared
Level = onnxruntime.GraphOptimizationLevel


def write_model(path: Path, value: float) -> Path:
    """relu(x W + b) + s, with metadata; its weights are of random numbers and of `value`."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "b": np.full(WIDTH, value, np.float32),
        "s": np.ones(1, np.float32),
    }
    # An initialiser that is an input too can be overridden by a feed.
    text = f"""(float[n, {WIDTH}] x, float[1] s) => (float[n, {WIDTH}] y)
        {{ a = MatMul(x, w)  c = Add(a, b)  d = Relu(c)  y = Add(d, s) }}"""
    model = text_model(text, weights)
    model.model_version, model.producer_name = 3, "tests"
    model.graph.doc_string = "a graph"
    helper.set_model_props(model, {"classes": "a b"})
    onnx.save(model, path)
    return path


def write_small(path: Path, factor: float) -> Path:
    """x · factor, whose weights are external data of an entry."""
    text = "(float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"
    onnx.save(text_model(text, {"w": np.eye(64, dtype=np.float32) * factor}), path)
    return path


def factor_of(session: Any) -> float:
    return float(session.run(None, {"x": np.ones((1, 64), np.float32)})[0][0, 0])


@pytest.fixture(autouse=True)
def _waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that say nothing else wait for their prepared model."""
    monkeypatch.setattr(ort.InferenceSession, "_defaults", {"prepare": "wait"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("inline") / "model.onnx", 0.5)


def feed(rows: int = 3) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(1)
    return {"x": random.standard_normal((rows, WIDTH)).astype(np.float32)}


def described(session: Any) -> dict[str, Any]:
    meta = session.get_modelmeta()
    sides = ("get_inputs", "get_outputs", "get_overridable_initializers")
    return {
        **{side: [(a.name, a.type, a.shape) for a in getattr(session, side)()] for side in sides},
        **{name: getattr(meta, name) for name in dir(meta) if not name.startswith("_")},
        "providers": (session.get_providers(), session.get_provider_options()),
        "path": session._model_path,
        "options": [*ort.options.attributes(session.get_session_options())],
    }


def assert_same(session: Any, plain: Any) -> None:
    """Fail unless both say the same and answer with the same bits."""
    assert described(session) == described(plain)
    for rows in (1, 3):
        answers = [one.run(None, feed(rows)) for one in (session, plain)]
        np.testing.assert_array_equal(*answers, strict=True)


def is_mapped(key: str) -> bool:
    return f"/{key}/weights.bin" in Path("/proc/self/maps").read_text(encoding="utf-8")


# What it is.


def test_session_maps_the_prepared_model_and_is_a_plain_one_otherwise(model: Path) -> None:
    session, plain = ort.InferenceSession(model), PlainSession(model)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert type(session._sess) is native.InferenceSession
    assert session.prepared
    assert not session.why_plain
    assert is_mapped(session.prepared)
    assert_same(session, plain)
    one = {"s": np.full(1, 9, np.float32)}
    overridden = [each.run(None, feed() | one)[0] for each in (session, plain)]
    np.testing.assert_array_equal(*overridden)
    with pytest.raises(AttributeError, match=r"^master: this session is inline"):
        session.master  # noqa: B018


def test_relative_path_stays_as_the_program_wrote_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    session = ort.InferenceSession("model.onnx", providers=CPU)
    assert session.prepared
    assert session._model_path == "model.onnx"
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(session))  # noqa: S301 of its own
    assert copy.prepared == session.prepared
    np.testing.assert_array_equal(copy.run(None, feed()), session.run(None, feed()))


def options_of(*calls: tuple[str, str, Any], **attributes: Any) -> Any:
    """``SessionOptions`` with these attributes and calls, each a method and its two arguments."""
    options = ort.SessionOptions()
    for name, value in attributes.items():
        setattr(options, name, value)
    for method, first, second in calls:
        getattr(options, method)(first, second)
    return options


ENTRY = "add_session_config_entry"


def test_options_of_a_run_and_of_threads_share_one_entry(model: Path) -> None:
    spinning = "session.intra_op.allow_spinning"
    options = options_of(
        (ENTRY, spinning, "0"),
        intra_op_num_threads=1,
        log_severity_level=3,
        enable_mem_pattern=False,
    )
    session = ort.InferenceSession(model, options, providers=CPU)
    assert session.prepared == ort.InferenceSession(model, providers=CPU).prepared
    assert_same(session, PlainSession(model, options, providers=CPU))
    said = session.get_session_options()
    assert said.graph_optimization_level == Level.ORT_ENABLE_ALL
    assert said.get_session_config_entry(spinning) == "0"


# Where it is plain.


RECORD = "session.record_ep_graph_assignment_info"


def test_option_about_the_graph_as_it_was_written_opens_a_plain_session(
    model: Path, tmp_path: Path
) -> None:
    def opened(why: str, *calls: tuple[str, str, Any], **attributes: Any) -> Any:
        options = options_of(*calls, **attributes)
        session = ort.InferenceSession(model, options, providers=CPU)
        assert (session.prepared, session.why_plain) == ("", f"{why} was set")
        return session

    written = tmp_path / "optimised.onnx"
    opened("SessionOptions.optimized_model_filepath", optimized_model_filepath=str(written))
    assert written.exists()
    recorded = opened(f"the configuration entry {RECORD!r}", (ENTRY, RECORD, "1"))
    assert recorded.get_provider_graph_assignment_info()
    prefix = str(tmp_path / "profile")
    profiled = opened(
        "SessionOptions.enable_profiling", enable_profiling=True, profile_file_prefix=prefix
    )
    np.testing.assert_array_equal(profiled.run(None, feed()), PlainSession(model).run(None, feed()))
    assert Path(profiled.end_profiling()).exists()


def test_small_model_opens_plain_unless_asked_for_and_again_where_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "small.onnx")
    monkeypatch.chdir(tmp_path)
    for given in ((tmp_path / "small.onnx").read_bytes(), "small.onnx"):
        session = ort.InferenceSession(given, providers=CPU)
        assert session.why_plain == "it has less than 16 MiB"
        assert ort.InferenceSession(given, providers=CPU, prepare="always").prepared
    monkeypatch.chdir("/")
    session.set_providers(CPU)
    assert session._model_path == "small.onnx"
    assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [-1, -1]


def test_model_that_draws_random_numbers_opens_plain(tmp_path: Path) -> None:
    """An operator without a seed draws by its number in the graph, which optimising changes."""
    path = tmp_path / "random.onnx"
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] b, float[3] y) {
        a = Identity(x) b = Relu(a) y = RandomNormal<shape=[3]>() }"""
    onnx.save(onnx.parser.parse_model(text), path)
    drawn = []
    for prepare in ("always", "never"):
        onnxruntime.set_seed(7)
        session = ort.InferenceSession(path, providers=CPU, prepare=prepare)
        assert session.why_plain
        drawn.append(session.run(None, {"x": np.ones(1, np.float32)})[1])
    np.testing.assert_array_equal(*drawn)


def test_bytes_with_their_weights_elsewhere_are_prepared(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "apart.onnx"
    onnx.save(onnx.load(model), path, save_as_external_data=True, location="weights")
    monkeypatch.chdir(tmp_path)
    session = ort.InferenceSession(path.read_bytes(), providers=CPU)
    assert session.prepared, session.why_plain
    plain = PlainSession(model, providers=CPU)
    np.testing.assert_array_equal(session.run(None, feed()), plain.run(None, feed()))


SCALE = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(1, np.float32))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"prepare": "never"}, id="never"),
        pytest.param({"disabled_optimizers": ["MatMulAddFusion"]}, id="optimisers"),
        pytest.param({"read_config_from_model": 1}, id="config"),
        pytest.param(
            {"sess_options": options_of(("add_initializer", "s", SCALE))}, id="initialisers"
        ),
    ],
)
def test_what_no_key_has_opens_a_plain_session(model: Path, given: dict[str, Any]) -> None:
    session = ort.InferenceSession(model, providers=CPU, **given)
    assert session.why_plain
    assert not session.prepared


def test_arguments_of_workers_need_devices(model: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^batch_axes: got .* expected devices= beside it"):
        ort.InferenceSession(model, batch_axes={"x": 0})
    with pytest.warns(UserWarning, match=r"^devises: an unknown argument"):
        assert ort.InferenceSession(model, devises=2).prepared
    with pytest.raises(InvalidInputError, match=r"^prepare: got 'soon', expected one of \['back"):
        ort.InferenceSession(model, prepare="soon")


@pytest.mark.parametrize("given", [b"no model", "missing.onnx", ""])
def test_wrong_model_raises_what_a_plain_session_does(given: Any) -> None:
    raised = []
    for kind in (ort.InferenceSession, PlainSession):
        with pytest.raises(Exception, match=r".") as info:
            kind(given, providers=CPU)
        raised.append((info.type, str(info.value)[:60]))  # the rest may have an address
    assert raised[0] == raised[1]


# The cache.


def test_cache_that_cannot_be_used_opens_a_plain_session(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MCINFER_CACHE", "/dev/null/cache")
    with caplog.at_level(logging.INFO, "mcinfer.ort"):
        session = ort.InferenceSession(model, providers=CPU)
    assert session.why_plain.startswith("the cache at /dev/null/cache cannot be used: ")
    assert session.why_plain in caplog.text
    assert_same(session, PlainSession(model, providers=CPU))


def test_mapped_entry_survives_clear_and_goes_with_its_last_session(
    model: Path, cache: Cache
) -> None:
    session = ort.InferenceSession(model, providers=CPU)
    binding = session.io_binding()  # holds the native session
    key, wanted = session.prepared, session.run(None, feed())
    assert cache.clear()[1] == 1
    np.testing.assert_array_equal(session.run(None, feed()), wanted)
    del session
    gc.collect()
    assert cache.clear()[1] == 1
    del binding
    gc.collect()
    assert not is_mapped(key)
    assert cache.clear()[1] == 0


def test_program_that_closed_all_descriptors_keeps_those_that_it_opens_later(
    tmp_path: Path,
) -> None:
    code = """
import os, sys
from mcinfer import ort
sessions = [
    ort.InferenceSession(sys.argv[1], prepare="always") for _ in range(2)
]
assert all(one.prepared for one in sessions)
os.closerange(3, 256)
own = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
sessions[0].close()
del sessions
print([fd for fd in own if not os.path.exists(f"/proc/self/fd/{fd}")])
"""
    path = write_small(tmp_path / "model.onnx", 1)
    ended = run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("[]\n", 0), ended.stderr


# What else a session does.


def test_providers_are_set_anew_on_the_prepared_model(model: Path) -> None:
    session = ort.InferenceSession(model, providers=CPU)
    session.set_providers(CPU)
    assert session.prepared
    assert_same(session, PlainSession(model, providers=CPU))


def test_closed_session_says_so_and_has_let_the_model_go(model: Path) -> None:
    with ort.InferenceSession(model, providers=CPU) as session:
        session.run(None, feed())
        native_session = ref(session._sess)
    session.close()
    assert native_session() is None
    for use in (lambda: session.run(None, feed()), session.get_inputs, session.get_modelmeta):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()


class Labelled(ort.InferenceSession):
    """It has attributes of its own, of all kinds, and says what is equal."""

    __slots__ = ("slot",)

    def __init__(self, labels: list[str], *given: Any, **named: Any) -> None:
        self.labels, self.slot = labels, 1
        super().__init__(*given, **named)
        self.after = 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labelled)

    __hash__ = None  # type: ignore[assignment] # as Python does for a class with __eq__


def test_attributes_of_a_subclass_survive_pickle_and_copy(model: Path) -> None:
    session = Labelled(["a"], model, providers=CPU)
    session.later = 3
    wanted = session.run(None, feed())
    for again in (pickle.loads(pickle.dumps(session)), copy.copy(session)):  # noqa: S301 of its own
        assert type(again) is Labelled
        assert (again.labels, again.slot, again.after, again.later) == (["a"], 1, 2, 3)
        assert again.prepared
        np.testing.assert_array_equal(again.run(None, feed()), wanted)
    third = pickle.loads(pickle.dumps(again))  # noqa: S301 of its own
    assert (third.labels, third.slot, third.after, third.later) == (["a"], 1, 2, 3)


def test_session_is_pickled_with_the_options_of_its_opening(model: Path) -> None:
    options, providers = options_of((ENTRY, "session.set_denormal_as_zero", "1")), [*CPU]
    session = ort.InferenceSession(model, options, providers)
    options.graph_optimization_level = Level.ORT_DISABLE_ALL
    session.get_session_options().graph_optimization_level = Level.ORT_DISABLE_ALL
    providers.append("no such")
    again = pickle.loads(pickle.dumps(session))  # noqa: S301 of its own
    assert again.prepared == session.prepared
    assert again.get_session_options().graph_optimization_level == Level.ORT_ENABLE_ALL


class DeadlineError(Exception):
    """What the program's handler of a signal raises."""


def late(*_: object) -> None:
    raise DeadlineError


def test_program_that_ends_its_start_by_a_signal_gets_its_own_exception(
    model: Path, cache: Cache
) -> None:
    """While the model is prepared, which is nearly all of a first start."""

    def end_the_start() -> None:
        wait_until(lambda: [*cache.folder.glob("tmp-*/*")])  # which the child writes
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, late)
    try:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(end_the_start)
            with pytest.raises(DeadlineError):
                ort.InferenceSession(model, providers=CPU)
            ended.result()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert cache.entries() == []


def test_what_a_handler_raises_comes_out_of_every_step_of_a_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = math.inf  # how many files are opened and looked at before the signal comes

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                left = math.inf
                signal.raise_signal(signal.SIGALRM)
            return function(*given, **named)

        return call

    ort.InferenceSession(model, providers=CPU).close()
    for name in ("open", "fstat"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    before = signal.signal(signal.SIGALRM, late)
    try:
        left = most = 10_000
        ort.InferenceSession(model, providers=CPU).close()
        steps = most - int(left)
        assert steps > 5
        for step in range(steps):
            left = step
            with pytest.raises(DeadlineError):
                ort.InferenceSession(model, providers=CPU)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_installed_session_is_inline_or_made_so_by_its_own_devices(model: Path) -> None:
    for defaults, own in (({}, {}), ({"devices": 2}, {"devices": "inline"})):
        ort.install(**defaults)
        try:
            assert onnxruntime.InferenceSession(model, providers=CPU, **own).prepared
        finally:
            ort.uninstall()


# Processes that are forked.


@pytest.fixture
def in_child() -> Callable[[Callable[[], Any]], Any]:
    """Calls a function in a process that is forked, which then ends as Python does."""

    def call(function: Callable[[], Any]) -> Any:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                try:
                    answer = function()
                except BaseException as exc:
                    answer = repr(exc)
                with open(writing, "wb") as pipe:
                    pickle.dump(answer, pipe)
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        ended: list[tuple[int, int]] = []

        def has_ended() -> bool:
            ended.append(os.waitpid(pid, os.WNOHANG))
            return ended[-1][0] != 0

        try:
            with open(reading, "rb") as answers:
                answer = pickle.load(answers)  # noqa: S301 of its own
            wait_until(has_ended)
        finally:
            if not ended or ended[-1][0] == 0:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
        assert ended[-1][1] == 0
        return answer

    return call


@pytest.mark.parametrize(("count", "ran_before"), [(1, False), (3, True)])
def test_forked_process_runs_the_sessions_of_its_parent(
    model: Path, in_child: Callable[[Callable[[], Any]], Any], count: int, ran_before: bool
) -> None:
    options = options_of(intra_op_num_threads=count)
    session = ort.InferenceSession(model, options, providers=CPU)
    plain = PlainSession(model, options, providers=CPU).run(None, feed())
    if ran_before:
        session.run(None, feed())
    before = id(session._sess)  # held by nothing else, so that the child could destroy it

    def child() -> Any:
        together: list[Any] = []

        def run() -> None:
            together.append(session.run(None, feed())[0])

        both = [threading.Thread(target=run) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        is_same = id(session._sess) == before
        return [*together, is_same, session.prepared, is_mapped(session.prepared)]

    first, second, is_the_same, key, mapped = in_child(child)
    np.testing.assert_array_equal(first, plain[0])
    np.testing.assert_array_equal(second, plain[0])
    assert (is_the_same, key, mapped) == (count == 1, session.prepared, True)
    assert id(session._sess) == before
    assert_same(session, PlainSession(model, options, providers=CPU))


@pytest.mark.parametrize("change", ["replaced", "link moved", "removed", "none"])
@pytest.mark.parametrize("prepare", ["always", "never"])
def test_forked_process_never_runs_another_model_than_its_parent(
    tmp_path: Path, in_child: Callable[[Callable[[], Any]], Any], prepare: str, change: str
) -> None:
    model, other = write_small(tmp_path / "a.onnx", 1), write_small(tmp_path / "b.onnx", 100)
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    session = ort.InferenceSession(link, providers=CPU, prepare=prepare)
    if change == "replaced":
        other.replace(model)
    elif change == "link moved":
        link.unlink()
        link.symlink_to(other)
    elif change == "removed":
        model.unlink()

    def child() -> Any:
        with suppress(ClosedError):
            factor_of(session)
        return factor_of(session)  # again

    answer = in_child(child)
    if prepare == "always" or change == "none":
        assert answer == 1
    else:
        assert answer.startswith("ClosedError(")
        assert f"{link} was changed or removed" in answer
    assert factor_of(session) == 1


@pytest.mark.parametrize("given", ["path", "bytes"])
def test_forked_process_sees_that_external_data_were_changed(
    tmp_path: Path,
    in_child: Callable[[Callable[[], Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    path = write_small(tmp_path / "model.onnx", 2)
    loaded = onnx.load(path)
    onnx.save(loaded, path, save_as_external_data=True, location="data", size_threshold=0)
    monkeypatch.chdir(tmp_path)
    model: Any = path if given == "path" else path.read_bytes()
    session = ort.InferenceSession(model, providers=CPU, prepare="never")
    assert in_child(lambda: factor_of(session)) == 2
    (tmp_path / "data").write_bytes(np.ones((64, 64), np.float32).tobytes())
    assert f"{tmp_path / 'data'} was changed" in in_child(lambda: factor_of(session))


def test_signal_handler_runs_another_session_while_one_is_opened_again(
    tmp_path: Path,
    in_child: Callable[[Callable[[], Any]], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_small(tmp_path / "model.onnx", 3)
    first, second = (ort.InferenceSession(path, providers=CPU, prepare="always") for _ in range(2))
    seen: list[float] = []
    create = PlainSession._create_inference_session

    def interrupted(self: Any, *arguments: Any) -> None:
        if self is first:
            signal.raise_signal(signal.SIGUSR1)
        create(self, *arguments)

    def child() -> Any:
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(factor_of(second)))
        signal.alarm(int(PATIENCE))
        return factor_of(first), seen

    monkeypatch.setattr(PlainSession, "_create_inference_session", interrupted)
    assert in_child(child) == (3, [3])
