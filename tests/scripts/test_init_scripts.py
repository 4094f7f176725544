"""`source nanotf-init` and `source nanotf-unset` in real shells."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHELLS = {"bash": ["bash", "--norc", "-c"], "zsh": ["zsh", "-f", "-c"]}
OPTIONS = [
    *([], ["-o"], ["--disable-openmp"], ["-j"], ["--enable-jemalloc"], ["-t"]),
    *(["--enable-tcmalloc"], ["-c"], ["--disable-allocator"], ["-p"], ["--perf"]),
    *(["--disable-onednn"], ["-r", "1"], ["--cores", "1"], ["-q"], ["--quiet"], ["-d"]),
    *(["--debug"], ["-oc", "-pq", "-r1"]),
]
# Values that a shell could mangle, including the empty one.
AWKWARD = {
    "KMP_BLOCKTIME": "",
    "TF_NUM_INTEROP_THREADS": " a  'b' \"c\" $HOME `ls` \\ !x *\nsecond line\n\n",
    "OMP_NUM_THREADS": "",
    "MALLOC_CONF": "caf\udce9",
}

Variables = dict[str, str]


@dataclass
class Result:
    """Result of a shell: its exit code and output, and the environments that it dumped."""

    code: int
    out: str
    err: str
    environments: list[Variables]


def without_noise(variables: Variables) -> Variables:
    return {name: value for name, value in variables.items() if name not in ("_", "SHLVL")}


class Shell:
    """One kind of shell, with the two scripts on PATH.

    Args:
        name: str, a key of `SHELLS`.
        directory: Path, for the scripts and the written environments.
    """

    def __init__(self, name: str, directory: pathlib.Path) -> None:
        self.name = name
        self.directory = directory
        self.bin = directory / "with space"
        self.bin.mkdir()
        for script in ("nanotf-init", "nanotf-unset"):
            shutil.copy(ROOT / "scripts" / script, self.bin)
        self.python(f'exec "{sys.executable}" "$@"')

    def python(self, body: str, directory: pathlib.Path | None = None) -> None:
        """Puts a `python3` next to the scripts, or elsewhere."""
        path = (directory or self.bin) / "python3"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, code: str, variables: Variables | None = None) -> Result:
        """Runs code, in which `dump` writes the environment to a file."""
        env = shutil.which("env")
        count = code.count("dump")
        for number in range(count):
            code = code.replace("dump", f'"{env}" -0 > "{self.directory}/{number}"', 1)
        environ = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(variables or {}),
        }
        done = subprocess.run(
            [*SHELLS[self.name], code],
            env=environ,
            cwd=self.directory,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=120,
            start_new_session=True,  # an interactive shell would ask for this session's terminal
        )
        environments = [self._read(number) for number in range(count)]
        return Result(done.returncode, done.stdout, done.stderr, environments)

    def _read(self, number: int) -> Variables:
        path = self.directory / str(number)
        if not path.exists():
            return {}
        entries = os.fsdecode(path.read_bytes()).split("\0")
        pairs = (entry.partition("=") for entry in entries if entry)
        return without_noise({name: value for name, _, value in pairs})


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Shell:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return Shell(request.param, tmp_path)


# -------------------------------------------------------------------------------- init
def test_init_exports_the_configuration_and_prints_it(shell: Shell) -> None:
    done = shell.run("source nanotf-init; dump")
    assert done.code == 0, done.err
    (after,) = done.environments
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        assert int(after[name]) >= 1
    assert after["TF_ENABLE_ONEDNN_OPTS"] == "1"
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_ENABLE_ONEDNN_OPTS"):
        assert f"  {name} " in done.out
    assert "NANOTF_ENV" in after
    assert done.out.startswith("nanotf: ")
    assert done.err == ""


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_unset_restores_the_environment_after_each_option(shell: Shell, options: list[str]) -> None:
    line = " ".join(options)
    done = shell.run(f"dump; source nanotf-init {line}; dump; source nanotf-unset; dump", AWKWARD)
    assert done.code == 0, done.err
    before, between, after = done.environments
    assert between != before
    assert after == before


def test_an_old_value_that_was_changed_comes_back_to_the_byte(shell: Shell) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux has LD_PRELOAD, the one variable that init changes if set")
    # Any preloadable library can be the allocator. The old value is invalid, so the dynamic linker
    # prints an error.
    code = (
        "import sys, nanotf.machine.installed as i; "
        "i.ALLOCATORS['tcmalloc'] = (('libm.so.6', 'libc.so.6'), 'libm'); "
        "from nanotf import cli; sys.exit(cli.main(sys.argv[3:]))"
    )
    shell.python(f'exec "{sys.executable}" -c "{code}" "$@"')
    old = " a  'b' \"c\" $HOME `ls` \\ !x *\nsecond line caf\udce9\n\n"
    done = shell.run(
        "dump; source nanotf-init; dump; source nanotf-init -q -o; source nanotf-unset; dump",
        {"LD_PRELOAD": old},
    )
    before, between, after = done.environments
    assert before["LD_PRELOAD"] == old
    assert between["LD_PRELOAD"].endswith("libm.so.6:" + ":".join(old.split()))
    assert after == before


def test_options_have_their_described_effect(shell: Shell) -> None:
    done = shell.run(
        "source nanotf-init -q -o -c; dump; source nanotf-init -q --disable-onednn -r 1 -cp; dump"
    )
    first, second = done.environments
    assert not {"OMP_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD"} & set(first)
    assert first["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert second["TF_ENABLE_ONEDNN_OPTS"] == "0"
    assert second["OMP_NUM_THREADS"] == second["TF_NUM_INTRAOP_THREADS"] == "1"
    assert second["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert done.out == ""


def test_init_twice_with_other_options_is_restored_as_a_whole(shell: Shell) -> None:
    done = shell.run(
        "dump; source nanotf-init -p -c; source nanotf-init -o; source nanotf-unset; dump", AWKWARD
    )
    before, after = done.environments
    assert after == before


def test_init_is_idempotent(shell: Shell) -> None:
    done = shell.run("source nanotf-init; dump; source nanotf-init; dump", AWKWARD)
    once, twice = done.environments
    assert once == twice


def test_variables_of_the_user_win_and_are_reported(shell: Shell) -> None:
    variables = {"KMP_BLOCKTIME": "200", "OMP_NUM_THREADS": "1"}
    done = shell.run("source nanotf-init; dump", variables)
    (after,) = done.environments
    assert after["KMP_BLOCKTIME"] == "200"
    assert after["TF_NUM_INTRAOP_THREADS"] == "1"
    assert "200  (yours, kept)" in done.out


def test_changes_made_after_init_are_left_alone(shell: Shell) -> None:
    done = shell.run("source nanotf-init -q; export KMP_BLOCKTIME=3; source nanotf-unset; dump")
    (after,) = done.environments
    assert after["KMP_BLOCKTIME"] == "3"
    assert "OMP_NUM_THREADS" not in after
    assert "left alone: KMP_BLOCKTIME" in done.out


@pytest.mark.parametrize("option", ["-j", "-t", ""])
def test_ld_preload_is_never_broken(shell: Shell, option: str) -> None:
    # The dynamic linker prints an error to the standard error of every program that it starts.
    done = shell.run(f"source nanotf-init -q {option} 2>/dev/null; dump; ls > /dev/null")
    (after,) = done.environments
    assert done.err == ""
    for entry in filter(None, after.get("LD_PRELOAD", "").split(":")):
        assert pathlib.Path(entry).is_file()


@pytest.mark.parametrize(
    ("option", "package"), [("-j", "libjemalloc2"), ("-t", "libtcmalloc-minimal4")]
)
def test_a_missing_allocator_is_one_warning_line(shell: Shell, option: str, package: str) -> None:
    nothing = "{name: (('libnothing.so',), package) for name, (_, package) in i.ALLOCATORS.items()}"
    code = (
        f"import sys, nanotf.machine.installed as i; i.ALLOCATORS.update({nothing}); "
        "from nanotf import cli; sys.exit(cli.main(sys.argv[3:]))"
    )
    shell.python(f'exec "{sys.executable}" -c "{code}" "$@"')
    both = f"source nanotf-init -q --disable-allocator; dump; source nanotf-init {option}; dump"
    done = shell.run(both, {"LD_PRELOAD": ""})
    assert done.code == 0
    without, with_option = (each["LD_PRELOAD"] for each in done.environments)
    assert with_option == without, "at most TensorFlow's OpenMP"
    assert done.err.startswith("nanotf: warning: ")
    assert package in done.err
    assert done.err.count("\n") == 1


# ------------------------------------------------------------------- refusals and help
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--bogus", "Unrecognized arguments: --bogus. Received: source nanotf-init --bogus."),
        ("-x", "-x"),
        ("-q extra", "extra"),
        ("-j -t", "not allowed with"),
        ("-r", "expected one argument"),
        ("-r many", "must be a whole number. Received: 'many'. See `source nanotf-init --help`."),
        ("-r 0", "cores_per_process=0"),
        ("-r 1000000", "cores_per_process=1000000"),
        ("-qn", "number of processes in all commands"),
    ],
)
def test_a_wrong_option_leaves_the_shell_untouched(
    shell: Shell, arguments: str, message: str
) -> None:
    done = shell.run(f"dump; source nanotf-init {arguments} || echo code $?; dump", AWKWARD)
    before, after = done.environments
    assert after == before
    assert done.out == "code 2\n"
    assert done.err.startswith("nanotf: ")
    assert message in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("script", ["nanotf-init", "nanotf-unset"])
def test_help_is_printed_and_changes_nothing(shell: Shell, script: str, option: str) -> None:
    done = shell.run(f"source nanotf-init -q; dump; source {script} {option}; dump")
    before, after = done.environments
    assert after == before
    assert done.out.startswith(f"usage: source {script}")
    assert "--quiet" in done.out


def test_unset_without_init_says_so(shell: Shell) -> None:
    done = shell.run("dump; source nanotf-unset; dump")
    before, after = done.environments
    assert (done.code, after) == (0, before)
    assert done.out == "nanotf: nanotf-init has set nothing here.\n"


def test_a_state_that_nanotf_did_not_write_is_refused(shell: Shell) -> None:
    done = shell.run("source nanotf-unset || echo code $?; dump", {"NANOTF_ENV": "x"})
    assert done.out == "code 2\n"
    assert "NANOTF_ENV must hold what nanotf-init wrote" in done.err
    assert done.environments[0]["NANOTF_ENV"] == "x"


@pytest.mark.parametrize("script", ["nanotf-init", "nanotf-unset"])
def test_an_executed_script_refuses(shell: Shell, script: str) -> None:
    for code in (f'"{shell.bin}/{script}"', f'{shell.name} "{shell.bin}/{script}"'):
        done = shell.run(code)
        assert done.code == 2
        assert done.out == ""
        assert done.err == f"nanotf: {script} must be sourced, not executed: source {script}\n"


def test_another_shell_is_refused(tmp_path: pathlib.Path) -> None:
    if shutil.which("dash") is None:
        pytest.skip("dash is not installed")
    code = f'. "{ROOT}/scripts/nanotf-init"; echo continues'
    done = subprocess.run(["dash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "continues\n"
    assert done.stderr == "nanotf: nanotf-init needs bash or zsh\n"


# -------------------------------------------------------------------- the user's shell
LEFTOVERS = {
    "bash": 'compgen -A function; compgen -v; set +o; shopt -p; echo "$-"; trap',
    "zsh": "print -l ${(ko)parameters} ${(ko)functions}; setopt; trap",
}


def test_nothing_but_the_variables_changes_in_the_shell(shell: Shell) -> None:
    inspect = f'{{ {LEFTOVERS[shell.name]}; echo "$#" "$@"; pwd; }}'
    # The first round lets the shell create its own variables.
    done = shell.run(
        f"set -- 'a b' c; {inspect} > round; {inspect} > before; "
        f"source nanotf-init -- > printed; source nanotf-unset -- > printed; {inspect} > after"
    )
    assert done.code == 0, done.err
    before, after = ((shell.directory / name).read_text() for name in ("before", "after"))
    assert "a b" in before
    assert after == before


def test_strict_shells_continue(shell: Shell) -> None:
    options = {"bash": "set -Eeuo pipefail; trap 'echo trapped' ERR", "zsh": "set -eu"}
    done = shell.run(
        f"{options[shell.name]}; source nanotf-init -q; source nanotf-unset -q; "
        "source nanotf-init --bogus || echo refused; echo continues"
    )
    assert (done.code, done.out) == (0, "refused\ncontinues\n")


def test_a_function_can_source_them(shell: Shell) -> None:
    done = shell.run("f() { source nanotf-init -q; }; f; dump")
    assert "NANOTF_ENV" in done.environments[0]


def test_an_interactive_shell_can_source_them(shell: Shell) -> None:
    options = {"bash": "set -o history -o histexpand", "zsh": "setopt shin_stdin; true"}
    flags = {"bash": "bash --norc --noprofile -i", "zsh": "zsh -f -i"}
    (shell.directory / "typed").write_text(
        f"{options[shell.name]}\nsource nanotf-init -q\nenv -0 > 0\n"
    )
    shell.run(f"{flags[shell.name]} < typed 2> errors; true")
    assert "NANOTF_ENV" in shell._read(0), (shell.directory / "errors").read_text()


def test_a_script_with_arguments_is_told_how_to_source(shell: Shell) -> None:
    done = shell.run("set -- --lr 0.1; source nanotf-init || true")
    assert "must write: source nanotf-init --" in done.err
    done = shell.run("set -- --lr 0.1; source nanotf-init --; dump")
    assert (done.code, "NANOTF_ENV" in done.environments[0]) == (0, True)


# ------------------------------------------------------------------------ which Python
def test_the_python_beside_the_script_is_used(shell: Shell, tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shell.python("echo the wrong Python >&2; exit 1", elsewhere)
    done = shell.run(f'PATH="{elsewhere}:$PATH"; source "{shell.bin}/nanotf-init" -q; dump')
    assert (done.code, done.err) == (0, "")
    assert "NANOTF_ENV" in done.environments[0]


def test_files_in_the_current_folder_are_not_run(shell: Shell) -> None:
    for name in ("argparse", "json", "runpy", "nanotf"):
        (shell.directory / f"{name}.py").write_text(
            "raise SystemExit('others run their code here')"
        )
    done = shell.run("source nanotf-init -q; source nanotf-unset -q; dump")
    assert (done.code, done.err) == (0, "")


def test_a_link_to_the_script_finds_its_python(shell: Shell, tmp_path: pathlib.Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shell.python("echo the wrong Python >&2; exit 1", elsewhere)
    (tmp_path / "linked").symlink_to(shell.bin / "nanotf-init")
    done = shell.run(f'PATH="{elsewhere}:$PATH"; source ./linked -q; dump')
    assert (done.code, done.err) == (0, "")
    assert "NANOTF_ENV" in done.environments[0]


def test_python3_on_path_is_used_if_none_lies_beside_the_script(
    shell: Shell, tmp_path: pathlib.Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shell.bin / "python3").rename(elsewhere / "python3")
    done = shell.run(f'PATH="{elsewhere}:$PATH"; source nanotf-init -q; dump')
    assert (done.code, done.err) == (0, "")
    assert "NANOTF_ENV" in done.environments[0]


def test_a_python_that_fails_halfway_changes_nothing(shell: Shell) -> None:
    shell.python("echo export OMP_NUM_THREADS=99; echo broken >&2; exit 1")
    done = shell.run("dump; source nanotf-init || echo code $?; dump")
    before, after = done.environments
    assert after == before
    assert (done.out, done.err) == ("code 2\n", "broken\n")
