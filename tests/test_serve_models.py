"""Tests of mcinfer/serve: models as they come and go, messages, and what is public."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

import mcinfer.serve
from mcinfer import (
    EngineOptions,
    InvalidInputError,
    Master,
    PredictError,
    PredictTimeoutError,
    QueueFullError,
)
from mcinfer.serve.documents import InferDocument, InputDocument, TensorParameters
from mcinfer.serve.inference import Inference, status_of
from mcinfer.serve.models import LOG_SAYS, Control, Models, RefusedError
from mcinfer.serve.regions import Regions
from mcinfer.serve.service import ServeOptions, Service
from mcinfer.serve.tensors import from_bytes

FOLDER = Path(mcinfer.serve.__file__).parent


def test_compiled_messages_are_those_of_the_file_beside_them(tmp_path: Path) -> None:
    target = tmp_path / "inference.binpb"
    words = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={target}", "inference.proto"]
    assert protoc.main(words) == 0
    kind = descriptor_pb2.FileDescriptorSet
    have = (FOLDER / "inference.binpb").read_bytes()
    assert kind.FromString(have) == kind.FromString(target.read_bytes()), "run: make proto"


MANY_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from mcinfer.serve.messages import message
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as pool:
    assert len({*pool.map(message, ["ModelConfig"] * 32)}) == 1
"""


@pytest.mark.parametrize("kind", ["upb", "python"])
def test_threads_may_ask_for_a_message_at_once_whatever_protobuf_there_is(kind: str) -> None:
    """As those do that load models at the start; packages with operators choose Python's."""
    env = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": kind}
    for _ in range(3):
        subprocess.run([sys.executable, "-c", MANY_THREADS], env=env, check=True)


Write = Callable[..., Path]


@pytest.fixture
def repository(tmp_path: Path) -> Write:
    """Writes a version of a model of the engine "fake", and returns the repository."""

    def write(name: str, version: str, config: str = "", file: str = "model.onnx") -> Path:
        folder = tmp_path / name / version
        folder.mkdir(parents=True, exist_ok=True)
        tensors = [["x", "float32", ["batch", 4]]]
        content = {"inputs": tensors, "outputs": [["y", *tensors[0][1:], {"from": "x"}]]}
        (folder / file).write_text(json.dumps(content))
        if config:
            (tmp_path / name / "config.pbtxt").write_text(config)
        return tmp_path

    return write


def loaded(folder: Path, **control: Any) -> Models:
    options = {"engine": "fake", "devices": "inline"}
    return Models({}, folder, lambda _: options, control=Control(**control))


def test_highest_version_is_served_and_others_are_named(repository: Write) -> None:
    async def load() -> None:
        for version in ("2", "10", "007", "next"):
            repository("m", version)
        async with loaded(repository("m", "9")) as models:
            assert models.instance("m").version == "10"
            with pytest.raises(RefusedError, match="not served in version 9, but in 10") as caught:
                models.instance("m", "9")
            assert caught.value.status == 404
            repository("late", "1")
            assert [e["name"] for e in models.index()] == ["m", "late"]
            await models.load("late")
            await models.unload("m")
            states = {e["name"]: (e["state"], e["reason"]) for e in models.index()}
            assert states == {"m": ("UNAVAILABLE", "unloaded"), "late": ("READY", "")}

    asyncio.run(load())


def test_load_that_fails_leaves_what_was_served(repository: Write) -> None:
    async def load() -> None:
        async with loaded(repository("m", "1")) as models:
            before = models.instance("m")
            (repository("m", "2") / "m" / "2" / "model.onnx").write_text("{")
            with pytest.raises(RefusedError, match="failed to load 'm', "):
                await models.load("m")
            assert models.instance("m") is before
            assert models.index()[0]["reason"] == LOG_SAYS

    asyncio.run(load())


def test_load_without_the_cores_that_the_server_gave_the_model_shares_what_is_left(
    repository: Write, caplog: pytest.LogCaptureFixture
) -> None:
    absent = max(os.sched_getaffinity(0)) + 1
    options = {"engine": "fake", "devices": 1, "options": EngineOptions(cores=[[absent]])}

    async def load() -> None:
        async with Models({}, repository("m", "1"), lambda _: options) as models:
            assert models.instance("m").ready

    asyncio.run(load())
    assert f"gave it the cores (({absent},),), and" in caplog.text


