"""docs/ray.md and the example do what they say."""

import re
import secrets
import subprocess

import pytest
import ray
from ray import serve

from tests.process.scripts import ROOT, blocks, run_python
from tests.process.waiting import marked
from tests.ray.conftest import wait_until


@pytest.mark.usefixtures("cluster")
def test_programs_of_the_page_run_one_after_another(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = blocks(ROOT / "docs" / "ray.md", "python")
    assert len(programs) == 4
    run = serve.run
    monkeypatch.setattr(serve, "run", lambda app: run(app, route_prefix=None))  # without a port
    names: dict[str, object] = {}
    try:
        for program in programs:
            exec(program, names)  # noqa: S102 the page's own
    finally:
        serve.shutdown()
    printed = capfd.readouterr().out  # lines of Ray's may come between a text and its line end
    for line in ("['id', 'embedding']", "ready: 2 of 2 workers serve", "(2, 64)"):
        assert line in printed
    ray.kill(names["actor"])


def run_script(*command: str) -> subprocess.CompletedProcess[str]:
    """A program with a cluster of its own; nothing of it may be left."""
    mark = ("MCINFER_TEST_SCRIPT", secrets.token_hex(8))
    done = run_python(*command, env=dict([mark]), timeout=220)
    wait_until(lambda: not marked(*mark))
    return done


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
