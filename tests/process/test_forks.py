"""Programs that fork: the child has no part in its parent's master, and does it no harm."""

import os
import signal
import subprocess
import sys

import pytest

from mcinfer.config import INLINE
from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE, ROOT, Program, run

ANSWER = "48.0"
"""The sum of the usual model's outputs for X: 16 times 2 * 1 + 1."""


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os.execv('/bin/true', ['true'])"])
def test_forked_child_is_refused_and_its_end_is_no_matter(
    fake_model: FakeModel, ending: str
) -> None:
    text = f"""
master = mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never").start()
held = master.allocate({{"x": (2, 4)}})
answer = master.predict(X)
say_pids(master)
child = os.fork()
if not child:
    for use in (
        lambda: master.predict(X),
        lambda: master.submit(X),
        lambda: master.allocate({{"x": (1, 4)}}),
        lambda: master.statistics(),
    ):
        try:
            use()
        except mcinfer.ClosedError as exc:
            say("forked" in str(exc))
    master.close()
    del held, answer
    {ending}
assert os.waitpid(child, 0)[1] == 0
say_pids(master)
say(master.predict(X)["y"].sum())
master.close()
"""
    with Program(PREAMBLE + text, fake_model()) as program:
        workers = program.pids()
        assert [program.line() for _ in range(4)] == ["True"] * 4
        assert program.pids() == workers
        assert program.line() == ANSWER
        ended = program.wait()
        assert (ended.status, ended.out, ended.err) == (0, "", "")


@pytest.mark.parametrize("devices", [1, INLINE])
def test_forked_child_may_have_a_master_of_its_own_and_waits_for_no_answer_of_its_parents(
    fake_model: FakeModel, devices: object
) -> None:
    text = """
import asyncio, concurrent.futures
events = asyncio.new_event_loop()
devices = "inline" if sys.argv[2] == "inline" else 1
with mcinfer.Master(sys.argv[1], devices, engine="fake", verify="never") as master:
    done = master.submit(X)
    done.result()
    future = master.submit({"x": np.full((1, 4), -1, np.float32)})
    child = os.fork()
    if not child:
        signal.alarm(40)
        for use in (
            future.result,
            future.exception,
            lambda: concurrent.futures.wait([done, future]),
            lambda: [*concurrent.futures.as_completed([done, future])],
            lambda: future.add_done_callback(print),
            lambda: asyncio.wrap_future(future, loop=events),
        ):
            try:
                use()
            except mcinfer.ClosedError as exc:
                say("forked" in str(exc))
        say(concurrent.futures.wait([done]).done == {done}, future.done())
        with mcinfer.Master(sys.argv[1], devices, engine="fake", verify="never") as own:
            say(own.predict(X)["y"].sum())
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(future.result()["y"].sum())
    child = os.fork()
    if not child:
        signal.alarm(40)
        master.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(master.predict(X)["y"].sum())
events.close()
"""
    ended = run(text, fake_model(when={"-1": "sleep:0.3"}), devices)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.split() == ["True"] * 7 + ["False", ANSWER, "-4.0", ANSWER]


def test_forked_child_makes_none_of_the_calls_that_its_parent_has_to_make(
    fake_model: FakeModel,
) -> None:
    text = """
import threading
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    enough = threading.Event()
    master.submit(X).add_done_callback(lambda _: enough.wait())
    future = master.submit(X)
    future.add_done_callback(lambda _: say("parent's", os.getpid() == parent))
    parent = os.getpid()
    future.result()
    other = master.submit(X)
    other.result()
    child = os.fork()
    if not child:
        other.add_done_callback(lambda _: say("child's", os.getpid() != parent))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    enough.set()
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines() == ["child's True", "parent's True"]


# Results, and arrays of `allocate`, that are held at a fork.


@pytest.mark.parametrize("count", [1, 40_000])
def test_what_a_forked_child_holds_is_its_own(fake_model: FakeModel, count: int) -> None:
    """Neither what the parent does with the memory shows in the child, nor the other way round."""
    text = f"""
