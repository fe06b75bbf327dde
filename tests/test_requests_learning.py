"""Tests of mcinfer/requests/learning.py: calls that the look, or the whole run after the pieces, answers."""

from types import SimpleNamespace
from typing import Any, cast

from mcinfer.errors import PredictError, PredictTimeoutError
from mcinfer.requests.learning import Learner
from mcinfer.requests.request import NO_WEIGHTS, Call
from mcinfer.requests.waiting_threads import WaitingThreads
from mcinfer.sharding import SaidAxes
from tests.planned_requests import A_POOL, PLAIN, W, X


def test_pieces_error_is_the_callers_where_the_inputs_do_not_come_back_from_their_device() -> None:
    def late(_: Call) -> Any:
        raise PredictTimeoutError("the device is busy")

    learner = Learner(
        model=PLAIN,
        planner=cast("Any", SimpleNamespace(host_arrays=late)),
        threads=WaitingThreads(),
        said=SaidAxes(),
        engine="fake",
        identity="",
        joins=False,
        verify="never",
        log=A_POOL,
    )
    splitter = learner.splitter
    call = Call(
        inputs={"x": X, "w": W},
        splitter=splitter,
        split_state=splitter.state,
        weights=NO_WEIGHTS,
        pieces=2,
        joins=False,
        start=0.0,
        timeout=1.0,
        rows=(2, 2),
    )
    assert call.may_be_rescued
    assert learner.rescue(call, PredictError("the pieces failed")) is None
    assert splitter.state.splits