def test_repository_that_is_gone_leaves_what_was_served(repository: Write) -> None:
    async def load() -> None:
        async with loaded(folder := repository("m", "1")) as models:
            folder.rename(folder.with_name("elsewhere"))
            assert models.index()[0]["state"] == "READY"
            with pytest.raises(RefusedError, match="failed to load 'm', "):
                await models.load("m")
            with pytest.raises(RefusedError, match="no such model is known"):
                await models.load("other")
            assert models.instance("m").ready

    asyncio.run(load())


def test_master_is_closed_if_what_comes_after_its_start_fails(repository: Write) -> None:
    masters: list[Master] = []

    def fail(master: Master) -> None:
        masters.append(master)
        raise InvalidInputError("no")

    async def load() -> None:
        options = {"engine": "fake", "devices": "inline", "max_batch_size": 2}
        async with Models({}, repository("m", "1"), lambda _: options, fail) as models:
            assert models.index()[0]["reason"] == "no"

    asyncio.run(load())
    assert masters[0].health().state == "closed"


def test_model_that_cannot_be_loaded_leaves_the_others_and_the_server_is_not_ready(
    repository: Write, caplog: pytest.LogCaptureFixture
) -> None:
    async def load() -> None:
        repository("good", "1")
        async with loaded(folder := repository("bad", "1", config='name: "worse"')) as models:
            assert models.instance("good").ready
            entries = {e["name"]: e for e in models.index()}
            assert entries["bad"]["reason"] == "name: got 'worse', expected 'bad'"
            assert "failed to load 'bad', name: got 'worse'" in caplog.text
            assert not models.ready
            assert not Service(models, ServeOptions()).ready
            assert Service(models, ServeOptions(strict_readiness=False)).ready
            (folder / "bad" / "config.pbtxt").unlink()
            await models.load("bad")
            assert models.ready
            repository("late", "1", config="ensemble_scheduling { }")
            with pytest.raises(RefusedError, match="failed to load 'late'"):
                await models.load("late")
            assert models.ready  # it was not there at the start

    asyncio.run(load())


@pytest.mark.parametrize(
    ("by_file", "exit_on_error"), [(True, None), (True, True), (False, True), (True, False)]
)
def test_model_that_cannot_be_loaded_ends_a_start_that_needs_it(
    repository: Write, by_file: bool, exit_on_error: bool | None
) -> None:
    folder = repository("good", "1")
    (folder / "bad").mkdir()
    files = {"bad": folder / "nowhere.onnx"} if by_file else {}

    async def load() -> None:
        options: dict[str, Any] = {"engine": "fake", "devices": "inline"}
        control = Control(exit_on_error=exit_on_error)
        models = Models(files, folder, lambda _: options, control=control)
        try:
            async with models:
                assert [name for name, _ in models.loaded()] == ["good"]
        finally:
            assert not models.loaded()

    if exit_on_error is False:
        asyncio.run(load())
        return
    with pytest.raises(RefusedError, match="failed to load 'bad'"):
        asyncio.run(load())


@pytest.mark.parametrize(
    ("config", "served"),
    [
        ("version_policy { latest { num_versions: 2 } }", ["9", "10"]),
        ("version_policy: { all {} }", ["2", "9", "10"]),
        ("version_policy { specific { versions: [2, 9] } }", ["2", "9"]),
    ],
)
def test_versions_of_the_policy_are_served_and_the_highest_answers_for_all(
    repository: Write, config: str, served: list[str]
) -> None:
    async def load() -> None:
        for version in ("2", "10"):
            repository("m", version)
        async with loaded(repository("m", "9", config)) as models:
            service = Service(models, ServeOptions())
            assert service.model_metadata("m")["versions"] == served
            assert models.instance("m").version == served[-1]
            assert [models.instance("m", version).version for version in served] == served
            assert [e["version"] for e in models.index()] == served
            stats = service.statistics("m")["model_stats"]
            assert [each["version"] for each in stats] == served
            stats = service.statistics("m", served[0])["model_stats"]
            assert [each["version"] for each in stats] == served[:1]
            with pytest.raises(RefusedError, match=f"version 3, but in {', '.join(served)}"):
                models.instance("m", "3")
            masters = [each.master for _, each in models.loaded()]
            await models.unload("m")
            with pytest.raises(RefusedError, match="unloaded"):
                models.instance("m", served[0])
        assert {master.health().state for master in masters} == {"closed"}

    asyncio.run(load())


