"""The report of `nanotf doctor` on described machines, as text and as JSON; the command."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

import pytest
from healthy import GIB, GOOD, describe
from machines import container, flat, two_sockets

import nanotf
from nanotf import cli
from nanotf.cli import doctor, facts, self_test
from nanotf.cli.report_text import render
from nanotf.cli.usage import BusyProcess, Usage
from nanotf.errors import InvalidArgumentError, PlacementError
from nanotf.machine import topology
from nanotf.machine.limits import read_system
from nanotf.machine.processor import Processor, read_processor
from nanotf.machine.tensorflow_build import TensorFlowBuild, read_build

USAGE = Usage(
    load_averages=(3.0, 2.0, 1.0),
    busy_cores=7.21,
    stolen_cores=0.5,
    processes=(
        BusyProcess("train", 10, True, 2.0),
        BusyProcess("solver", 11, False, 1.5, on_usable_cores=False),
        *(BusyProcess("sh", pid, True, 0.2) for pid in range(12, 16)),
    ),
)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_nothing_to_fix() -> None:
    report = doctor.examine(facts=describe())
    assert report["findings"] == []
    assert not doctor.has_errors(report)
    assert render(report).endswith("findings    none: nothing to fix\n```")


def test_one_block_can_be_copied() -> None:
    before, block, after = render(doctor.examine(facts=describe())).split("```")
    assert before.startswith("To report a problem, copy the block below into the issue.")
    assert block.startswith(f"text\nnanotf      {nanotf.__version__} (")
    assert after == ""


def test_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = render(doctor.examine(2, facts=describe(machine=flat(2, can_pin=False))))
    assert max(map(len, shown.splitlines())) <= 80
    assert "findings" in shown


def test_workers_that_are_not_pinned_have_no_cores_of_their_own() -> None:
    shown = render(doctor.examine(2, facts=describe(machine=flat(4, can_pin=False))))
    text = "as many threads as 2 cores can run, on any core (not pinned)"
    assert [line for line in shown.splitlines() if line.startswith("  worker")] == [
        f"  worker {rank}: {text}" for rank in (0, 1)
    ]


def test_the_report_has_everything() -> None:
    environ = {"KMP_BLOCKTIME": "7", "OMP_NUM_THREADS": "56\n"}
    tuned = dataclasses.replace(GOOD.build, threads=60)
    described = dataclasses.replace(GOOD, environ=environ, tuned=tuned)
    shown = render(doctor.examine(4, facts=described))
    for line in (
        "machine     2 sockets, 2 NUMA nodes, 56 cores, 112 logical CPUs",
        "cores       56 usable cores: 56 physical cores online",
        "processor   A Processor: AVX2, AVX-512, AVX-512 BF16, AMX BF16",
        "system      Linux 6.1.0 x86_64, Debian GNU/Linux 12 (bookworm), glibc 2.36",
        "load        averages 1.50, 1.00, 0.50 (1, 5, 15 minutes); 0.1 cores busy in a sample of "
        "0.5 s",
        "memory      256.0 GiB; 200.0 GiB available; /dev/shm 128.0 GiB, 127.0 GiB free (sets "
        "nanotf no",
        "            limit)",
        "limits      open files 1024, processes 4096, address space unlimited",
        "collectives native (_shm.so, avx512)",
        "allocators  tcmalloc (/lib/libtcmalloc_minimal.so.4); workers preload "
        "libtcmalloc_minimal.so.4",
        "  worker 3: cores 42-55, NUMA node 1",
        "  KMP_BLOCKTIME                          7",
        "  TF_NUM_INTRAOP_THREADS                 not set; nanotf-init would set 56",
        r"  OMP_NUM_THREADS                        '56\n'",
        "     -> source nanotf-init.",
    ):
        assert line in shown.splitlines()
    assert "tensorflow  2.21.0 (tensorflow-cpu 2.21.0), tf.keras is keras 3.15.1, " in shown
    assert "  1. note: After nanotf-init, TensorFlow would start 60 threads instead of 61" in shown
    assert max(map(len, shown.splitlines())) < 135, "long values are cut"
    assert shown.isascii()


def test_failed_tests_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (
        self_test.Check("training", True, "fine"),
        self_test.Check("all-reduce", False, "wrong sum"),
    )
    monkeypatch.setattr(self_test, "run_trial", lambda: checks)
    report = doctor.examine(facts=describe(), test=True)
    shown = render(report)
    assert "  pass  training: fine\n  FAIL  all-reduce: wrong sum" in shown
    assert doctor.has_errors(report)
    assert report["findings"][0]["text"] == "The test failed: all-reduce: wrong sum"


def test_a_test_needs_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "run_trial", lambda: pytest.fail("it was run"))
    for changes in ({"machine": flat(1)}, {"environ": {"OMP_NUM_THREADS": "1"}}):
        report = doctor.examine(facts=describe(**changes), test=True)
        (found,) = (f for f in report["findings"] if f["severity"] == "error")
        assert found["text"].startswith("Two workers need two cores")
        assert found["text"].endswith("; the test was skipped.")
        assert report["test"] == []


def test_json_is_plain_and_has_the_documented_keys() -> None:
    described = dataclasses.replace(GOOD, machine=container(), usage=USAGE)
    report = doctor.examine(2, facts=described)
    told = json.loads(json.dumps(report))
    assert told == report
    assert list(told) == list(doctor.KEYS)
    for key, section in told.items():
        for entry in section if isinstance(section, list) else [section or {}]:
            assert set(entry) <= set(re.findall(r"\w+", doctor.KEYS[key])), key
    for entry in (*told["load"]["processes"], *told["environment"]["variables"]):
        assert set(entry) <= set(
            re.findall(r"\w+", doctor.KEYS["load"] + doctor.KEYS["environment"])
        )
    assert told["machine"]["usable_cores"] == [4, 5, 6]
    assert told["machine"]["cpuset"] == list(range(4, 12))
    assert [worker["cores"] for worker in told["workers"]] == [[4], [5]]
    assert told["tensorflow"]["keras"] == "keras 3.15.1"
    first, *_ = told["environment"]["variables"]
    assert first == {"name": "KMP_BLOCKTIME", "value": None, "nanotf_init": "1"}


def test_text_is_written_from_the_printed_json_alone() -> None:
    described = dataclasses.replace(GOOD, machine=container(), usage=USAGE, environ={"TF_X": "7"})
    report = doctor.examine(2, facts=described)
    shown = render(json.loads(json.dumps(report)))
    assert shown == render(report)
    one_line = " ".join(shown.split())
    for finding in report["findings"]:
        assert f"{finding['severity']}: {finding['text']} -> {finding['fix']}" in one_line
    for variable in report["environment"]["variables"]:
        assert f"  {variable['name']} " in shown
    assert "\n".join(report["machine"]["picture"]) in shown
    for key in ("kernel", "distribution", "libc"):
        assert report["platform"][key] in shown


def test_busy_processes_are_listed_without_users_and_command_lines() -> None:
    shown = render(doctor.examine(facts=describe(usage=USAGE)))
    start = shown.index("load  ")
    assert shown[start : shown.index("memory  ")].splitlines() == [
        "load        averages 3.00, 2.00, 1.00 (1, 5, 15 minutes); 7.2 cores busy in a sample of "
        "0.5 s, and a",
        "            hypervisor took 0.5 for others",
        "            2.0 cores: train (pid 10, yours)",
        "            1.5 cores: solver (pid 11, another user's, on other cores)",
        "            0.2 cores: sh (pid 12, yours)",
        "            0.2 cores: sh (pid 13, yours)",
        "            0.2 cores: sh (pid 14, yours)",
        "            others that were less busy: 1",
    ]


@pytest.mark.parametrize(
    ("number", "error"), [(0, InvalidArgumentError), (57, PlacementError), (10**6, PlacementError)]
)
def test_impossible_numbers_of_workers(number: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Received: num_processes={number}"):
        doctor.examine(number, facts=GOOD)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "gather", describe)
    monkeypatch.setattr(topology, "describe_machine", two_sockets)
    assert cli.main(["doctor", "-n", "4"]) == 0
    assert "worker 3: cores 42-55, NUMA node 1" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert cli.main(["doctor", "-n", "100000"]) == 2
    assert capsys.readouterr().err.startswith("nanotf: Every worker needs cores of its own")
    monkeypatch.setattr(facts, "gather", lambda: describe(build=TensorFlowBuild()))
    assert cli.main(["doctor"]) == 1


def test_a_path_that_is_not_utf_8_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "gather", describe)
    monkeypatch.setattr(topology, "describe_machine", two_sockets)
    monkeypatch.setattr(sys, "executable", "/opt/\udcff/python")
    assert cli.main(["doctor"]) == 0
    assert r"(/opt/\udcff/python)" in capsys.readouterr().out


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
