"""Programs of Triton's repositories, asked of ``mcinfer serve`` in the place of Triton's server.

    python -m tests.serve.triton_suite [--client FOLDER] [--server FOLDER] [--only TEXT]
        [--write docs/serving_suite.md]

``--client`` names ``src/python/examples`` of a checkout of https://github.com/triton-inference-server/client,
``--server`` names ``qa/L0_http`` of one of https://github.com/triton-inference-server/server; nothing of them
is in this repository. The programs and tests are not changed: the examples get the address by their option
``-u``, and the tests ask at port 8000 of this machine, which must be free. Their models are built here.

Each runs in a process of its own. It has to pass, or has to be in `WHY_NOT`. The exit status is 1 where it is
neither, and where one of `WHY_NOT` passes. `--write` puts the table between the marks of a page.
"""

import argparse
import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import onnx

from tests.programs.ort_suite import write_page
from tests.serve.models import add_version
from tests.serve.servers import Server
from tests.text_models import text_model

EXAMPLES = (
    "simple_http_*.py",
    "simple_grpc_*.py",
    "grpc_explicit_*.py",
    "reuse_infer_objects_*.py",
)
"""Of the folder of examples, those that ask models which can be built here."""

TESTS = ("http_test.py", "python_http_aio_test.py")
"""Of the folder of tests, those that ask a server for what this one has."""

PORT = 8000
"""Where the tests ask."""

SECONDS = 120.0
"""How long a program or a test may take."""

MORE: Mapping[str, Sequence[Sequence[str]]] = {
    "reuse_infer_objects_client.py": [["-i", "grpc"]],
    "simple_grpc_infer_client.py": [["-C", "gzip"]],
    "simple_http_aio_infer_client.py": [
        ["--request-compression-algorithm", "gzip", "--response-compression-algorithm", "deflate"]
    ],
    "simple_http_infer_client.py": [
        ["--request-compression-algorithm", "deflate", "--response-compression-algorithm", "gzip"]
    ],
}
"""Options with which an example runs once more."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why programs or tests do not pass.

    Attributes:
        why: In a few words.
        says: What each writes then.
        names: Theirs.
    """

    why: str
    says: str
    names: Sequence[str]


WHY_NOT = (
    Reason(
        "the server's name is mcinfer, not triton",
        "FAILED : get_server_metadata",
        ["simple_grpc_health_metadata.py", "simple_http_health_metadata.py"],
    ),
    Reason(
        "the server's name is mcinfer, not triton",
        "'mcinfer' != 'triton'",
        ["test_get_server_metadata"],
    ),
    Reason(
        "models keep no state between requests: there are no sequences",
        "unknown model: 'simple_sequence'",
        [
            "simple_grpc_aio_sequence_stream_infer_client.py",
            "simple_grpc_sequence_stream_infer_client.py",
            "simple_grpc_sequence_sync_infer_client.py",
            "simple_http_sequence_sync_infer_client.py",
        ],
    ),
    Reason(
        "a request has one answer: there are no decoupled models",
        "unknown model: 'repeat_int32'",
        ["simple_grpc_custom_repeat.py"],
    ),
    Reason(
        "memory of a card is not shared with clients",
        "CUDA",
        ["simple_grpc_cudashm_client.py", "simple_http_cudashm_client.py"],
    ),
    Reason(
        "clients register shared memory over HTTP alone",
        "UNIMPLEMENTED",
        [
            "reuse_infer_objects_client.py -i grpc",
            "simple_grpc_shm_client.py",
            "simple_grpc_shm_string_client.py",
        ],
    ),
    Reason(
        "models come from files of the server alone: a request with files is INVALID_ARGUMENT, not INTERNAL",
        "expected status 'StatusCode.INTERNAL' for oversized file parameter",
        ["simple_grpc_model_control.py"],
    ),
    Reason(
        "models come from files of the server alone: a request with files is 400, not 500",
        "500 != 400 : Expected 500 for oversized file parameter",
        ["test_load_oversized_file_parameter"],
    ),
    Reason(
        "a negative size is 400, not 500",
        "500 != 400 : Expected error code 500 for negative dimension",
        ["test_negative_dimensions"],
    ),
    Reason(
        "an unknown version is NOT_FOUND, not INVALID_ARGUMENT",
        "PASS is missing",
        ["grpc_explicit_int8_content_client.py"],
    ),
    Reason(
        "the status is that, the message is in other words",
        "not found in '",
        ["test_buffer_size_overflow", "test_repository_index_deeply_nested_json"],
    ),
    Reason(
        "a request that has both Content-Length and Transfer-Encoding is refused (RFC 9112, 6.1)",
        "400 Client Error",
        ["test_content_encoding_chunked_manually"],
    ),
)
"""The programs and tests that do not pass. What fails otherwise is a problem."""

