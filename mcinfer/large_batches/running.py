"""A large batch through a pool, in constant memory.

::

    input file ── rows, in order ──► a request ──► Master.predict ──► rows ──► a folder beside the output,
                                     a request     (over all workers)          and its file at the end

Two requests are under way, so that workers do not wait for what is read or written. This thread does both.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from mcinfer import __version__
from mcinfer.errors import BuildError, InvalidInputError, McinferError
from mcinfer.large_batches.output import BatchOutput
from mcinfer.large_batches.partial_folder import PartialFolder
from mcinfer.large_batches.positioned import stamp
from mcinfer.large_batches.reading import InputFile, StoredArray
from mcinfer.large_batches.requests import Requests, plan_requests
from mcinfer.master import Master
from mcinfer.prepared.files import external_files, open_regular
from mcinfer.prepared.onnx_files import scan
from mcinfer.progress import showing_work
from mcinfer.specs import ModelSpec
from mcinfer.staging import Arrays

_UNDER_WAY = 2
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def run_batch(
    model: Path,
    source: Path,
    target: Path,
    *,
    devices: int | Sequence[str] | None = None,
    rows: int | None = None,
    timeout: float | None = None,
    restart: bool = False,
) -> list[str]:
    """Run what is in a file, and write another.

    Args:
        model: Path of an ONNX model.
        source: The .npz file with its inputs by name, or an .npy file with the only one.
        target: The .npz file to write.
        devices: As `Master` takes them.
        rows: Of one request; None is as `plan_requests` says.
        timeout: Seconds for one request, None is `Timeouts.predict`.
        restart: Whether to discard what an interrupted run has done, in the place of going on with it.

    Returns:
        For each output a line with its name, element type and shape.

    Raises:
        McinferError, OSError: It failed; says what is kept of it.
    """
    target = target.absolute()
    if not target.parent.is_dir():
        # Before the work, not after it.
        raise InvalidInputError(f"--output: there is no folder {target.parent}")
    if target.is_dir():
        raise InvalidInputError(f"--output: {target} is a folder, expected a file to write")
    with InputFile(source) as file, closing(Master(model, devices)) as master:
        chosen = [worker.device for worker in master.statistics().workers]
        work = _describe(model, file, chosen, rows)
        with PartialFolder(target, work, restart=restart) as folder:
            master.start()
            spec = ModelSpec(inputs=master.inputs, outputs=master.outputs)
            arrays = file.arrays([tensor.name for tensor in spec.inputs])
            requests = plan_requests(spec, arrays, len(chosen), rows)
            output = BatchOutput(folder, requests)
            with _keeping(output, requests):
                _answer(master, arrays, requests, output, timeout)
                file.check_unchanged()
            with _keeping(output, requests):
                return output.finish(target)


def _describe(
    model: Path, file: InputFile, devices: Sequence[str], rows: int | None
) -> dict[str, Any]:
    """What the result depends on."""
    path = model.absolute()
    with open_regular(path) as (descriptor, _):
        stamps = [stamp(descriptor, str(path))]
    external: list[Path] = []
    with suppress(BuildError):  # workers will tell what is wrong with it
        external = external_files(path, None, scan(path).external)
    for part in external:
        with open_regular(part) as (descriptor, _):
            stamps.append(stamp(descriptor, str(part)))
    return {
        "model": stamps,
        "input": file.stamp,
        "--devices": [*devices],
        "--batch": rows,
        "version of mcinfer": __version__,
        "version of ONNX Runtime": [_version(name) for name in _RUNTIMES],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _answer(
    master: Master,
    arrays: Mapping[str, StoredArray],
    requests: Requests,
    output: BatchOutput,
    timeout: float | None,
) -> None:
    """Have all requests answered that are not yet."""
    predict = partial(
        master.predict,
        timeout=timeout,
        batch_axes=requests.axes,
        shards=len(master.statistics().workers),  # also while one is started again
    )
    if output.done:
        done, total = _rows(requests, output.done), _rows(requests, requests.count)
        print(f"mcinfer: going on at row {done} of {total}", file=sys.stderr, flush=True)
    answers: deque[Future[Arrays]] = deque()
    with _showing(requests, output) as take, ThreadPoolExecutor(_UNDER_WAY) as threads:
        try:
            for inputs in _inputs(arrays, requests, output.done):
                answers.append(threads.submit(predict, inputs))
                del inputs
                if len(answers) == _UNDER_WAY:
                    take(answers.popleft().result())
            while answers:
                take(answers.popleft().result())
        except BaseException:
            master.close()  # so that the threads end
            raise


def _inputs(arrays: Mapping[str, StoredArray], requests: Requests, first: int) -> Iterator[Arrays]:
    """The inputs of each request from that one on."""
    whole = {name: arrays[name].whole() for name, axis in requests.axes.items() if axis is None}
    rows = {
        name: arrays[name].rows(axis) for name, axis in requests.axes.items() if axis is not None
    }
    for request in range(first, requests.count):
        start, stop = requests.span(request)
        sizes = requests.sizes
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

        def take(answer: Arrays) -> None:
            output.add(answer)
            done = _rows(requests, output.done)
            speed = (done - before) / max(monotonic() - begun, 1e-9)
            work.show(done, f"({speed:.1f} rows/s)")

        yield take


@contextmanager
def _keeping(output: BatchOutput, requests: Requests) -> Iterator[None]:
    """Save what is done when it goes no further, and say so."""
    try:
        yield
    except InvalidInputError:  # the file is damaged, or changes: what came of it is no better
        output.forget()
        raise
    except BaseException as exc:
        kept = output.keep()
        if not kept:
            raise
        text = (
            f"{_rows(requests, kept)} of {_rows(requests, requests.count)} rows are done and kept"
        )
        if isinstance(exc, (McinferError, OSError)):
            raise McinferError(f"{exc}; {text}: the same command goes on there") from exc
        print(f"mcinfer: {text}: the same command goes on there", file=sys.stderr, flush=True)
        raise
