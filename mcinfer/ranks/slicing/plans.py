"""The plan of one rank: the steps that run its slice, and its place among the ranks.

`mcinfer.ranks.slicing.segments` writes it. This module does not import `onnx`, so a rank whose slice was cut
before needs neither the package nor its memory.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mcinfer.errors import BuildError
from mcinfer.specs import ModelSpec, TensorSpec, numpy_dtype

PLAN_FILE = "plan.json"
"""A rank's plan, beside its segments."""

REPORT_FILE = "slices.json"
"""The slicer's report, beside the slices."""

METADATA_KEY = "mcinfer.slice"
"""The metadata property of a slice in a file: its plan without steps, as JSON."""

VERSION = 1
"""Of plans, reports, and the metadata of slices."""

ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
Reduction = Literal["sum", "max", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the slice without collectives: a model of its own.

    Attributes:
        file: Its file, in the plan's folder.
        phase: How many collectives must run before it.
        inputs: Names of its inputs, in the order of the file.
        outputs: Names of its outputs, in the order of the file.
    """

    file: str
    phase: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective operation on one value.

    Attributes:
        node: The collective node's name.
        phase: How many collectives must run before it.
        operation: Of reductions.
        axis: That gathers join and scatters cut; may be negative.
        root: The rank whose value a broadcast sends.
        input: Name of the value that this rank gives.
        output: Name of the result.
    """

    node: str
    phase: int = 0
    kind: ExchangeKind
    operation: Reduction = "sum"
    axis: int = 0
    root: int = 0
    input: str
    output: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.output,)

    @property
    def options(self) -> dict[str, Any]:
        """What the methods of a group that are called after this kind take, by name."""
        names = {"all_reduce": ["operation"], "all_gather": ["axis"], "broadcast": ["root"]}
        return {name: getattr(self, name) for name in names.get(self.kind, ["axis", "operation"])}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How one rank runs its slice.

    Attributes:
        rank: Number of the rank whose slice this is; None if the slice does not say.
        tensor: How many ranks share a stage; None if the slice does not say: then all ranks of the group.
        pipeline: How many stages there are.
        spec: Inputs and outputs of the whole model.
        receives: Source rank of each value that comes from an earlier stage.
        sends: The ranks that get a value, by its name.
        made: Names of the whole model's outputs that this slice makes.
        steps: In the order of their execution.
    """

    rank: int | None
    tensor: int | None
    pipeline: int
    spec: ModelSpec
    receives: Mapping[str, int] = field(default_factory=dict)
    sends: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    made: tuple[str, ...]
    steps: tuple[Segment | Exchange, ...] = ()

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["spec"]
        sides = {"inputs": self.spec.inputs, "outputs": self.spec.outputs}
        specs = {
            side: [[spec.name, spec.element_type, spec.shape] for spec in specs]
            for side, specs in sides.items()
        }
        return {"version": VERSION, **plain, **specs}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], what: str = "rank plan") -> "RankPlan":
        """The plan that `to_json` gave; BuildError if it is of another version, or damaged."""
        version = value.get("version") if isinstance(value, Mapping) else None
        if version != VERSION:
            raise BuildError(f"{what}: got version {version!r}, expected {VERSION}")
        try:
            return cls(
                rank=value["rank"],
                tensor=value["tensor"],
                pipeline=value["pipeline"],
                spec=ModelSpec(inputs=_specs(value["inputs"]), outputs=_specs(value["outputs"])),
                receives=dict(value["receives"]),
                sends={name: tuple(ranks) for name, ranks in value["sends"].items()},
                made=tuple(value.get("made", ())),
                steps=tuple(_step(step) for step in value.get("steps", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise BuildError(f"{what}: got a damaged one: {exc!r}") from exc

    def write(self, folder: Path) -> None:
        (folder / PLAN_FILE).write_text(json.dumps(self.to_json()))

    @classmethod
    def read(cls, folder: Path) -> "RankPlan":
        """The plan in a folder; BuildError if there is none."""
        try:
            return cls.from_json(json.loads((folder / PLAN_FILE).read_text()))
        except (OSError, ValueError, RecursionError) as exc:
            raise BuildError(f"{folder / PLAN_FILE}: {exc}") from exc


def rank_folder(rank: int) -> str:
    """The name of the folder of a rank's segments, beside its weights and those of other ranks."""
    return f"rank{rank}"


def _specs(value: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=numpy_dtype(element_type), shape=tuple(shape))
        for name, element_type, shape in value
    )


def _step(value: Mapping[str, Any]) -> Segment | Exchange:
    if "file" not in value:
        return Exchange(**value)
    return Segment(
        **{**value, "inputs": tuple(value["inputs"]), "outputs": tuple(value["outputs"])}
    )
