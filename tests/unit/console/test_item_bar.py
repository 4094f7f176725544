"""Texts of the bar of a call's items, by a clock that the test sets."""

from __future__ import annotations

import pytest

from nanotf.console import progress_rows
from nanotf.console.progress_rows import ItemBar, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_rows.screen, "print_last", lambda row, text: None)


def test_texts(clock: Clock) -> None:
    notes = iter(["", "best loss 0.5 (trial 3)"])
    bar = ItemBar("map", 1, lambda: next(notes), clock)
    bar.begin(8)
    assert (bar.text(), bar.fraction()) == ("0/8, 0.0 s", 0.0)
    bar.item_begins(0)
    bar.item_begins(1)
    clock.now += 4
    assert bar.text() == "0/8, 2 running, 4.0 s"  # no item has told how long one takes
    bar.item_ends(0, 4.0)
    bar.item_begins(2)
    # 8 items of 4 s: of 6 that wait or have just begun, 5 wait; item 1 is due.
    assert bar.text() == "1/8, 2 running, 4.0 s, about 12 s left"
    bar.item_ends(1, 4.0, failed=True)
    assert bar.text() == "2/8, 1 running, 4.0 s, about 24 s left, 1 failed, best loss 0.5 (trial 3)"
    assert bar.fraction() == 0.25
    bar.item_is_lost(2)
    assert bar.text().startswith("2/8, 4.0 s, 1 failed")  # nobody works: no time is known
    clock.now += 1
    bar.end()
    assert bar.last_text() == "2/8 after 5.0 s, 1 failed, best loss 0.5 (trial 3)"


def test_the_end(clock: Clock) -> None:
    bar = ItemBar("map", "auto", clock=clock)
    bar.begin(2)
    for item in range(2):
        bar.item_begins(item)
        clock.now += 40
        bar.item_ends(item, 40.0)
    bar.end()
    assert bar.last_text() == "2/2 in 1:20 min"


def test_a_part_of_the_whole(clock: Clock) -> None:
    """The time left is that of the part's own items, and of those after it."""
    bar = ItemBar("search", 1, clock=clock, before=4, after=2)
    bar.begin(2)
    assert bar.text() == "4/8, 0.0 s"
    bar.item_begins(0)
    clock.now += 5
    bar.item_ends(0, 5.0)
    bar.item_begins(1)
    assert bar.text() == "5/8, 1 running, 5.0 s, about 15 s left"
    bar.item_ends(1, 0.0)
    bar.end()
    assert bar.last_text() == "6/8 after 5.0 s"


def test_the_last_items_take_as_long_as_one(clock: Clock) -> None:
    """However many workers there are, and idle ones are no help."""
    bar = ItemBar("map", 1, clock=clock)
    bar.begin(3)
    bar.item_begins(0)
    clock.now += 10
    bar.item_ends(0, 10.0)
    bar.item_begins(1)
    clock.now += 4
    bar.item_begins(2)
    assert bar.seconds_left() == 10
    clock.now += 60  # longer than expected
    assert bar.seconds_left() == 0 and "left" not in bar.text()


def test_a_line_for_each_item(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    bar = ItemBar("map", 2, clock=clock)
    bar.begin(2)
    bar.item_begins(1)
    clock.now += 75
    bar.item_ends(1, 75.0)
    bar.item_ends(0, 0.0, failed=True)
    bar.end()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "nanotf: map 1/2: item 1 took 1:15 min",
        "nanotf: map 2/2: item 0 failed after 0.0 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (60, "1:00 min"), (3723, "1:02:03 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
