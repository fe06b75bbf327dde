"""``mcinfer inspect``: what a model takes and gives, what of it is split, and what it is made of.

``--json`` writes the same as one object; what is not known is null, and nothing is left out of lists:

- ``model``: the path; ``engine``: what loaded it; ``providers``: what runs it there, on the CPU;
  ``runtime``: null, or ``version`` of ONNX Runtime and the ``providers`` that it offers on this machine.
- ``inputs`` and ``outputs``: ``name``, ``type``, and ``shape``: numbers, symbols, or null without a name;
  null itself where the model does not say how many dimensions there are.
- ``split``: ``inputs`` and ``outputs``: by name, the axis; null for an input that goes whole, an output that
  is the same from every worker; a text why an output cannot be joined. ``known``: ``"said"``, ``"declared"``,
  ``"learned"``, ``"recorded"`` or ``"unknown"``; ``splits``; ``checked``; ``rows`` and ``difference`` of the
  request that has shown it; ``reason`` why requests run whole, or empty; ``fixed``: whether the batch is cut
  into runs of a fixed number of rows; ``summary``: all of this in one sentence.
- ``onnx``: null where the file is no ONNX file, or ``ir_version``, ``producer``, ``opsets`` (version by
  domain), ``operators`` (``domain``, ``type``, ``count``; the most frequent first, those of subgraphs and
  functions too) and ``weights``: ``count`` of the main graph's initialisers, ``constants`` of all other
  tensors (of nodes, subgraphs, functions); of both ``bytes``, ``external_bytes``, ``external_files``.
- ``prepared``: null where the cache cannot be read, or its ``state``, and ``key`` and ``bytes`` of its entry
  in the cache. ``already``: it was there. ``now``: loading it made it. ``unused``: it is there, but a worker
  with default options does not take it from there. ``failed``: it cannot be made. ``no``: it is not there.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.options import (
    BatchAxisOption,
    ModelArgument,
    OutputAxisOption,
    axes_of,
    check_model,
    engine_for,
)
from mcinfer.cli.progress import let_workers_tell, megabytes
from mcinfer.errors import BuildError, EngineError, McinferError, printable

_Facts = dict[str, Any]

_MAX_LINES = 12
"""Of a list, where not all are asked for."""

_MAX_CHARACTERS = 100
"""Of a name that the model gave."""

_MAX_SUMMARY = 500
"""Characters of how the batch is split, with the names in it."""

_KEY_CHARACTERS = 12

_OF_SPLIT = ("known", "splits", "checked", "rows", "difference", "reason")


def inspect(
    model: ModelArgument,
    example: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="For --probe: an .npz file with the inputs by name, or an .npy file with the only one.",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Run --input whole and in pieces, to learn how its batch splits."
        ),
    ] = False,
    batch_axis: BatchAxisOption = None,
    output_axis: OutputAxisOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as one JSON object.")] = False,
) -> None:
    """What a model takes and gives, what is split, and what it is made of."""
    if probe != (example is not None):
        raise typer.BadParameter(
            "--probe and --input go together: the one runs what the other gives"
        )
    axes = {
        "batch_axes": axes_of("--batch-axis", batch_axis),
        "output_axes": axes_of("--output-axis", output_axis),
    }
    check_model(model)
    let_workers_tell()
    contents, unranked = _onnx_contents(model)
    try:
        facts = _loaded(model, axes, example)
    except McinferError:
        if contents is not None and not as_json:
            print(*_lines_of_contents(contents), sep="\n")
        raise
    facts["onnx"] = contents
    for tensor in (*facts["inputs"], *facts["outputs"]):
        if not tensor["shape"] and tensor["name"] in unranked:
            tensor["shape"] = None  # a worker has no word for it but that of scalars
    print(json.dumps(facts, indent=1) if as_json else "\n".join(_lines(facts)))


# What there is to say.


def _onnx_contents(model: Path) -> tuple[_Facts | None, Collection[str]]:
    """What stands in the file, and which tensors may have any shape; None if it is no ONNX file."""
    from mcinfer.model_cache.onnx_files import scan

    try:
        found = scan(model)
    except (BuildError, OSError):  # if it matters, whoever loads the file says so in better words
        return None, ()
    return {
        "ir_version": found.ir_version,
        "producer": found.producer,
        "opsets": found.opsets,
        "operators": [
            {"domain": domain, "type": operator, "count": count}
            for (domain, operator), count in found.operators.most_common()
        ],
        "weights": {
            "count": len(found.initializers),
            "constants": found.constants,
            "bytes": found.weight_bytes,
            "external_bytes": found.external_bytes,
            "external_files": [*found.external],
        },
    }, found.unranked


def _loaded(model: Path, axes: Mapping[str, Any], example: Path | None) -> _Facts:
    """What a worker says that has loaded the model, and what that left in the cache."""
    from mcinfer.cli.batch import silent_about_splits
    from mcinfer.master import Master
    from mcinfer.sharding import is_fixed
    from mcinfer.specs import ModelSpec

    engine = engine_for(model)
    before = _entries(model) if engine == "onnxruntime" else None
    with silent_about_splits(), Master(model, 1, engine=engine, **axes) as master:
        spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
        providers = master.statistics().workers[0].providers
        prepared = None if before is None else _prepared(before, _entries(model))
        if example is not None:
            master.learn(_read_example(example, spec))
        split = master.split
    return {
        "model": str(model),
        "engine": engine,
        "providers": [*providers],
        "runtime": _runtime() if engine == "onnxruntime" else None,
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "split": {
            **{name: getattr(split, name) for name in _OF_SPLIT},
            "inputs": dict(split.inputs),
            "outputs": dict(split.outputs),
            "fixed": is_fixed(spec, split),
            "summary": split.summary(),
        },
        "prepared": prepared,
    }


def _read_example(path: Path, spec: Any) -> _Facts:
    """The arrays of a request, by input name."""
    from mcinfer.bench.inputs import InputOptions, saved_inputs

    alone = path.suffix == ".npy"
    options = InputOptions(
        files={spec.inputs[0].name: path} if alone else {}, archive=None if alone else path, dims={}
    )
    return {name: array for name, (_, array) in saved_inputs(spec, options).items()}


def _tensor(spec: Any) -> _Facts:
    return {"name": spec.name, "type": spec.element_type, "shape": [*spec.shape]}


def _runtime() -> _Facts | None:
    from mcinfer.cli.doctor import installed_runtime

    try:
        return asdict(installed_runtime())
    except EngineError:  # a worker has loaded the model all the same
        return None


def _entries(model: Path) -> dict[str, _Facts] | None:
    """What the cache has of this model, by key; None if it cannot be read."""
    from mcinfer.model_cache.building import FAILURE_FILE
    from mcinfer.model_cache.cache import Cache
    from mcinfer.model_cache.keys import read_source

    try:
        cache = Cache.default()
        entries = cache.entries()
        digest = ""
        if entries:
            with cache.notes("sources") as memory:
                digest = read_source(model, memory=memory).digest
    except (
        McinferError,
        OSError,
    ):  # the worker goes on without the cache as well, or says what is wrong
        return None
    itself = Path(os.path.realpath(model)).parent.name  # a prepared model may be looked at as well
    return {
        info.key: {
            "bytes": info.bytes,
            "used": info.in_use,
            "failed": (cache.folder / info.key / FAILURE_FILE).exists(),
        }
        for info in entries
        if info.key == itself or info.facts.get("model") == digest
    }


def _prepared(before: _Facts, after: _Facts | None) -> _Facts | None:
    """What the cache had of a model, and has now that a worker has loaded it, in one."""
    if after is None:
        return None
    used = [key for key, entry in after.items() if entry["used"]]
    key = next(iter(used or after), None)
    if key is None:
        return {"state": "no", "key": None, "bytes": None}
    if used:
        state = "already" if key in before else "now"
    else:
        state = "failed" if after[key]["failed"] else "unused"
    return {"state": state, "key": key, "bytes": after[key]["bytes"]}


# How it is said.


def _lines(facts: _Facts) -> Iterator[str]:
    yield from _lines_of_tensors("inputs", facts["inputs"])
    yield from _lines_of_tensors("outputs", facts["outputs"])
    split = facts["split"]
    if split["fixed"] and split["splits"]:
        yield "batch: fixed; inputs with a multiple of their rows are split in so many runs"
    else:
        yield f"batch: {printable(split['summary'][:_MAX_SUMMARY])}"
    if split["splits"]:
        yield from _lines_of_axes(split["inputs"], "split", "whole")
        yield from _lines_of_axes(split["outputs"], "joined", "the same from every worker")
    runtime = facts["runtime"]
    yield f"runs on: {', '.join(facts['providers'])}"
    if runtime is not None:
        yield f"onnxruntime {runtime['version']} offers: {', '.join(runtime['providers'])}"
    if facts["onnx"] is None:
        yield "operators and weights: not known; the file is not of ONNX's own format"
    else:
        yield from _lines_of_contents(facts["onnx"])
    if facts["prepared"] is not None:
        yield f"prepared: {_words_of_prepared(facts['prepared'])}"


def _lines_of_axes(axes: Mapping[str, int | None], verb: str, otherwise: str) -> Iterator[str]:
    """Which tensors are split or joined, by axis, and which are not."""
    kinds: dict[str, list[str]] = {}
    for name, axis in axes.items():
        kind = otherwise if axis is None else f"{verb} along axis {axis}"
        kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        more = ", …" if len(names) > _MAX_LINES else ""
        yield f"  {kind}: {', '.join(map(_shown, names[:_MAX_LINES]))}{more}"


def _lines_of_tensors(title: str, tensors: Sequence[_Facts]) -> Iterator[str]:
    yield f"{title}:"
    names = [f"{_shown(tensor['name'])}:" for tensor in tensors[:_MAX_LINES]]
    width = max(map(len, names), default=0)
    for name, tensor in zip(names, tensors, strict=False):
        yield f"  {name:<{width}} {tensor['type']}{_shape_text(tensor['shape'])}"
    yield from _others(tensors)


def _shape_text(shape: Sequence[int | str | None] | None) -> str:
    if shape is None:
        return ", rank not known"
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"[{_shown(sizes)}]"


def _others(items: Sequence[Any], more: str = "") -> Iterator[str]:
    if len(items) > _MAX_LINES:
        yield f"  and {_count(len(items) - _MAX_LINES, 'other')}{more}"


def _lines_of_contents(contents: _Facts) -> Iterator[str]:
    operators = contents["operators"]
    total = sum(operator["count"] for operator in operators)
    yield f"operators: {_count(total, 'node')} of {_count(len(operators), 'type')}"
    shown, rest = operators[:_MAX_LINES], operators[_MAX_LINES:]
    width = len(str(shown[0]["count"])) if shown else 0
    for operator in shown:
        main = operator["domain"] == "ai.onnx"
        name = operator["type"] if main else f"{operator['domain']}.{operator['type']}"
        yield f"  {operator['count']:>{width}}  {_shown(name)}"
    yield from _others(operators, f", {_count(sum(o['count'] for o in rest), 'node')}")
    weights = contents["weights"]
    outside = ""
    if weights["external_files"]:
        files = _count(len(weights["external_files"]), "other file")
        outside = f", of which {megabytes(weights['external_bytes'])} in {files}"
    counts = _count(weights["count"], "initialiser")
    if weights["constants"]:
        counts = f"{counts} and {_count(weights['constants'], 'other constant')}"
    yield f"weights: {counts}, {megabytes(weights['bytes'])}{outside}"
    opsets = ", ".join(f"{domain} {version}" for domain, version in contents["opsets"].items())
    by = contents["producer"] and f"; by {_shown(contents['producer'])}"
    yield f"written: IR version {contents['ir_version']}; opsets {_shown(opsets)}{by}"


def _words_of_prepared(prepared: _Facts) -> str:
    if prepared["key"] is None:
        return "no; a worker loads the file as it is"
    entry = f"{megabytes(prepared['bytes'])} in the cache, {prepared['key'][:_KEY_CHARACTERS]}"
    return {
        "already": f"yes; {entry}",
        "now": f"yes, just now; {entry}",
        "unused": f"yes, but with default options a worker loads the file as it is; {entry}",
        "failed": "no, it cannot be; a worker loads the file as it is",
    }[prepared["state"]]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(text: str) -> str:
    """What a model says, on a terminal: whatever characters it has, and however many."""
    clean = printable(text[: _MAX_CHARACTERS + 1])
    return clean if len(clean) <= _MAX_CHARACTERS else f"{clean[: _MAX_CHARACTERS - 1]}…"
