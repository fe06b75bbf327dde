"""Models that cannot be made ready: an error that says where and why, and no process left."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from mcinfer import (
    BuildError,
    ClosedError,
    EngineOptions,
    InvalidInputError,
    Master,
    MissingDependencyError,
)
from tests.process.models import FakeModel
from tests.text_models import text_model


def failure_to_start(master: Master) -> str:
    """The text of the error that `start` raises."""
    with pytest.raises(BuildError) as caught:
        master.start()
    master.close()
    assert {worker.pid for worker in master.statistics().workers} == {None}
    return str(caught.value)


def test_build_that_raises_names_every_such_worker_once_ends_the_others_and_closes_the_master(
    fake_model: FakeModel, tmp_path: Path
) -> None:
    master = Master(fake_model(build="fail"), 3, engine="fake", verify="never")
    assert failure_to_start(master) == "workers 0 to 2: fake: asked to fail"
    with pytest.raises(ClosedError):
        master.predict({})
    with pytest.raises(ClosedError):
        master.start()
    model = fake_model(build=f"once:{tmp_path / 'done'}:fail")
    text = failure_to_start(Master(model, 2, engine="fake", verify="never"))
    assert text.count("asked to fail") == 1


def test_options_that_no_message_can_carry_are_refused_by_their_name(
    fake_model: FakeModel,
) -> None:
    options = EngineOptions(session_config={"key": "x" * (17 << 20)})
    with pytest.raises(InvalidInputError, match=r"^options: they do not fit a message to a worker"):
        Master(fake_model(), 1, engine="fake", options=options)


def test_model_with_many_properties_and_initialisers_is_described() -> None:
    names = [f"weight{number}" for number in range(2_000)]
    inputs = ", ".join(f"float[1] {name}" for name in ("x", *names))
    zeros = dict.fromkeys(names, np.zeros(1, np.float32))
    model = text_model(f"({inputs}) => (float[1] y) {{ y = Identity(x) }}", zeros)
    properties = {f"property {number}": "about this model" for number in range(500)}
    onnx.helper.set_model_props(model, properties)
    with Master(model, 1, options=EngineOptions(describe=True), verify="never") as master:
        assert master.description.properties == properties
        assert {spec.name for spec in master.description.overridable} == {*names}
        assert master.predict([np.ones(1, np.float32)])["y"] == 1


def test_missing_package_is_told_as_such(
    fake_model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The workers have this process's import path, and find this in the place of the package.
    (tmp_path / "ml_dtypes.py").write_text("raise ModuleNotFoundError(name='ml_dtypes')")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = fake_model(
        inputs=[["x", "bfloat16", ["batch", 4]]],
        outputs=[["y", "bfloat16", ["batch", 4], {"from": "x"}]],
    )
    with pytest.raises(MissingDependencyError, match="pip install 'ml_dtypes>=") as caught:
        Master(model, 2, engine="fake", verify="never").start()
    assert str(caught.value).startswith("workers 0 and 1: ")
    assert str(caught.value).count("pip install") == 1
