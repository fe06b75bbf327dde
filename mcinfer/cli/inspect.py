"""``mcinfer inspect``: what a model takes and gives, what of it is split, and what it is made of.

``--json`` writes the same as one object; what is not known is null, and nothing is left out of lists:

- ``model``: the path; ``engine``: what loaded it; ``providers``: what runs it there, on the CPU;
  ``runtime``: null, or ``version`` of ONNX Runtime and the ``providers`` that it offers on this machine.
- ``inputs`` and ``outputs``: ``name``, ``type``, and ``shape``: numbers, symbols, or null without a name.
- ``batch``: its ``symbol`` or null; whether it is ``fixed``; ``axes``: by input, where it is cut.
- ``onnx``: null where the file is no ONNX file, or ``ir_version``, ``producer``, ``opsets`` (version by
  domain), ``operators`` (``domain``, ``type``, ``count``; the most frequent first, those of subgraphs and
  functions too) and ``weights`` (``count``, ``bytes``, ``external_bytes``, ``external_files``).
- ``prepared``: null where the cache cannot be read, or its ``state``, and ``key`` and ``bytes`` of its entry
  in the cache. ``already``: it was there. ``now``: loading it made it. ``unused``: it is there, but a worker
  with default options does not take it from there. ``failed``: it cannot be made. ``no``: it is not there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.options import ModelArgument
from mcinfer.errors import BuildError, McinferError
from mcinfer.progress import let_workers_tell, megabytes

_Facts = dict[str, Any]

_MOST_LINES = 12
"""Of a list, where not all are asked for."""

_MOST_CHARACTERS = 100
"""Of a name that the model gave."""

_KEY_CHARACTERS = 12
_ASK_SECONDS = 60.0
_ASK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
found = {"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}
print(json.dumps(found))
"""
"""The command line imports no runtime: it would stay for as long as the workers run."""

_MINDIR = {".mindir": ("mindspore", "mindspore_lite"), ".ms": ("mindspore_lite",)}
"""Engines for files of these endings: the first that is installed."""


def inspect(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as one JSON object.")] = False,
) -> None:
    """What a model takes and gives, what is split, and what it is made of."""
    let_workers_tell()
    contents = _onnx_contents(model)
    try:
        facts = _loaded(model)
    except McinferError:
        if contents is not None and not as_json:
            print(*_lines_of_contents(contents), sep="\n")
        raise
    facts["onnx"] = contents
    print(json.dumps(facts, indent=1) if as_json else "\n".join(_lines(facts)))


# What there is to say.


def _onnx_contents(model: Path) -> _Facts | None:
    """What stands in the file; None if it is no ONNX file that can be read."""
    from mcinfer.prepared.onnx_files import contents

    try:
        found = contents(model)
    except (BuildError, OSError):  # if it matters, whoever loads the file says so in better words
        return None
    return {
        "ir_version": found.ir_version,
        "producer": found.producer,
        "opsets": found.opsets,
        "operators": [
            {"domain": domain, "type": operator, "count": count}
            for (domain, operator), count in found.operators.items()
        ],
        "weights": {
            "count": found.weights,
            "bytes": found.weight_bytes,
            "external_bytes": found.external_bytes,
            "external_files": [*found.external],
        },
    }


def _loaded(model: Path) -> _Facts:
    """What a worker says that has loaded the model, and what that left in the cache."""
    from mcinfer.master import Master
    from mcinfer.sharding import batch_symbol
    from mcinfer.specs import ModelSpec

    engine = _engine(model)
    before = _entries(model) if engine == "onnxruntime" else None
    with Master(model, 1, engine=engine) as master:
        spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
        providers = master.statistics().workers[0].providers
        prepared = None if before is None else _prepared(before, _entries(model))
    symbol = batch_symbol(spec)
    firsts = {tensor.name: tensor.shape[0] for tensor in spec.inputs if tensor.shape}
    fixed = symbol is None and bool(firsts)
    fixed = fixed and all(isinstance(size, int) for size in firsts.values())
    if symbol is None:
        axes = dict.fromkeys(firsts, 0) if fixed else {}
    else:
        axes = {t.name: t.shape.index(symbol) for t in spec.inputs if symbol in t.shape}
    return {
        "model": str(model),
        "engine": engine,
        "providers": [*providers],
        "runtime": _runtime() if engine == "onnxruntime" else None,
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "batch": {"symbol": symbol, "fixed": fixed, "axes": axes},
        "prepared": prepared,
    }


