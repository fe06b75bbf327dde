"""A model's configuration as Triton has it, ``config.pbtxt``: what it says for a `Master`, and for requests.

Each field is honoured, is passed over (the log names it), or refuses the model: docs/serving.md has a table.
protobuf's own parser reads the text, with the messages of ``inference.proto``.

Sources: model_config.proto in https://github.com/triton-inference-server/common says what fields mean, and
onnxruntime.cc in https://github.com/triton-inference-server/onnxruntime_backend has the parameters.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format, text_format
from google.protobuf.message import Message
from numpy.typing import NDArray

from mcinfer.config import EngineOptions, Limits, Timeouts
from mcinfer.engines.names import ENGINES
from mcinfer.errors import InvalidInputError, PredictError
from mcinfer.machine import whole_cpus
from mcinfer.serve.documents import InputDocument
from mcinfer.serve.messages import message
from mcinfer.serve.tensors import DATATYPES, TensorHead, from_bytes, shape_of
from mcinfer.specs import STRING, TensorSpec

_log = logging.getLogger("mcinfer.serve")

_PLATFORMS = {name: engine.platform for name, engine in ENGINES.items() if engine.platform}
"""By engine, which is Triton's *backend*, too."""

_FILE = "config.pbtxt"

_MAX_DEVICES = 1024
"""Of a model, as for a number of devices; clients may give configurations."""

_MAX_TEXT = 1 << 18
"""Characters of a client's configuration, a megabyte of which is read for a second."""

_LOWEST = -(1 << 31)
"""Priority of requests that say none, where the configuration says none."""

_HONOURED = frozenset(
    place + name
    for place, names in {
        "": "name platform backend version_policy max_batch_size default_model_filename model_warmup",
        "input.": "name data_type dims reshape optional",
        "output.": "name data_type dims reshape",
        "optimization.": "graph",
        "dynamic_batching.": "max_queue_delay_microseconds default_priority_level",
        "dynamic_batching.default_queue_policy.": "default_timeout_microseconds max_queue_size",
        "instance_group.": "count kind gpus",
        "parameters.": "intra_op_thread_count inter_op_thread_count execution_mode",
        "model_operations.": "op_library_filename",
    }.items()
    for name in names.split()
)

_HOWTO = "docs/howto/fastapi.md shows a server of your own with several models behind one answer"

_REFUSED = {
    "sequence_batching": f"models keep no state here between requests; {_HOWTO}",
    "ensemble_scheduling": f"a request runs one model here; {_HOWTO}",
    "batch_input": "a batch has no inputs here but those of its requests",
    "batch_output": "a batch has no outputs here but those of its requests",
    "model_transaction_policy.decoupled": "each request has one answer here",
}
"""What a model needs that names one of these, and why it is not there."""

_OWN = ("model_operations", "model_warmup")
"""These load code, or take files and memory of the server: no client may say them."""

_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
"""ONNX Runtime's levels of optimisation by Triton's; 0 is the usual one."""


