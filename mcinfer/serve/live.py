"""A page of figures for people, which are new once a second by server-sent events.

Without a viewer there is no work. The events' format: https://html.spec.whatwg.org/#server-sent-events
"""

import asyncio
import re
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from math import isfinite
from time import monotonic
from typing import Any

import orjson
import psutil
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from mcinfer.serve.models import LOG_SAYS
from mcinfer.serve.service import Service
from mcinfer.statistics import Health, Histogram, Statistics

_SECONDS = 1.0
_PAGE = files("mcinfer.serve").joinpath("page.html").read_text("utf-8")
_SCRIPTS = [
    f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    for text in re.findall("(?s)<script>(.*?)</script>", _PAGE)
]
_POLICY = (
    "default-src 'none'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; script-src "
)


def _figures(now: Statistics, before: Statistics, seconds: float) -> dict[str, Any]:
    """What happened between two snapshots, and what is so now."""
    latency = _since(now.latency, before.latency)
    rows = _since(now.batch_sizes, before.batch_sizes)
    quantiles = [latency.quantile(part) for part in (0.5, 0.9, 0.99)]
    return {
        "state": now.health.state,
        "reasons": _public(now.health).reasons,
        "rate": latency.count / seconds,
        "latency_ms": [value * 1e3 if isfinite(value) else None for value in quantiles],
        "queued": now.queued,
        "in_flight": now.in_flight,
        "rows": rows.total / rows.count if rows.count else None,
        "join_gain": now.join_gain if isfinite(now.join_gain) else None,
        "answered": now.succeeded,
        "failed": now.failed,
        "workers": [
            (w.index, w.device, w.state, w.restarts, w.runs, _own_megabytes(w.pid))
            for w in now.workers
        ],
    }


def _public(health: Health) -> Health:
    """Without the errors that are the reasons, which may name files of the server."""
    reasons = {LOG_SAYS: None} if health.state == "failed" else dict.fromkeys(health.reasons)
    return replace(health, reasons=tuple(reason.partition(": ")[0] for reason in reasons))


def _since(now: Histogram, before: Histogram) -> Histogram:
    counts = tuple(n - b for n, b in zip(now.counts, before.counts, strict=True))
    return replace(now, counts=counts, total=now.total - before.total)


def _own_megabytes(pid: int | None) -> int | None:
    """Memory of a process that it shares with no other, by statm of proc(5)."""
    with suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info() if pid else None
        return None if memory is None else (memory.rss - memory.shared) // 1_000_000
    return None


def page_routes(service: Service) -> list[Route]:
    """The page, and the events that keep it new."""

    def taken() -> dict[tuple[str, str], Statistics]:
        return {
            (each.name, each.version): each.statistics for each in service.figures.taken().models
        }

    async def page(_: Request) -> HTMLResponse:
        parts = [
            f"<section><h2>{escape(name)} <small>{version}</small></h2>"
            f"<pre>{escape(str(replace(statistics, health=_public(statistics.health))))}</pre></section>"
            for (name, version), statistics in taken().items()
        ]
        text = _PAGE.replace("<!--figures-->", "".join(parts) or "<p>No model is loaded.</p>")
        text = text.replace("<!--process-->", service.figures.process)
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY + " ".join(_SCRIPTS)})

    async def events() -> AsyncIterator[bytes]:
        before, then = taken(), monotonic()
        while not service.ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(service.ending.wait(), _SECONDS)
            now, seconds = taken(), monotonic() - then
            models = [
                {"name": each[0], "version": each[1], **_figures(new, before[each], seconds)}
                for each, new in now.items()
                if each in before and before[each].accepted <= new.accepted  # it is the same master
            ]
            before, then = now, then + seconds
            yield b"data: " + orjson.dumps(models) + b"\n\n"

    async def live(_: Request) -> StreamingResponse:
        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(events(), headers=headers, media_type="text/event-stream")

    return [Route("/", page), Route("/live", live)]
