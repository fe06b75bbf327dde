"""The programs of README.md, docs/start.md, docs/ort.md and docs/howto/, which do what their pages say."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from venv import EnvBuilder

import numpy as np
import onnx
import psutil
import pytest
from packaging.requirements import Requirement

from examples.build_encoder import build_encoder
from mcinfer import errors
from mcinfer.bench.report import dump
from mcinfer.engines.preparation import ensure_prepared
from mcinfer.examples import encoder
from tests import bench_reports
from tests.dockerfiles import command_of, lay_out
from tests.process.scripts import (
    ROOT,
    Program,
    blocks,
    run_documented,
    run_example,
    run_python,
)
from tests.process.waiting import all_gone
from tests.text_models import text_model

HOWTO = ROOT / "docs" / "howto"
PAGES = [ROOT / "README.md", ROOT / "docs" / "ort.md", *sorted(HOWTO.glob("*.md"))]


# A program prints something else if an earlier one has learned how its model splits.
pytestmark = pytest.mark.usefixtures("cache")


def program(page: Path) -> str:
    text, *others = blocks(page, "python")
    assert not others or page.stem == "files"  # whose others tests/programs/test_files.py runs
    return text


def test_every_page_has_one_program_and_a_test() -> None:
    assert all(program(page) for page in PAGES)
    tested = {
        "celery",
        "compare",
        "docker",
        "fastapi",
        "files",
        "gunicorn",
        "lora",
        "notebook",
        "pytest",
    }
    tested |= {"README", "ort", "kubernetes"}  # the last one by test_deploy.py
    assert tested == {page.stem for page in PAGES}


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(pytest.param(f"docs/{p}.md", marks=pytest.mark.thorough) for p in ("ort", "howto/lora")),
    ],
)
def test_program_prints_what_its_page_shows(page: str, tmp_path: Path) -> None:
    [shown] = blocks(ROOT / page, "text")
    assert run_documented(program(ROOT / page), tmp_path) == shown


@pytest.mark.thorough
def test_program_that_compares_two_benchmarks_prints_what_changed(tmp_path: Path) -> None:
    page = HOWTO / "compare.md"
    before, after = ([100.0, 110.0], [100.0, 104.0]), ([104.0, 108.0], [122.0, 123.0])
    for name, (session, concurrent) in (("before", before), ("after", after)):
        report = bench_reports.small(session=session, concurrent=concurrent, gone=session)
        (tmp_path / f"{name}.json").write_bytes(dump(report))
    [shown] = blocks(page, "text")
    assert run_documented(program(page), tmp_path).splitlines()[:2] == shown.splitlines()


@pytest.mark.thorough
def test_program_for_files_goes_on_where_it_was(tmp_path: Path) -> None:
    np.save(tmp_path / "embeddings.npy", np.zeros((1000, 64), np.float32))
    (tmp_path / "embeddings.rows").write_text("512")
    [shown] = blocks(HOWTO / "files.md", "text")
    said = run_documented(program(HOWTO / "files.md"), tmp_path)
    assert said == "".join(shown.splitlines(keepends=True)[2:])
    written = np.load(tmp_path / "embeddings.npy").any(axis=1)
    assert (written[:512].any(), written[512:].all()) == (False, True)


@pytest.mark.thorough
def test_interpreter_shows_what_the_page_does(tmp_path: Path) -> None:
    page = HOWTO / "notebook.md"
    [shown] = blocks(page, "text")
    command = (sys.executable, "-W", "error", "-q", "-i")
    with Program(program(page), cwd=tmp_path, command=command, stdin=True) as interpreter:
        ended = interpreter.wait(50.0)
    assert (ended.status, ended.out) == (0, shown)


@pytest.mark.thorough
def test_fixture_is_used_by_passing_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_encoder.py"
    path.write_text(program(HOWTO / "pytest.md"), encoding="utf-8")
    text = "import sys, pytest; sys.exit(pytest.main(['-q', sys.argv[1]]))"
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with Program(text, path, cwd=tmp_path, env=plain) as tests:
        ended = tests.wait(50.0)
    assert ended.status == 0, ended.out
    assert "2 passed" in ended.out


@pytest.mark.thorough
def test_pytest_shows_of_a_refused_input_the_callers_lines_and_no_source_of_mcinfers(
    tmp_path: Path,
) -> None:
    text = """
        import asyncio, numpy as np, pytest, mcinfer, mcinfer.mslite as mslite, mcinfer.ort
        from mcinfer.examples import encoder

        BAD = {"image": np.zeros((2, 3, 32, 32))}
        MASTER = mcinfer.Master(encoder(), devices="inline").start()
        SESSION = mcinfer.ort.InferenceSession(encoder(), providers=["CPUExecutionProvider"])
        MODEL = mslite.Model()
        MODEL.build_from_file(str(encoder()), mslite.ModelType.MINDIR, mslite.Context())

        @pytest.mark.parametrize("ask", [
            lambda: MASTER.predict(BAD),
            lambda: MASTER.submit(BAD),
            lambda: list(MASTER.map([BAD])),
            lambda: asyncio.run(MASTER.predict_async(BAD)),
            lambda: MASTER.warm_up(BAD),
            lambda: MASTER.learn(BAD),
            lambda: SESSION.run(None, BAD),
            lambda: SESSION.run(None, [BAD["image"]]),
            lambda: MODEL.predict([mslite.Tensor(BAD["image"])]),
            lambda: mcinfer.Master(encoder(), devices="gpu"),
        ])
        def test(ask):
            ask()
    """
    (tmp_path / "test_refused.py").write_text(textwrap.dedent(text), encoding="utf-8")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_refused.py")
    done = run_python(*command, cwd=tmp_path, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    places = [
        (tmp_path / place).resolve()
        for place in re.findall(r"^(\S+\.py):\d+: ", done.stdout, re.MULTILINE)
    ]
    assert "10 failed" in done.stdout
    assert done.stdout.count("has dtype float64, expected float32") >= 7
    assert not any(place.is_relative_to(ROOT / "mcinfer") for place in places), done.stdout
    assert tmp_path / "test_refused.py" in places


def installed_by(line: str, folder: Path) -> Path:
    """An environment with what `pip install '.[extras]'` brings, linked from this one; its programs."""
    EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    [extras] = re.findall(r"pip install '\.\[(.+)\]'", line)
    wanted = [("mcinfer", extra) for extra in extras.split(",")]
    for name, extra in wanted:  # which grows
        for needed in map(Requirement, metadata.requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                found = [(needed.name, one) for one in ("", *needed.extras)]
                wanted += [one for one in found if one not in wanted]
    for name in {name for name, _ in wanted} - {"mcinfer"}:
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / part).symlink_to(str(distribution.locate_file(part)))
    command = folder / "bin" / "mcinfer"
    command.write_text('#!/bin/sh\nexec python -m mcinfer "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return folder / "bin"


@pytest.mark.thorough
def test_start_page_runs_with_what_its_install_line_brings(tmp_path: Path) -> None:
    """Step by step, in one folder."""
    text = (ROOT / "docs" / "start.md").read_text("utf-8")
    step = r"^```(\w+)\n(.*?)^```$|((?:^    [^\n]+\n)+)"
    steps = re.findall(step, text, re.MULTILINE | re.DOTALL)
    install = steps.pop(0)[2]
    programs = installed_by(install, tmp_path / "environment")
    path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    printed = ""
    for language, content, commands in steps:
        if language == "text":
            assert printed == content
        elif language == "python":
            printed = run_documented(content, tmp_path, str(programs / "python"))
        else:
            for command in commands.splitlines():
                done = subprocess.run(
                    ["sh", "-ec", command], cwd=tmp_path, env=path, capture_output=True, timeout=200
                )
                # The machine of a test may be busy, and then there is no verdict.
                disturbed = b"mcinfer: No verdict. " in done.stderr
                assert done.returncode == disturbed, (command, done.stderr)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.thorough
def test_image_has_all_that_its_program_needs(tmp_path: Path) -> None:
    """The steps of the Dockerfile that copy, install the package and run the program."""
    page, image = HOWTO / "docker.md", tmp_path / "image"
    [text], [shown] = blocks(page, "dockerfile"), blocks(page, "text")
    packages = lay_out(text, image, {"app.py": program(page)})
    interpreter, *arguments = command_of(text, "CMD")
    assert interpreter == "python"
    env = {"PYTHONPATH": str(packages)}
    done = run_python("-W", "error", *arguments, cwd=image / "app", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


FASTAPI = program(HOWTO / "fastapi.md")
UVICORN = ("uvicorn", "service:app", "--port", "0")
GUNICORN = ("gunicorn", "-b", "127.0.0.1:0", "service:application")


def as_module(module: str, *arguments: str) -> str:
    """A program that is ``python -m module`` in its working folder."""
    return (
        f"import runpy, sys; sys.argv[1:] = {[*arguments]!r}; sys.path.insert(0, '')\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )


@contextmanager
def serving(text: str, folder: Path, *command: str, processes: int = 2) -> Iterator[HTTPConnection]:
    """A connection to a service, which has to leave no process behind when SIGTERM ends it.

    `processes` is how many it has to have beside its first one, at least.
    """
    module = command[0]
    if not find_spec(module) or ("fastapi" in text and not find_spec("fastapi")):
        pytest.skip(f"{module}, or what it serves with, is not installed")
    (folder / "service.py").write_text(text, encoding="utf-8")
    with Program(as_module(*command), cwd=folder) as server:
        lines = iter(server.error_line, "")
        address = next(
            match[1] for line in lines if (match := re.search(r"http://(\S+:\d+)", line))
        )
        connection = HTTPConnection(address, timeout=40)
        yield connection
        connection.close()
        pids = [process.pid for process in psutil.Process(server.pid).children(recursive=True)]
        assert len(pids) >= processes
        server.send_signal(signal.SIGTERM)
        server.wait(50.0)
        assert all_gone(pids)


def answer_to(connection: HTTPConnection, place: str, body: bytes) -> bytes:
    connection.request("POST", place, body)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return content


def with_a_pool() -> str:
    """Gunicorn's program with the two other lines of its page."""
    page = HOWTO / "gunicorn.md"
    opening, asking = re.findall(r"^    (.*\bmaster\b.*)$", page.read_text("utf-8"), re.MULTILINE)
    text = re.sub(r"^session = .*$", opening, program(page), flags=re.MULTILINE)
    return "import mcinfer\n" + re.sub(r"\(embeddings,\) = .*", asking, text)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "place", "command", "processes"),
    [
        pytest.param(FASTAPI, "/embeddings", UVICORN, 0, id="fastapi"),
        pytest.param(with_a_pool(), "/", (*GUNICORN, "--threads", "16"), 2, id="gunicorn"),
    ],
)
def test_service_answers_and_leaves_nothing_after_a_sigterm(
    text: str, place: str, command: tuple[str, ...], processes: int, tmp_path: Path
) -> None:
    images = np.random.default_rng(0).random((2, 3, 32, 32), np.float32)
    with serving(text, tmp_path, *command, processes=processes) as connection:
        content = answer_to(connection, place, images.tobytes())
        assert np.shape(json.loads(content)) == (2, 64)
        if command is UVICORN:
            connection.request("GET", "/health")
            assert json.load(connection.getresponse()) == {"state": "ready", "reasons": []}


