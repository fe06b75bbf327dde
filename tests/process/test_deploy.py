"""The image of deploy/Dockerfile without a container: its files alone, its entry point, its check."""

import re
import shutil
import signal
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml

from mcinfer.examples import encoder
from tests.command_line import COMMAND
from tests.dockerfiles import ROOT, command_of, lay_out
from tests.process.scripts import Program, blocks, run_documented

pytestmark = pytest.mark.thorough

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
MANIFEST = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
PAGE = ROOT / "docs" / "howto" / "kubernetes.md"


def checked(port: str) -> int:
    """The exit status of the image's health check, at another port."""
    interpreter, *arguments = command_of(DOCKERFILE, "HEALTHCHECK")
    assert interpreter == "python"
    there = [argument.replace("8000", port) for argument in arguments]
    return subprocess.run([sys.executable, *there], stderr=subprocess.DEVNULL).returncode


@pytest.mark.thorough
def test_image_serves_what_its_probes_and_clients_ask_for_until_sigterm(tmp_path: Path) -> None:
    packages = lay_out(DOCKERFILE, tmp_path / "image")
    (models := tmp_path / "models" / "encoder" / "1").mkdir(parents=True)
    shutil.copy(encoder(), models / "model.onnx")
    (tmp_path / "keys").write_text("sesame\n", encoding="utf-8")
    deployment, _ = yaml.safe_load_all(MANIFEST)
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    places = {"/models": tmp_path / "models", "/keys/keys": tmp_path / "keys"}
    given = [str(places.get(argument, argument)) for argument in container["args"]]
    entry = [*command_of(DOCKERFILE, "ENTRYPOINT"), *given]
    here = ["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]  # later ones count
    with Program(
        COMMAND, *entry[1:], *here, cwd=tmp_path, env={"PYTHONPATH": str(packages)}
    ) as server:
        found = re.search(r"serving encoder at http://127.0.0.1:(\d+)", server.error_line())
        assert found
        port = found[1]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = HTTPConnection("127.0.0.1", int(port), timeout=20)
            probe.request("GET", container[kind]["httpGet"]["path"])
            assert probe.getresponse().status == 200
            probe.close()
        assert checked(port) == 0
        [program], [shown] = blocks(PAGE, "python"), blocks(PAGE, "text")
        assert run_documented(program.replace(":8000", f":{port}"), tmp_path) == shown
        server.send_signal(signal.SIGTERM)
        ended = server.wait()
    assert ended.status in (-signal.SIGTERM, 128 + signal.SIGTERM), ended.err
    assert checked(port) == 1
