"""Variables derived from plans and user environments."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from nanotf import cli
from nanotf.cli import shell
from nanotf.errors import InvalidArgumentError, PlacementError
from nanotf.machine import installed
from nanotf.machine.environment import (
    WORKER_INTEROP_THREADS,
    Environment,
    initialised,
    shell_environment,
    worker_environment,
)
from nanotf.machine.installed import Installed
from nanotf.machine.shell_state import STATE_VARIABLE, Options, cores_cap, read_state, user_environ
from nanotf.machine.topology import LogicalCpu, Machine, Placement, plan

TCMALLOC = "/lib/libtcmalloc_minimal.so.4"
JEMALLOC = "/lib/libjemalloc.so.2"
STOCK = Installed(allocators=(("tcmalloc", TCMALLOC), ("jemalloc", JEMALLOC)))
BARE = Installed()
INTEL = Installed(tensorflow_uses_openmp=True, libiomp5="/tf/libiomp5.so")

MACHINE = Machine(tuple(LogicalCpu(n, n, socket=n // 4, numa_node=n // 4) for n in range(8)))
PLACEMENT = Placement(1, (4, 5, 6), 1)


def init(
    environ: dict[str, str], options: Options | None = None, found: Installed = STOCK
) -> dict[str, str]:
    """Returns the environment after `source nanotf-init`."""
    options = options or Options()
    made = shell_environment(MACHINE, environ, options, found)
    return initialised(environ, options, made)


# -------------------------------------------------------------------------------- workers
def test_a_worker_gets_its_cores() -> None:
    made = worker_environment(PLACEMENT, {"HOME": "/root"}, STOCK)
    assert made.variables == {
        "OMP_NUM_THREADS": "3",
        "KMP_AFFINITY": "granularity=fine,proclist=[4,5,6],explicit",
        "KMP_BLOCKTIME": "1",
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": str(WORKER_INTEROP_THREADS),
        "LD_PRELOAD": TCMALLOC,
        "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 40),
    }
    assert (made.kept, made.removed, made.warnings) == ({}, (), ())


def test_a_worker_that_is_not_pinned_binds_no_threads() -> None:
    made = worker_environment(Placement(0, (0, 1), None, pin=False), {}, STOCK)
    assert "KMP_AFFINITY" not in made.variables
    assert made.variables["OMP_NUM_THREADS"] == "2"


def test_another_openmp_is_not_told_to_bind_the_main_thread() -> None:
    made = worker_environment(PLACEMENT, {}, Installed(foreign_openmp=True))
    assert "KMP_AFFINITY" not in made.variables


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"])
def test_the_users_thread_counts_are_upper_bounds_in_a_worker(name: str) -> None:
    assert worker_environment(PLACEMENT, {name: "8"}, BARE).variables[name] == "3"
    fewer = worker_environment(PLACEMENT, {name: "2"}, BARE)
    assert (fewer.kept, fewer.variables.get(name)) == ({name: "2"}, None)


@pytest.mark.parametrize("name", ["KMP_AFFINITY", "KMP_BLOCKTIME", "TF_NUM_INTEROP_THREADS"])
def test_variables_of_the_user_win_and_are_reported(name: str) -> None:
    made = worker_environment(PLACEMENT, {name: "mine"}, STOCK)
    assert name not in made.variables
    assert made.kept == {name: "mine"}


def test_an_empty_value_counts_as_unset() -> None:
    assert worker_environment(PLACEMENT, {"KMP_BLOCKTIME": ""}, BARE).variables["KMP_BLOCKTIME"]


def test_a_single_inter_op_thread_is_warned_about() -> None:
    made = worker_environment(PLACEMENT, {"TF_NUM_INTEROP_THREADS": "1"}, BARE)
    (warning,) = made.warnings
    assert warning.text.startswith("TF_NUM_INTEROP_THREADS=1 leaves a worker no thread")
    assert warning.fix == "unset it"
    assert str(warning) == f"{warning.text}; unset it."


def test_a_worker_uses_onednn_as_its_parent_does() -> None:
    assert "TF_ENABLE_ONEDNN_OPTS" not in worker_environment(PLACEMENT, {}, STOCK).variables
    environ = init({}, Options(onednn=False))
    assert environ["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert (
        worker_environment(PLACEMENT, environ, STOCK).apply(environ)["TF_ENABLE_ONEDNN_OPTS"] == "0"
    )


def test_variables_exported_by_init_are_not_the_users() -> None:
    environ = init({})
    assert environ["OMP_NUM_THREADS"] == "8"
    made = worker_environment(PLACEMENT, environ, STOCK)
    assert made.variables["KMP_AFFINITY"] == "granularity=fine,proclist=[4,5,6],explicit"
    assert made.kept == {}


def test_changes_after_init_are_the_users() -> None:
    made = worker_environment(PLACEMENT, init({}) | {"KMP_BLOCKTIME": "7"}, STOCK)
    assert made.kept == {"KMP_BLOCKTIME": "7"}


def test_inits_options_hold_for_the_workers() -> None:
    environ = init({}, Options(openmp=False, allocator="none"))
    applied = worker_environment(PLACEMENT, environ, STOCK).apply(environ)
    assert not {"OMP_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD"} & set(applied)
    assert applied["TF_NUM_INTRAOP_THREADS"] == "3"


def test_init_values_that_do_not_fit_a_worker_are_removed() -> None:
    environ = init({"KMP_BLOCKTIME": ""})
    made = worker_environment(Placement(0, (0,), None, pin=False), environ, STOCK)
    assert made.removed == ("KMP_AFFINITY",)
    assert "KMP_AFFINITY" not in made.apply(environ)
    assert made.apply(environ)["KMP_BLOCKTIME"] == "1"


# ---------------------------------------------------------------------------------- shells
def test_a_shell_uses_the_whole_machine() -> None:
    made = shell_environment(MACHINE, {}, installed=STOCK)
    assert made.variables["OMP_NUM_THREADS"] == "8"
    assert made.variables["TF_NUM_INTRAOP_THREADS"] == "8"
    assert made.variables["TF_NUM_INTEROP_THREADS"] == "2"
    assert made.variables["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert made.variables["KMP_AFFINITY"].count(",") == 9


def test_cores_limits_a_shell_and_the_plan() -> None:
    environ = init({}, Options(cores=3))
    assert environ["OMP_NUM_THREADS"] == environ["TF_NUM_INTRAOP_THREADS"] == "3"
    assert cores_cap(environ) == 3


def test_more_cores_than_exist_are_refused() -> None:
    with pytest.raises(PlacementError, match="cores_per_process=9"):
        shell_environment(MACHINE, {"OMP_NUM_THREADS": "2"}, Options(cores=9), BARE)


def test_the_users_thread_count_wins_over_cores() -> None:
    made = shell_environment(MACHINE, {"OMP_NUM_THREADS": "2"}, Options(cores=4), BARE)
    assert made.kept == {"OMP_NUM_THREADS": "2"}
    assert made.variables["TF_NUM_INTRAOP_THREADS"] == "2"
    assert "OMP_NUM_THREADS=2 was set by you and wins over --cores 4" in made.warnings[0].text


def test_disabling_openmp_leaves_its_variables_alone() -> None:
    made = shell_environment(MACHINE, {"KMP_BLOCKTIME": "5"}, Options(openmp=False), INTEL)
    assert not any(name.startswith(("OMP_", "KMP_", "LD_")) for name in made.variables)
    assert made.kept == {"KMP_BLOCKTIME": "5"}


def test_onednn_enabled_by_the_user_stays_and_is_reported() -> None:
    environ = {"TF_ENABLE_ONEDNN_OPTS": "1"}
    made = shell_environment(MACHINE, environ, Options(onednn=False), BARE)
    assert made.kept == environ
    assert "wins over --disable-onednn" in made.warnings[0].text


@pytest.mark.parametrize(
    ("value", "cap"),
    [("4", 4), (" 4 ", 4), ("4,2", 4), ("0", None), ("", None), ("many", None), ("-1", None)],
)
def test_the_users_thread_count_is_a_cap(value: str, cap: int | None) -> None:
    assert cores_cap({"OMP_NUM_THREADS": value}) == cap


def test_the_thread_count_that_init_exported_is_no_cap() -> None:
    assert cores_cap(init({})) is None
    assert cores_cap(init({"OMP_NUM_THREADS": "5"})) == 5
    assert cores_cap(init({"OMP_NUM_THREADS": "5"}, Options(cores=3))) == 3


# ------------------------------------------------------------------------------- libraries
def preload(
    environ: dict[str, str], found: Installed, allocator: str = "auto"
) -> tuple[str | None, Environment]:
    made = shell_environment(MACHINE, environ, Options(allocator=allocator), found)
    return made.variables.get("LD_PRELOAD"), made


def test_libiomp5_is_preloaded_only_for_a_tensorflow_that_uses_openmp() -> None:
    assert preload({}, INTEL)[0] == "/tf/libiomp5.so"
    assert preload({}, BARE)[0] is None


def test_the_users_preloads_follow_ours_without_duplicates() -> None:
    assert preload({"LD_PRELOAD": "/a.so /b.so"}, STOCK)[0] == f"{TCMALLOC}:/a.so:/b.so"
    assert preload({"LD_PRELOAD": "/mine/libiomp5.so"}, INTEL)[0] is None
    value, made = preload({"LD_PRELOAD": f"/a.so:{TCMALLOC}"}, STOCK)
    assert value is None
    assert made.kept == {"LD_PRELOAD": f"/a.so:{TCMALLOC}"}


@pytest.mark.parametrize(("wanted", "warnings"), [("auto", 0), ("jemalloc", 0), ("tcmalloc", 1)])
def test_the_users_allocator_is_neither_replaced_nor_tuned(wanted: str, warnings: int) -> None:
    value, made = preload({"LD_PRELOAD": "/mine/libjemalloc.so"}, STOCK, wanted)
    assert value is None
    assert len(made.warnings) == warnings
    assert not {"MALLOC_CONF", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"} & set(made.variables)


def test_jemalloc_comes_with_its_settings() -> None:
    value, made = preload({}, STOCK, "jemalloc")
    assert value == JEMALLOC
    assert "background_thread:true" in made.variables["MALLOC_CONF"]


@pytest.mark.parametrize(
    ("name", "package"),
    [("tcmalloc", "libtcmalloc-minimal4"), ("jemalloc", "libjemalloc2")],
)
def test_a_missing_allocator_that_the_user_asked_for_is_one_warning(
    name: str, package: str
) -> None:
    value, made = preload({}, BARE, name)
    assert value is None
    (warning,) = made.warnings
    assert name in warning.text
    assert package in warning.fix
    assert "\n" not in str(warning)


def test_a_missing_default_allocator_is_no_warning() -> None:
    assert preload({}, BARE)[1].warnings == ()


@pytest.mark.parametrize(
    ("allocator", "name", "value"),
    [
        ("tcmalloc", "TCMALLOC_RELEASE_RATE", "0"),
        ("jemalloc", "MALLOC_CONF", "thp:always"),
        ("none", "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    ],
)
def test_perf_tunes_the_allocator_in_use(allocator: str, name: str, value: str) -> None:
    plain = shell_environment(MACHINE, {}, Options(allocator=allocator), STOCK)
    tuned = shell_environment(MACHINE, {}, Options(allocator=allocator, perf=True), STOCK)
    assert value in tuned.variables[name]
    assert value not in plain.variables.get(name, "")
    assert set(tuned.variables) - set(plain.variables) <= {name}


# ----------------------------------------------------------------------------------- state
AWKWARD = {"LD_PRELOAD": "", "TF_NUM_INTEROP_THREADS": "", "HOME": "a 'b' \"c\"\n$d\udcff\n"}


def test_the_earlier_environment_can_be_read_back() -> None:
    assert user_environ(init(AWKWARD)) == AWKWARD


def test_init_after_init_remembers_the_first_environment() -> None:
    once = init(AWKWARD, Options(allocator="jemalloc", perf=True))
    twice = init(once, Options(openmp=False))
    assert user_environ(twice) == AWKWARD
    assert twice == init(AWKWARD, Options(openmp=False))
    assert init(once, Options(allocator="jemalloc", perf=True)) == once


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"options":{},"values":{"A":"1"},"before":{}}',
        '{"options":{},"values":{"A":1},"before":{"A":null}}',
        '{"options":{},"values":{"A;ls":"1"},"before":{"A;ls":null}}',
        '{"options":{"allocator":"x"},"values":{},"before":{}}',
        '{"options":{"cores":"2"},"values":{},"before":{}}',
        '{"options":{"other":1},"values":{},"before":{}}',
    ],
)
def test_a_state_that_init_did_not_write_is_ignored_and_not_evaluated(value: str) -> None:
    environ = {STATE_VARIABLE: value, "A": "1"}
    assert read_state(environ) is None
    assert user_environ(environ) == {"A": "1"}
    with pytest.raises(InvalidArgumentError, match=f"Received: {STATE_VARIABLE}="):
        shell.unset_code(environ)


def test_the_table_shows_who_set_a_value() -> None:
    text = shell.table(Environment({"B": "1"}, {"LONG": "a\x1b[2Jb\n"}))
    assert text == "  B     1\n  LONG  'a\\x1b[2Jb\\n'  (yours, kept)"


# --------------------------------------------------------------------- what is installed
def test_this_machines_allocators_can_be_preloaded() -> None:
    for _, path in installed.find_installed().allocators:
        assert installed.can_preload(path)


def test_a_file_that_is_no_library_cannot_be_preloaded(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "libtcmalloc.so"
    text.write_text("not a library")
    assert not installed.can_preload(str(text))
    assert not installed.can_preload(str(tmp_path / "missing.so"))


@pytest.mark.parametrize(("needs", "expected"), [(b"libiomp5.so", True), (b"libm.so.6", False)])
def test_openmp_is_found_among_tensorflows_linked_libraries(
    tmp_path: pathlib.Path, needs: bytes, expected: bool
) -> None:
    library = tmp_path / "libtensorflow_framework.so.2"
    library.write_bytes(b"\x7fELF\0" + needs + b"\0libdl.so.2\0")
    assert installed.uses_openmp(tmp_path) is expected


def test_a_tensorflow_without_the_library_uses_no_openmp(tmp_path: pathlib.Path) -> None:
    assert installed.uses_openmp(tmp_path) is False
    (tmp_path / "libtensorflow_framework.so.2").touch()
    assert installed.uses_openmp(tmp_path) is False


def test_tensorflows_own_libiomp5_is_found_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "can_preload", lambda path: pathlib.Path(path).is_file())
    own = tmp_path / "_solib_local/some_openmp/libiomp5.so"
    other = tmp_path / "prefix/libiomp5.so"
    for path in (own, other):
        path.parent.mkdir(parents=True)
        path.touch()
    package, prefix = tmp_path / "tensorflow", tmp_path / "prefix"
    assert installed.find_libiomp5(package, prefix) == str(own)
    own.unlink()
    assert installed.find_libiomp5(package, prefix) == str(other)
    other.unlink()
    assert installed.find_libiomp5(package, prefix) is None


# ----------------------------------------------------------------------- nanotf env
@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["OMP_NUM_THREADS", "LD_PRELOAD", "TF_NUM_INTRAOP_THREADS", "TF_ENABLE_ONEDNN_OPTS"]
    names.append(STATE_VARIABLE)
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clean")
def test_env_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json", "-r", "1", "-o"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["variables"]["TF_NUM_INTRAOP_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in printed["variables"]


@pytest.mark.usefixtures("clean")
def test_env_prints_each_workers_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json", "-n", "1", "-r", "1", "--disable-onednn"]) == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    assert tuple(worker["cores"]) == plan(1, 1).cores()
    assert worker["variables"]["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert cli.main(["env", "-n", "1"]) == 0
    assert "worker 0: cores [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env", "-n", "0"], "Received: num_processes=0"),
        (["env", "-n", "100000"], "Received: num_processes=100000"),
        (["env", "-r", "0"], "Received: cores_per_process=0"),
        (["env", "--bogus"], "--bogus"),
        (["env", "-j", "-t"], "not allowed with"),
        (["run", "-m"], "required: script"),
    ],
)
@pytest.mark.usefixtures("clean")
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_nanotf_without_a_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    alone = capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")


def test_neither_importing_nor_env_imports_tensorflow() -> None:
    code = (
        "import sys; from nanotf import cli; cli.main(['env', '--json']); "
        "sys.exit(any(m in sys.modules for m in ('tensorflow', 'numpy', 'keras')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_closes_the_pipe() -> None:
    """Runs `nanotf env --help | head -1`; this head reads nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nanotf", "env"]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_output_to_a_full_disk() -> None:
    command = [sys.executable, "-m", "nanotf", "env"]
    with pathlib.Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    text = "nanotf: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, text)
