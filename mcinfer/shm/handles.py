"""The numbers that stand for shared weights: what is in one, and what it tells when nobody answers to it.

::

    bit 62        41 40      25 24       16 15        10 9          0
        | owner's pid |  random  | start time | namespace | check     |

Nothing in a handle is secret: the kernel says who asks, and that protects. Below 2**63, since MindSpore
Lite's handles travel through signed 64-bit integers.

The check makes the whole number leave 1 when divided by 1021, a prime, in the way of ISO/IEC 7064: a
handle with one digit wrong, or two neighbours swapped, is none, in decimal as in binary.
"""

import os
import secrets
from dataclasses import dataclass

from mcinfer.process import pid_namespace, start_time

_PID_BITS = 22  # PID_MAX_LIMIT of Linux is 2**22
_RANDOM_BITS = 16
_START_BITS = 9
_NAMESPACE_BITS = 6
_CHECK_BITS = 10
_PRIME = 1021

MAX_HANDLE = (1 << 63) - 1


def _low(value: int, bits: int) -> int:
    return value & ((1 << bits) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The parts of a handle.

    Attributes:
        pid: Of the owner, in its pid namespace.
        random: What tells the handles of one owner apart; 16 bits.
        start: The low 9 bits of the owner's start time.
        namespace: The low 6 bits of the number of its pid namespace.
    """

    pid: int
    random: int
    start: int
    namespace: int

    @classmethod
    def new(cls) -> "Handle":
        """One for this process."""
        pid = os.getpid()
        return cls(
            pid=pid,
            random=secrets.randbits(_RANDOM_BITS),
            # None where /proc is that of another pid namespace.
            start=_low(start_time(pid) or 0, _START_BITS),
            namespace=_low(pid_namespace(), _NAMESPACE_BITS),
        )

    @classmethod
    def parse(cls, number: int) -> "Handle | None":
        """The parts of a number; None if it never was a handle."""
        check = _low(number, _CHECK_BITS)
        if not 0 < number <= MAX_HANDLE or number % _PRIME != 1 or check >= _PRIME:
            return None
        rest, namespace = divmod(number >> _CHECK_BITS, 1 << _NAMESPACE_BITS)
        rest, start = divmod(rest, 1 << _START_BITS)
        pid, random = divmod(rest, 1 << _RANDOM_BITS)
        return cls(pid=pid, random=random, start=start, namespace=namespace) if pid else None

    @property
    def number(self) -> int:
        """What users pass on."""
        parts = self.pid
        parts = parts << _RANDOM_BITS | self.random
        parts = parts << _START_BITS | self.start
        parts = parts << _NAMESPACE_BITS | self.namespace
        parts <<= _CHECK_BITS
        return parts + (1 - parts) % _PRIME

    @property
    def address(self) -> str:
        """The abstract address (unix(7)) that the owner listens on."""
        return f"\0mcinfer-weights-{self.number:016x}"

    def is_of_this_namespace(self) -> bool:
        """Whether the owner's pid means the same process here."""
        return self.namespace == _low(pid_namespace(), _NAMESPACE_BITS)

    def is_started(self, start: int | None) -> bool:
        """Whether a process of the owner's pid that started then can be the owner; None is none."""
        return start is not None and self.start == _low(start, _START_BITS)
