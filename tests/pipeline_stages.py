"""Runs the stages of a model one after another, each in a session of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto

from mcinfer.ranks.slicing.pipeline import Stage

Arrays = dict[str, NDArray[Any]]


def session(model: bytes) -> ort.InferenceSession:
    """A session whose results do not depend on how operators are fused, which differs between stages."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_whole(model: ModelProto, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    names = [value.name for value in model.graph.output]
    return dict(zip(names, session(model.SerializeToString()).run(names, inputs), strict=True))


def run_stages(stages: Sequence[Stage], inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """All that the stages make; each gets inputs of the model, and what earlier ones send to it alone."""
    made: Arrays = {}
    for number, stage in enumerate(stages):
        taken = [value.name for value in stage.model.graph.input]
        for name in taken:
            if name not in inputs:
                assert number in stages[stage.receives[name]].sends[name]
        given = {name: inputs[name] if name in inputs else made[name] for name in taken}
        made |= run_whole(stage.model, given)
    return made


def check_stages(model: ModelProto, stages: Sequence[Stage], inputs: Arrays) -> None:
    """The stages give what the model gives, bit by bit."""
    made = run_stages(stages, inputs)
    for name, expected in run_whole(model, inputs).items():
        np.testing.assert_array_equal(made[name], expected, name)
