"""Each worker's part of a cluster's CPUs and of the parent's variables; needs no Ray."""

from __future__ import annotations

import pytest

from nanotf.errors import PlacementError
from nanotf.pool.ray import ray_cluster, ray_crew


@pytest.mark.parametrize(
    ("cpus", "size", "wanted", "expected"),
    [
        ([8], 2, None, 4),
        ([8], 3, None, 2),
        ([8, 8], 2, None, 8),
        ([8, 8], 3, None, 4),  # 16 // 3 would fit only twice
        ([16, 4], 2, None, 8),
        ([16, 4], 3, None, 5),
        ([8, 8], 2, 3, 3),
        ([0, 2], 2, None, 1),
    ],
)
def test_share(cpus: list[int], size: int, wanted: int | None, expected: int) -> None:
    assert ray_cluster.share(cpus, size, wanted) == expected


@pytest.mark.parametrize(
    ("cpus", "size", "wanted"), [([2], 3, None), ([4, 4], 3, 3), ([], 2, None), ([0], 2, None)]
)
def test_too_few(cpus: list[int], size: int, wanted: int | None) -> None:
    with pytest.raises(PlacementError, match=f"num_processes={size}.* nodes with .* CPUs"):
        ray_cluster.share(cpus, size, wanted)


def test_variables_that_leave_the_parent() -> None:
    going = {
        "TF_USE_LEGACY_KERAS": "1",
        "KERAS_BACKEND": "tensorflow",
        "NANOTF_VECTORS": "avx2",
        "OMP_NUM_THREADS": "4",
        "PYTHONHASHSEED": "7",
        "XLA_FLAGS": "",
    }
    staying = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "TF_TOKEN_app_terraform_io", "TF_VAR_password")
    others = ("HOME", "PATH", "PYTHONPATH", "LD_PRELOAD")
    parent = {**going, **dict.fromkeys((*staying, *others), "hunter2")}
    assert ray_crew.taken_over(parent) == going