def answer(number):
    return master.predict({{"x": np.full(({count}, 4), number, np.float32)}})["y"]

def children_word(child, reading):
    with os.fdopen(reading) as words:
        say(words.read())
    assert os.waitpid(child, 0)[1] == 0

with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never") as master:
    for _ in range(2):
        mine, dropped = answer(1), answer(2)
        array = master.allocate({{"x": ({count}, 4)}})["x"]
        array[:] = 3
        (reading, writing), (waiting, going) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            mine[:] = -1
            os.write(writing, b"written ")
            os.read(waiting, 1)
            right = [np.all(a == n) for a, n in ((mine, -1), (dropped, 5), (array, 3))]
            os.write(writing, str([*map(bool, right)]).encode())
            os._exit(0)
        os.close(writing)
        os.read(reading, 8)
        say(bool(np.all(mine == 3)), bool(np.all(array == 3)))
        mine[:], array[:] = 7, 8
        del dropped
        kept = [answer(10 + number) for number in range(4)]
        assert master.predict({{"x": array}})["y"][0, 0] == 17
        os.write(going, b".")
        children_word(child, reading)
        os.close(waiting), os.close(going)
"""
    ended = run(text, fake_model())
    expected = "True True\n[True, True, True]\n" * 2
    assert (ended.status, ended.out, ended.err) == (0, expected, "")


def test_result_of_a_closed_master_is_the_childs_own(fake_model: FakeModel) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    answer = master.predict(X)["y"]
del master
child = os.fork()
if not child:
    grandchild = os.fork()
    if not grandchild:
        answer[:] = -2
        os._exit(0)
    os.waitpid(grandchild, 0)
    say(answer.sum())
    answer[:] = -1
    os._exit(0)
os.waitpid(child, 0)
say(answer.sum())
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out, ended.err) == (0, f"{ANSWER}\n{ANSWER}\n", "")


def test_child_without_memory_for_its_results_says_so(fake_model: FakeModel) -> None:
    text = """
import resource

os.register_at_fork(after_in_child=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 20,) * 2))
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    answer = master.predict({"x": np.ones((40_000, 4), np.float32)})["y"]
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(master.predict(X)["y"].sum())
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out) == (0, ANSWER + "\n")
    assert "OSError" in ended.err
    assert "stay those of the process that it was forked from" in ended.err


def test_parent_does_not_wait_for_a_child_that_is_killed_at_its_start(
    fake_model: FakeModel,
) -> None:
    text = """
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGKILL))
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    answer = master.predict(X)["y"]
    child = os.fork()
    say(os.waitpid(child, 0)[1])
    say(master.predict(X)["y"].sum(), answer.sum())
"""
    ended = run(text, fake_model())
    expected = f"{signal.SIGKILL:d}\n{ANSWER} {ANSWER}\n"
    assert (ended.status, ended.out, ended.err) == (0, expected, "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not warn")
@pytest.mark.parametrize("devices", [0, 1])
def test_python_warns_of_a_fork_beside_a_master_and_not_beside_a_session_of_one_thread(
    devices: int,
) -> None:
    text = """
import os, sys
import mcinfer, mcinfer.ort
from mcinfer.examples import encoder

options = mcinfer.ort.SessionOptions()
options.intra_op_num_threads = 1
session = mcinfer.ort.InferenceSession(encoder(), options, providers=["CPUExecutionProvider"])
master = mcinfer.Master(encoder(), devices=1).start() if sys.argv[1] == "1" else None
if not os.fork():
    os._exit(0)
os.wait()
"""
    command = [sys.executable, "-W", "default", "-c", text, str(devices)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=50, check=True)
    assert ("use of fork() may lead to deadlocks" in done.stderr) == bool(devices), done.stderr
