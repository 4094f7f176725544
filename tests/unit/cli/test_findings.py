"""Findings of `nanotf doctor` on described machines: each problem is one finding."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
from healthy import GIB, GOOD, describe, find, only
from machines import container, flat, laptop

from nanotf.cli import doctor
from nanotf.cli.report_text import render
from nanotf.cli.usage import BusyProcess, OtherPool, Usage
from nanotf.compat.versions import TESTED_TENSORFLOW
from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.installed import Installed
from nanotf.machine.limits import System
from nanotf.machine.processor import Processor
from nanotf.machine.shell_state import Options
from nanotf.machine.tensorflow_build import TensorFlowBuild

BUILDS = [
    (TensorFlowBuild(error="exited with code 1: No module named 'tensorflow'"), "No TensorFlow"),
    (TensorFlowBuild(("tensorflow 2.21.0",), error="was killed by SIGILL: x"), "SIGILL"),
    (dataclasses.replace(GOOD.build, keras="keras 3.8.0"), "keras 3.8.0 trains wrongly"),
    (dataclasses.replace(GOOD.build, backend="torch", keras="", error="x"), "Keras runs on torch"),
    (
        dataclasses.replace(GOOD.build, backend="", keras="", error="Keras: no 'torch'"),
        "no 'torch'.",
    ),
]


@pytest.mark.parametrize(("build", "text"), BUILDS)
def test_a_failure_is_an_error_and_comes_first(build: TensorFlowBuild, text: str) -> None:
    report = doctor.examine(facts=describe(build=build, installed=Installed()))
    assert doctor.has_errors(report)
    first, *others = report["findings"]
    assert (first["severity"], text in first["text"]) == ("error", True)
    assert [finding["severity"] for finding in others] == ["note"]  # tcmalloc
    assert f"1. error: {first['text'][:40]}" in render(report)


def test_several_packages_of_tensorflow() -> None:
    build = dataclasses.replace(GOOD.build, packages=("tensorflow 2.21.0", "tensorflow-cpu 2.20"))
    (found,) = find(build=build)
    assert found["severity"] == "warning"
    assert "pip uninstall tensorflow tensorflow-cpu" in found["fix"]


@pytest.mark.parametrize("version", ["2.13.1", "2.22.0-dev20260101"])
def test_a_tensorflow_that_was_not_tested(version: str) -> None:
    (found,) = find(build=dataclasses.replace(GOOD.build, tensorflow=version))
    assert found["severity"] == "warning"
    assert found["text"] == f"nanotf is tested with TensorFlow 2.14 to 2.21, not with {version}."


def test_the_tested_versions_are_those_that_pip_installs() -> None:
    project = (pathlib.Path(__file__).parents[3] / "pyproject.toml").read_text()
    (oldest, newest) = TESTED_TENSORFLOW
    assert f"intel-tensorflow=={oldest[0]}.{oldest[1]}.0" in project
    assert f"<{newest[0]}.{newest[1] + 1}" in project


def test_a_quota_leaves_workers_unpinned() -> None:
    found = only(find(machine=container()), "A CPU quota of 3.5 CPUs")
    assert found["severity"] == "note"
    assert "--cpuset-cpus=4-6" in found["fix"]


def test_too_few_cores() -> None:
    machine = flat(4, affinity=frozenset({1}))
    report = doctor.examine(facts=describe(machine=machine))
    assert len(report["workers"]) == 1
    found = only(report["findings"], "Two workers need two cores")
    assert "1 of them in the affinity mask (taskset)" in found["text"]
    assert "taskset" in found["fix"]


def test_a_worker_across_two_nodes_and_the_number_that_avoids_it() -> None:
    found = only(find(3), "cores of several NUMA nodes")
    assert "worker 2 has" in found["text"]
    assert found["fix"] == "Use another number of workers, such as 2, 4."
    assert find(4) == []


def test_efficiency_cores_slow_all_workers() -> None:
    assert find(6, machine=laptop()) == []
    found = only(find(8, machine=laptop()), "efficiency cores")
    assert "12-13" in found["text"]
    assert found["fix"] == "Use another number of workers, such as 5, 6."


def test_a_cap_that_the_user_has_set() -> None:
    found = only(find(environ={"OMP_NUM_THREADS": "4"}), "nanotf uses 4 cores of 56")
    assert "unset OMP_NUM_THREADS" in found["fix"]


SYSTEMS = [
    (System(address_space=8 * GIB), "limited to 8.0 GiB", "ulimit -v unlimited."),
    (System(open_files=64), "limit is 64,", "ulimit -n 1024."),
    (System(memory=64 * GIB, memory_limit=GIB), "only 1.0 GiB is", "Use fewer workers"),
]


@pytest.mark.parametrize(("system", "text", "fix"), SYSTEMS)
def test_limits_of_the_system(system: System, text: str, fix: str) -> None:
    (found,) = find(system=system)
    assert (found["severity"], text in found["text"]) == ("warning", True)
    assert found["fix"].startswith(fix)


def test_without_the_native_library() -> None:
    (found,) = find(native=(False, "_shm.so was not built"))
    assert found["severity"] == "error"
    assert found["text"] == (
        "Several workers are refused without nanotf's native library: _shm.so was not built."
    )
    assert "python -m nanotf.collectives.build" in found["fix"]
    assert "pip install ziglang" in found["fix"]


def test_causes_of_slowness() -> None:
    found = find(
        build=dataclasses.replace(GOOD.build, onednn=False),
        installed=Installed(),
        processor=Processor("Old", frozenset({"avx2"})),
        environ={"TF_NUM_INTEROP_THREADS": "1"},
    )
    assert only(found, "oneDNN")["fix"] == "Install tensorflow-cpu."
    assert "libtcmalloc-minimal4" in only(found, "tcmalloc")["fix"]
    assert only(found, "TF_NUM_INTEROP_THREADS=1 leaves")["fix"] == "Unset it."
    assert [f["severity"] for f in found] == sorted(
        (f["severity"] for f in found), key=["error", "warning", "note"].index
    )


def test_oneDNN_that_was_switched_off() -> None:
    build = dataclasses.replace(GOOD.build, onednn=False)
    found = find(build=build, environ={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert only(found, "because of TF_ENABLE_ONEDNN_OPTS=0")["severity"] == "warning"


def test_unpinnable_machines() -> None:
    found = find(machine=flat(4, can_pin=False, notes=("processes cannot be pinned here",)))
    assert only(found, "cannot be pinned")["severity"] == "warning"


def test_nanotf_init_is_advised_only_where_it_changes_tensorflow() -> None:
    assert doctor.examine(facts=GOOD)["findings"] == [], "its variables would change nothing"
    now = dataclasses.replace(GOOD.build, threads=227, bound_threads=2, allocator="/lib/libc.so.6")
    (found,) = doctor.examine(facts=dataclasses.replace(GOOD, build=now))["findings"]
    assert (found["severity"], found["fix"]) == ("note", "source nanotf-init.")
    assert found["text"] == (
        "After nanotf-init, TensorFlow would start 61 threads instead of 227, and bind 0 of its "
        "threads to cores instead of 2, and take memory from libtcmalloc_minimal.so.4 instead of "
        "libc.so.6 in this shell."
    )
    failed = TensorFlowBuild(GOOD.build.packages, error="did not end within 120 s")
    assert doctor.examine(facts=dataclasses.replace(GOOD, tuned=failed))["findings"] == []


def test_the_users_cap_bounds_the_advised_numbers_of_workers() -> None:
    machine = Machine(tuple(LogicalCpu(n, n, numa_node=n // 3) for n in range(12)))
    found = only(find(2, machine=machine, environ={"OMP_NUM_THREADS": "8"}), "NUMA nodes")
    assert "56" not in found["fix"]
    numbers = [int(n) for n in found["fix"].removesuffix(".").split("such as ")[1].split(", ")]
    assert max(numbers) <= 4
    for number in numbers:
        rest = find(number, machine=machine, environ={"OMP_NUM_THREADS": "8"})
        assert not [finding for finding in rest if "NUMA nodes" in finding["text"]]


# ------------------------------------------------------------- other users of the cores
BUSY = BusyProcess("python", 41, True, 2.0)
POOL = OtherPool("python train.py (process 99)", 99, (0, 1, 2))
ELSEWHERE = BusyProcess("solver", 42, False, 30.0, on_usable_cores=False)


def test_busy_processes_are_named() -> None:
    usage = Usage(processes=(*(dataclasses.replace(BUSY, pid=n) for n in range(40, 45)), ELSEWHERE))
    (found,) = find(usage=usage)
    assert found["severity"] == "warning"
    assert found["text"].startswith(
        "Other processes keep 10.0 cores busy that workers may use: python (pid 40) 2.0, "
        "python (pid 41) 2.0, python (pid 42) 2.0 and 2 more."
    )
    assert found["fix"] == "Wait until they end, or stop them."


@pytest.mark.parametrize("processes", [(ELSEWHERE,), (dataclasses.replace(BUSY, cores=0.4),)])
def test_harmless_processes_are_no_finding(processes: tuple[BusyProcess, ...]) -> None:
    assert find(usage=Usage(processes=processes)) == []


def test_an_idle_pool_is_worth_knowing() -> None:
    (found,) = find(
        usage=Usage(pools=(POOL, OtherPool("python other.py (process 77)", 77, (500,))))
    )
    assert found["severity"] == "note"
    assert "workers of python train.py (process 99) are pinned to the cores 0-2" in found["text"]
    assert found["fix"].startswith("Call nanotf.shutdown() in process 99 ")


# ---------------------------------------------------------- one cause, one finding
WITHOUT_ONEDNN = dataclasses.replace(GOOD.build, onednn=False)
JEMALLOC = Options(allocator="jemalloc")
SLOW_AND_ASTRIDE = Machine(
    tuple(LogicalCpu(n, n, numa_node=n // 3, efficiency=n >= 4) for n in range(6))
)


def _sourced(options: Options, environ: dict[str, str] | None = None, **changes: Any) -> Any:
    """Describes a machine on which the user set variables after `nanotf-init` had run."""
    facts = describe(options, **changes)
    return dataclasses.replace(facts, environ={**facts.environ, **(environ or {})})


ONE_CAUSE = {
    "OMP_NUM_THREADS leaves one core": (
        describe(environ={"OMP_NUM_THREADS": "1"}),
        ["this process has 1 core, because of OMP_NUM_THREADS=1."],
    ),
    "a quota leaves one core": (
        describe(machine=flat(4, quota=1.5)),
        ["this process has 1 usable core: 4 physical cores online, the cgroup's CPU quota is 1.5"],
    ),
    "OMP_NUM_THREADS wins over --cores": (
        describe(Options(cores=8), environ={"OMP_NUM_THREADS": "4"}),
        ["nanotf uses 4 cores of 56, because of OMP_NUM_THREADS=4 and nanotf-init --cores 8."],
    ),
    "OMP_NUM_THREADS and a mask": (
        describe(machine=flat(8, affinity=frozenset(range(4))), environ={"OMP_NUM_THREADS": "2"}),
        ["nanotf uses 2 cores of 4, because of OMP_NUM_THREADS=2."],
    ),
    "no pinning, with a quota": (
        describe(machine=flat(8, quota=4.0, can_pin=False, notes=("cannot be pinned",))),
        ["Workers cannot be pinned to cores here, so they may slow each other down. A CPU quota"],
    ),
    "a number of workers that fits neither nodes nor cores": (
        describe(machine=SLOW_AND_ASTRIDE),
        ["worker 1 has cores of several NUMA nodes"],
    ),
    "a busy pool": (
        describe(
            usage=Usage(
                processes=(BusyProcess("nanotf-pinned", 100, True, 1.0),),
                pools=(dataclasses.replace(POOL, cores=(0,)),),
            )
        ),
        ["Other processes keep 1.0 cores busy"],
    ),
    "an allocator that is missing": (
        describe(JEMALLOC, installed=Installed()),
        ["jemalloc was requested but is not installed"],
    ),
    "an allocator that the user preloads": (
        describe(installed=Installed(), environ={"LD_PRELOAD": "/lib/libjemalloc.so.2"}),
        [],
    ),
    "no allocator, as the user wants": (
        describe(Options(allocator="none"), installed=Installed()),
        [],
    ),
    "nanotf-init would enable oneDNN": (
        dataclasses.replace(GOOD, build=WITHOUT_ONEDNN),
        ["After nanotf-init, TensorFlow would use oneDNN in this shell."],
    ),
    "nanotf-init disabled oneDNN": (
        describe(Options(onednn=False), build=WITHOUT_ONEDNN),
        ["because of nanotf-init --disable-onednn."],
    ),
    "two packages break TensorFlow": (
        describe(build=TensorFlowBuild(("tensorflow 2.21.0", "tensorflow-cpu 2.20"), error="x")),
        ["TensorFlow cannot be imported: the attempt x. Several packages provide"],
    ),
    "the address space breaks TensorFlow": (
        describe(
            build=TensorFlowBuild(("tensorflow 2.21.0",), error="x"),
            system=System(address_space=8 * GIB),
        ),
        ["TensorFlow cannot be imported: the attempt x. The address space is limited to 8.0 GiB"],
    ),
}


@pytest.mark.parametrize("name", ONE_CAUSE)
def test_one_cause_is_one_finding_with_one_fix(name: str) -> None:
    facts, texts = ONE_CAUSE[name]
    found = doctor.examine(facts=facts)["findings"]
    assert len(found) == len(texts), found
    for finding, text in zip(found, texts, strict=True):
        assert text in finding["text"]
        assert finding["fix"].endswith(".")


def test_fixes_name_all_that_must_change() -> None:
    facts, _ = ONE_CAUSE["OMP_NUM_THREADS wins over --cores"]
    (found,) = doctor.examine(facts=facts)["findings"]
    assert "unset OMP_NUM_THREADS, then source nanotf-init" in found["fix"]
    facts, _ = ONE_CAUSE["a busy pool"]
    (found,) = doctor.examine(facts=facts)["findings"]
    assert "pinned to the cores 0." in found["text"]
    assert found["fix"].startswith("Wait until they end, or stop them; or call nanotf.shutdown()")
    facts, _ = ONE_CAUSE["the address space breaks TensorFlow"]
    (found,) = doctor.examine(facts=facts)["findings"]
    assert found["fix"].startswith("ulimit -v unlimited.")


def test_a_broken_tensorflow_is_no_failed_test_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.self_test, "run_trial", lambda: pytest.fail("it was run"))
    facts = describe(build=TensorFlowBuild(("tensorflow 2.21.0",), error="x"))
    report = doctor.examine(facts=facts, test=True)
    assert [finding["severity"] for finding in report["findings"]] == ["error"]
    assert report["test"] == []
    assert "test\n  skipped: fix the errors below first" in render(report)


def test_cores_that_were_taken_away_after_nanotf_init() -> None:
    facts = describe(Options(cores=8), build=dataclasses.replace(GOOD.build, threads=10))
    tuned = dataclasses.replace(GOOD.build, threads=6)
    fewer = dataclasses.replace(facts, machine=flat(4), tuned=tuned)
    (found,) = doctor.examine(facts=fewer)["findings"]
    assert "start 6 threads instead of 10" in found["text"]


@pytest.mark.parametrize(
    ("with_plugin", "setting"), [(0.008, "TF_ENABLE_ZENDNN_OPTS=0"), (0.002, "OPTS=1 ")]
)
def test_the_faster_way_with_a_plugin_is_advised(with_plugin: float, setting: str) -> None:
    builds = GOOD.build, dataclasses.replace(GOOD.build, float32=with_plugin)
    (finding,) = find(plugins=("zentf 2.21.0.0",), switched=builds)
    assert f"zentf 2.21.0.0. A convolution takes {1000 * with_plugin:.1f} ms" in finding["text"]
    assert "4.0 ms without" in finding["text"]
    assert setting in finding["fix"]
