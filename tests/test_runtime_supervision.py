"""Tests of mcinfer/runtime/supervision.py: the order in which workers that share weights start and end."""

from mcinfer.runtime.supervision import Sharing


def ordered(workers: int) -> Sharing:
    sharing = Sharing()
    for worker in range(workers):
        sharing.order(worker)
    return sharing


def started(sharing: Sharing) -> list[int]:
    """Those that may start now."""
    found = []
    while (worker := sharing.next()) is not None:
        found.append(worker)
    return found


def test_others_start_when_the_first_has_made_the_weights() -> None:
    sharing = ordered(3)
    assert started(sharing) == [0]
    sharing.note_made(True)
    assert started(sharing) == [1, 2]
    assert (sharing.maker, sharing.users) == (0, {1, 2})
    # One that starts again uses them at once.
    assert not sharing.note_end(2)
    sharing.order(2)
    assert started(sharing) == [2]


def test_all_start_when_the_first_could_not_make_the_weights() -> None:
    sharing = ordered(3)
    assert started(sharing) == [0]
    sharing.note_made(False)
    assert started(sharing) == [1, 2]
    assert not sharing.users
    sharing.note_end(0)
    sharing.order(0)
    assert started(sharing) == [0]


def test_next_worker_makes_the_weights_when_the_first_has_died_in_its_build() -> None:
    sharing = ordered(2)
    assert started(sharing) == [0]
    sharing.note_end(0)
    sharing.order(0)
    assert started(sharing) == [1]
    sharing.note_made(True)
    assert started(sharing) == [0]
    assert sharing.maker == 1


def test_next_maker_starts_when_no_process_has_the_weights_of_the_last() -> None:
    sharing = ordered(3)
    started(sharing)
    sharing.note_made(True)
    started(sharing)
    assert sharing.note_end(0)
    sharing.order(0)
    sharing.note_end(1)
    sharing.order(1)
    assert started(sharing) == []
    sharing.note_end(2)
    assert started(sharing) == [0]
    assert started(sharing) == []


def test_maker_is_asked_to_end_after_those_that_use_its_weights() -> None:
    sharing = ordered(3)
    started(sharing)
    sharing.note_made(True)
    started(sharing)
    assert not sharing.hold_exit(1)
    assert sharing.hold_exit(0)
    sharing.note_end(1)
    sharing.order(1)
    assert (sharing.take_exit(), started(sharing)) == (None, [])
    sharing.note_end(2)
    assert (sharing.take_exit(), sharing.take_exit(), started(sharing)) == (0, None, [])
    sharing.note_end(0)
    assert started(sharing) == [1]


def test_none_starts_with_the_weights_of_a_maker_that_was_asked_to_end() -> None:
    sharing = ordered(2)
    started(sharing)
    sharing.note_made(True)
    assert started(sharing) == [1]
    sharing.note_end(1)
    assert not sharing.hold_exit(0)
    sharing.order(1)
    assert started(sharing) == []
    sharing.note_end(0)
    assert started(sharing) == [1]


def test_worker_that_is_not_to_be_started_any_more_holds_no_other_up() -> None:
    sharing = ordered(3)
    assert sharing.withdraw(0)
    assert started(sharing) == [1]
    assert not sharing.withdraw(1)
