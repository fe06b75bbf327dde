"""What is found out of a model before it is measured: what it takes, and how its batch is split."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mcinfer.bench.inputs import InputOptions, examples
from mcinfer.errors import McinferError
from mcinfer.master import Master
from mcinfer.model_cache.split_records import records_in
from mcinfer.sharding import Axes, SaidAxes, Split, first_split, is_fixed
from mcinfer.specs import ModelSpec


@contextmanager
def own_records(folder: Path) -> Iterator[None]:
    """Meanwhile, what is learned is kept below this folder: it is learned from inputs that are made up."""
    records = folder / "splits"
    records.mkdir(mode=0o700)
    with records_in(records):
        yield


def look_at(
    master: Master,
    batches: Sequence[int],
    inputs: InputOptions,
    batch_axes: Axes,
    output_axes: Axes,
) -> tuple[ModelSpec, Split]:
    """What the model takes and gives, and how its batch is split: learned, if that is not known.

    A benchmark sends the same request again and again, and its rows may be equal, which shows nothing. What
    is learned here is recorded, within `own_records`, where the masters that are measured find it.

    Args:
        master: Started, for the model; one worker is enough.
        batches: Rows of the requests that will come.
        inputs: What they are made of.
        batch_axes: What the user says, as the master was given it.
        output_axes: Likewise.

    Returns:
        The model; and a split by which requests run from the first one on. Where they run whole, it says
        why, and its `inputs` still say where their rows lie, as far as that is said or declared.

    Raises:
        InvalidInputError: The options do not fit the model.
    """
    model = ModelSpec(inputs=master.inputs, outputs=master.outputs)
    first = first_split(model, SaidAxes(inputs=batch_axes, outputs=output_axes))
    split, why = master.split, ""
    said_whole = first.known == "said" and bool(first.reason)
    if not (split.checked or said_whole or is_fixed(model, first)):
        for example in examples(model, first, batches, inputs):
            try:
                split = master.learn(example)
            except McinferError as exc:
                why = why or f"an example to learn it from failed: {exc}"
            else:
                why = why or "no example has shown whether the rows of a batch are independent"
            if split.checked:
                break
    if why and not split.checked:
        split = replace(split, reason=why)
    if all(axis is None for axis in split.inputs.values()):
        split = replace(split, inputs=first.inputs)
    return model, split