def test_versions_are_all_loaded_or_none_is(repository: Write) -> None:
    async def load() -> None:
        async with loaded(repository("m", "1", "version_policy { all {} }")) as models:
            before = models.instance("m")
            repository("m", "3")
            (repository("m", "2") / "m" / "2" / "model.onnx").write_text("{")
            with pytest.raises(RefusedError, match="failed to load 'm', "):
                await models.load("m")
            assert [each for _, each in models.loaded()] == [before]

    asyncio.run(load())


def test_shapes_change_between_clients_and_the_model(repository: Write) -> None:
    config = """
        max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: 4 } }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1, -1 ] reshape { shape: [ -1 ] } }
    """

    async def load() -> None:
        async with loaded(repository("m", "1", config)) as models:
            instance = models.instance("m")
            tensors = Service(models, ServeOptions()).model_metadata("m")
            assert [*map(str, instance.inputs)] == ["x: float32[batch, 2, 2]"]
            assert tensors["inputs"][0]["shape"] == [-1, 2, 2]
            assert instance.config["input"][0]["reshape"] == {"shape": (4,)}
            for rows in (3, 1 << 16):  # the latter lie where workers read them
                x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 2)
                size = TensorParameters(binary_data_size=x.nbytes)
                given = InputDocument("x", "FP32", x.shape, size)
                request = Inference(InferDocument((given,)), instance, Regions(False))
                request.allocate(others := request.read())
                if rows > 3:
                    request.arrays["x"][:] = x
                else:
                    request.arrays["x"] = from_bytes(others[0][0], x.tobytes())
                (y,) = await request.run()
                np.testing.assert_array_equal(y, x.reshape(rows, 1, 4))

    asyncio.run(load())


def test_model_is_warm_before_it_is_ready(repository: Write) -> None:
    config = """
        max_batch_size: 8
        model_warmup [
            { name: "zeros" batch_size: 3 count: 2
              inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } } }
        ]
    """

    async def load() -> None:
        async with loaded(repository("m", "1", config)) as models:
            rows = models.instance("m").master.statistics().batch_sizes
            assert rows.count >= 2
            assert rows.total == 3 * rows.count

    asyncio.run(load())


def test_warm_up_that_fails_refuses_the_model(repository: Write) -> None:
    config = (
        'model_warmup { batch_size: 1 inputs { key: "z" value { dims: [ 4 ] zero_data: true } } }'
    )

    async def load() -> None:
        async with loaded(repository("m", "1", config)) as models:
            assert "model_warmup: got inputs ['z']" in models.index()[0]["reason"]

    asyncio.run(load())


def test_clients_change_models_only_where_they_may(repository: Write) -> None:
    async def load() -> None:
        repository("a", "1")
        async with loaded(folder := repository("b", "1"), first=["b"]) as models:
            assert [name for name, _ in models.loaded()] == ["b"]
            assert models.ready
            await models.load("a")
            assert [name for name, _ in models.loaded()] == ["a", "b"]
        async with loaded(folder, by_clients=False) as models:
            for change in (models.load, models.unload):
                with pytest.raises(RefusedError, match="is not allowed"):
                    await change("a")
            assert models.instance("a").ready
        (folder / "bad").mkdir()
        with pytest.raises(RefusedError, match="failed to load 'bad'"):
            async with loaded(folder, first=["bad"]):
                pass
        with pytest.raises(
            InvalidInputError, match=r"got \['c'\], expected some of \['a', 'b', 'bad'\]"
        ):
            loaded(folder, first=["c"])

    asyncio.run(load())


NEVER = 1e9
"""Seconds between two looks at a repository: `Models.catch_up` is what looks."""


