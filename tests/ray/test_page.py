"""docs/ray.md and the example do what they say."""

import os
import re
import secrets
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import ray
from ray import serve

from tests.ray.conftest import ROOT, wait_until

PAGE = ROOT / "docs" / "ray.md"


@pytest.mark.usefixtures("cluster")
def test_programs_of_the_page_run_one_after_another(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 4
    run = serve.run
    monkeypatch.setattr(serve, "run", lambda app: run(app, route_prefix=None))  # without a port
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(block, names)  # noqa: S102 the page's own
    finally:
        serve.shutdown()
    printed = capfd.readouterr().out  # lines of Ray's may come between a text and its line end
    for line in ("['id', 'embedding']", "ready: 2 of 2 workers serve", "(2, 64)"):
        assert line in printed
    ray.kill(names["actor"])


def run_script(*command: str) -> subprocess.CompletedProcess[str]:
    """A program with a cluster of its own; nothing of it may be left."""
    mark = {"MCINFER_TEST_SCRIPT": secrets.token_hex(8)}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env={**os.environ, **mark},
    )
    wait_until(lambda: not _marked(mark))
    return done


def _marked(mark: dict[str, str]) -> list[psutil.Process]:
    """The processes that have this in their environment, as all that a program starts."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark.items() <= process.environ().items():
                found.append(process)
    return found


def test_example_survives_the_death_of_a_node() -> None:
    done = run_script(str(ROOT / "examples/ray_cluster/main.py"), "--rows", "20000")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    killed = re.search(r"^killed node (\w+) after (\d+) of 20000 rows$", done.stdout, re.M)
    assert killed is not None
    assert 0 < int(killed[2]) < 20000
    counts = re.findall(r"^node (\w+): (\d+) rows( before it was killed)?$", done.stdout, re.M)
    assert sum(int(count) for _, count, _ in counts) == 20000
    assert [node for node, _, died in counts if died] == [killed[1]]
    assert lines[-1] == "=========== success ==========="
