"""Tests of mcinfer/serve: models and their configurations, messages, and what is public."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

import mcinfer.serve
from mcinfer import EngineOptions, InvalidInputError, Limits, Master, Timeouts
from mcinfer.serve import models
from mcinfer.serve.inference import public
from mcinfer.serve.messages import message
from mcinfer.serve.models import Models, RefusedError

FOLDER = Path(mcinfer.serve.__file__).parent


def test_compiled_messages_are_those_of_the_file_beside_them(tmp_path: Path) -> None:
    target = tmp_path / "inference.binpb"
    words = ["protoc", f"-I{FOLDER}", f"--descriptor_set_out={target}", "inference.proto"]
    assert protoc.main(words) == 0
    kind = descriptor_pb2.FileDescriptorSet
    have = (FOLDER / "inference.binpb").read_bytes()
    assert kind.FromString(have) == kind.FromString(target.read_bytes()), "run: make proto"


def options_of(text: str) -> dict[str, Any]:
    config = message("ModelConfig")()
    models._read_config(config, Path("unused"), text)
    before = {"limits": Limits(memory_bytes=1 << 20), "timeouts": Timeouts(start=5)}
    return models._options(config, before)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"max_batch_size": 1, "max_delay": 0.0}),
        ({"max_batch_size": 8}, {"max_batch_size": 1, "max_delay": 0.0}),
        (
            {"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 500}},
            {"max_batch_size": 8, "max_delay": 0.0005},
        ),
        ({"backend": "openvino"}, {"max_batch_size": 1, "max_delay": 0.0, "engine": "openvino"}),
        (
            {
                "platform": "onnxruntime_onnx",
                "instance_group": [{"count": 2, "kind": "KIND_CPU"}, {}],
            },
            {
                "max_batch_size": 1,
                "max_delay": 0.0,
                "engine": "onnxruntime",
                "devices": ["cpu:0", "cpu:1", "cpu:2"],
            },
        ),
        (
            {"instance_group": [{"count": 2, "gpus": [0, 3]}, {"kind": "KIND_GPU"}]},
            {
                "max_batch_size": 1,
                "max_delay": 0.0,
                "devices": ["cuda:0", "cuda:0", "cuda:3", "cuda:3", "cuda:0"],
            },
        ),
        (
            {
                "dynamic_batching": {
                    "default_queue_policy": {
                        "max_queue_size": 3,
                        "default_timeout_microseconds": 2000000,
                    }
                }
            },
            {
                "max_batch_size": 1,
                "max_delay": 0.0,
                "limits": Limits(memory_bytes=1 << 20, queue=3),
                "timeouts": Timeouts(start=5, predict=2.0),
            },
        ),
    ],
)
def test_configuration_gives_options_of_the_master(
    config: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert options_of(json.dumps(config)) == expected


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backend": "tensorflow"}, "backend: got 'tensorflow', expected one of"),
        ({"instance_group": [{"kind": "KIND_MODEL"}]}, "got count 1 of KIND_MODEL"),
        ({"instance_group": [{"count": -1}]}, "got count -1"),
        ({"max_batch_size": "many"}, "it is no model configuration"),
    ],
)
def test_configuration_that_cannot_be_followed_is_refused(config: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        options_of(json.dumps(config))


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


def loaded(folder: Path) -> Models:
    return Models({}, folder, lambda _: {"engine": "fake", "devices": "inline"})


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
            assert "fake" in models.index()[0]["reason"]

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
        with pytest.raises(RefusedError, match="failed to load 'm', no"):
            async with Models({}, repository("m", "1"), lambda _: options, fail):
                pass

    asyncio.run(load())
    assert masters[0].health().state == "closed"


def test_one_model_that_cannot_be_loaded_ends_the_others(repository: Write) -> None:
    async def load() -> None:
        repository("good", "1")
        models = loaded(repository("bad", "1", config='name: "worse"'))
        with pytest.raises(RefusedError, match="failed to load 'bad', name: got 'worse'"):
            async with models:
                pass
        assert not models.loaded()

    asyncio.run(load())


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "."])
def test_file_of_a_version_lies_in_its_folder(repository: Write, name: str) -> None:
    async def load() -> None:
        folder = repository("m", "1", config=f'default_model_filename: "{name}"')
        with pytest.raises(RefusedError, match="failed to load 'm'"):
            async with loaded(folder):
                pass

    asyncio.run(load())


def test_text_for_clients_has_no_folder_and_keeps_names_in_models(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    text = f"{path}: Node /encoder/layer.0/MatMul failed ('{path}'), see {tmp_path}/a b"
    assert public(text) == (
        f"model.onnx: Node /encoder/layer.0/MatMul failed ('model.onnx'), see {tmp_path.name}/a b"
    ).replace(f"{tmp_path.name}/", "")
