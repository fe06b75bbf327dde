"""``mcinfer inspect``: what a model takes and gives, how its batch is split, and what it is made of.

docs/command_line.md lists the fields of ``--json``.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.cache import KEY_CHARACTERS
from mcinfer.cli.options import (
    BatchAxisOption,
    ModelArgument,
    OutputAxisOption,
    axes_of,
    check_model,
)
from mcinfer.cli.probes import gpus_and_driver, installed_runtime
from mcinfer.cli.progress import counted, let_workers_tell, megabytes
from mcinfer.engines.names import engines_for
from mcinfer.errors import BuildError, EngineError, McinferError, printable

_Facts = dict[str, Any]

_MAX_LINES = 12
"""Lines of a list; ``--json`` has all."""

_MAX_CHARACTERS = 100
"""Characters of a name that the model gave."""

_MAX_SUMMARY = 500
"""Characters of how the batch is split, with the names in it."""

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
        raise typer.BadParameter("--probe and --input go together: --probe runs the input")
    axes = axes_of(batch_axis, output_axis)
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
            tensor["shape"] = None  # a worker reports it as a scalar
    print(json.dumps(facts, indent=1, default=asdict) if as_json else "\n".join(_lines(facts)))


# The facts.


def _onnx_contents(model: Path) -> tuple[_Facts | None, Collection[str]]:
    """The contents of the file, and the tensors of any shape; None if it is no ONNX file."""
    from mcinfer.model_cache.onnx_files import scan

    try:
        found = scan(model)
    except (BuildError, OSError):  # if it matters, the worker that loads the file says so
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
    """What a worker that has loaded the model reports, and what that left in the cache."""
    from mcinfer.bench.inputs import InputOptions, saved_inputs
    from mcinfer.cli.batch import silent_about_splits
    from mcinfer.config import EngineOptions
    from mcinfer.master import Master
    from mcinfer.sharding import is_fixed
    from mcinfer.specs import ModelSpec

    engine, waiting = engines_for(model)[0], EngineOptions(prepare="wait")
    before = _entries(model) if engine == "onnxruntime" else None
    with silent_about_splits(), Master(model, 1, engine=engine, options=waiting, **axes) as master:
        spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
        providers = master.statistics().workers[0].providers
        prepared = None if before is None else _prepared(before, _entries(model))
        if example is not None:
            alone = {spec.inputs[0].name: example} if example.suffix == ".npy" else {}
            options = InputOptions(files=alone, archive=None if alone else example, dims={})
            saved = saved_inputs(spec, options)
            master.learn({name: array for name, (_, array) in saved.items()})
        split = master.split
    runtime = driver = None
    gpus: Sequence[Any] = ()
    with suppress(EngineError):  # a worker has loaded the model all the same
        runtime = installed_runtime() if engine == "onnxruntime" else None
    with suppress(OSError):  # `mcinfer doctor` says why there is none
        gpus, driver = gpus_and_driver()
    inputs, outputs = (
        [{"name": t.name, "type": t.element_type, "shape": [*t.shape]} for t in tensors]
        for tensors in (spec.inputs, spec.outputs)
    )
    return {
        "model": str(model),
        "engine": engine,
        "providers": [*providers],
        "runtime": runtime,
        "gpus": gpus,
        "driver": driver,
        "inputs": inputs,
        "outputs": outputs,
        "split": {
            **{name: getattr(split, name) for name in _OF_SPLIT},
            "inputs": dict(split.inputs),
            "outputs": dict(split.outputs),
            "fixed": is_fixed(spec, split),
            "summary": split.summary(),
        },
        "prepared": prepared,
    }


def _entries(model: Path) -> _Facts | None:
    """The prepared forms of this model in the cache, by key; None if the cache cannot be read."""
    from mcinfer.model_cache.cache import FAILURE_FILE, MODEL_FILE, Cache
    from mcinfer.model_cache.keys import read_content

    digest = ""
    try:
        cache = Cache.default()
        if entries := cache.entries():
            digest = read_content(model, memory=cache.notes("sources")).digest
    except (McinferError, OSError):  # the worker goes on without the cache, or says what is wrong
        return None
    itself = Path(os.path.realpath(model)).parent.name  # a prepared model may be inspected as well
    found = {
        info.key: (info, cache.folder / info.key)
        for info in entries
        if info.key == itself or info.facts.get("model") == digest
    }
    return {  # without what OpenVINO has compiled, and slices
        key: entry
        for key, entry in found.items()
        if any((entry[1] / name).exists() for name in (MODEL_FILE, FAILURE_FILE))
    }


def _prepared(before: _Facts, after: _Facts | None) -> _Facts | None:
    """The entry of a model after a worker has loaded it, and how it came to be there."""
    from mcinfer.model_cache.cache import FAILURE_FILE

    if after is None:
        return None
    used = [key for key, (info, _) in after.items() if info.in_use]
    key = next(iter(used or after), None)
    if key is None:
        return {"state": "no", "key": None, "bytes": None}
    info, folder = after[key]
    if used:
        state = "already" if key in before else "now"
    else:
        state = "failed" if (folder / FAILURE_FILE).exists() else "unused"
    return {"state": state, "key": key, "bytes": info.bytes}


# The lines.


def _lines(facts: _Facts) -> Iterator[str]:
    for title in ("inputs", "outputs"):
        yield f"{title}:"
        shown = facts[title][:_MAX_LINES]
        names = [f"{_shown(tensor['name'])}:" for tensor in shown]
        width = max(map(len, names), default=0)
        for name, tensor in zip(names, shown, strict=True):
            yield f"  {name:<{width}} {tensor['type']}{_shape_text(tensor['shape'])}"
        yield from _others(facts[title])
    split = facts["split"]
    if split["fixed"] and split["splits"]:
        yield "batch: fixed; inputs with a multiple of their rows are split in so many runs"
    else:
        yield f"batch: {printable(split['summary'][:_MAX_SUMMARY])}"
    if split["splits"]:
        yield from _lines_of_axes(split["inputs"], "split", "whole")
        yield from _lines_of_axes(split["outputs"], "joined", "the same from every worker")
    yield f"runs on: {', '.join(facts['providers'])}"
    if facts["runtime"]:
        yield str(facts["runtime"])
    yield from map(str, facts["gpus"])
    if facts["driver"]:
        yield f"  {facts['driver']}"
    if facts["onnx"] is None:
        yield "operators and weights: not known; the file is not of ONNX's own format"
    else:
        yield from _lines_of_contents(facts["onnx"])
    if prepared := facts["prepared"]:
        entry = prepared["key"] or ""
        if entry:
            entry = f"{megabytes(prepared['bytes'])} in the cache, {entry[:KEY_CHARACTERS]}"
        words = {
            "already": f"yes; {entry}",
            "now": f"yes, just now; {entry}",
            "unused": f"yes, but with default options a worker loads the file as it is; {entry}",
            "failed": "no, it cannot be; a worker loads the file as it is",
            "no": "no; a worker loads the file as it is",
        }
        yield f"prepared: {words[prepared['state']]}"


def _lines_of_axes(axes: Mapping[str, int | None], verb: str, otherwise: str) -> Iterator[str]:
    """Which tensors are split or joined, by axis, and which are not."""
    kinds: dict[str, list[str]] = {}
    for name, axis in axes.items():
        kind = otherwise if axis is None else f"{verb} along axis {axis}"
        kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        more = ", …" if len(names) > _MAX_LINES else ""
        yield f"  {kind}: {', '.join(map(_shown, names[:_MAX_LINES]))}{more}"


def _shape_text(shape: Sequence[int | str | None] | None) -> str:
    if shape is None:
        return ", rank not known"
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"[{_shown(sizes)}]"


def _others(items: Sequence[Any], more: str = "") -> Iterator[str]:
    if len(items) > _MAX_LINES:
        yield f"  and {counted(len(items) - _MAX_LINES, 'other')}{more}"


def _lines_of_contents(contents: _Facts) -> Iterator[str]:
    operators = contents["operators"]
    total = sum(operator["count"] for operator in operators)
    yield f"operators: {counted(total, 'node')} of {counted(len(operators), 'type')}"
    shown = operators[:_MAX_LINES]
    width = len(str(shown[0]["count"])) if shown else 0
    for operator in shown:
        total -= operator["count"]
        main = operator["domain"] == "ai.onnx"
        name = operator["type"] if main else f"{operator['domain']}.{operator['type']}"
        yield f"  {operator['count']:>{width}}  {_shown(name)}"
    yield from _others(operators, f", {counted(total, 'node')}")
    weights = contents["weights"]
    counts = counted(weights["count"], "initialiser")
    if weights["constants"]:
        counts += f" and {counted(weights['constants'], 'other constant')}"
    outside = ""
    if files := weights["external_files"]:
        size = megabytes(weights["external_bytes"])
        outside = f", of which {size} in {counted(len(files), 'other file')}"
    yield f"weights: {counts}, {megabytes(weights['bytes'])}{outside}"
    opsets = ", ".join(f"{domain} {version}" for domain, version in contents["opsets"].items())
    by = contents["producer"] and f"; by {_shown(contents['producer'])}"
    yield f"written: IR version {contents['ir_version']}; opsets {_shown(opsets)}{by}"


def _shown(text: str) -> str:
    """A text of the model, printable and not too long."""
    clean = printable(text[: _MAX_CHARACTERS + 1])
    return clean if len(clean) <= _MAX_CHARACTERS else f"{clean[: _MAX_CHARACTERS - 1]}…"
