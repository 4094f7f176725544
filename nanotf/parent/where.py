"""The place of a call's workers: the arguments that every method of nanotf has, checked once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from nanotf.compat.versions import check_keras
from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.parent import defaults, gpu
from nanotf.pool import backends, warm
from nanotf.pool.plans import AnyPlan
from nanotf.pool.pool import Pool
from nanotf.pool.transports import check_can_exchange, check_transport


def check_may_start(received: str) -> None:
    """Raises `NanoError` if this process cannot use workers now.

    Args:
        received: the call, as the user wrote it.
    """
    check_keras()
    if "NANOTF_RANK" in os.environ:
        raise NanoError(
            f"A worker cannot start workers of its own. Received: {received} inside worker "
            f"{os.environ['NANOTF_RANK']}. Remove the argument there."
        )
    warm.check_not_lent(received)


@dataclasses.dataclass(frozen=True)
class Where:
    """The workers that a call asks for; `of` checks what the user has passed."""

    size: int  # number of workers; 1 if this process does the work
    transport: str  # one of `transports.TRANSPORTS`
    cores_per_process: int | None  # None for equal shares of all usable cores
    cores: Sequence[int] | None  # the logical CPUs to divide
    backend: str | None  # one of `backends.BACKENDS`; None for that of the run
    avoid: Collection[int] = ()  # the logical CPUs of this process's readers

    @classmethod
    def of(
        cls,
        num_processes: Any = None,
        transport: str | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        backend: str | None = None,
    ) -> Where:
        """Checks the arguments that all methods have in common.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: An argument has a wrong value.
            UnsupportedVersionError: The back end's package is not installed.
        """
        backends.check_backend(backend)
        # `plan` checks the cores: that takes a look at the machine.
        made = cls(1, check_transport(transport), cores_per_process, cores, backend)
        return made.sized(num_processes)

    def sized(self, num_processes: Any) -> Where:
        """Returns the same place for another number of workers; None means none.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: It is no int, or below 1.
        """
        if num_processes is None:
            return dataclasses.replace(self, size=1)
        topology.check_num_processes(num_processes)
        return dataclasses.replace(self, size=int(num_processes))

    def avoiding(self, cores: Collection[int]) -> Where:
        """Returns the same place, without cores on which readers run."""
        return dataclasses.replace(self, avoid=cores)

    @property
    def has_workers(self) -> bool:
        """True if workers do the work, and not this process."""
        return self.size > 1 and not defaults.alone

    def can_have_workers(self, method: str) -> bool:
        """Returns False if there are GPUs, which replace workers.

        Args:
            method: the method that is called, for errors.

        Raises:
            NanoError: Workers cannot be used here and now.
        """
        check_may_start(f"{method}(num_processes={self.size})")
        if gpu.devices():
            return False
        check_can_exchange(self.transport)  # now: before readers start, and the model is built
        return True

    def plan(self, method: str) -> AnyPlan | None:
        """Plans where the workers of a call run.

        Args:
            method: as in `can_have_workers`.

        Returns:
            None if there are GPUs, which replace workers.

        Raises:
            NanoError: Workers cannot be used here and now.
        """
        if not self.can_have_workers(method):
            return None
        wanted = self.size, self.cores_per_process, self.cores
        return backends.plan(self.backend, *wanted, self.avoid)

    def lent(self, plan: AnyPlan) -> AbstractContextManager[Pool]:
        """Lends a pool with the workers of a plan, warm or new."""
        return warm.pool_for(plan, self.transport)
