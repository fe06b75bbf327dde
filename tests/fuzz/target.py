"""What the fuzzer drives: each target takes one message, and says what came of it.

A target raises `Violation`, or anything but what handling may raise, when a promise is broken.
"""

import random
from abc import ABC, abstractmethod


class Violation(Exception):  # noqa: N818 what it is called
    """A promise was broken."""


class Target(ABC):
    """Something that takes messages."""

    @abstractmethod
    def prepare(self, rng: random.Random) -> list[bytes]:
        """Get ready for one message; such as are right for the state that this leads to."""

    @abstractmethod
    def take(self, data: bytes) -> str:
        """Take a message; in a word, what came of it.

        Raises:
            Violation: A promise was broken.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds."""