def _engine(model: Path) -> str:
    engines = _MINDIR.get(model.suffix, ("onnxruntime",))
    return next((name for name in engines if find_spec(name) is not None), engines[0])


def _tensor(spec: Any) -> _Facts:
    return {"name": spec.name, "type": spec.element_type, "shape": [*spec.shape]}


def _runtime() -> _Facts | None:
    """What ONNX Runtime is installed, asked in a process that ends with the answer."""
    from mcinfer.children import environment

    path = json.dumps([os.path.abspath(folder) for folder in sys.path])
    try:
        ran = subprocess.run(  # noqa: S603 nothing in it comes from outside
            [sys.executable, "-P", "-c", _ASK, path],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ASK_SECONDS,
            check=True,
        )
        found: _Facts = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return found


def _entries(model: Path) -> dict[str, _Facts] | None:
    """What the cache has of this model, by key; None if it cannot be read."""
    from mcinfer.prepared.cache import Cache
    from mcinfer.prepared.contents import FAILURE_FILE
    from mcinfer.prepared.sources import read_source

    try:
        cache = Cache.default()
        entries = cache.entries()
        digest = read_source(model, memory=cache.sources).digest if entries else ""
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
    used = {key: entry for key, entry in after.items() if entry["used"]}
    if used:
        key = next(iter(used))
        return {"state": "already" if key in before else "now", "key": key, **_size(after, key)}
    if not after:
        return {"state": "no", "key": None, "bytes": None}
    key = next(iter(after))
    return {
        "state": "failed" if after[key]["failed"] else "unused",
        "key": key,
        **_size(after, key),
    }


def _size(entries: _Facts, key: str) -> _Facts:
    return {"bytes": entries[key]["bytes"]}


# How it is said.


def _lines(facts: _Facts) -> Iterator[str]:
    yield from _lines_of_tensors("inputs", facts["inputs"])
    yield from _lines_of_tensors("outputs", facts["outputs"])
    batch = facts["batch"]
    if batch["symbol"] is not None:
        symbol = _shown(repr(batch["symbol"]))
        yield f"batch: the symbol {symbol}; inputs that have it are split, others go whole"
    elif batch["fixed"]:
        yield "batch: fixed; inputs with a multiple of their rows are split in so many runs"
    else:
        yield "batch: none is known; requests run whole unless batch_axes says what to split"
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


def _lines_of_tensors(title: str, tensors: Sequence[_Facts]) -> Iterator[str]:
    yield f"{title}:"
    names = [f"{_shown(tensor['name'])}:" for tensor in tensors[:_MOST_LINES]]
    width = max(map(len, names), default=0)
    for name, tensor in zip(names, tensors, strict=False):
        shape = ", ".join("?" if size is None else str(size) for size in tensor["shape"])
        yield f"  {name:<{width}} {tensor['type']}[{_shown(shape)}]"
    yield from _others(tensors)


def _others(items: Sequence[Any], more: str = "") -> Iterator[str]:
    if len(items) > _MOST_LINES:
        yield f"  and {_count(len(items) - _MOST_LINES, 'other')}{more}"


def _lines_of_contents(contents: _Facts) -> Iterator[str]:
    operators = contents["operators"]
    total = sum(operator["count"] for operator in operators)
    yield f"operators: {_count(total, 'node')} of {_count(len(operators), 'type')}"
    shown, rest = operators[:_MOST_LINES], operators[_MOST_LINES:]
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
    size = megabytes(weights["bytes"])
    yield f"weights: {_count(weights['count'], 'initialiser')}, {size}{outside}"
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
    clean = "".join(c if c.isprintable() else "?" for c in text[: _MOST_CHARACTERS + 1])
    return clean if len(clean) <= _MOST_CHARACTERS else f"{clean[: _MOST_CHARACTERS - 1]}…"