@dataclass(frozen=True, slots=True)
class Reshape:
    """How a tensor's shape changes between clients and the model; -1 is a size that a request decides."""

    clients: tuple[int, ...]
    models: tuple[int, ...]

    def to_model(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _filled(self.clients, self.models, shape)

    def to_clients(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """An output as clients see it; `PredictError` if it is not as the configuration says."""
        try:
            return array.reshape(_filled(self.models, self.clients, array.shape))
        except ValueError as exc:
            text = f"output {name!r}: the model gave {[*array.shape]}, expected {[*self.models]}"
            raise PredictError(text) from exc


def _filled(given: Sequence[int], wanted: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    free = iter([size for size, n in zip(shape, given, strict=True) if n == -1])
    return tuple(next(free) if n == -1 else n for n in wanted)


class Configuration:
    """The configuration of one model.

    Args:
        folder: The model's, which may have a ``config.pbtxt``; or a model's file, which has none.
        name: Of the model.
        text: A client's configuration in JSON, in place of the file.

    Attributes:
        is_given: Whether there is one.
        rows: Most rows of a request, as it says; 0 if the model has no batch.
        file: The name of the model's file in a version's folder; empty for the usual one.
        priority: Of requests that say none.
        passed_over: The fields that have no effect here.

    Raises:
        InvalidInputError: It cannot be read, or needs what is not there.
        OSError: The file cannot be read.
    """

    def __init__(self, folder: Path, name: str, text: str | None = None) -> None:
        self._folder, file = folder, folder / _FILE
        self.is_given = text is not None or (folder.is_dir() and file.exists())
        self._said, unknown = message("ModelConfig")(), ""
        if text is not None:
            if len(text) > _MAX_TEXT:
                raise InvalidInputError(
                    f"config: it has more than {_MAX_TEXT} characters, the limit"
                )
            self._said, unknown = _read(text, json_format.Parse, "ignore_unknown_fields")
        elif self.is_given:
            if not file.is_file():  # a pipe may say nothing for ever
                raise InvalidInputError(f"config: {_FILE} is no file")
            own = file.read_text("utf-8", "replace")
            self._said, unknown = _read(own, text_format.Parse, "allow_unknown_field")
        said = self._said
        self.passed_over = [*dict.fromkeys(_passed_over(said)), *filter(None, [unknown])]
        for field, _ in said.ListFields() if text is not None else ():
            if field.name in _OWN:
                raise InvalidInputError(f"{field.name}: expected it in {_FILE} alone")
        if said.name not in ("", name):
            raise InvalidInputError(f"name: got {said.name!r}, expected {name!r}")
        self.rows: int = said.max_batch_size
        self.file = _plain("default_model_filename", said.default_model_filename)
        self.priority: int = -said.dynamic_batching.default_priority_level or _LOWEST

    def versions(self, found: Collection[int]) -> list[int]:
        """Those to serve of those that there are, the highest alone by default.

        Raises:
            InvalidInputError: There is none.
        """
        policy, known = self._said.version_policy, sorted(found)
        wanted = [*policy.specific.versions] if policy.HasField("specific") else known
        if policy.WhichOneof("policy_choice") in (None, "latest"):
            wanted = known[-(policy.latest.num_versions or 1) :]
        chosen = sorted({*wanted} & {*known})
        if not chosen:
            text = f"version_policy: got the versions {known}, expected {wanted or 'one or more'}"
            raise InvalidInputError(text)
        if absent := sorted({*wanted} - {*known}):
            _log.warning("%s: version_policy names versions that are not there: %s", self, absent)
        return chosen

    def __str__(self) -> str:
        return self._folder.name

    def options(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `Master` that it says. As with Triton, it says whether requests are joined.

        Args:
            before: What they are without it.

        Raises:
            InvalidInputError: It says what cannot be.
        """
        if not self.is_given:
            return {}
        said, dynamic = self._said, self._said.dynamic_batching
        policy, joins = dynamic.default_queue_policy, said.HasField("dynamic_batching")
        options: dict[str, Any] = {
            "max_batch_size": max(1, self.rows) if joins else 1,
            "max_delay": dynamic.max_queue_delay_microseconds / 1e6,
        }
        if name := said.backend or said.platform:
            engines = [e for e, platform in _PLATFORMS.items() if name in (e, platform)]
            if not engines:
                raise InvalidInputError(f"backend: got {name!r}, expected one of {[*_PLATFORMS]}")
            options["engine"] = engines[0]
        if devices := _devices(said):
            options["devices"] = devices
        engine = before.get("options", EngineOptions())
        if (own := self._engine_options(engine)) != engine:
            options["options"] = own
        if queue := policy.max_queue_size:
            options["limits"] = replace(before.get("limits", Limits()), queue=queue)
        if micro := policy.default_timeout_microseconds:
            options["timeouts"] = replace(before.get("timeouts", Timeouts()), predict=micro / 1e6)
        # Longer, a request would wait for company until its time is over.
        most = {**before, **options}.get("timeouts", Timeouts()).predict
        options["max_delay"] = min(options["max_delay"], most)
        return options

    def _engine_options(self, before: EngineOptions) -> EngineOptions:
        """With threads, optimisation and operators as it says them; 0 is the usual, as with Triton."""
        level, libraries = (
            self._said.optimization.graph.level,
            self._said.model_operations.op_library_filename,
        )
        if level not in _LEVELS:
            text = f"optimization.graph.level: got {level}, expected one of {[*_LEVELS]}"
            raise InvalidInputError(text)
        own: dict[str, Any] = {}
        if threads := self._number("intra_op_thread_count"):
            own["threads"] = threads
        if self._number("execution_mode", most=1):
            own["inter_op_threads"] = self._number("inter_op_thread_count") or whole_cpus()
        if level:
            graph = {"graph_optimization_level": _LEVELS[level]}
            own["session_options"] = {**before.session_options, **graph}
        if libraries:
            paths = [str(self._folder / path) for path in libraries]
            own["custom_operators"] = [*before.custom_operators, *paths]
        return replace(before, **own)

    def _number(self, name: str, most: int = 1 << 15) -> int:
        """A parameter that is a whole number; 0 if it is not there."""
        if name not in self._said.parameters:
            return 0
        text = self._said.parameters[name].string_value
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= most):
            raise InvalidInputError(f"{name}: got {text!r}, expected a number from 0 to {most}")
        return int(text)

    # Tensors.

    def seen(
        self, role: str, specs: Sequence[TensorSpec]
    ) -> tuple[tuple[TensorSpec, ...], dict[str, Reshape]]:
        """The model's inputs or outputs as clients see them, and how the shapes of some change.

        Args:
            role: ``"input"`` or ``"output"``.
            specs: The model's.

        Raises:
            InvalidInputError: It names a tensor that the model does not have, or has otherwise.
        """
        seen, reshapes = {spec.name: spec for spec in specs}, {}
        for said in getattr(self._said, role):
            optional = role == "input" and said.optional
            if said.name in seen and not optional:
                self._check(role, said, seen[said.name])
                if (reshape := self._reshape(role, said)) is not None:
                    reshapes[said.name], shape = reshape, seen[said.name].shape
                    sizes = [None if size == -1 else size for size in said.dims]
                    shape = (*shape[: len(reshape.clients) - len(sizes)], *sizes)
                    seen[said.name] = replace(seen[said.name], shape=shape)
            elif said.name in seen or not optional:
                text = "optional, expected false, since the model needs it"
                text = text if optional else f"a name that the model does not have, of {[*seen]}"
                raise InvalidInputError(f"{role} {said.name!r}: got {text}")
        return tuple(seen.values()), reshapes

    def _full(self, dims: Sequence[int]) -> tuple[int, ...]:
        return (-1, *dims) if self.rows > 0 else tuple(dims)

    def _check(self, role: str, said: Any, spec: TensorSpec) -> None:
        """Raise `InvalidInputError` unless a tensor of the model is as it says."""
        if said.data_type and (got := _data_type(said)) != type_name(spec):
            raise InvalidInputError(f"{role} {said.name!r}: got {got}, expected {type_name(spec)}")
        inner, own = said.reshape.shape if said.HasField("reshape") else said.dims, shape_of(spec)
        dims = self._full(inner)
        # Triton fills in dims that are not there. The model's may be unknown, which looks like a scalar's.
        if own and (inner or said.HasField("reshape")):
            pairs = zip(dims, own, strict=False)
            if len(dims) != len(own) or any(-1 not in p and p[0] != p[1] for p in pairs):
                text = f"{role} {said.name!r}: got {[*dims]} (the batch is first, if there is one)"
                raise InvalidInputError(f"{text}, and the model has {own}")

    def _reshape(self, role: str, said: Any) -> Reshape | None:
        """How its shape changes, if it does."""
        if not said.HasField("reshape") or said.dims == said.reshape.shape:
            return None
        dims, shape = self._full(said.dims), self._full(said.reshape.shape)
        if dims.count(-1) != shape.count(-1) or prod(dims) != prod(shape):
            text = f"{role} {said.name!r}: got {[*dims]} and the reshape {[*shape]}"
            raise InvalidInputError(f"{text}, expected the same number of elements")
        return Reshape(dims, shape)

    def warm_ups(
        self, specs: Sequence[TensorSpec]
    ) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """How often to run which inputs before the model is ready.

        As with Triton, a sample without rows is left out, and a file has one row, which all rows repeat.

        Args:
            specs: The inputs as clients see them.

        Raises:
            InvalidInputError: An input is not the model's, or not as the model has it.
            OSError: A file cannot be read.
        """
        known = {spec.name: spec for spec in specs}
        for sample in self._said.model_warmup:
            if unknown := sample.inputs.keys() - known:
                text = f"model_warmup: got inputs {sorted(unknown)}, expected some of {[*known]}"
                raise InvalidInputError(text)
            if sample.batch_size:
                rows = [sample.batch_size] if self.rows > 0 else []
                values = {
                    n: self._values(known[n], each, rows) for n, each in sample.inputs.items()
                }
                yield max(1, sample.count), values

    def _values(self, spec: TensorSpec, said: Any, rows: Sequence[int]) -> NDArray[Any]:
        if min(said.dims, default=0) < 0:
            raise InvalidInputError(f"model_warmup: got {[*said.dims]} for {spec}, expected sizes")
        kind = _data_type(said).removeprefix("TYPE_").replace(STRING.upper(), "BYTES")
        row = TensorHead(spec, InputDocument(spec.name, kind, (*(1 for _ in rows), *said.dims)))
        shape, way = (*rows, *said.dims), said.WhichOneof("input_data_type")
        if way == "input_data_file":
            name = _plain(way, said.input_data_file)
            values = from_bytes(row, (self._folder / "warmup" / name).read_bytes())
            return np.repeat(values, rows[0], axis=0) if rows else values
        if spec.element_type == STRING:
            return np.full(shape, "", object)
        if way != "random_data":
            return np.zeros(shape, spec.dtype)
        random = np.random.default_rng(0)
        if spec.dtype.kind in "biu":  # 0 and 1 are the indices that most tables have
            return random.integers(0, 2, shape).astype(spec.dtype)
        return random.random(shape).astype(spec.dtype)


def type_name(spec: TensorSpec) -> str:
    """Triton's name of a tensor's type; ``TYPE_INVALID`` if it has none."""
    kind = "TYPE_" + DATATYPES[spec.element_type].replace("BYTES", STRING.upper())
    known = message("ModelInput").DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name
    return kind if kind in known else "TYPE_INVALID"


def _data_type(said: Any) -> str:
    return _name_of(said, "data_type")


def _name_of(said: Any, field: str) -> str:
    """The name of an enumeration's value, or the number of one that has none, as JSON may say."""
    number = getattr(said, field)
    known = said.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return known[number].name if number in known else str(number)


def _read(text: str, parse: Any, lenient: str) -> tuple[Any, str]:
    """A configuration, and what the parser says of a field that it does not know; empty without one."""
    errors = (text_format.ParseError, json_format.ParseError, RecursionError)
    try:
        return parse(text, message("ModelConfig")()), ""
    except errors as first:
        try:
            return parse(text, message("ModelConfig")(), **{lenient: True}), str(first)
        except errors as exc:
            raise InvalidInputError(f"config: it is no model configuration: {exc}") from exc


def _passed_over(said: Message, place: str = "") -> Iterator[str]:
    """The fields that have no effect; `InvalidInputError` at one that refuses the model."""
    for field, value in said.ListFields():
        name = place + field.name
        if name in _REFUSED:
            raise InvalidInputError(f"{name}: {_REFUSED[name]}")
        if name == "parameters":
            yield from (f"{name}.{key}" for key in value if f"{name}.{key}" not in _HONOURED)
        elif any(known.startswith(f"{name}.") for known in (*_HONOURED, *_REFUSED)):
            for each in [value] if isinstance(value, Message) else value:
                yield from _passed_over(each, f"{name}.")
        elif name not in _HONOURED:
            yield name


def _plain(field: str, name: str) -> str:
    if Path(name).name != name:
        raise InvalidInputError(f"{field}: got {name!r}, expected a name")
    return name


def _devices(said: Any) -> list[str]:
    """The devices of the instance groups: one for each instance that they count."""
    devices: list[str] = []
    for group in said.instance_group:
        kind, count = _name_of(group, "kind"), group.count or 1
        if len(devices) + count * max(1, len(group.gpus)) > _MAX_DEVICES:
            raise InvalidInputError(f"instance_group: expected at most {_MAX_DEVICES} instances")
        if count < 0 or kind not in ("KIND_AUTO", "KIND_CPU", "KIND_GPU"):
            text = f"instance_group: got count {count} of {kind}, expected 1 or more of KIND_CPU,"
            raise InvalidInputError(f"{text} KIND_GPU or KIND_AUTO")
        if group.gpus or kind == "KIND_GPU":
            devices += [f"cuda:{card}" for card in group.gpus or [0] for _ in range(count)]
        else:
            start = sum(device.startswith("cpu") for device in devices)
            devices += [f"cpu:{start + i}" for i in range(count)]
    return devices
