"""A new model is not waited for: sessions open plain, and one process of the host prepares it beside them."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import onnxruntime
import psutil
import pytest

from mcinfer import Master, ort
from mcinfer.model_cache.cache import Cache
from mcinfer.model_cache.keys import claim_key, read_content
from mcinfer.ort.inline import COMING
from tests.process.scripts import PREAMBLE, Program
from tests.process.test_inline_sessions import CPU, feed, is_mapped, write_model
from tests.process.test_preparing import maps
from tests.process.waiting import pids, wait_until

PATIENCE = 120.0

OPEN = """
import logging, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from mcinfer import ort
session = ort.InferenceSession(sys.argv[1])
say("why:", session.why_plain)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("beside") / "model.onnx", 0.5)


def beside() -> list[psutil.Process]:
    """The processes of this machine that prepare a model beside its sessions, in this test's cache."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get("MCINFER_CACHE") == os.environ["MCINFER_CACHE"]
            if ours and "mcinfer.model_cache.children" in process.cmdline():
                found.append(process)
    return found


def waits(name: str) -> bool:
    """Whether this process has a thread of that name."""
    return name in {thread.name for thread in threading.enumerate()}


def await_beside(condition: Callable[[], object]) -> None:
    """Wait for what prepares a model, which has no time at its priority where others keep the cores busy."""

    def is_so() -> object:
        for process in beside():
            with suppress(psutil.Error, OSError):  # not as every user
                process.nice(0)
                Path(f"/proc/{process.pid}/autogroup").write_text("0", encoding="ascii")
        return condition()

    wait_until(is_so, timeout=PATIENCE)


def await_entry(cache: Cache) -> None:
    await_beside(lambda: cache.entries() and not beside())


@pytest.fixture
def slow(cache: Cache) -> Iterator[Callable[[], None]]:
    """No process has the turn to prepare until this is called."""
    turn = cache.await_turn()
    open_turn = [turn]

    def go_on() -> None:
        while open_turn:
            os.close(open_turn.pop())

    yield go_on
    go_on()


def test_new_model_opens_plain_and_those_that_start_later_map_it(model: Path, cache: Cache) -> None:
    session = ort.InferenceSession(model)
    assert (session.prepared, session.why_plain) == ("", COMING)
    answer = session.run(None, feed())
    await_entry(cache)
    assert not session.prepared  # it stays as it is
    later = ort.InferenceSession(model)
    assert is_mapped(later.prepared)
    np.testing.assert_array_equal(later.run(None, feed()), answer)
    assert os.listdir(cache.folder / "background") == ["turn"]


def test_processes_that_start_at_once_prepare_a_model_once(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    with Program(PREAMBLE + OPEN, model) as first, Program(PREAMBLE + OPEN, model) as second:
        outs = [program.wait(timeout=PATIENCE).out for program in (first, second)]
    assert all(f"why: {COMING}" in out for out in outs)
    assert sum(out.count("beside its sessions") for out in outs) == 1
    (process,) = beside()  # the programs have ended; it goes on
    assert process.nice() == 19
    assert process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():  # there sessions share out the cores, not processes
        wait_until(lambda: group.read_text("ascii").endswith("nice 19\n"))
    slow()
    await_entry(cache)


def test_others_load_nothing_to_prepare_a_model_that_one_process_sees_to(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    text = OPEN + "say('mcinfer.engines.preparation' in sys.modules)\n"
    assert ort.InferenceSession(model).why_plain == COMING
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert ort.InferenceSession(model, options).why_plain == COMING  # in this way at the next start
    with Program(PREAMBLE + text, model) as program:
        ended = program.wait(timeout=PATIENCE)
    assert ended.out.splitlines()[-2:] == [f"why: {COMING}", "False"]
    assert len(beside()) == 1
    slow()
    await_entry(cache)
    assert ort.InferenceSession(model).prepared
    assert ort.InferenceSession(model, options).why_plain == COMING
    await_beside(lambda: len(cache.entries()) == 2 and not beside())
    assert ort.InferenceSession(model, options).prepared


def test_model_that_cannot_be_shared_leaves_no_claim(model: Path, cache: Cache) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.save_model_format", "ONNX")
    assert "was set" in ort.InferenceSession(model, options).why_plain
    assert not (cache.folder / "background").exists()
    assert ort.InferenceSession(model).why_plain == COMING
    await_entry(cache)


def test_path_of_a_prepared_model_needs_no_claim(model: Path, cache: Cache) -> None:
    assert ort.InferenceSession(model).why_plain == COMING
    await_entry(cache)
    key = ort.InferenceSession(model).prepared
    path = cache.folder / key / "model.onnx"
    claim, _ = cache.claim(claim_key(read_content(path)))
    assert claim is not None
    try:
        assert ort.InferenceSession(path).prepared == key
    finally:
        os.close(claim)


def test_process_that_was_stopped_leaves_the_claim_to_the_next_start(
    model: Path, cache: Cache, slow: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as where a thread waits for it
        assert ort.InferenceSession(model).why_plain == COMING
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        await_beside(beside)
        (process,) = beside()
        process.terminate()  # as when the service is stopped
        await_beside(lambda: not beside() and not waits("mcinfer-beside"))
    assert cache.entries() == []
    assert not caplog.records
    slow()
    assert ort.InferenceSession(model).why_plain == COMING
    await_entry(cache)


def test_session_that_waits_to_go_over_does_not_try_again_what_the_kernel_has_killed(
    model: Path, slow: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    session = ort.InferenceSession(model, providers=CPU, prepare="switch")
    await_beside(beside)
    beside()[0].kill()  # memory ran out
    await_beside(lambda: not waits("mcinfer-switch"))
    assert "lately: the process that did it ended with status -9" in session.why_plain
    assert [record.name for record in caplog.records] == ["mcinfer.model_cache", "mcinfer.ort"]
    assert not beside()
    slow()


def test_program_that_is_no_python_is_ended(
    model: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 1000\n", encoding="utf-8")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("mcinfer.model_cache.children._HELLO_SECONDS", 2.0)
    assert ort.InferenceSession(model).why_plain == COMING
    await_beside(lambda: not waits("mcinfer-beside"))
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text(encoding="utf-8")))
    assert cache.entries() == []


def test_clear_leaves_what_is_being_prepared_beside_its_sessions_alone(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    assert ort.InferenceSession(model).why_plain == COMING
    cache.clear()
    assert ort.InferenceSession(model).why_plain == COMING
    await_beside(beside)
    assert len(beside()) == 1
    slow()
    await_entry(cache)


def test_failure_is_said_once_and_not_tried_again_at_each_start(
    tmp_path: Path, cache: Cache, slow: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    path, away = write_model(tmp_path / "model.onnx", 0.5), tmp_path / "away.onnx"
    assert ort.InferenceSession(path).why_plain == COMING
    await_beside(beside)
    path.rename(away)
    path.mkdir()
    slow()
    await_beside(lambda: caplog.records and not beside())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "could not be prepared: " in record.getMessage()
    path.rmdir()
    away.rename(path)
    again = ort.InferenceSession(path)
    assert again.why_plain.startswith("it could not be prepared lately: ")
    assert not beside()
    (key,) = {*os.listdir(cache.folder / "background")} - {"turn"}
    os.utime(cache.folder / "background" / key, (0, 0))  # long ago
    assert ort.InferenceSession(path).why_plain == COMING
    await_entry(cache)


def test_model_of_a_moment_is_no_failure(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    path, away = write_model(tmp_path / "model.onnx", 0.5), tmp_path / "away.onnx"
    assert ort.InferenceSession(path).why_plain == COMING
    path.rename(away)
    await_beside(lambda: not waits("mcinfer-beside"))
    assert (cache.entries(), caplog.records) == ([], [])
    away.rename(path)
    assert ort.InferenceSession(path).why_plain == COMING
    await_entry(cache)


def test_session_that_knows_the_whole_model_does_not_have_it_prepared_again(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    assert ort.InferenceSession(model).why_plain == COMING
    sources = cache.notes("sources")

    def is_remembered() -> bool:  # as by the process that prepares it, which reads it first
        return bool(read_content(model, memory=sources) and os.listdir(sources))

    await_beside(is_remembered)
    assert ort.InferenceSession(model).why_plain == COMING
    await_beside(beside)
    assert len(beside()) == 1
    slow()
    await_entry(cache)


def test_program_says_for_all_its_sessions_when_they_map_a_new_model(
    model: Path, cache: Cache, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    text = "import sys, onnxruntime\nprint(onnxruntime.InferenceSession(sys.argv[1]).prepared)\n"
    program.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mcinfer.ort", "--prepare", "wait", str(program), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    (info,) = cache.entries()
    assert done.stdout.split() == [info.key]


# Pools.


def test_pool_opens_plain_and_its_next_workers_map_the_model(model: Path, cache: Cache) -> None:
    with Master(model, 2) as master:
        plain = np.array(master.predict(feed())["y"])
        await_entry(cache)
        (info,) = cache.entries()
        weights = cache.folder / info.key / "weights.bin"
        assert not any(maps(pid, weights) for pid in pids(master))
        master.restart_workers()
        assert all(maps(pid, weights) for pid in pids(master))
        np.testing.assert_array_equal(master.predict(feed())["y"], plain)


def test_pool_whose_copies_would_be_large_waits(
    model: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcinfer.model_cache._MOST_COPIED_BYTES", 1 << 20)
    with Master(model, 2) as master:
        (info,) = cache.entries()
        assert all(maps(pid, cache.folder / info.key / "weights.bin") for pid in pids(master))


def test_next_master_in_this_process_maps_what_the_first_had_prepared(
    model: Path, cache: Cache
) -> None:
    with Master(model, "inline") as master:
        plain = np.array(master.predict(feed())["y"])
        await_entry(cache)
        (info,) = cache.entries()
        assert not is_mapped(info.key)
    with Master(model, "inline") as master:
        assert is_mapped(info.key)
        np.testing.assert_array_equal(master.predict(feed())["y"], plain)


# Going over.


def switched(session: Any) -> None:
    await_beside(lambda: session.prepared)


def test_switch_under_eight_threads_gives_equal_bits_and_frees_the_plain_session(
    model: Path, cache: Cache
) -> None:
    session = ort.InferenceSession(model, providers=CPU, prepare="switch")
    before, expected = ref(session._sess), session.run(None, feed())[0]
    over = threading.Event()

    def runs() -> int:
        count = 0
        while not over.is_set():
            np.testing.assert_array_equal(session.run(None, feed())[0], expected)
            count += 1
        return count

    with ThreadPoolExecutor(8) as threads:
        counts = [threads.submit(runs) for _ in range(8)]
        try:
            switched(session)
            await_beside(lambda: before() is None)
        finally:
            over.set()
        assert all(count.result() for count in counts)
    assert is_mapped(session.prepared)
    assert not session.why_plain
    assert [one.name for one in session.get_inputs()] == ["x"]
    assert session.get_providers() == CPU
    await_entry(cache)


def test_what_was_taken_before_a_switch_stays_valid(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    session = ort.InferenceSession(model, providers=CPU, prepare="switch")
    before, expected = ref(session._sess), session.run(None, feed())[0]
    binding, inputs = session.io_binding(), session.get_inputs()
    binding.bind_cpu_input("x", feed()["x"])
    binding.bind_output("y", "cpu")
    slow()
    switched(session)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], expected)
    assert [one.name for one in inputs] == ["x"]
    own = session.io_binding()
    own.bind_cpu_input("x", feed()["x"])
    own.bind_output("y", "cpu")
    session.run_with_iobinding(own)
    np.testing.assert_array_equal(own.copy_outputs_to_cpu()[0], expected)
    foreign = onnxruntime.InferenceSession(model, providers=CPU).io_binding()
    with pytest.raises(ValueError, match="session that created it"):
        session.run_with_iobinding(foreign)
    del binding, inputs
    await_beside(lambda: before() is None)
    await_entry(cache)


def test_run_async_of_before_a_switch_ends_on_the_plain_session(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    session = ort.InferenceSession(model, providers=CPU, prepare="switch")
    before, expected = ref(session._sess), session.run(None, feed())[0]
    answers: list[Any] = []

    def answered(results: Any, _: Any, error: str) -> None:
        """In a thread of the plain native session, which has to end before that is destroyed."""
        switched(session)
        answers.append((results[0], error, before() is not None))

    session.run_async(None, feed(), answered, None)
    slow()
    await_beside(lambda: answers)
    ((result, error, was_there),) = answers
    assert not error
    assert was_there
    np.testing.assert_array_equal(result, expected)
    await_beside(lambda: before() is None)
    await_entry(cache)


def test_session_that_gave_values_of_its_own_or_was_closed_does_not_switch(
    model: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    giving, closed, anew = (
        ort.InferenceSession(model, providers=CPU, prepare="switch") for _ in range(3)
    )
    value = giving.create_ortvalue_from_shape_and_type([3, 2100], np.float32, "cpu")
    closed.close()
    slow()
    await_entry(cache)
    anew.set_providers(CPU)
    assert anew.prepared
    await_beside(lambda: not waits("mcinfer-switch"))
    assert not giving.prepared
    assert giving.run(None, {"x": value})[0].shape == (3, 2100)
    assert not closed.prepared


def test_session_does_not_switch_to_another_model_at_its_path(
    tmp_path: Path, cache: Cache, slow: Callable[[], None]
) -> None:
    path = write_model(tmp_path / "model.onnx", 0.5)
    session = ort.InferenceSession(path, providers=CPU, prepare="switch")
    expected = session.run(None, feed())[0]
    write_model(tmp_path / "other.onnx", 50.0).replace(path)
    slow()
    other = ort.InferenceSession(path, providers=CPU, prepare="wait")
    assert other.prepared
    await_beside(lambda: "have changed" in session.why_plain)
    np.testing.assert_array_equal(session.run(None, feed())[0], expected)
    await_entry(cache)


def test_process_that_is_forked_maps_what_its_parent_had_plain(model: Path, cache: Cache) -> None:
    session = ort.InferenceSession(model, providers=CPU)
    expected = session.run(None, feed())[0]
    await_entry(cache)
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            equal = np.array_equal(session.run(None, feed())[0], expected)
            status = 0 if equal and is_mapped(session.prepared) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not session.prepared


# Disks that are full, and caches that cannot be written.


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a size as the user's cache; or again, with other options."""
    if os.geteuid() != 0:
        pytest.skip("root alone mounts")
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", place], check=False
        )
        if done.returncode:
            pytest.skip("this container may not mount")
        monkeypatch.setenv("MCINFER_CACHE", str(place))
        return place

    yield mount
    subprocess.run(["umount", "--lazy", place], check=False)


