"""Real programs below ``python -m mcinfer ort`` answer as they do alone: inline, and with workers.

`make test-programs` runs them, by the file programs.ini beside this one, in an environment that has them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.process.scripts import run_python
from tests.process.waiting import marked
from tests.programs.program_cases import PROGRAMS, difference

PLAIN: Sequence[str] = ()
OURS = ("-m", "mcinfer", "ort")
INLINE, WORKERS = (*OURS, "--prepare", "wait"), (*OURS, "--devices", "2")
WAYS = pytest.mark.parametrize(
    ("launch", "tolerance"),
    [pytest.param(INLINE, 0.0, id="inline"), pytest.param(WORKERS, 1e-5, id="workers")],
)

SPLIT = ("rapidocr", "magika", "open-nsfw", "silero batch")
"""Those whose batches go to both workers."""

SHARED = ("open-nsfw",)
"""Those whose models are large enough to be prepared for inline sessions."""


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")
    # By this, the test knows what these programs started.
    monkeypatch.setenv("MCINFER_TEST_PROGRAM", str(tmp_path))


def printed(launch: Sequence[str], arguments: Sequence[str], stdin: str) -> str:
    done = run_python(*launch, *arguments, stdin=stdin, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said(output: str, what: str) -> list[Any]:
    messages = [json.loads(line) for line in output.splitlines()]
    return [message[what] for message in messages if what in message]


@WAYS
@pytest.mark.parametrize("name", [*PROGRAMS])
def test_work_that_is_repeated_in_an_open_program_has_the_same_answer(
    name: str, launch: Sequence[str], tolerance: float, tmp_path: Path
) -> None:
    """Workers check the first requests and learn from them; the later ones are split by what was learned."""
    arguments = [str(Path(__file__).with_name("program_cases.py")), name, str(tmp_path)]
    plain = printed(PLAIN, arguments, "\n")
    ours = printed(launch, arguments, "\n\n\n")
    wanted, *others = said(plain, "answer") + said(ours, "answer")
    assert PROGRAMS[name].finding in wanted
    assert len(others) == 3
    for answer in others:
        far = difference(wanted, answer)
        assert far is not None, f"{wanted}\n{answer}"
        assert far <= tolerance
    _, alive = psutil.wait_procs(marked("MCINFER_TEST_PROGRAM", str(tmp_path)), timeout=30)
    assert not alive
    assert said(plain, "served") == said(plain, "shared") == [[]]
    (served,), (shared,) = said(ours, "served"), said(ours, "shared")
    if launch == INLINE:
        assert served == []
        assert {*shared} == {name in SHARED}
        return
    assert shared == []
    assert len(served) == 2
    assert sum(served) >= len(others)
    assert all(served) or name not in SPLIT