def test_changes_of_the_repository_are_taken_up_once_they_stand_still(repository: Write) -> None:
    async def load() -> None:
        async with loaded(folder := repository("m", "1"), poll=NEVER) as models:

            async def versions() -> list[tuple[str, str]]:
                await models.catch_up()
                return [(name, each.version) for name, each in models.loaded()]

            first = models.instance("m")
            assert await versions() == [("m", "1")]
            assert models.instance("m") is first
            file = repository("m", "2") / "m" / "2" / "model.onnx"
            for _ in range(3):
                file.write_text(file.read_text() + " ")
                assert await versions() == [("m", "1")]
            assert await versions() == [("m", "2")]
            repository("new", "1")
            assert await versions() == [("m", "2")]
            assert await versions() == [("m", "2"), ("new", "1")]
            shutil.rmtree(folder / "m" / "2")
            shutil.rmtree(folder / "new")
            assert len(await versions()) == 2
            assert await versions() == [("m", "1")]
            assert models.ready
            assert {e["name"]: e["reason"] for e in models.index()}["new"] == "its folder is gone"
            folder.rename(folder.with_name("away"))
            await versions()
            assert await versions() == [("m", "1")]

    asyncio.run(load())


def test_versions_that_have_not_changed_stay_as_they_are(repository: Write) -> None:
    async def load() -> None:
        repository("m", "1", "version_policy { all {} }")
        async with loaded(folder := repository("m", "2"), poll=NEVER) as models:
            kept = models.instance("m", "1")
            gone = models.instance("m", "2").master
            repository("m", "3")
            shutil.rmtree(folder / "m" / "2")
            for _ in range(2):
                await models.catch_up()
            assert [each.version for _, each in models.loaded()] == ["1", "3"]
            assert models.instance("m", "1") is kept
            (repository("m", "4") / "m" / "4" / "model.onnx").write_text("{")
            for _ in range(2):
                await models.catch_up()
            assert [each.version for _, each in models.loaded()] == ["1", "3"]
            assert models.index()[0]["reason"] == LOG_SAYS
            await asyncio.gather(*models._models["m"].closing)
            assert kept.ready
            assert gone.health().state == "closed"
            repository("m", "5", "version_policy { specific { versions: 1 } }")
            for _ in range(2):
                await models.catch_up()
            assert models.instance("m") is not kept

    asyncio.run(load())


def test_repository_is_looked_at_again_and_again(repository: Write) -> None:
    async def load() -> None:
        async with loaded(repository("m", "1"), poll=0.01) as models, asyncio.timeout(60):
            repository("m", "2")
            while models.instance("m").version != "2":
                await asyncio.sleep(0.01)

    asyncio.run(load())


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "."])
def test_file_of_a_version_lies_in_its_folder(repository: Write, name: str) -> None:
    async def load() -> None:
        folder = repository("m", "1", config=f'default_model_filename: "{name}"')
        async with loaded(folder) as models:
            assert not models.loaded()
            assert models.index()[0]["state"] == "UNAVAILABLE"

    asyncio.run(load())


@pytest.mark.parametrize(
    "folder", ["plain", "with a space", "with [brackets] and 'quotes'", "a:b,c;d"]
)
@pytest.mark.parametrize(
    "config",
    [
        "",
        'default_model_filename: "model.json\\n"',
        'default_model_filename: "none.xml"',
        'backend: "openvino"',
        "instance_group { gpus: 7 }",
    ],
)
def test_answer_has_no_folder_of_a_model_that_cannot_be_loaded_and_the_error_has(
    tmp_path: Path, folder: str, config: str
) -> None:
    version = tmp_path / folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_text("{")
    (version.parent / "config.pbtxt").write_text(config)

    async def load() -> None:
        served = loaded(tmp_path / folder)
        with pytest.raises(RefusedError) as caught:
            await served.load("m")
        assert status_of(caught.value, {"request_id": "1"}) == (
            400,
            f"failed to load 'm', {LOG_SAYS}",
        )
        assert len(str(caught.value)) > len(caught.value.public)
        assert served.index()[0]["reason"] == LOG_SAYS

    asyncio.run(load())


@pytest.mark.parametrize("folder", ["/", "/etc/", "/no-such-folder/"])
def test_answer_to_a_run_that_failed_is_the_same_whatever_the_system_says(folder: str) -> None:
    for kind, status in ((PredictError, 500), (QueueFullError, 503), (PredictTimeoutError, 504)):
        failure = kind(f"[Errno 2] No such file: '{folder}x y'")
        got, text = status_of(failure, {"request_id": "1"})
        assert (got, folder in text) == (status, False)