ON_FILES = """
import os, re, time
from tasks import app, embed, session

here = os.getcwd()
app.conf.update(
    broker_url="filesystem://",
    result_backend=f"file://{here}/results",
    broker_transport_options={
        "data_folder_in": f"{here}/queue",
        "data_folder_out": f"{here}/queue",
        "control_folder": f"{here}/control",
    },
)

@app.task
def look(path):
    embeddings, sizes, ours = embed(path), {"Rss": 0, "Private_Dirty": 0}, False
    for line in open("/proc/self/smaps"):
        name, _, value = line.partition(":")
        if "-" in name:
            ours = session().prepared in line
        elif ours and name in sizes:
            sizes[name] += int(value.split()[0]) << 10
    time.sleep(0.3)  # so that the other process takes the next one
    return os.getpid(), session().prepared, sizes, embeddings
"""
"""The program of Celery's page with a broker that is a folder, and a task that looks at its process."""

ASKING = """
import json
from on_files import look

answers = [look.delay("images.npy") for _ in range(8)]
print(json.dumps([answer.get(timeout=40) for answer in answers]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not find_spec("celery"), reason="Celery is not installed")
def test_processes_of_celery_answer_from_one_copy_of_the_weights(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weights = random.random((3 * 32 * 32, 1500), np.float32)  # above the least size that is shared
    images = random.random((2, 3, 32, 32), np.float32)
    np.save(tmp_path / "images.npy", images)
    graph = (
        "(float[n,3,32,32] image) => (float[n,1500] y) { row = Flatten(image)  y = MatMul(row, w) }"
    )
    onnx.save(text_model(graph, {"w": weights}), tmp_path / "model.onnx")
    ensure_prepared(tmp_path / "model.onnx").close()  # as the page advises
    text = program(HOWTO / "celery.md").replace("(encoder()", '("model.onnx"')
    (tmp_path / "tasks.py").write_text(text, encoding="utf-8")
    (tmp_path / "on_files.py").write_text(ON_FILES, encoding="utf-8")
    for folder in ("queue", "results", "control"):
        (tmp_path / folder).mkdir()
    command = ("celery", "-A", "on_files", "worker", "--concurrency", "2", "--loglevel", "INFO")
    with Program(as_module(*command), cwd=tmp_path) as worker:
        assert any(" ready." in worker.error_line() for _ in range(50))  # of which some are empty
        answers = json.loads(run_documented(ASKING, tmp_path))
        children = {process.pid for process in psutil.Process(worker.pid).children()}
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(50.0).status == 0
    assert {pid for pid, *_ in answers} == children
    assert len(children) == 2
    assert len({key for _, key, *_ in answers}) == 1
    for *_, sizes, embeddings in answers:
        np.testing.assert_allclose(embeddings, images.reshape(2, -1) @ weights, rtol=1e-4)
        assert sizes["Rss"] >= weights.nbytes
        assert sizes["Private_Dirty"] < weights.nbytes / 10  # all others are pages of the one file
    assert all_gone([*children])


@pytest.mark.thorough
def test_tutorial_goes_from_a_session_to_a_service(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorial.md"
    inspected, shown = blocks(page, "text")
    session, workers, service = blocks(page, "python")
    build = ("sd_dual_core/build_unet.py", "--size", "tiny", "--output", "unet.onnx")
    run_example(*build, cwd=tmp_path)
    done = run_python("-m", "mcinfer", "inspect", "unet.onnx", cwd=tmp_path)
    in_tiny = inspected.replace("4, 32, 32", "4, 16, 16").replace("77, 256", "77, 32")
    assert done.stdout.startswith(in_tiny)
    tiny = session.replace("4, 32, 32", "4, 16, 16").replace("77, 256", "77, 32")
    assert run_documented(tiny, tmp_path).startswith("one session: ")
    assert run_documented(workers, tmp_path).partition("\n")[2] == shown
    with serving(service, tmp_path, *UVICORN) as connection:
        content = answer_to(connection, "/denoise", (tmp_path / "batch.npz").read_bytes())
    expected = np.load(tmp_path / "expected.npy")
    np.testing.assert_allclose(np.load(io.BytesIO(content))["out_sample"], expected, atol=1e-3)


def test_troubleshooting_has_every_error() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    found = {*re.findall(r"^(?:## |\| `)(\w+Error)\b", text, re.MULTILINE)}
    assert found == names - {"McinferError"}


def test_shipped_encoder_is_small_valid_and_the_builders(tmp_path: Path) -> None:
    build_encoder(tmp_path / "encoder.onnx")
    onnx.checker.check_model(onnx.load(encoder()), full_check=True)
    assert encoder().stat().st_size < 200_000
    built, shipped = onnx.load(tmp_path / "encoder.onnx"), onnx.load(encoder())
    assert built.graph == shipped.graph
