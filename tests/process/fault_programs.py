"""Programs with a pool, which signals end at a moment of the pool's life."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import onnx
import pytest
from onnx.parser import parse_model

from mcinfer.config import TransportKind
from tests.process.fault_pools import CLOSE, hold_imports
from tests.process.models import AFFINE, FakeModel
from tests.process.scripts import PREAMBLE, Ended, Program
from tests.process.waiting import HeldPipe, all_gone, is_alive, wait_until

_SERVICE = """
import threading
import msgpack
model, moment, late, handles, transport = sys.argv[1:6]
if handles:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if late:
    sys.path.insert(0, late)
master = mcinfer.Master(
    model, 2, engine="fake", verify="never", timeouts=mcinfer.Timeouts(close=CLOSE),
    restart=mcinfer.RestartPolicy(budget=1000, backoff=0.0), transport=transport,
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
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, most[1]))
began = time.monotonic()
try:
    mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never", transport=sys.argv[2]).start()
except mcinfer.McinferError as exc:
    say(time.monotonic() - began)
    say(f"{type(exc).__name__}: {exc}")
resource.setrlimit(resource.RLIMIT_NOFILE, most)
with mcinfer.Master(sys.argv[1], 2, engine="fake", verify="never", transport=sys.argv[2]) as master:
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


class Service:
    """A program at a moment of its pool's life; a context manager that leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        fake_model: FakeModel,
        moment: str,
        *,
        handles: bool,
        transport: TransportKind,
    ) -> None:
        """Start it and wait for that moment.

        Args:
            folder: For this program alone.
            fake_model: The fixture.
            moment: One of the matrix's.
            handles: The program has a handler of SIGTERM that calls `sys.exit`.
            transport: Of its pool.
        """
        name = {"building": "build0", "busy": "run0", "exiting": "run0"}.get(moment)
        pipe = HeldPipe(folder / name) if name else None
        late = ""
        if moment == "importing":
            late, pipe = hold_imports(folder)
        closing = HeldPipe(folder / "close")
        self._pipes = [pipe, closing] if pipe else [closing]
        model = fake_model(build=f"told:{folder}/build", run=f"told:{folder}/run")
        arguments = (model, moment, late, "yes" if handles else "", transport)
        self.program = Program(PREAMBLE + _SERVICE, *arguments)
        try:
            self._reach(moment, pipe, closing, folder)
        except BaseException:
            self.__exit__()  # the with statement will not: it has no object yet
            raise

    def _reach(self, moment: str, pipe: HeldPipe | None, closing: HeldPipe, folder: Path) -> None:
        self.workers = self.program.pids()
        if moment in ("idle", "busy", "exiting", "being restarted"):
            assert self.program.line() == "started"
        if moment == "being restarted":
            pipe = HeldPipe(folder / "build0")
            self._pipes.append(pipe)
            os.kill(self.workers[0], signal.SIGKILL)
        if pipe is not None:
            pipe.wait()
        if moment == "being restarted":
            self.workers += [pid for pid in _children(self.program.pid) if pid not in self.workers]
        if moment == "exiting":
            closing.wait()
            closing.tell("")
            wait_until(lambda: not is_alive(self.workers[1]))

    def end(self, *signals: signal.Signals) -> tuple[float, Ended]:
        """Send these signals, a second one once a worker is gone, and wait until all processes are gone.

        Returns:
            The seconds from the first signal, and how the program ended.
        """
        memory = {*_memfds(self.program.pid)}
        began = monotonic()
        for count, number in enumerate(signals):
            if count:
                wait_until(lambda: not all(map(is_alive, self.workers)))
            with suppress(ProcessLookupError):
                if number == signal.SIGINT:
                    self.program.interrupt()
                else:
                    self.program.send_signal(number)
        wait_until(lambda: all_gone([self.program.pid, *self.workers]))
        seconds = monotonic() - began
        ended = self.program.wait()
        assert ended.out == ""
        left = [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if memory & {*_memfds(pid)}
        ]
        assert not left, f"{left} hold memory of {self.program.pid}"
        assert os.listdir(os.environ["XDG_RUNTIME_DIR"]) == []
        return seconds, ended

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        self.program.__exit__()


def _memfds(pid: int) -> Iterator[int]:
    """The inodes of the memory files that a process has open; none if they may not be read."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:" in os.readlink(entry):
                yield entry.stat().st_ino


def _children(pid: int) -> list[int]:
    text = ""
    for task in Path(f"/proc/{pid}/task").iterdir():
        text += (task / "children").read_text(encoding="ascii") + " "
    return [int(word) for word in text.split()]


def start_without_descriptors(fake_model: FakeModel, transport: TransportKind) -> tuple[float, str]:
    """Start with too few descriptors, then with all of them, which must serve.

    Returns:
        The seconds of the first start, and the type and the text of its error.
    """
    with Program(PREAMBLE + _WITHOUT_DESCRIPTORS, fake_model(), transport) as program:
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
    assert ended.err.startswith(str(model)), ended.err
    assert ended.err.count("\n") == 1, ended.err
    return float(seconds)