def test_full_disk_leaves_a_session_plain_and_no_half_of_an_entry(
    model: Path, disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = disk("size=24m")  # the model has 18 MB, and needs twice that
    session = ort.InferenceSession(model, providers=CPU)
    assert session.why_plain == COMING
    await_beside(lambda: caplog.records and not beside())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "there is no room in" in record.getMessage() or "bytes are free" in record.getMessage()
    assert session.run(None, feed())[0].any()
    assert [*place.glob("tmp-*")] == []
    assert Cache.default().entries() == []
    assert Cache.default().limit_bytes < (24 << 20) // 4 + 1


def test_read_only_cache_serves_what_it_has_and_says_once_why_a_model_is_plain(
    model: Path, tmp_path: Path, disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = disk("size=200m")
    key = ort.InferenceSession(model, providers=CPU, prepare="wait").prepared
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    session = ort.InferenceSession(model, providers=CPU)
    assert session.prepared == key
    assert is_mapped(key)
    with caplog.at_level(logging.INFO, "mcinfer"):
        other = ort.InferenceSession(write_model(tmp_path / "other.onnx", 2.0), providers=CPU)
    assert not other.prepared
    assert "Read-only file system" in other.why_plain
    (record,) = caplog.records
    assert other.why_plain in record.getMessage()
    assert not beside()
