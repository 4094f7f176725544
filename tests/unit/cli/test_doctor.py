"""`nanotf doctor` on described machines: the picture, the findings, the output."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from machines import container, flat, laptop, two_sockets

from nanotf import cli
from nanotf.cli import doctor, trial
from nanotf.cli.findings import Facts, Finding
from nanotf.cli.picture import draw, ranges
from nanotf.errors import InvalidArgumentError, PlacementError
from nanotf.machine import topology
from nanotf.machine.cpus import LogicalCpu, Machine
from nanotf.machine.environment import initialised, shell_environment
from nanotf.machine.installed import Installed
from nanotf.machine.limits import System, read_system
from nanotf.machine.processor import Processor, read_processor
from nanotf.machine.shell_state import Options
from nanotf.machine.tensorflow_build import TensorFlowBuild, read_build
from nanotf.machine.topology import plan

GIB = 1 << 30
GOOD = Facts(
    machine=two_sockets(),
    processor=Processor("A Processor", frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})),
    system=System(memory=256 * GIB, shm=128 * GIB, open_files=1024, processes=4096),
    build=TensorFlowBuild(
        ("tensorflow-cpu 2.21.0",), "2.21.0", "keras 3.15.1", "tensorflow", onednn=True
    ),
    installed=Installed(allocators=(("tcmalloc", "/lib/libtcmalloc_minimal.so.4"),)),
    native=(True, "_shm.so, avx512"),
    environ={},
)


def _facts(**changes: Any) -> Facts:
    """Describes a healthy machine, with changes; `nanotf-init` was sourced."""
    facts = dataclasses.replace(GOOD, **changes)
    wanted = shell_environment(facts.machine, facts.environ, Options(), facts.installed)
    return dataclasses.replace(facts, environ=initialised(facts.environ, Options(), wanted))


def _findings(num_processes: int | None = None, **changes: Any) -> list[Finding]:
    return list(doctor.examine(num_processes, facts=_facts(**changes)).findings)


def _one(found: list[Finding], word: str) -> Finding:
    """Returns the only finding that contains a word."""
    (only,) = [finding for finding in found if word in finding.text]
    return only


# ------------------------------------------------------------------------------- pictures
def test_two_sockets_with_two_workers() -> None:
    assert draw(two_sockets(), plan(2, machine=two_sockets())).splitlines() == [
        "  socket 0",
        "  +-- NUMA node 0 ------------------+",
        "  | 00000000 00000000 00000000 0000 | cores 0-27, hyper-threads 56-83",
        "  +---------------------------------+",
        "  socket 1",
        "  +-- NUMA node 1 ------------------+",
        "  | 11111111 11111111 11111111 1111 | cores 28-55, hyper-threads 84-111",
        "  +---------------------------------+",
        "  0, 1, ...  a core of that worker",
    ]


def test_a_container_shows_which_cores_are_not_its_own() -> None:
    lines = draw(container(), plan(3, machine=container())).splitlines()
    assert lines[2] == "  | ----012.        | cores 0-7"
    assert lines[6] == "  | ....----        | cores 8-15"
    assert lines[8:] == [
        "  0, 1, ...  a core of that worker",
        "  .  a core that no worker has",
        "  -  a core that this process may not use",
    ]


def test_efficiency_and_offline_cores_are_told_apart() -> None:
    cpus = laptop().cpus
    machine = Machine((*cpus[:-1], dataclasses.replace(cpus[-1], online=False)))
    lines = draw(machine, plan(3, machine=machine)).splitlines()
    assert lines[2:4] == [
        "  | 001122          | cores 0,2,4,6,8,10, hyper-threads 1,3,5,7,9,11",
        "  | .......!        | efficiency cores 12-19",
    ]
    assert lines[-1] == "  !  a core that is offline"


def test_many_workers_and_long_lines() -> None:
    machine = flat(100)
    lines = draw(machine, plan(100, machine=machine)).splitlines()
    assert lines[2].startswith("  | 01234567 89abcdef ")
    assert lines[2].endswith("######## | cores 0-99")
    assert lines[3].split() == ["|", *["########"] * 4, "####", "|"]
    assert len({len(line) for line in lines[1:5] if "cores" not in line}) == 1
    assert lines[-2:] == [
        "  0, 1, ...  a core of that worker",
        "  #  a core of worker 36 or above",
    ]


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2,5"
    assert ranges([]) == ""


# ------------------------------------------------------------------------------- findings
def test_nothing_to_fix() -> None:
    report = doctor.examine(facts=_facts())
    assert report.findings == ()
    assert not report.has_errors()
    assert doctor.render(report).endswith("findings    none: nothing to fix")


BUILDS = [
    (TensorFlowBuild(error="exited with code 1: No module named 'tensorflow'"), "No TensorFlow"),
    (TensorFlowBuild(("tensorflow 2.21.0",), error="was killed by SIGILL: x"), "SIGILL"),
    (dataclasses.replace(GOOD.build, keras="keras 3.8.0"), "keras 3.8.0 trains wrongly"),
    (dataclasses.replace(GOOD.build, backend="torch"), "Keras runs on torch"),
]


@pytest.mark.parametrize(("build", "text"), BUILDS)
def test_a_failure_is_an_error_and_comes_first(build: TensorFlowBuild, text: str) -> None:
    report = doctor.examine(facts=_facts(build=build, installed=Installed()))
    assert report.has_errors()
    first, *others = report.findings
    assert (first.severity, text in first.text) == ("error", True)
    assert [finding.severity for finding in others] == ["note"]  # tcmalloc
    assert f"1. error: {first.text[:40]}" in doctor.render(report)


def test_several_packages_of_tensorflow() -> None:
    build = dataclasses.replace(GOOD.build, packages=("tensorflow 2.21.0", "tensorflow-cpu 2.20"))
    (found,) = _findings(build=build)
    assert found.severity == "warning"
    assert "pip uninstall tensorflow tensorflow-cpu" in found.fix


def test_a_quota_leaves_workers_unpinned() -> None:
    found = _one(_findings(machine=container()), "A CPU quota of 3.5 CPUs")
    assert found.severity == "note"
    assert "--cpuset-cpus=4-6" in found.fix


def test_too_few_cores() -> None:
    machine = flat(4, affinity=frozenset({1}))
    report = doctor.examine(facts=_facts(machine=machine))
    assert len(report.plan.placements) == 1
    assert "1 core" in _one(list(report.findings), "Two workers need two cores").text


def test_a_worker_across_two_nodes_and_the_number_that_avoids_it() -> None:
    found = _one(_findings(3), "cores of several NUMA nodes")
    assert "worker 2 has" in found.text
    assert found.fix == "Use another number of workers, such as 2, 4."
    assert _findings(4) == []


def test_efficiency_cores_slow_all_workers() -> None:
    assert _findings(6, machine=laptop()) == []
    found = _one(_findings(8, machine=laptop()), "efficiency cores")
    assert "12-13" in found.text
    assert "up to 6 workers" in found.fix


def test_a_cap_that_the_user_has_set() -> None:
    found = _one(_findings(environ={"OMP_NUM_THREADS": "4"}), "nanotf uses 4 cores of 56")
    assert "unset OMP_NUM_THREADS" in found.fix


SYSTEMS = [
    (System(address_space=8 * GIB), "limited to 8.0 GiB", "ulimit -v unlimited."),
    (System(open_files=64), "limit is 64,", "ulimit -n 1024."),
    (System(memory=64 * GIB, memory_limit=GIB), "only 1.0 GiB is", "Use fewer workers"),
]


@pytest.mark.parametrize(("system", "text", "fix"), SYSTEMS)
def test_limits_of_the_system(system: System, text: str, fix: str) -> None:
    (found,) = _findings(system=system)
    assert (found.severity, text in found.text) == ("warning", True)
    assert found.fix.startswith(fix)


def test_causes_of_slowness() -> None:
    found = _findings(
        native=(False, "_shm.so was not built"),
        build=dataclasses.replace(GOOD.build, onednn=False),
        installed=Installed(),
        processor=Processor("Old", frozenset({"avx2"})),
        environ={"TF_NUM_INTEROP_THREADS": "1"},
    )
    assert "g++" in _one(found, "pure-Python").fix
    assert _one(found, "oneDNN").severity == "note"
    assert "libtcmalloc-minimal4" in _one(found, "tcmalloc").fix
    assert "float32" in _one(found, "bfloat16").fix
    assert _one(found, "TF_NUM_INTEROP_THREADS=1 leaves").fix == "Unset it."
    assert [f.severity for f in found] == sorted(
        (f.severity for f in found), key=["error", "warning", "note"].index
    )


def test_oneDNN_that_was_switched_off() -> None:
    build = dataclasses.replace(GOOD.build, onednn=False)
    found = _findings(build=build, environ={"TF_ENABLE_ONEDNN_OPTS": "0"})
    assert _one(found, "since TF_ENABLE_ONEDNN_OPTS=0").severity == "warning"


def test_unpinnable_machines() -> None:
    found = _findings(machine=flat(4, can_pin=False, notes=("processes cannot be pinned here",)))
    assert _one(found, "cannot be pinned").severity == "warning"


def test_nanotf_init_that_was_not_sourced() -> None:
    (found,) = doctor.examine(facts=GOOD).findings
    assert (found.severity, found.fix) == ("note", "source nanotf-init.")


# -------------------------------------------------------------------------------- reports
@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = doctor.render(doctor.examine(2, facts=_facts(machine=flat(2, can_pin=False))))
    assert max(map(len, shown.splitlines())) <= 80
    assert "findings" in shown


def test_workers_that_are_not_pinned_have_no_cores_of_their_own() -> None:
    shown = doctor.render(doctor.examine(2, facts=_facts(machine=flat(4, can_pin=False))))
    text = "as many threads as 2 cores can run, on any core (not pinned)"
    assert [line for line in shown.splitlines() if line.startswith("  worker")] == [
        f"  worker {rank}: {text}" for rank in (0, 1)
    ]


def test_the_report_has_everything() -> None:
    facts = dataclasses.replace(GOOD, environ={"KMP_BLOCKTIME": "7", "OMP_NUM_THREADS": "56\n"})
    shown = doctor.render(doctor.examine(4, facts=facts))
    for line in (
        "machine     2 sockets, 2 NUMA nodes, 56 cores, 112 logical CPUs",
        "cores       56 usable cores: 56 physical cores online",
        "processor   A Processor: AVX2, AVX-512, AVX-512 BF16, AMX BF16",
        "memory      256.0 GiB, /dev/shm 128.0 GiB (sets nanotf no limit)",
        "limits      open files 1024, processes 4096, address space unlimited",
        "collective  native (_shm.so, avx512)",
        "allocators  tcmalloc (/lib/libtcmalloc_minimal.so.4)",
        "  worker 3: cores 42-55, NUMA node 1",
        "  KMP_BLOCKTIME                          7  (yours, kept)",
        "  TF_NUM_INTRAOP_THREADS                 56  (nanotf-init would set it)",
        r"  OMP_NUM_THREADS                        '56\n'  (yours, kept)",
        "     -> source nanotf-init.",
    ):
        assert line in shown.splitlines()
    assert "tensorflow  2.21.0 (tensorflow-cpu 2.21.0), tf.keras is keras 3.15.1, " in shown
    assert "  1. note: nanotf-init would set " in shown
    assert max(map(len, shown.splitlines())) < 135, "long values are cut"
    assert shown.isascii()


def test_failed_tests_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (trial.Check("training", True, "fine"), trial.Check("all-reduce", False, "wrong sum"))
    monkeypatch.setattr(trial, "run_trial", lambda: checks)
    report = doctor.examine(facts=_facts(), test=True)
    shown = doctor.render(report)
    assert "  pass  training: fine\n  FAIL  all-reduce: wrong sum" in shown
    assert report.has_errors()
    assert report.findings[0].text == "The test of all-reduce failed: wrong sum"


def test_a_test_needs_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "run_trial", lambda: pytest.fail("it was run"))
    for changes in ({"machine": flat(1)}, {"environ": {"OMP_NUM_THREADS": "1"}}):
        report = doctor.examine(facts=_facts(**changes), test=True)
        (found,) = (f for f in report.findings if f.severity == "error")
        assert found.text.endswith("this process has 1 core; the test was skipped.")
        assert "Give it more" in found.fix
        assert report.checks == ()


def test_json_is_plain_and_has_the_same() -> None:
    report = doctor.examine(2, facts=dataclasses.replace(GOOD, machine=container()))
    told = json.loads(json.dumps(doctor.as_json(report)))
    assert told["machine"]["usable_cores"] == [4, 5, 6]
    assert told["machine"]["cpuset"] == list(range(4, 12))
    assert [worker["cores"] for worker in told["workers"]] == [[4], [5]]
    assert told["tensorflow"]["keras"] == "keras 3.15.1"
    assert told["environment"]["now"]["OMP_NUM_THREADS"] is None
    assert [f["text"] for f in told["findings"]] == [f.text for f in report.findings]


@pytest.mark.parametrize(
    ("number", "error"), [(0, InvalidArgumentError), (57, PlacementError), (10**6, PlacementError)]
)
def test_impossible_numbers_of_workers(number: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Received: num_processes={number}"):
        doctor.examine(number, facts=GOOD)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "gather", _facts)
    monkeypatch.setattr(topology, "describe_machine", two_sockets)
    assert cli.main(["doctor", "-n", "4"]) == 0
    assert "worker 3: cores 42-55, NUMA node 1" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert cli.main(["doctor", "-n", "100000"]) == 2
    assert capsys.readouterr().err.startswith("nanotf: Every worker needs cores of its own")
    monkeypatch.setattr(doctor, "gather", lambda: _facts(build=BUILDS[0][0]))
    assert cli.main(["doctor"]) == 1


# --------------------------------------------------------------------------- this machine
def test_the_processor_is_read(tmp_path: Any) -> None:
    (tmp_path / "proc").mkdir()
    text = "processor\t: 0\nmodel name\t: Name @ 2 GHz\nflags\t\t: fpu avx2 avx512f amx_bf16\n\n"
    (tmp_path / "proc/cpuinfo").write_text(2 * text)
    found = read_processor(tmp_path)
    assert (found.name, found.has_bfloat16) == ("Name @ 2 GHz", True)
    assert found.features() == ("AVX2", "AVX-512", "AMX BF16")
    assert read_processor(tmp_path / "nowhere") == Processor()


def test_a_memory_limit_of_an_ancestor_counts(tmp_path: Any) -> None:
    from nanotf.machine.cgroups import read_limits

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert read_limits(tmp_path).memory is None
    (group.parent / "memory.max").write_text(f"{2 * GIB}\n")
    assert read_limits(tmp_path).memory == 2 * GIB


def test_this_system_and_this_tensorflow() -> None:
    system = read_system()
    assert system.memory is not None
    assert system.memory > GIB
    broken = read_build({"PATH": "", "PYTHONHOME": "/nowhere"})
    assert broken.error.startswith("exited with code")
    assert broken.tensorflow == ""


def test_unknown_cpus_are_drawn_too() -> None:
    machine = Machine((LogicalCpu(0, 0), LogicalCpu(1, 0), LogicalCpu(2, 1)))
    assert "hyper-threads 1" in draw(machine)
