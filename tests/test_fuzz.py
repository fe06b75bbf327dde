"""A short run of the fuzzer (tests/fuzz), and what it once found; the long form is a program."""

import random
from pathlib import Path

import pytest

from mcinfer.protocol import MESSAGES, decode
from tests.fuzz.fuzzing import TARGETS, fuzz, opened
from tests.fuzz.mutating import CORPUS, corpus

INPUTS = {"master": 1_000, "worker": 1_500}


@pytest.mark.parametrize("target", [*TARGETS])
def test_changed_messages_are_taken_or_refused(target: str) -> None:
    outcomes = fuzz(target, range(INPUTS[target]), seed=1)
    # Both must be frequent, or the inputs are too wild or too tame to show anything.
    assert INPUTS[target] / 20 < outcomes["refused"] < INPUTS[target] * 0.98
    if target == "master":
        assert outcomes["answered"] > INPUTS[target] / 20


@pytest.mark.parametrize("name", [*TARGETS])
def test_messages_of_the_corpus_are_taken_or_refused(name: str) -> None:
    with opened(name) as target:
        for data in corpus():
            for state in range(8):
                target.prepare(random.Random(state))  # noqa: S311 no secret
                target.take(data)


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
