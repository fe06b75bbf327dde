"""Programs that fork: the child has no part in its parent's master, and does it no harm."""

import pytest

from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE, Program, run

ANSWER = "48.0"
"""The sum of the usual model's outputs for X: 16 times 2 * 1 + 1."""


@pytest.mark.parametrize(
    "ending", ["os._exit(0)", "sys.exit(0)", "os.execv('/bin/true', ['true'])"]
)
def test_forked_child_is_refused_and_its_end_is_no_matter(
    fake_model: FakeModel, ending: str
) -> None:
    text = f"""
master = mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never").start()
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
        ended = program.wait(timeout=5.0)
        assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_forked_child_that_leaves_the_with_statement_closes_nothing(
    fake_model: FakeModel,
) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never") as master:
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(master.predict(X)["y"].sum())
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out, ended.err) == (0, ANSWER + "\n", "")


def test_forked_child_may_have_a_master_of_its_own(fake_model: FakeModel) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    child = os.fork()
    if not child:
        with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as own:
            say(own.predict(X)["y"].sum())
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(master.predict(X)["y"].sum())
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out, ended.err) == (0, f"{ANSWER}\n{ANSWER}\n", "")


def test_forked_child_does_not_wait_for_an_answer_that_cannot_come(fake_model: FakeModel) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    future = master.submit({"x": np.full((1, 4), -1, np.float32)})
    child = os.fork()
    if not child:
        signal.alarm(5)
        try:
            future.result()
        except mcinfer.ClosedError as exc:
            say("forked" in str(exc))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(future.result()["y"].sum())
"""
    ended = run(text, fake_model(when={"-1": "sleep:0.3"}))
    assert (ended.status, ended.out, ended.err) == (0, "True\n-4.0\n", "")


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


def test_forked_child_closes_while_its_parent_copies(fake_model: FakeModel) -> None:
    text = """
with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
    with master._planner._copier._pool._shutdown_lock:  # as a thread that begins a copy
        child = os.fork()
        if not child:
            signal.alarm(5)
            master.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(master.predict(X)["y"].sum())
"""
    ended = run(text, fake_model())
    assert (ended.status, ended.out, ended.err) == (0, ANSWER + "\n", "")
