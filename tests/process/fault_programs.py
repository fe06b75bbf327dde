"""Programs with a pool, which signals end at a moment of the pool's life."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

import onnx
import psutil
import pytest
from onnx.parser import parse_model

from tests.process.fault_pools import CLOSE, hold_imports
from tests.process.models import AFFINE, FakeModel
from tests.process.scripts import PREAMBLE, Ended, Program
from tests.process.waiting import HeldPipe, all_gone, is_alive, wait_until

_SERVICE = """
import threading
import msgpack
model, moment, late, handles = sys.argv[1:5]
if handles:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if late:
    sys.path.insert(0, late)
master = mcinfer.Master(
    model, 2, engine="fake", verify="never", timeouts=mcinfer.Timeouts(close=CLOSE),
    restart=mcinfer.RestartPolicy(budget=1000, backoff=0.0),
)

def tell():
    while None in [worker.pid for worker in master.statistics().workers]:
        time.sleep(0.001)
    say_pids(master)

threading.Thread(target=tell, daemon=True).start()
with master:
    say("started")
    if moment == "busy":
        master.predict(X)
    if moment == "exiting":
        future = master.submit(X)
        open(os.path.join(os.path.dirname(model), "close")).read()
        master.close()
    while True:
        time.sleep(60)
""".replace("CLOSE", str(CLOSE))
"""A service: it serves until a signal ends it."""


_WITHOUT_DESCRIPTORS = """
import resource
def pool():
    return mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never")
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, most[1]))
began = time.monotonic()
try:
    pool().start()
except mcinfer.McinferError as exc:
    say(time.monotonic() - began)
    say(f"{type(exc).__name__}: {exc}")
resource.setrlimit(resource.RLIMIT_NOFILE, most)
with pool() as master:
    say((master.predict(X)["y"] == 3).all())
"""

_WITH_FULL_DISK = """
model, cache = sys.argv[1:3]
with open(os.path.join(cache, "all"), "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
began = time.monotonic()
options = mcinfer.EngineOptions(prepare="always")
with mcinfer.Master(model, 2, options=options, verify="never") as master:
    say(time.monotonic() - began)
    say((master.predict(X)["y"] == 3).all())
"""

_MOUNT = 'mount -t tmpfs -o size=1m,mode=700 tmpfs "$0" && exec "$@"'


def end_service(
    folder: Path,
    fake_model: FakeModel,
    moment: str,
    *signals: signal.Signals,
    handles: bool,
) -> tuple[float, Ended]:
    """Send signals to a program at a moment of its pool's life; fail if it leaves anything behind.

    The first signal comes at that moment, the second once a worker is gone. If the program `handles` SIGTERM,
    it calls `sys.exit`. Returns the seconds until all processes were gone, and how the program ended.
    """
    with ExitStack() as stack:

        def pipe(name: str) -> HeldPipe:
            made = HeldPipe(folder / name)
            stack.callback(made.close)
            return made

        late, held, closing = "", None, pipe("close")
        if moment == "importing":
            late, held = hold_imports(folder)
            stack.callback(held.close)
        elif moment != "being restarted":
            held = pipe("build0" if moment == "building" else "run0")
        model = fake_model(build=f"told:{folder}/build", run=f"told:{folder}/run")
        arguments = (model, moment, late, "yes" if handles else "")
        program = stack.enter_context(Program(PREAMBLE + _SERVICE, *arguments))
        workers = program.pids()
        if moment in ("busy", "exiting", "being restarted"):
            assert program.line() == "started"
        if moment == "being restarted":
            held = pipe("build0")
            os.kill(workers[0], signal.SIGKILL)
        assert held is not None
        held.wait()
        if moment == "exiting":
            closing.wait()
            closing.tell("")
            wait_until(lambda: not is_alive(workers[1]))
        workers += [child.pid for child in psutil.Process(program.pid).children()]
        memory = {*_memfds(program.pid)}
        began = monotonic()
        for count, number in enumerate(signals):
            if count:
                wait_until(lambda: not all(map(is_alive, workers)))
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    program.interrupt()
                else:
                    program.send_signal(number)
        wait_until(lambda: all_gone([program.pid, *workers]))
        seconds = monotonic() - began
        ended = program.wait()
        assert ended.out == ""
        left = [pid for pid in psutil.pids() if memory & {*_memfds(pid)}]
        assert not left, f"{left} hold memory of {program.pid}"
        assert os.listdir(os.environ["XDG_RUNTIME_DIR"]) == []
        return seconds, ended


def _memfds(pid: int) -> Iterator[int]:
    """The inodes of the memory files that a process has open; none if they may not be read."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:" in os.readlink(entry):
                yield entry.stat().st_ino


def start_without_descriptors(fake_model: FakeModel) -> tuple[float, str]:
    """Start with too few descriptors, then with all, which must serve: the first one's seconds and error."""
    with Program(PREAMBLE + _WITHOUT_DESCRIPTORS, fake_model()) as program:
        seconds, text, right = program.line(), program.line(), program.line()
        ended = program.wait()
        assert (ended.status, right) == (0, "True"), ended
        return float(seconds), text


def start_with_full_disk(folder: Path) -> float:
    """Start a pool whose cache has no room, in seconds: it must serve, and warn once.

    Skips the test if no file system may be mounted.
    """
    model, cache = folder / "model.onnx", folder / "cache"
    onnx.save(parse_model(AFFINE), model)
    cache.mkdir(mode=0o700)
    namespace = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-Urm")
    command = (*namespace, "sh", "-c", _MOUNT, str(cache), sys.executable)
    env = {"MCINFER_CACHE": str(cache)}
    with Program(PREAMBLE + _WITH_FULL_DISK, model, cache, env=env, command=command) as program:
        seconds, right = program.line(), program.line()
        ended = program.wait()
    if not seconds and ended.err.startswith(("unshare:", "mount:")):
        pytest.skip(f"no file system may be mounted here: {ended.err.strip()}")
    assert (ended.status, right) == (0, "True"), ended
    assert f"{model.name} on cpu:0, cpu:1: each process has a copy" in ended.err
    assert ended.err.count("\n") == 1, ended.err
    return float(seconds)
