"""Programs whose surroundings are unusual: closed streams, tight limits, folders that nobody can write to."""

import sys
from pathlib import Path

import pytest

from tests.process.models import AFFINE, FakeModel, OnnxModel
from tests.process.scripts import PREAMBLE, Program, run

# Closed standard streams, which daemons have.

UNSTREAMED = """
import logging
from mcinfer.ort import InferenceSession

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.basicConfig(level=logging.INFO, handlers=[handler])
options = mcinfer.EngineOptions(prepare="always")
session = InferenceSession(sys.argv[1], prepare="always")
with mcinfer.Master(sys.argv[1], 2, options=options) as master:
    said += [f"sum {answer.sum()}" for answer in (session.run(None, X)[0], master.predict(X)["y"])]
    said += ["stream " + os.readlink(f"/proc/self/fd/{stream}") for stream in range(3)]
with open(sys.argv[2], "w") as file:
    file.write("\\n".join(said))
"""


def test_program_without_standard_streams_prepares_and_shares_and_none_of_its_files_is_one(
    onnx_model: OnnxModel, tmp_path: Path
) -> None:
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable)
    result, env = tmp_path / "said", {"MCINFER_CACHE": str(tmp_path / "cache")}
    program = Program(PREAMBLE + UNSTREAMED, onnx_model(AFFINE), result, env=env, command=closed)
    with program:
        assert program.wait().status == 0
    said = result.read_text(encoding="utf-8").splitlines()
    assert any("its weights are those of the entry" in line for line in said), said
    assert said.count("sum 48.0") == 2
    # libffi holds itself open from `import numpy` on (3.5, of Debian sid).
    streams = [line for line in said if line.startswith("stream ")]
    assert [name for name in streams if ".so." not in name] in (
        ["stream /dev/null"] * n for n in (2, 3)
    )


# Limits of the process.

SMALL_FILES = """
import resource
for most in (100 << 10, 1 << 20):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never") as master:
            master.predict({"x": np.ones((1 << 17, 4), np.float32)})
    except mcinfer.McinferError as exc:
        say(type(exc).__name__, exc)
"""


def test_limit_on_the_size_of_files_is_named(fake_model: FakeModel) -> None:
    started, predicted = run(SMALL_FILES, fake_model()).out.splitlines()
    assert "BuildError" in started
    assert "102400 bytes (ulimit -f, RLIMIT_FSIZE)" in started
    assert "PredictError" in predicted
    assert "1048576 bytes (ulimit -f, RLIMIT_FSIZE)" in predicted


FEW_THREADS = """
import resource
mcinfer.Master
if os.getuid() == 0:  # whom the limit does not bind
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
for devices in (2, "inline"):
    try:
        mcinfer.Master(b"never opened", devices).start()
    except mcinfer.BuildError as exc:
        say(exc)
"""


def test_limit_on_the_threads_of_a_user_is_named_before_one_is_started() -> None:
    ended = run(FEW_THREADS)
    assert ended.status == 0, ended.err
    limit = "0 are left: ulimit -u (RLIMIT_NPROC) of this user is 1"
    pool, inline = ended.out.splitlines()
    assert f"14 threads are needed and {limit}" in pool
    assert f"3 threads are needed and {limit}" in inline


# Threads that are not Python's own, or are started no more.

PATCHED = """
import select, socket, subprocess, _thread
from mcinfer.ort import InferenceSession

def replaced(*_, **__):
    raise AssertionError("nothing of mcinfer's is to be called here")

replaced.__module__ = f"{sys.argv[2]}.stand_in"
module, _, name = sys.argv[3].partition(".")
setattr(sys.modules[module], name, replaced)
for devices in (2, "inline"):
    try:
        mcinfer.Master(sys.argv[1], devices).start()
    except mcinfer.BuildError as exc:
        say(exc)
say(InferenceSession(sys.argv[1]).run(None, X)[0].sum())
"""


def test_monkey_patch_is_named_by_a_master_and_leaves_inline_sessions(
    onnx_model: OnnxModel,
) -> None:
    patch, name = "gevent", "_thread.start_new_thread"
    ended = run(PATCHED, onnx_model(AFFINE), patch, name)
    *refusals, answer = ended.out.splitlines()
    assert (ended.status, answer) == (0, "48.0"), ended.err
    assert len(refusals) == 2
    for refusal in refusals:
        assert f"{patch} has replaced {name} of this process" in refusal
        assert "use an inline session" in refusal


@pytest.mark.parametrize("imported", [False, True])
def test_master_first_made_in_an_atexit_handler_is_refused_and_an_inline_session_answers(
    onnx_model: OnnxModel, imported: bool
) -> None:
    text = f"""
import atexit, threading
{"mcinfer.Master" if imported else ""}
@atexit.register
def late():
    try:
        mcinfer.Master(sys.argv[1], 2).start()
    except mcinfer.BuildError as exc:
        say(exc)
    from mcinfer.ort import InferenceSession
    say(InferenceSession(sys.argv[1]).run(None, X)[0].sum())
"""
    ended = run(text, onnx_model(AFFINE))
    assert ended.err == ""
    refusal, answer = ended.out.splitlines()
    assert "a Master cannot be started in an atexit handler" in refusal
    assert answer == "48.0"


# Folders.


def test_master_without_a_folder_to_write_to_names_the_variables(fake_model: FakeModel) -> None:
    text = """
from mcinfer import private
private.temporary_places = lambda *_: ["/proc"]  # where no user can make a folder
try:
    mcinfer.Master(sys.argv[1], 2, engine="fake").start()
except mcinfer.BuildError as exc:
    say(exc)
"""
    ended = run(text, fake_model())
    assert ended.err == ""
    assert "/proc: " in ended.out
    assert "XDG_RUNTIME_DIR or TMPDIR can name one" in ended.out
