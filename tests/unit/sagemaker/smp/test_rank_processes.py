"""`nanotf run --smp`: processes that run a script as ranks, without TensorFlow."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from typing import Any

import psutil
import pytest

import nanotf
from nanotf.errors import NanoError
from nanotf.machine import topology
from nanotf.sagemaker.smp import script_ranks

ROOT = pathlib.Path(nanotf.__file__).parents[1]
TWO = {"SM_HP_MP_PARAMETERS": '{"partitions": 2}'}


@pytest.mark.parametrize(
    ("flag", "n", "environ", "size"),
    [
        (True, 2, {}, 2),
        (True, None, TWO, 2),
        (False, None, TWO, 2),
        (False, "auto", TWO, 2),
        (False, 4, TWO, 4),
        (False, 4, {}, None),
        (False, 4, {"SM_HP_MP_PARAMETERS": '{"partitions": 1}'}, None),
        (True, 4, {"SM_HP_MP_PARAMETERS": '{"partitions": 1}'}, 4),
    ],
)
def test_who_runs_the_script(flag: bool, n: Any, environ: dict[str, str], size: Any) -> None:
    assert script_ranks.number(flag, n, None, environ) == size


@pytest.mark.parametrize(
    ("flag", "n", "hosts", "environ", "text"),
    [
        (True, None, None, {}, "needs the number of processes. Received: -n None"),
        (True, "auto", None, {}, "needs the number of processes. Received: -n auto"),
        (False, 3, None, TWO, "3 processes, partitions=2"),
        (True, 0, None, {}, "must be at least 1"),
        (True, 2, "a:1,b:1", {}, "run on one host"),
        (False, 2, None, {"SM_HP_MP_PARAMETERS": "{"}, "must hold a dict in JSON"),
    ],
)
def test_wrong_requests(
    flag: bool, n: Any, hosts: str | None, environ: dict[str, str], text: str
) -> None:
    with pytest.raises(NanoError, match=text):
        script_ranks.number(flag, n, hosts, {**environ, "NANOTF_CURRENT_HOST": "a"})


def _started(
    directory: pathlib.Path, source: str, *options: str, **environ: str
) -> subprocess.Popen[str]:
    """Starts a script as two ranks."""
    if len(topology.describe_machine().usable_cores()) < 2:
        pytest.skip("two ranks need two cores")
    (directory / "script.py").write_text(textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, "-m", "nanotf", "run", *options, "script.py", "an argument"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(
    directory: pathlib.Path, source: str, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script as two ranks to its end."""
    with _started(directory, source, *options, **environ) as process:
        out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_ranks_run_the_script(tmp_path: pathlib.Path) -> None:
    done = _run(
        tmp_path,
        """
        import os, sys
        import smdistributed.modelparallel.tensorflow as smp
        smp.init()
        assert sys.argv[1:] == ["an argument"] and __name__ == "__main__"
        places = smp.allgather((smp.mp_rank(), sorted(os.sched_getaffinity(0))))
        assert [place for place, _ in places] == [0, 1]
        assert not set(places[0][1]) & set(places[1][1])  # cores
        assert "tensorflow" not in sys.modules
        print("plain", smp.rank())
        print("error", smp.rank(), file=sys.stderr)
        """,
        **TWO,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1] plain 1", "plain 0"]
    assert {"[1] error 1", "error 0"} <= set(done.stderr.splitlines())


def test_a_dead_rank_ends_the_others(tmp_path: pathlib.Path) -> None:
    """Rank 0 catches the error and continues, so it is stopped."""
    done = _run(
        tmp_path,
        """
        import os, signal
        from nanotf import smp
        smp.init({"partitions": 2})
        smp.barrier()
        if smp.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            smp.barrier()
        except Exception as error:
            print(type(error).__name__, error.rank, error.partition, error.signal)
        signal.pause()  # until it is stopped
        """,
        "--smp",
        "-n",
        "2",
    )
    assert done.returncode == 128 + 9
    assert done.stdout == "WorkerDied 1 1 9\n"
    assert "nanotf: rank 1 (partition 1, process " in done.stderr
    assert "was killed by SIGKILL" in done.stderr


def test_a_rank_that_raises(tmp_path: pathlib.Path) -> None:
    done = _run(
        tmp_path,
        """
        from nanotf import smp
        smp.init({"partitions": 2})
        if smp.rank() == 1:
            raise ValueError("of rank 1")
        smp.recv_from(1)
        """,
        "--smp",
        "-n",
        "2",
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "[1] ValueError: of rank 1" in lines
    assert [line for line in lines if line.startswith("[1] ")][1].endswith("line 5, in <module>")
    assert lines[-1].startswith("nanotf: rank 1 (partition 1, process ")
    assert lines[-1].endswith("exited with code 1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_all_ranks(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    """Ctrl-C reaches the scripts, which clean up; if `nanotf run` is killed, they are, too."""
    source = """
        import time
        from nanotf import smp
        smp.init({"partitions": 2})
        smp.barrier()
        try:
            print("ready")
            while True:
                time.sleep(0.1)
        finally:
            print("cleaned up")
        """
    with _started(tmp_path, source, "--smp", "-n", "2") as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == ["[1] ready\n", "ready\n"]
        ranks_of_run = psutil.Process(process.pid).children()
        process.send_signal(number)
        text, errors = process.communicate(timeout=60)
        # Rank 0 shows where it was interrupted; the other does not repeat it.
        assert errors.count("KeyboardInterrupt\n") == (number == signal.SIGINT)
        assert ("cleaned up\n" in text) == ("[1] cleaned up\n" in text) == (number == signal.SIGINT)
        gone, left = psutil.wait_procs(ranks_of_run, timeout=60)
        assert len(gone) == 2 and not left
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected


def test_a_second_interrupt_kills_ranks_that_do_not_end(tmp_path: pathlib.Path) -> None:
    source = """
        import signal
        from nanotf import smp
        signal.signal(signal.SIGINT, lambda number, frame: print("stays"))
        smp.init({"partitions": 2})
        smp.barrier()
        print("ready")
        while True:
            signal.pause()
        """
    with _started(tmp_path, source, "--smp", "-n", "2") as process:
        assert process.stdout is not None and process.stderr is not None
        ready, stays = ({f"{line}\n", f"[1] {line}\n"} for line in ("ready", "stays"))
        assert {process.stdout.readline() for _ in range(2)} == ready
        ranks_of_run = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert {process.stdout.readline() for _ in range(2)} == stays
        told = "nanotf: the ranks have not ended yet. Ctrl-C again kills them.\n"
        assert told in iter(process.stderr.readline, "")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert errors == "nanotf: the ranks are killed.\n"
        gone, left = psutil.wait_procs(ranks_of_run, timeout=60)
        assert len(gone) == 2 and not left
    assert process.returncode == 128 + signal.SIGKILL
