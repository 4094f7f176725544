"""`nanotf run --ranks` and `--smp`: processes that run a script as ranks, without TensorFlow."""

from __future__ import annotations

import json
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
from nanotf.machine import cluster, topology
from nanotf.machine.cluster import Cluster
from nanotf.ranks import rank_crew, rank_launch, this_rank

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
    assert rank_launch.are_wanted(flag, environ) == (size is not None)
    if size is not None:
        assert rank_launch.number(_found("a"), n, False, environ) == size


def _found(flag: str) -> Cluster:
    return cluster.find({"NANOTF_CURRENT_HOST": "a"}, flag)


def test_hosts_may_give_the_numbers() -> None:
    assert rank_launch.number(_found("b:1,a:3"), 2, False, {}) == 3
    assert rank_launch.number(_found("b:1,a"), 2, False, {}) == 2


@pytest.mark.parametrize(
    ("smp", "n", "hosts", "environ", "text"),
    [
        (False, None, "a", {}, "needs the number of processes of each host. Received: -n None"),
        (False, "auto", "a", {}, "needs the number of processes of each host. Received: -n auto"),
        (False, 3, "a", TWO, "3 processes, partitions=2"),
        (False, 0, "a", {}, "must be at least 1"),
        (
            True,
            None,
            "a:1,b:1",
            {},
            "run on one host. Received: the hosts a, b",
        ),
        (False, 2, "a,b", TWO, "ranks of nanotf.smp run on one host"),
        (False, 2, "a", {"SM_HP_MP_PARAMETERS": "{"}, "must hold a dict in JSON"),
    ],
)
def test_wrong_requests(smp: bool, n: Any, hosts: str, environ: dict[str, str], text: str) -> None:
    with pytest.raises(NanoError, match=text):
        rank_launch.number(_found(hosts), n, smp, environ)


def test_places_are_counted_by_host() -> None:
    counts = (2, 1, 3)
    places = [this_rank.RankPlace.of(rank, counts) for rank in range(6)]
    assert [(each.rank, each.size) for each in places] == [(rank, 6) for rank in range(6)]
    assert [each.local_rank for each in places] == [0, 1, 0, 0, 1, 2]
    assert [each.local_size for each in places] == [2, 2, 1, 3, 3, 3]
    assert [(each.cross_rank, each.cross_size) for each in places] == [
        (0, 3), (0, 2), (1, 3), (2, 3), (1, 2), (0, 1)
    ]  # fmt: skip
    assert not places[0].is_homogeneous
    assert this_rank.RankPlace.of(0, (2, 2)).is_homogeneous


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
        try:
            smp.barrier()  # raises, too, where rank 1 is dead before rank 0 has left it
            if smp.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
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


def test_rank_0_prints_and_the_others_log(tmp_path: pathlib.Path) -> None:
    logs = tmp_path / "logs"
    done = _run(
        tmp_path,
        """
        import importlib.util, json, os, sys
        import horovod.tensorflow as hvd
        hvd.init()
        config = json.loads(os.environ["TF_CONFIG"])
        assert config["task"] == {"type": "worker", "index": hvd.rank()}
        assert len(set(config["cluster"]["worker"])) == hvd.size() == 2
        assert os.environ["HOROVOD_LOCAL_RANK"] == str(hvd.local_rank())
        assert importlib.util.find_spec("smdistributed.dataparallel.tensorflow") is not None
        assert "tensorflow" not in sys.modules
        print("rank", hvd.rank())
        """,
        "--ranks",
        "-n",
        "2",
        NANOTF_WORKER_LOGS=str(logs),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0\n"
    assert (logs / "rank-1.log").read_text() == "rank 1\n"
    assert f"starting 2 ranks; rank 0 prints, the others log to {logs}" in done.stderr
    assert "for itself" not in done.stderr


def test_ranks_that_use_no_library_are_told(tmp_path: pathlib.Path) -> None:
    done = _run(tmp_path, "print(1)", "--ranks", "-n", "2", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout == "1\n"
    (line,) = [line for line in done.stderr.splitlines() if "for itself" in line]
    assert line.startswith("nanotf: each of the 2 ranks ran the script for itself")
    assert not list(tmp_path.glob("nanotf-ranks-*"))  # nothing failed, so nothing stays


def test_a_failed_rank_is_named_and_its_log_stays(tmp_path: pathlib.Path) -> None:
    source = """
        import os, sys
        if os.environ["HOROVOD_RANK"] == "1":
            print("last words")
            sys.exit(3)
        while True:
            pass
        """
    done = _run(tmp_path, source, "--ranks", "-n", "2", TMPDIR=str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.rstrip().endswith("exited with code 3")
    assert "nanotf: rank 1 (process " in done.stderr
    (log,) = tmp_path.glob("nanotf-ranks-*/rank-1.log")
    assert log.read_text() == "last words\n"
    assert f"the output of the other ranks is in {log.parent}" in done.stderr


def test_logs_that_cannot_be_where_they_are_wanted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = _run(
        tmp_path,
        "import os, sys; os.environ['HOROVOD_RANK'] == '1' and sys.exit(3)",
        "--ranks",
        "-n",
        "2",
        NANOTF_WORKER_LOGS=str(tmp_path / "file/logs"),
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 3
    assert "Logs cannot be written to" in done.stderr and "Traceback" not in done.stderr


def test_variables_of_a_rank() -> None:
    found = rank_crew.rank_variables(1, (3,), ["a:1000", "a:1001", "a:1002"])
    assert json.loads(found["TF_CONFIG"])["cluster"]["worker"][1] == "a:1001"
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"], found["HOROVOD_CROSS_SIZE"]) == (
        "1",
        "3",
        "1",
    )


def test_one_rank_without_a_launcher_says_one_line(tmp_path: pathlib.Path) -> None:
    code = (
        "from nanotf import hvd\n"
        "assert not hvd.is_initialized()\n"
        "hvd.init(); hvd.init()\n"
        "assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)\n"
        "import sys; assert 'tensorflow' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("nanotf: hvd.init() found no launcher: this process is the only rank.")
    assert "`nanotf run --ranks -n 2 train.py" in line
