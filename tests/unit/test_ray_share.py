"""How many of a cluster's CPUs each worker gets; no Ray is needed."""

from __future__ import annotations

import pytest

from nanotf.errors import PlacementError
from nanotf.on_ray import cluster


@pytest.mark.parametrize(
    ("cpus", "size", "wanted", "expected"),
    [
        ([8], 2, None, 4),
        ([8], 3, None, 2),
        ([8, 8], 2, None, 8),
        ([8, 8], 3, None, 4),  # 16 // 3 would fit but twice
        ([16, 4], 2, None, 8),
        ([16, 4], 3, None, 5),
        ([8, 8], 2, 3, 3),
        ([0, 2], 2, None, 1),
    ],
)
def test_share(cpus: list[int], size: int, wanted: int | None, expected: int) -> None:
    assert cluster.share(cpus, size, wanted) == expected


@pytest.mark.parametrize(
    ("cpus", "size", "wanted"), [([2], 3, None), ([4, 4], 3, 3), ([], 2, None), ([0], 2, None)]
)
def test_too_few(cpus: list[int], size: int, wanted: int | None) -> None:
    with pytest.raises(PlacementError, match=f"num_processes={size}.* nodes with .* CPUs"):
        cluster.share(cpus, size, wanted)
