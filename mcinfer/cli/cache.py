"""``mcinfer cache``: list, empty and fill the cache of prepared models."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from mcinfer.cli.options import ModelArgument, check_model
from mcinfer.cli.progress import counted, megabytes, showing_work
from mcinfer.errors import printable
from mcinfer.model_cache.cache import FAILURE_FILE, Cache, EntryInfo, about, disk_bytes

KEY_CHARACTERS = 12
"""Characters of an entry's key that are shown."""


def list_entries() -> None:
    """What is in the cache, the latest used last, and the pids of your processes that map it."""
    cache = Cache.default()
    entries, users = cache.entries(), cache.users()
    for info in entries:
        print(_line(cache.folder, info, users.get(info.key, ())))
    limit = f"of at most {megabytes(cache.limit_bytes)} in {cache.folder}"
    engine_bytes = cache.engine_bytes()
    if engine_bytes:
        print(f"built by TensorRT and OpenVINO: {megabytes(engine_bytes)}")
    if entries or engine_bytes:
        total_bytes = engine_bytes + sum(info.bytes for info in entries)
        print(f"{counted(len(entries), 'entry')}, {megabytes(total_bytes)} {limit}")
    else:
        print(f"the cache is empty: nothing {limit}")


def _line(folder: Path, info: EntryInfo, users: Sequence[int]) -> str:
    entry = folder / info.key
    used = datetime.fromtimestamp(info.used_at).isoformat(timespec="minutes")
    use = "in use" if info.in_use else "not in use"
    by = f", mapped by {', '.join(map(str, users))}" if users else ""
    model = printable(about(entry).get("name", "?"))
    failed = ", cannot be prepared" if (entry / FAILURE_FILE).exists() else ""
    engine = printable(info.facts.get("engine", "?"))
    size = megabytes(info.bytes)
    return (
        f"{info.key[:KEY_CHARACTERS]}  {size:>11}  {used}  {use:10}  {model}  {engine}{failed}{by}"
    )


def clear() -> None:
    """Remove all entries that no process uses."""
    freed_bytes, in_use = Cache.default().clear()
    left = f"; left because they are in use: {counted(in_use, 'entry')}" if in_use else ""
    print(f"freed {megabytes(freed_bytes)}{left}")


def prepare(model: ModelArgument) -> None:
    """Prepare a model, so that workers start at once."""
    from mcinfer.engines.preparation import SLOW, ensure_prepared  # which needs NumPy

    check_model(model)
    made = False

    def show(tick: Mapping[str, Any]) -> None:  # called at least once if an entry is made
        nonlocal made
        made = True
        work.show(0, f"{megabytes(tick['written'])} written")

    log = logging.getLogger("mcinfer.model_cache")
    log.addFilter(lambda record: record.msg != SLOW)  # the line below shows it
    with showing_work(f"preparing {printable(model.name)}") as work:
        held = ensure_prepared(model, progress=show)
    with closing(held):
        how = f"prepared in {about(held.folder).get('seconds', 0.0):.1f} s"
        if not made:
            how = f"was there already, {how}"
        print(f"{held.folder}: {megabytes(disk_bytes(held.folder))}, {how}")
