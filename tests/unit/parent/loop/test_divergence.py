"""Ranks that have diverged: the parent decides by their reports."""

from __future__ import annotations

import pytest

from nanotf.errors import CollectiveError
from nanotf.parent.loop.divergence import DivergenceDetector
from nanotf.wire.failures import Failure, FailureKind
from nanotf.wire.messages import Reached


@pytest.mark.parametrize("kind", list(FailureKind))
def test_failures_of_a_collective_that_count_as_divergence(kind: FailureKind) -> None:
    found = DivergenceDetector("train", 2).explain(1, Failure(kind, 1, "so it is", "do that"))
    assert (found is not None) == (kind in (FailureKind.DIFFERENT, FailureKind.EXPIRED))
    if found is not None:
        assert "Received: in train, in rank 1 a collective failed: so it is. Decide" in str(found)


@pytest.mark.parametrize(
    ("count", "fingerprint", "differ"), [(2, 5, False), (2, 6, True), (1, 6, False)]
)
def test_counts_and_fingerprints(count: int, fingerprint: int, differ: bool) -> None:
    detector = DivergenceDetector("train", 2)
    detector.note(Reached(7, 0, 2, 5, "all_reduce of float32[3]"))
    detector.note(Reached(7, 1, count, fingerprint, "all_reduce of float32[4]"))
    if not differ:
        detector.check()
        return
    with pytest.raises(CollectiveError, match=r"number 2 is .*\[3\] on rank 0, but .*\[4\]"):
        detector.check()
