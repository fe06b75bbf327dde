"""How a worker opens its model: one engine, around the adapter's where the worker is more than its cores.

::

    a rank  ──► open_rank: its slice               a CPU worker of a pool ──► WideEngine ──► the adapter's
    a card  ──► CardEngine ──► the adapter's       another one            ──► the adapter's

The loop knows an `Engine`, and not which of these it is.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from mcinfer.config import CARD_KIND, CoreShare, Device
from mcinfer.engines.adapters import described, open_engine
from mcinfer.engines.base import Engine, EngineRequest
from mcinfer.engines.preparation import readable_content
from mcinfer.engines.wide import WideEngine
from mcinfer.errors import McinferError
from mcinfer.machine import format_core_list
from mcinfer.model_cache.children import Progress
from mcinfer.protocol import Build
from mcinfer.shm.arena import AttachedBlocks


def open_worker_engine(
    message: Build, blocks: AttachedBlocks, group: Sequence[int], progress: Progress
) -> tuple[Engine, Sequence[int], dict[str, Any]]:
    """Pin this process to its cores, and load the model that BUILD names.

    Args:
        message: The build.
        blocks: The master's, which an engine on a card opens and pins.
        group: Descriptors of the group that this worker is a rank of, if any; the engine's from now on.
        progress: Called while the model is prepared.

    Returns:
        The engine; the cores that its runs at once may have parts of, if any; and the fields of BUILD_FINISH
        that say what the model is.

    Raises:
        ProtocolError: The block that BUILD names was not attached.
        See `mcinfer.engines.open_engine`, `mcinfer.cards.staging.open_on_card`, `mcinfer.ranks.open_rank`.
    """
    device = Device.parse(message.device)
    share, notes = _pin_to_allowed(message.share)
    request = EngineRequest(
        model=message.model,
        device=device,
        options=message.options,
        share=share,
    )
    content = readable_content(request)
    request = replace(request, content=content)
    if device.kind == CARD_KIND:
        from mcinfer.cards.cuda import model_of

        request = replace(request, device_model=partial(model_of, device))
    if message.ranks > 1:
        from mcinfer.ranks import open_rank

        cut = (message.tensor, message.pipeline)
        engine = open_rank(request, message.rank, cut, group, progress)
    elif device.kind == CARD_KIND:
        from mcinfer.cards.staging import open_on_card

        slab = None if message.slab is None else blocks.take(message.slab)
        engine = open_on_card(message, request, slab, blocks, progress)
    else:
        engine = open_engine(message.engine, request, progress)
    with ExitStack() as opened:
        opened.callback(engine.close)
        facts = described(engine, request, notes)
        opened.pop_all()
    cores = () if share.shared or engine.pins else share.cores
    # A model that draws random numbers has one state of them.
    is_sole = engine.widens and engine.concurrent == 1
    if share.wide_cores and is_sole and content is not None and not content.random:
        engine = WideEngine(engine, share, partial(_open_wide, message, request), content)
    return engine, cores, facts


def _open_wide(message: Build, request: EngineRequest, share: CoreShare) -> Engine:
    """The model with these cores; prepared once more, its weights would be in memory twice."""

    def refuse(_: Mapping[str, Any]) -> None:
        raise McinferError("the prepared model is not in the cache any more")

    return open_engine(message.engine, replace(request, share=share), refuse)


def _pin_to_allowed(planned: CoreShare) -> tuple[CoreShare, tuple[str, ...]]:
    """Pin this process to its share of the cores that it may use now.

    Returns:
        The share, and a note for the user if it is not as planned.
    """
    allowed = sorted(os.sched_getaffinity(0))
    share = planned.of_allowed(allowed)
    notes: tuple[str, ...] = ()
    if share.cores != planned.cores:
        before, now, left = map(format_core_list, (planned.cores, allowed, share.cores))
        what = f"{left} are left" if left else "not pinned"
        notes = (f"planned for cores {before}, and {now} are allowed now: {what}",)
    if share.cores:
        with suppress(OSError):  # they were taken in between: it is not pinned
            os.sched_setaffinity(0, share.cores)
    return share, notes
