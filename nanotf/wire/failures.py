"""Failures of collectives. A worker reports the facts, and the parent decides by them."""

from __future__ import annotations

import dataclasses
import enum


class FailureKind(enum.IntEnum):
    """Kinds of failures; the numbers of NanotfFailureKind in `collectives/native/shm.h`."""

    MISUSED = 1  # it was called wrongly, or the group cannot be used
    ABORTED = 2  # a rank or the parent gave up
    EXPIRED = 3  # a rank waited until the deadline
    LOST = 4  # a rank's process ended or left the group while another waited for it
    DIFFERENT = 5  # ranks called different collectives; the group is still usable


@dataclasses.dataclass(frozen=True)
class Failure:
    """A collective that failed."""

    kind: FailureKind
    rank: int  # the rank that noticed; -1 for the parent, or no particular rank
    text: str  # what happened, only for people, without the final period
    remedy: str = ""  # what to do about it, only for people; may be empty
    missing: tuple[int, ...] = ()  # the ranks that did not come before the deadline

    @property
    def message(self) -> str:
        """Returns the text of an exception."""
        message = f"nanotf collective: {self.text}"
        return f"{message}. {self.remedy}" if self.remedy else message
