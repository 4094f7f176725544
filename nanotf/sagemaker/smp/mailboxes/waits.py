"""Finds ranks that wait for each other forever, in the reports of what each waits for.

A rank is stuck if each of its waits is for a stuck rank, and no letter of that rank is under way.
That is the largest such set. It takes care of threads: a rank with two waits, one of which can end,
is not stuck; and of ranks that wait for a cycle without being in it.

A rank may compute in one thread while another one waits, and then send: a pipeline's stage does so
all the time. So only ranks count that have reported the same for some time, with no thread that
ran, or waited for a core or a disk, and with next to no processor time used.

Reports are of different moments. Each rank's waits and counts have been the same for
`STILL_SECONDS`, with the last report at most `FRESH_SECONDS` old, so there is a moment at which all
of them held. Nothing was under way then, and nobody could send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nanotf.errors import CollectiveError
from nanotf.sagemaker.smp.mailboxes.letters import WaitReport

STILL_SECONDS = 3.0  # above `FRESH_SECONDS`, so that the times of all ranks overlap
FRESH_SECONDS = 2.5  # more than two of `mailbox.REPORT_SECONDS`
IDLE_SHARE = 0.05  # of one core: below it, a process does nothing but wait
_SHOWN = 8  # ranks in a message, and waits of one


@dataclass(frozen=True)
class _Seen:
    report: WaitReport
    at: float  # of the clock, like `since`
    since: float  # the first report that said the same


class RankReports:
    """The reports of all ranks.

    Args:
        clock: returns seconds; another one in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, _Seen] = {}
        self._begins: dict[int, dict[int, float]] = {}  # of waits, by rank and number
        self._named: set[tuple[int, int]] = set()  # by `long_waits`

    def note(self, report: WaitReport) -> None:
        """Takes a rank's report."""
        now, last = self._clock(), self._seen.get(report.rank)
        since = now
        if last is not None and _same(last.report, report):
            used = report.seconds - last.report.seconds
            is_idle = not (last.report.is_busy or report.is_busy)
            # After a longer gap, it may have stopped waiting in between.
            if is_idle and used <= IDLE_SHARE * (now - last.at) and now - last.at <= FRESH_SECONDS:
                since = last.since
        self._seen[report.rank] = _Seen(report, now, since)

    def long_waits(self, seconds: float) -> list[str]:
        """Describes each wait that has lasted for some time, once. It may be as it should.

        Args:
            seconds: the time after which a wait is long.
        """
        now, texts = self._clock(), []
        for rank, seen in self._seen.items():
            current = {wait.number: wait for wait in seen.report.waits}
            begins = self._begins.get(rank, {})
            self._begins[rank] = {number: begins.get(number, seen.at) for number in current}
            for number, begin in self._begins[rank].items():
                is_fresh = now - seen.at <= FRESH_SECONDS  # else it may have its letter by now
                if is_fresh and now - begin > seconds and (rank, number) not in self._named:
                    self._named.add((rank, number))
                    texts.append(
                        f"Rank {rank} has waited {seconds:g} s for rank {current[number].source}, "
                        f"in {current[number].what}."
                    )
        return texts

    def stuck(self) -> list[WaitReport]:
        """Returns the reports of the ranks that wait for each other; empty if there are none."""
        now = self._clock()
        still = {
            rank: seen.report
            for rank, seen in self._seen.items()
            if now - seen.at <= FRESH_SECONDS and now - seen.since >= STILL_SECONDS
        }
        return list(stuck(still).values())


def _same(one: WaitReport, other: WaitReport) -> bool:
    return (one.waits, one.sent, one.received) == (other.waits, other.sent, other.received)


def stuck(reports: Mapping[int, WaitReport]) -> dict[int, WaitReport]:
    """Returns the reports of the ranks that cannot proceed, if all reports are of one moment.

    Args:
        reports: by rank, without the ranks that do not wait.
    """
    found = dict(sorted(reports.items()))
    while True:
        free = [rank for rank, report in found.items() if not _is_stuck(report, found)]
        if not free:
            return found
        for rank in free:
            del found[rank]  # the next round frees those that wait for it


def _is_stuck(report: WaitReport, among: Mapping[int, WaitReport]) -> bool:
    for wait in report.waits:
        source = among.get(wait.source)
        # Unequal counts: a letter is under way, perhaps the one that ends the wait.
        if source is None or source.sent[report.rank] != report.received[wait.source]:
            return False
    return True


def describe(reports: Iterable[WaitReport]) -> CollectiveError:
    """Returns the error of ranks that wait for each other."""
    each = [
        f"rank {report.rank} waits in " + " and in ".join(w.what for w in report.waits[:_SHOWN])
        for report in reports
    ]
    more = len(each) - _SHOWN
    each[_SHOWN:] = [f"{more} more ranks wait"] if more > 0 else []
    return CollectiveError(
        f"Sends and receives must match. Received: {'; '.join(each)}. These ranks wait for each "
        "other, and nothing is under way. Check that the ranks call matching functions in the "
        "same order."
    )
