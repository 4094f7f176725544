"""Each worker's part of a cluster's CPUs and of the parent's variables; needs no Ray."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from nanotf.errors import PlacementError, UnsupportedVersionError
from nanotf.pool.hosts.remote import taken_over
from nanotf.pool.ray import ray_cluster


@pytest.mark.parametrize(
    ("home", "others", "size", "wanted", "expected"),
    [
        (8, [], 2, None, (4, [2])),
        (8, [], 3, None, (2, [3])),
        (8, [8], 2, None, (4, [2])),  # what fits on this node stays there
        (8, [8], 2, 8, (8, [1, 1])),
        (2, [8], 3, None, (2, [1, 2])),
        (1, [4, 16, 8], 6, 1, (1, [1, 5])),  # no more nodes than needed
        (4, [8, 6], 4, 4, (4, [1, 2, 1])),
        (8, [8], 2, 3, (3, [2])),
    ],
)
def test_divide(home: int, others: list[int], size: int, wanted: int | None, expected: Any) -> None:
    assert ray_cluster.divide(home, others, size, wanted) == expected


@pytest.mark.parametrize(
    ("home", "others", "size", "wanted"),
    [
        (2, [], 3, None),
        (4, [4], 3, 3),
        (4, [8, 6], 5, 4),
        (0, [], 2, None),
        (0, [8], 2, None),  # the first worker is on this process's node
    ],
)
def test_too_few(home: int, others: list[int], size: int, wanted: int | None) -> None:
    with pytest.raises(PlacementError, match=f"num_processes={size}.* {home} CPUs on this"):
        ray_cluster.divide(home, others, size, wanted)


def test_the_part_of_a_node() -> None:
    assert ray_cluster.part(2, 4, 8) == 1.0
    assert ray_cluster.part(2, 3, 8) == 1.0, "the rest is too small for another worker"
    assert ray_cluster.part(1, 4, 16) == 0.25


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(__version__="2.49.2"))
    with pytest.raises(UnsupportedVersionError, match=r"Ray 2\.50 or later.*Ray 2\.49\.2"):
        ray_cluster.connect()


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
    assert taken_over(parent) == going
