"""Signals at any moment, in a program that uses a master: only the call that was interrupted is lost."""

import pytest

from mcinfer.config import INLINE
from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE, Program

SIGNALS = 80

# In a process of its own: a signal that comes late must not end the test run. The handler is armed by each
# call, and once only, so that what it raises comes in the call and nowhere else.
INTERRUPTED = """
import random, threading

number, does, seed, count = getattr(signal, sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
enough, armed, came, asked = threading.Event(), False, 0, 0

class Interrupted(Exception):
    pass

def handler(*_):
    global armed, came, asked
    if not armed:
        return
    armed = False
    came += 1
    if does == "raise":
        raise Interrupted
    statistics = master.statistics()
    assert statistics.accepted >= statistics.succeeded
    predict(-1.0)
    asked += 1

def send():
    chance = random.Random(seed)
    for _ in range(count):
        time.sleep(chance.uniform(0.0005, 0.004))
        os.kill(os.getpid(), number)
    enough.set()

def predict(value, rows=2):
    x = np.full((rows, 4), value, np.float32)
    assert np.all(master.predict([x])["y"] == 2 * value + 1), "a wrong answer"

def result(value):
    x = np.full((2, 4), value, np.float32)
    assert np.all(master.submit([x]).result()["y"] == 2 * value + 1), "a wrong answer"

def done(value):
    future = master.submit([np.full((2, 4), value, np.float32)])
    while not future.done():
        master.health()

def other():
    while not stop.is_set():
        try:
            predict(7, 3)
        except BaseException as exc:
            failures.append(repr(exc))
            return

# A shard that an interrupt had lost would show as a time-out, a lost free list as full memory.
timeouts = mcinfer.Timeouts(predict=40.0)
failures, stop, interrupted, answered = [], threading.Event(), 0, 0
devices = sys.argv[6] if sys.argv[6] == "inline" else 1
with mcinfer.Master(sys.argv[1], devices, engine="fake", verify="never", timeouts=timeouts) as master:
    before = [worker.pid for worker in master.statistics().workers]
    signal.signal(number, handler)
    others, sender = threading.Thread(target=other), threading.Thread(target=send)
    others.start()
    sender.start()
    calls = [predict, result, done]
    while not enough.is_set():
        try:
            armed = True
            calls[answered % 3](answered)
            armed = False
        except Interrupted:
            interrupted += 1
        answered += 1
    sender.join()
    stop.set()
    others.join()
    assert not failures, failures
    assert came > count // 10, came
    assert (interrupted, asked) == ((came, 0) if does == "raise" else (0, came))
    for _ in range(20):
        predict(1)
    deadline = time.monotonic() + 40
    while (s := master.statistics()).in_flight or s.queued_shards or s.memory_used_bytes > 4096:
        assert time.monotonic() < deadline, s
        time.sleep(0.01)
    assert [worker.pid for worker in s.workers] == before
say("whole")
"""


@pytest.mark.parametrize(
    ("number", "does"),
    [
        ("SIGINT", "raise"),
        ("SIGRTMIN", "ask"),
    ],
)
@pytest.mark.parametrize("devices", [1, INLINE])
def test_signals_leave_a_whole_pool(
    fake_model: FakeModel, number: str, does: str, devices: object
) -> None:
    arguments = (fake_model(), number, does, 1, SIGNALS, devices)
    with Program(PREAMBLE + INTERRUPTED, *arguments) as program:
        ended = program.wait()
    assert (ended.status, ended.out, ended.err) == (0, "whole\n", "")


def test_callback_that_does_not_return_stops_nothing_else(fake_model: FakeModel) -> None:
    text = """
import threading
never = threading.Event()
with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never") as master:
    master.submit(X).add_done_callback(lambda _: never.wait())
    assert np.all(master.predict(X)["y"] == 3)
    assert np.all(master.submit(X).result(10.0)["y"] == 3)
    try:
        master.predict({"x": np.full((1, 4), -1, np.float32)}, timeout=0.2)
    except mcinfer.PredictTimeoutError:
        say("timed out")
    os.kill(master.statistics().workers[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 40
    while master.statistics().workers[0].restarts != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    master.wait_ready(20.0)
say("closed")
"""
    with Program(PREAMBLE + text, fake_model(when={"-1": "sleep:5"})) as program:
        ended = program.wait()
    assert (ended.status, ended.out) == (0, "timed out\nclosed\n"), ended


def test_close_in_a_finalizer_of_a_cycle_writes_to_no_file_of_the_user(
    fake_model: FakeModel,
) -> None:
    text = """
import gc
class Holder:
    def __init__(self):
        self.me = self
        self.master = mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never").start()
        self.master.close()
    def __del__(self):
        files.append(open(os.path.join(folder, "f"), "w+b"))  # takes the number of what was closed before
        self.master.close()
folder, files = sys.argv[2], []
for _ in range(2):
    Holder()
    gc.collect()
say(len(files), [os.fstat(file.fileno()).st_size for file in files])
"""
    model = fake_model()
    with Program(PREAMBLE + text, model, model.parent) as program:
        ended = program.wait()
    assert (ended.status, ended.out) == (0, "2 [0, 0]\n"), ended
