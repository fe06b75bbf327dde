"""A large batch through a pool, in constant memory.

::

    input file ── rows, in order ──► a request ──► Master.predict ──► rows ──► a folder beside the output,
                                     a request     (over all workers)          and its file at the end

How a batch is split is known before the first request (`mcinfer.large_batches.learning`); work that was
interrupted goes on with the same split. Two requests are under way, so that workers do not wait for what is
read or written. This thread does both.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

from mcinfer import __version__
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.large_batches.learning import Work, plan_work
from mcinfer.large_batches.output import BatchOutput
from mcinfer.large_batches.partial_folder import PartialFolder
from mcinfer.large_batches.reading import DamagedInputError, InputFile, Rows, StoredArray
from mcinfer.large_batches.requests import Requests
from mcinfer.large_batches.sources import Sources, resolve_target
from mcinfer.large_batches.wording import say, silent_about_splits, speaking_of_options
from mcinfer.master import Master
from mcinfer.progress import megabytes, showing_work
from mcinfer.requests.request import Arrays
from mcinfer.sharding import Axes, JoinError, SaidAxes, first_split
from mcinfer.specs import ModelSpec

_UNDER_WAY = 2
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "mindspore", "mindspore-lite")


def run_batch(
    model: Path,
    source: Path,
    target: Path,
    *,
    engine: str = "onnxruntime",
    devices: int | Sequence[str] | None = None,
    rows: int | None = None,
    batch_axes: Axes | None = None,
    output_axes: Axes | None = None,
    timeout: float | None = None,
    restart: bool = False,
) -> list[str]:
    """Run what is in a file, and write another.

    Args:
        model: Path of the model.
        source: The .npz file with its inputs by name, or an .npy file with the only one.
        target: The .npz file to write; where it is a link, the file that it leads to.
        engine: As `Master` takes it.
        devices: As `Master` takes them. With None, interrupted work goes on in as many shards as it was begun
            with, on the devices that there are now.
        rows: Of one request; None is as `plan_requests` says.
        batch_axes: As `Master` takes them.
        output_axes: Likewise.
        timeout: Seconds for one request, None is `Timeouts.predict`.
        restart: Whether to discard what an interrupted run has done, in the place of going on with it.

    Returns:
        For each output a line with its name, element type and shape.

    Raises:
        McinferError, OSError: It failed; says what is kept of it.
    """
    target = resolve_target(target)  # before the work, not after it
    said = SaidAxes(inputs=dict(batch_axes or {}), outputs=dict(output_axes or {}))
    with (
        speaking_of_options(),
        InputFile(source) as file,
        closing(
            Master(model, devices, engine=engine, batch_axes=said.inputs, output_axes=said.outputs)
        ) as master,
    ):
        sources = Sources(model, file)
        sources.refuse(target)
        chosen = [worker.device for worker in master.statistics().workers]
        depends_on = {
            **sources.stamps,
            "--devices": None if devices is None else chosen,
            "--batch": rows,
            "--batch-axis": dict(said.inputs),
            "--output-axis": dict(said.outputs),
            "version of mcinfer": __version__,
            "version of the runtime": [_version(name) for name in _RUNTIMES],
        }
        with PartialFolder(target, depends_on, restart=restart) as folder:
            master.start()
            spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
            work = Work(
                master=master,
                model=spec,
                arrays=_arrays(file, spec),
                rows=rows,
                said=said,
                timeout=timeout,
            )
            requests = _recalled(folder, work) or plan_work(work, len(chosen))
            output = BatchOutput(folder, requests)
            with _keeping(output, requests, sources):
                # One request teaches the master; of several, what contradicts the split is an error.
                with silent_about_splits() if requests.count > 1 else nullcontext():
                    _answer(work, requests, output)
                _check_unchanged(master, file, sources)
                remarks = output.remarks()
                lines = output.finish(target)
    for remark in remarks:
        say(remark)
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _arrays(file: InputFile, spec: ModelSpec) -> dict[str, StoredArray]:
    dtypes = {tensor.name: tensor.dtype for tensor in spec.inputs}
    stored = file.arrays([*dtypes])
    return {name: array.read_as(dtypes.get(name)) for name, array in stored.items()}


def _recalled(folder: PartialFolder, work: Work) -> Requests | None:
    """The requests of work that was interrupted: what is done of it says how it is split, and over how many.

    Raises:
        McinferError: The folder is damaged; or there are requests left, and the split is not known any more
            to be the one that it was.
    """
    state = folder.state
    if state is None:
        return None
    try:
        shards = max(1, int(state["shards"]))
        outputs = {name: grown["axis"] for name, grown in state["outputs"].items()}
        split = first_split(work.model, SaidAxes(inputs=state["inputs"], outputs=outputs))
        rows = int(state["step"]) * work.requests(shards, split).unit_rows
        work = replace(work, rows=rows)
        requests = work.requests(shards, split)
        left = requests.count - int(state["done"])
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise folder.damage(str(exc)) from exc
    if left > 0 and not _goes_on(work, requests):
        raise McinferError(
            f"--output: {folder.path} holds what was done with another split of the batch than the one that "
            f"is known now; --restart discards it"
        )
    return requests


def _goes_on(work: Work, requests: Requests) -> bool:
    """Whether the file would be cut into these requests again."""
    try:
        return plan_work(work, requests.shards) == requests
    except DamagedInputError:
        raise
    except InvalidInputError:  # it cannot be cut, as is known now
        return False


def _check_unchanged(master: Master, file: InputFile, sources: Sources) -> None:
    file.check_unchanged()
    restarted = any(worker.restarts for worker in master.statistics().workers)
    if restarted and "model" in sources.changed():  # the others still have what it was
        raise InvalidInputError("MODEL: it changed, and a worker was started again meanwhile")


def _answer(work: Work, requests: Requests, output: BatchOutput) -> None:
    """Have all requests answered that are not yet."""
    master, arrays = work.master, work.arrays
    predict = partial(
        master.predict,
        timeout=work.timeout,
        shards=requests.shards,  # also while one is started again
    )
    if output.done:
        done, total = _rows(requests, output.done), _rows(requests, requests.count)
        say(f"going on at row {done} of {total}")
    rows = _opened(arrays, requests, output.done)
    answers: deque[Future[Arrays]] = deque()
    with _showing(requests, output) as take, ThreadPoolExecutor(_UNDER_WAY) as threads:
        try:
            for inputs in _inputs(arrays, rows, requests, output.done):
                answers.append(threads.submit(predict, inputs))
                del inputs
                if len(answers) == _UNDER_WAY:
                    take(answers.popleft().result())
            while answers:
                take(answers.popleft().result())
        except BaseException:
            master.close()  # so that the threads end
            raise


def _opened(arrays: Mapping[str, StoredArray], requests: Requests, first: int) -> dict[str, Rows]:
    """What reads the rows of each input that is cut, from that request on."""
    starts = {name: requests.span(first)[0] * size for name, size in requests.sizes.items()}
    axes = {name: axis for name, axis in requests.axes.items() if axis is not None}
    total = sum(arrays[name].bytes_before(axis, starts[name]) for name, axis in axes.items())
    with showing_work(sys.stderr, "reading what comes before", max(1, total)) as work:
        read = 0

        def tell(count: int) -> None:
            nonlocal read
            read += count
            work.show(read)

        return {name: arrays[name].rows(axis, starts[name], tell) for name, axis in axes.items()}


def _inputs(
    arrays: Mapping[str, StoredArray], rows: Mapping[str, Rows], requests: Requests, first: int
) -> Iterator[Arrays]:
    """The inputs of each request from that one on."""
    whole = {name: arrays[name].whole() for name, axis in requests.axes.items() if axis is None}
    sizes = requests.sizes
    for request in range(first, requests.count):
        start, stop = requests.span(request)
        cut = {name: read(start * sizes[name], stop * sizes[name]) for name, read in rows.items()}
        yield {**whole, **cut}


def _rows(requests: Requests, count: int) -> int:
    """Rows of so many requests."""
    return min(count * requests.step, requests.units) * requests.unit_rows


@contextmanager
def _showing(requests: Requests, output: BatchOutput) -> Iterator[Callable[[Arrays], None]]:
    """What takes an answer for the output, and shows how far that is."""
    begun, before = monotonic(), _rows(requests, output.done)
    total = max(1, _rows(requests, requests.count))
    with showing_work(sys.stderr, "running", total, "rows") as work:
        work.show(before)
        warned = False

        def take(answer: Arrays) -> None:
            nonlocal warned
            output.add(answer)
            if not warned:  # the sizes are known now
                warned = True
                if missing := output.missing_bytes():
                    say(f"--output: about {megabytes(missing)} more than are free will be needed")
            done = _rows(requests, output.done)
            speed = (done - before) / max(monotonic() - begun, 1e-9)
            work.show(done, f"({speed:.1f} rows/s)")

        yield take


@contextmanager
def _keeping(output: BatchOutput, requests: Requests, sources: Sources) -> Iterator[None]:
    """Save what is done when it goes no further, and say so; forget it where it is worth nothing."""
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, (DamagedInputError, JoinError)):
            output.forget()  # what comes next is other work
            if isinstance(exc, JoinError):
                raise type(exc)(
                    f"{exc}; --batch-axis INPUT=none for each input has it run whole"
                ) from exc
            raise
        kept = output.keep()
        if not kept:
            raise
        text = (
            f"{_rows(requests, kept)} of {_rows(requests, requests.count)} rows are done and kept"
        )
        if changed := sources.changed():
            text += f", but {' and '.join(changed)} changed: only --restart goes on, without them"
        else:
            text += ": the same command goes on there"
        if isinstance(exc, (McinferError, OSError)):
            raise McinferError(f"{exc}; {text}") from exc
        say(text)
        raise
