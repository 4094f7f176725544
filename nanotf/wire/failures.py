"""Why a collective failed: the facts that a worker tells the parent, which decides by them."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.IntEnum):
    """Kinds of failures; the numbers of `NanotfFailureKind` in `collectives/native/shm.h`."""

    MISUSED = 1  # it was called wrongly, or the group cannot be used
    ABORTED = 2  # a rank or the parent gave up
    EXPIRED = 3  # a rank waited until the deadline
    LOST = 4  # a rank's process ended or left the group while another waited for it
    DIFFERENT = 5  # ranks called different collectives; the group can be used further


@dataclasses.dataclass(frozen=True)
class Failure:
    """A collective that failed.

    Args:
        kind: `Kind`.
        rank: int, the rank that noticed; -1 for the parent, or nobody in particular.
        text: str, what happened, for people alone, without the last stop.
        remedy: str, what to do about it, for people alone; may be empty.
        missing: tuple of int, the ranks that were waited for in vain.
    """

    kind: Kind
    rank: int
    text: str
    remedy: str = ""
    missing: tuple[int, ...] = ()

    @property
    def message(self) -> str:
        """The text of an exception."""
        message = f"nanotf collective: {self.text}"
        return f"{message}. {self.remedy}" if self.remedy else message
