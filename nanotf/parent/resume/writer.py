"""Writes the checkpoints of one `fit`: at epochs' ends, at its own end, and at SIGTERM."""

from __future__ import annotations

from typing import Any

from nanotf.console import logger
from nanotf.parent.resume.moments import Moment
from nanotf.parent.resume.resumption import Content, Resumption
from nanotf.parent.resume.sigterm import Sigterm


class CheckpointWriter:
    """The checkpoints that one `fit` takes and writes.

    A context for the whole of training: within, SIGTERM makes `fit` write a checkpoint first, and
    no other run uses the folder.

    Args:
        call: `FitCall`, which asks for checkpoints.

    Attributes:
        sigterm: `Sigterm`.
        taken: what `Resumption.write` can write, or None.
        is_due: bool, whether it is to be written without a signal.
    """

    def __init__(self, call: Any, resumption: Resumption) -> None:
        self._call, self.resumption = call, resumption
        self.sigterm = Sigterm()
        self.taken: Content | None = None
        self.is_due = False

    def __enter__(self) -> CheckpointWriter:
        self.sigterm.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.resumption.release()  # first: the signal may end this process, or raise
        self.sigterm.__exit__(*error)

    def take(self, moment: Moment, is_due: bool = True) -> None:
        """Captures this process's state at a moment.

        Args:
            moment: the state of training, as it is now.
            is_due: False if only SIGTERM makes `fit` write it.
        """
        call = self._call
        reading = call.data.random_states_of(moment.epoch, call.progress.first[0])
        stop = bool(call.model.stop_training)
        self.taken = self.resumption.capture(moment, stop, call.progress.has_ended, reading)
        self.is_due = is_due

    def write(self) -> None:
        """Writes what was taken, then delivers SIGTERM if it has come."""
        if self.taken is not None:
            try:
                folder = self.resumption.write(self.taken)
            except OSError as error:
                logger.warning(
                    "A checkpoint could not be written, and training continues without it: %s",
                    error,
                )
            else:
                if self.sigterm.heard:
                    logger.warning("SIGTERM: %s holds all steps so far.", folder)
        self.taken, self.is_due = None, False
        if self._call.progress.has_ended:
            self.sigterm.holds = False  # there is nothing else to write
        if self.sigterm.heard:
            self.sigterm.deliver()
