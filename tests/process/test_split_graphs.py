"""Random graphs (tests/split_graphs.py) through a master with two workers, with the default options."""

from itertools import islice
from pathlib import Path

import onnx
import pytest

from mcinfer import Master
from tests.split_graphs import InProcess, compare, make_graph, make_requests, open_session

SEED = 9
REQUESTS = 5
ANY = range(5)
INDEPENDENT = [
    number
    for number in range(200)
    if (graph := make_graph(SEED, number)).independent and graph.tame
][:5]


@pytest.mark.parametrize("number", sorted({*ANY, *INDEPENDENT}))
def test_two_workers_give_what_one_session_gives(number: int, tmp_path: Path) -> None:
    graph = make_graph(SEED, number)
    session = open_session(graph.model)
    path = tmp_path / "random.onnx"
    onnx.save(graph.model, path)
    with Master(path, 2) as master:
        requests = make_requests(graph, SEED, number)
        outcome = compare(session, master.predict, islice(requests, REQUESTS))
        split = master.split
    assert outcome.wrong == [], graph.text()
    assert split.splits or number not in INDEPENDENT
    # The thousands of graphs that run without processes show the same.
    pool = InProcess(session)
    alone = compare(session, pool.predict, islice(make_requests(graph, SEED, number), REQUESTS))
    assert (alone.answered, alone.wrong) == (outcome.answered, [])
    assert pool.splitter.known.split == split
