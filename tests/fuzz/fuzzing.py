"""The loop: make an input, give it to a target under a time limit, count what came of it."""

import gc
import os
import random
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.master_target import MasterTarget
from tests.fuzz.mutating import corpus, mutate
from tests.fuzz.target import Target, Violation
from tests.fuzz.targets import DecodeTarget, WorkerTarget

TARGETS: dict[str, Callable[[Path], Target]] = {
    "decode": lambda _: DecodeTarget(),
    "master": lambda _: MasterTarget(),
    "worker": WorkerTarget,
}

_WARM_UP = 500
_PROGRESS = 100_000
_MAX_DESCRIPTORS_MORE = 4
_MAX_BYTES = 32 << 20
_MAX_TIMES = 100
"""By which one input may raise the most memory that there was: so much, and so many times its own bytes."""


class Finding(Exception):  # noqa: N818 what it is called
    """An input that broke a promise; the cause is what it did.

    Attributes:
        number: Which input.
        data: It.
        command: Does it again.
    """

    def __init__(self, target: str, seed: int, number: int, data: bytes, cause: object) -> None:
        super().__init__(f"{target}: input {number}: {cause!r}")
        self.number = number
        self.data = data
        self.command = f"python -m tests.fuzz --target {target} --seed {seed} --only {number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of many inputs."""

    target: str
    seed: int
    inputs: int
    seconds: float
    outcomes: Counter[str]
    growth_bytes: int

    def __str__(self) -> str:
        outcomes = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common())
        return (
            f"{self.target}: {self.inputs} inputs (seed {self.seed}) in {self.seconds:.1f} s, "
            f"{self.inputs / self.seconds:.0f} per second; peak memory grew by "
            f"{self.growth_bytes / 1e6:.1f} MB; {outcomes}"
        )


def fuzz(
    target: str,
    numbers: Sequence[int],
    seed: int,
    *,
    time_limit: float | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Result:
    """Give a target so many inputs, each of which the seed and its number alone decide.

    Args:
        target: One of `TARGETS`.
        numbers: Of the inputs.
        seed: Of all of them.
        time_limit: Seconds for each; None leaves the process's timer alone.
        tell: Gets a line of progress now and then.

    Raises:
        Finding: A promise was broken.
    """
    originals, outcomes = corpus(), Counter[str]()
    with _opened(target) as taker:
        start, peak, descriptors = time.monotonic(), _peak_bytes(), len(os.listdir("/proc/self/fd"))
        for done, number in enumerate(numbers):
            rng = _random(seed, number)
            live = taker.prepare(rng)
            pool = live if live and rng.random() < 0.8 else originals
            data = rng.choice(pool)
            if pool is originals or rng.random() < 0.5:
                data = mutate(rng, data, originals)
            before = _peak_bytes()
            try:
                with _limited(time_limit):
                    outcomes[taker.take(data)] += 1
            except Exception as exc:
                raise Finding(target, seed, number, data, exc) from exc
            taken = _peak_bytes() - before
            if taken > _MAX_BYTES + _MAX_TIMES * len(data):
                much = Violation(f"{taken} bytes were taken for {len(data)}")
                raise Finding(target, seed, number, data, much)
            if done == _WARM_UP:
                gc.collect()
                peak, descriptors = _peak_bytes(), len(os.listdir("/proc/self/fd"))
            if done % _PROGRESS == _PROGRESS - 1:
                tell(f"{target}: {done + 1} inputs, {time.monotonic() - start:.0f} s\n")
        gc.collect()
        if len(os.listdir("/proc/self/fd")) > descriptors + _MAX_DESCRIPTORS_MORE:
            left = len(os.listdir("/proc/self/fd")) - descriptors
            raise Violation(f"{target}: {left} descriptors were left open")
        return Result(
            target=target,
            seed=seed,
            inputs=len(numbers),
            seconds=time.monotonic() - start,
            outcomes=outcomes,
            growth_bytes=_peak_bytes() - peak,
        )


def replay(target: str, inputs: Sequence[bytes], seed: int = 0) -> Counter[str]:
    """Give a target these inputs as they are, each in several of its states."""
    outcomes = Counter[str]()
    with _opened(target) as taker:
        for data in inputs:
            for number in range(8):
                taker.prepare(_random(seed, number))
                outcomes[taker.take(data)] += 1
    return outcomes


@contextmanager
def _opened(target: str) -> Iterator[Target]:
    # Not pytest's: the path of a socket may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mcf-") as folder:
        taker = TARGETS[target](Path(folder))
        try:
            yield taker
        finally:
            taker.close()


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Raise in what takes longer."""
    if seconds is None:
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise Violation(f"not done within {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _random(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed}/{number}")  # noqa: S311 no secret


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
