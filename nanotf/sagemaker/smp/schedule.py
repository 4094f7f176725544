"""The order in which a partition computes a step: a pure function of the configuration.

With 2 partitions and 4 microbatches, F forward and B backward:

    "simple"        both            F0 F1 F2 F3 B0 B1 B2 B3
    "interleaved"   partition 0     F0 F1 B0 F2 B1 F3 B2 B3
                    partition 1     F0 B0 F1 B1 F2 B2 F3 B3

A partition sends without waiting for the receiver, and every partition handles microbatches in
ascending order, so no order can deadlock: F of a microbatch waits for F of earlier partitions
alone, and B for the last F and for B of later partitions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from nanotf.sagemaker.smp.config import Config


class Half(enum.Enum):
    """The two halves of a microbatch's work."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One half of one microbatch's work."""

    kind: Half
    microbatch: int  # 0 to `microbatches - 1`

    def __repr__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


def actions(config: Config, partition: int) -> list[Action]:
    """Returns what a partition does in a step, in order.

    Args:
        partition: 0 to `config.partitions - 1`.
    """
    count = config.microbatches
    ahead = count  # "simple", and "_only_forward": first all forward
    if config.pipeline == "interleaved":
        # As many as it takes until the first backward pass arrives from the last partition.
        ahead = min(count, config.partitions - partition, config.active_microbatches)
    found = [Action(Half.FORWARD, number) for number in range(ahead)]
    for number in range(count):
        found.append(Action(Half.BACKWARD, number))
        if ahead + number < count:
            found.append(Action(Half.FORWARD, ahead + number))
    return found