NOT_RUN: Mapping[str, str] = {
    "test_loading_large_invalid_model": "not run: its request has 3 GB, and it expects Triton's words"
}

CANNOT_PASS = {name: reason for reason in WHY_NOT for name in reason.names}

STUB = """
import unittest

TestResultCollector = unittest.TestCase
"""
"""In place of ``../common/test_util.py``, where the checkout does not have it."""

Group = Literal["passes", "does not pass", "not run", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On one program or test; `file` is where a test is, "" for a program."""

    name: str
    file: str
    words: str
    group: Group


# The models.


def _sums(kind: str, through: str = "") -> onnx.ModelProto:
    """OUTPUT0 is the sum and OUTPUT1 the difference of INPUT0 and INPUT1, each KIND[batch, 16].

    Args:
        kind: In ONNX's text form.
        through: Numbers in ONNX of the type to compute in, and of KIND: ONNX Runtime adds no int8.
    """
    tensors = [f"{kind}[batch, 16] {name}" for name in ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1")]
    body = "OUTPUT0 = Add(INPUT0, INPUT1) OUTPUT1 = Sub(INPUT0, INPUT1)"
    if through:
        wide, own = through.split()
        body = f"""
            a = Cast<to={wide}>(INPUT0) b = Cast<to={wide}>(INPUT1) sum = Add(a, b) difference = Sub(a, b)
            OUTPUT0 = Cast<to={own}>(sum) OUTPUT1 = Cast<to={own}>(difference)"""
    inputs, outputs = ", ".join(tensors[:2]), ", ".join(tensors[2:])
    return text_model(f"({inputs}) => ({outputs}) {{ {body} }}")


def _same(kind: str, sizes: str, count: int = 1) -> onnx.ModelProto:
    """OUTPUTn is INPUTn, KIND[batch, SIZES]."""
    numbers = range(count)
    inputs = ", ".join(f"{kind}[batch, {sizes.replace('n', f'n{i}')}] INPUT{i}" for i in numbers)
    nodes = " ".join(f"OUTPUT{i} = Identity(INPUT{i})" for i in numbers)
    return text_model(f"({inputs}) => ({inputs.replace('INPUT', 'OUTPUT')}) {{ {nodes} }}")


def _examples_models() -> dict[str, onnx.ModelProto]:
    """Seven models, as an example counts: the last is there for their number, and used by none."""
    return {
        "simple": _sums("int32"),
        "simple_identity": _same("string", "n"),
        "simple_int8": _sums("int8", "6 3"),
        "simple_string": _sums("string", "6 8"),
        "simple_identity_int64": _same("int64", "n"),
        "custom_identity_int32": _same("int32", "n"),
        "onnx_zero_1_float32": _same("float", "n"),
    }


def _tests_models() -> dict[str, onnx.ModelProto]:
    return {
        **_examples_models(),
        "onnx_zero_1_float16": _same("float16", "n, m0"),
        "onnx_zero_1_float32_queue": _same("float", "n"),
        "onnx_zero_1_object": _same("string", "n"),
        "onnx_zero_1_object_1_element": _same("string", "1"),
        "onnx_zero_3_float32": _same("float", "n", 3),
    }


QUEUE = """
instance_group [ { count: 2 kind: KIND_CPU } ]
dynamic_batching {
    max_queue_delay_microseconds: 1000000
    preferred_batch_size: [ 8 ]
    default_queue_policy {
        max_queue_size: 1
    }
}
"""
"""Of the model whose name ends so, as L0_http/test.sh has it, but for the instances.

A request waits for others once one was seen whose rows may run apart, over two instances.
"""


def build(folder: Path, models: Mapping[str, onnx.ModelProto]) -> Path:
    """A repository of these models."""
    for name, model in models.items():
        add_version(folder, name, 1, model)
        text = f'name: "{name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: 8\n'
        text += QUEUE if name.endswith("_queue") else ""
        (folder / name / "config.pbtxt").write_text(text, "utf-8")
    return folder


@contextmanager
def _server(models: Mapping[str, onnx.ModelProto], *arguments: object) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="mcinfer-models-") as made:
        place, env = build(Path(made) / "models", models), {"MCINFER_CACHE": f"{made}/cache"}
        options = ["--devices", "inline", "--client-shared-memory-tcp", *arguments]
        with Server("--repository", place, *options, env=env) as running:
            for name in [name for name in models if name.endswith("_queue")]:
                rows = {"shape": [16, 2], "data": [*range(32)]}
                tensor = {"name": "INPUT0", "datatype": "FP32", **rows}
                running.ask(f"/v2/models/{name}/infer", {"inputs": [tensor]})
            yield running


# The programs.


def run_examples(folder: Path, only: str = "") -> list[Verdict]:
    """Run each of the examples, on one server; what loads and unloads models has a server of its own."""
    paths = sorted({path for pattern in EXAMPLES for path in folder.glob(pattern)})
    if not paths:
        raise SystemExit(f"{folder}: expected a folder with {EXAMPLES[0]}, as src/python/examples")
    runs = [(path, [*more]) for path in paths for more in ([], *MORE.get(path.name, ()))]
    models, verdicts = _examples_models(), []
    with ExitStack() as stack:
        shared: Server | None = None
        for path, more in runs:
            name = " ".join([path.name, *more])
            if only not in name:
                continue
            if "_model_control" in name:
                # The one over gRPC counts eight models.
                eighth = {"other": _same("float", "n")} if "grpc" in name else {}
                with _server({**models, **eighth}) as own:
                    verdicts.append(_verdict(name, "", _run_example(path, more, own)))
                continue
            if shared is None:
                shared = stack.enter_context(_server(models))
            verdicts.append(_verdict(name, "", _run_example(path, more, shared)))
    return verdicts


def _run_example(path: Path, more: Sequence[str], server: Server) -> "Outcome":
    over_grpc = "grpc" in path.name or "grpc" in more
    command = [str(path), "-u", server.grpc if over_grpc else server.url, *more]
    with tempfile.TemporaryDirectory(prefix="mcinfer-suite-") as made:
        ended = _run(command, Path(made))
    # Some end with 0 in any case.
    if not ended.error and 'print("PASS' in path.read_text("utf-8") and "PASS" not in ended.text:
        return Outcome("PASS is missing", f"{ended.text}PASS is missing")
    return ended


def run_tests(folder: Path, only: str = "", port: int = PORT) -> list[Verdict]:
    """Run the tests of each file on a server of its own, each in a process."""
    files = [folder / name for name in TESTS if (folder / name).is_file()]
    if TESTS[0] not in [path.name for path in files]:
        raise SystemExit(f"{folder}: expected a folder with {TESTS[0]}, as qa/L0_http")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mcinfer-suite-") as made:
        place = Path(made) / "L0_http"
        (place.parent / "common").mkdir()
        place.mkdir()
        util, own = (
            folder.parent / "common" / "test_util.py",
            place.parent / "common" / "test_util.py",
        )
        if util.is_file():
            shutil.copy(util, own)
        else:
            own.write_text(STUB, "utf-8")
        for path in files:
            shutil.copy(path, place / path.name)
            names = [name for name in _tests_of(path) if only in name]
            # The other file counts the models, and expects Triton's usual mode.
            is_first = path.name == TESTS[0]
            models = _tests_models() if is_first else _examples_models()
            mode = () if is_first else ("--model-control-mode", "none")
            if names:
                _check_free(port)
                with _server(models, "--port", port, *mode):
                    verdicts += [_run_test(path.name, name, place) for name in names]
    return verdicts


def _tests_of(path: Path) -> list[str]:
    """The tests of a file, such as ``HttpTest.test_byte``."""
    classes = [n for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.ClassDef)]
    return [
        f"{each.name}.{node.name}"
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]


def _run_test(file: str, name: str, place: Path) -> Verdict:
    method = name.rpartition(".")[2]
    if method in NOT_RUN:
        return Verdict(name=name, file=file, words=NOT_RUN[method], group="not run")
    return _verdict(name, file, _run(["-m", "unittest", f"{Path(file).stem}.{name}"], place))


def _check_free(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as exc:
        raise SystemExit(f"the tests ask at port {port}, which is not free: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a program: why it failed, "" if it did not, and what it wrote."""

    error: str
    text: str


def _run(arguments: Sequence[str], place: Path) -> Outcome:
    """Run a program in a folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"it took more than {SECONDS:g} s", "")
    text = ended.stdout.decode("utf-8", "replace")
    return Outcome(_last_error(text, ended.returncode) if ended.returncode else "", text)


_ERROR = re.compile(r"^[A-Za-z_.]*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)


def _last_error(text: str, status: int) -> str:
    """The last error in a program's output, or its last line."""
    found = _ERROR.findall(text) or [line for line in text.splitlines() if line.strip()][-1:]
    return str(found[-1]).strip() if found else f"it ended with {status}"


# The table.


def _verdict(name: str, file: str, ended: Outcome) -> Verdict:
    """On a program or test that has ended."""
    reason = CANNOT_PASS.get(name.rpartition(".")[2] if file else name)
    group: Group = "passes"
    words = "passes"
    if ended.error and (reason is None or reason.says not in ended.text):
        group, words = "problem", f"**fails**: {ended.error}"
    elif ended.error and reason:
        group, words = "does not pass", f"does not pass: {reason.why}"
    elif reason is not None:
        group, words = "problem", f"passes, but is not to: {reason.why}"
    return Verdict(name=name, file=file, words=words, group=group)


def table(verdicts: Sequence[Verdict]) -> str:
    """The verdicts, in Markdown."""
    count = {group: sum(one.group == group for one in verdicts) for group in ("passes", "not run")}
    programs = sum(not one.file for one in verdicts)
    rows = [
        f"| `{one.name}` | {one.file and f'`{one.file}`'} | {_cell(one.words)} |"
        for one in verdicts
    ]
    return "\n".join(
        [
            f"{programs} runs of examples and {len(verdicts) - programs} tests: {count['passes']} pass,",
            f"{len(verdicts) - count['passes'] - count['not run']} do not, {count['not run']} not run."
            f" With tritonclient {version('tritonclient')} and onnxruntime {version('onnxruntime')}.",
            "",
            "| program or test | of the file | with `mcinfer serve` |",
            "|---|---|---|",
            *rows,
        ]
    )


def _cell(text: str) -> str:
    text = text if len(text) <= 200 else f"{text[:199]}…"
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Run programs of Triton's repositories.")
    for name, what in (("client", "src/python/examples"), ("server", "qa/L0_http")):
        parser.add_argument(f"--{name}", default="", metavar="FOLDER", help=f"{what} of a checkout")
    parser.add_argument("--only", default="", metavar="TEXT", help="what has this in its name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    options = parser.parse_args(arguments)
    whole = options.client and options.server and not options.only
    if options.write is not None and not whole:
        parser.error("--write: expected --client, --server and no --only")
    verdicts = []
    if options.client:
        verdicts += run_examples(Path(options.client).resolve(), options.only)
    if options.server:
        verdicts += run_tests(Path(options.server).resolve(), options.only)
    if not verdicts:
        parser.error("expected the folder of the examples or of the tests")
    text = table(verdicts)
    print(text)
    if any(one.group == "problem" for one in verdicts):
        return 1
    if options.write is not None:
        write_page(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
