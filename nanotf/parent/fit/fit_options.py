"""The arguments that nanotf adds to `fit`, beside those of `Where`."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.errors import check_integer
from nanotf.shipping.data.pipelines import check_sharding


@dataclasses.dataclass(frozen=True)
class FitOptions:
    """The options of one `fit`; `of` checks what the user has passed."""

    sharding: str = "parent"  # one of `pipelines.SHARDINGS`
    max_restarts: int = 0
    resume: Any = None  # the path of a folder, or None
    # The epoch with which workers begin if this process has trained those before; else None
    begins_at: int | None = None

    @classmethod
    def of(cls, sharding: str | None, max_restarts: Any, resume: Any) -> FitOptions:
        """Checks the arguments.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: An argument has a wrong value.
        """
        remedy = "Pass how often training may restart with new workers"
        restarts = check_integer("max_restarts", max_restarts, remedy, least=0)
        return cls(check_sharding(sharding), restarts, resume)
