"""A short run of the fuzzer (tests/fuzz), and what it once found; the long form is a program."""

from pathlib import Path

import pytest

from mcinfer.protocol import MESSAGES, decode
from tests.fuzz.fuzzing import TARGETS, fuzz, replay
from tests.fuzz.mutating import CORPUS, corpus

INPUTS = {"decode": 4_000, "master": 1_000, "worker": 1_500}
MAX_GROWTH_BYTES = 64 << 20


@pytest.mark.parametrize("target", [*TARGETS])
def test_changed_messages_are_taken_or_refused(target: str) -> None:
    result = fuzz(target, range(INPUTS[target]), seed=1)
    assert sum(result.outcomes.values()) == INPUTS[target]
    assert result.growth_bytes < MAX_GROWTH_BYTES
    # Both ways must be gone, or the inputs are too wild or too tame to show anything.
    assert INPUTS[target] / 20 < result.outcomes["refused"] < INPUTS[target] * 0.98
    if target == "master":
        assert result.outcomes["answered"] > INPUTS[target] / 20


@pytest.mark.parametrize("target", [*TARGETS])
def test_messages_of_the_corpus_are_taken_or_refused(target: str) -> None:
    outcomes = replay(target, corpus())
    assert sum(outcomes.values()) == 8 * len(corpus())


@pytest.mark.parametrize(
    "path",
    [path for path in CORPUS.glob("*.msgpack") if path.name[:2] != "x_"],
    ids=lambda path: path.stem,
)
def test_message_of_the_corpus_is_one_of_the_protocol(path: Path) -> None:
    assert type(decode(path.read_bytes())).__name__.lower() == path.stem.partition("_")[0]


def test_corpus_has_every_message() -> None:
    names = {path.stem for path in CORPUS.glob("*.msgpack")}
    assert {message.__name__.lower() for message in MESSAGES.values()} <= names
