"""smp in one process, without TensorFlow: init, places, objects, the original's import path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nanotf import smp
from nanotf.errors import JobError, NanoError
from nanotf.ranks import rank_aliases
from nanotf.sagemaker.smp import runtime


@pytest.fixture(autouse=True)
def _not_initialized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime._here, "config", None)
    yield
    runtime._hooks.clear()


def test_before_init() -> None:
    for function in (smp.rank, smp.mp_rank, smp.get_dp_group, smp.barrier):
        with pytest.raises(JobError, match=r"smp.init\(\)"):
            function()


def test_one_process() -> None:
    smp.init({"partitions": 1, "microbatches": 4})
    assert (smp.rank(), smp.size(), smp.local_rank(), smp.mp_rank(), smp.dp_rank()) == (
        0,
        1,
        0,
        0,
        0,
    )
    assert (smp.get_mp_group(), smp.get_dp_group()) == ([0], [0])
    assert smp.num_microbatches() == 4
    assert smp.allgather("it", smp.CommGroup.DP_GROUP) == ["it"]
    smp.broadcast("it", smp.CommGroup.WORLD)
    smp.mp_barrier()
    with pytest.raises(ValueError, match=r"dest_rank=1 .*number of processes is 1"):
        smp.send("it", 1)
    with pytest.raises(ValueError, match="src_rank=0"):
        smp.recv_from(0)


def test_configuration_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 1, "microbatches": 3}')
    smp.init()
    assert smp.num_microbatches() == 3


def test_several_partitions_need_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__, "--rate", "a b"])
    command = rf"nanotf run --smp -n 2 {__file__} --rate 'a b'"
    with pytest.raises(JobError, match=rf"partitions=2, in the only process.*\n +{command}\n"):
        smp.init({"partitions": 2})
    with pytest.raises(JobError):
        smp.rank()


def test_partition_index() -> None:
    smp.init({"partitions": 1, "auto_partition": False, "default_partition": 0})
    with smp.partition(0):
        pass
    with pytest.raises(ValueError, match="index=1, partitions=1"), smp.partition(1):
        pass
    smp.init({"partitions": 1})
    with smp.partition(1):  # ignored
        pass


@pytest.mark.parametrize("group", ["WORLD", None])
def test_wrong_group(group: Any) -> None:
    smp.init({"partitions": 1})
    with pytest.raises(NanoError, match=r"group must be a smp\.CommGroup"):
        smp.barrier(group)


def test_hooks_run_once() -> None:
    smp.init({"partitions": 1})
    calls: list[int] = []
    smp.register_post_partition_hook(lambda: calls.append(1))
    runtime.run_hooks()
    runtime.run_hooks()
    assert calls == [1]


def test_import_path_of_the_original() -> None:
    code = (
        f"from {rank_aliases.__name__} import install; install()\n"
        "import importlib.util, sys, nanotf.smp\n"
        "assert importlib.util.find_spec('smdistributed') is not None\n"
        "assert importlib.util.find_spec('smdistributed.modelparallel') is not None\n"
        "import smdistributed.modelparallel.tensorflow as smp\n"
        "from smdistributed.modelparallel.tensorflow import CommGroup\n"
        "assert smp is nanotf.smp and CommGroup is smp.CommGroup\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
