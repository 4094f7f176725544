"""Arguments of Horovod's API that nanotf accepts and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanotf import hvd
from nanotf.errors import InvalidArgumentError, JobError, UnavailableError
from nanotf.hvd import rank_facts, reductions


@pytest.mark.parametrize(
    ("op", "average", "chosen"),
    [
        (None, None, hvd.Average),
        (None, False, hvd.Sum),
        (None, True, hvd.Average),
        (hvd.Max, None, hvd.Max),
    ],
)
def test_chosen(op: Any, average: Any, chosen: Any) -> None:
    assert reductions.chosen(op, average) is chosen


@pytest.mark.parametrize(
    ("op", "average", "error", "text"),
    [
        (hvd.Adasum, None, UnavailableError, r"Received: op=hvd\.Adasum"),
        (hvd.Product, None, UnavailableError, r"Received: op=hvd\.Product"),
        ("sum", None, InvalidArgumentError, "Received: op='sum'"),
        (hvd.Sum, True, InvalidArgumentError, "Only one of op and average"),
    ],
)
def test_refused(op: Any, average: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        reductions.chosen(op, average)


def test_init_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rank_facts._state, "initialized", False)
    with pytest.raises(JobError, match=r"no call of hvd\.init\(\)"):
        hvd.rank()
    hvd.init()
    assert hvd.is_initialized() and (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()
    assert not hvd.is_initialized()


@pytest.mark.parametrize("given", [{"comm": [0]}, {"process_sets": [object()]}])
def test_parts_of_the_ranks_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnavailableError, match="All ranks take part"):
        hvd.init(**given)


def test_elastic_is_refused() -> None:
    with pytest.raises(UnavailableError, match=r"Received: hvd\.elastic\.run\. Save a checkpoint"):
        hvd.elastic.run  # noqa: B018


def test_ranks_as_a_process_set_are_refused() -> None:
    """An array has no truth value."""
    with pytest.raises(UnavailableError, match="All ranks take part"):
        rank_facts.check_process_set(np.array([0, 1]))
