"""Jobs on a small disk that fills and empties: `unshare -rm python full_disk.py FOLDER`.

The disk is a tmpfs in a mount namespace, so the caller need not be root, and nothing is left.
`test_full_disk.py` runs it.
"""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import tarfile

from waiting import wait_until

from nanotf.errors import JobError
from nanotf.sagemaker.jobs import follow, launch, metrics
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode

SECONDS = 120.0
LINES = 300
# Prints as much as the disk had room for, and tells by files elsewhere where it is.
SCRIPT = f"""
import os, pathlib, sys, time
here = pathlib.Path(os.environ["HERE"])
def gate(name):
    (here / f"{{name}}.reached").touch()
    while not (here / f"{{name}}.open").exists():
        time.sleep(0.02)
def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
gate("begin")
own = pathlib.Path(os.environ["SM_OUTPUT_INTERMEDIATE_DIR"], "fill")
if "own" in sys.argv:
    fill(own)
for number in range({LINES}):
    print(f"loss: {{number}} " + "x" * 1000, flush=True)
if "own" in sys.argv:
    gate("printed")
    own.unlink()
if "model" in sys.argv:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "m").write_bytes(os.urandom(50_000))
gate("end")
"""


class Disk:
    """A tmpfs of 2 MB."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(self.path)]
        subprocess.run(mount, check=True)

    def fill(self) -> None:
        """Leaves no room."""
        with contextlib.suppress(OSError), (self.path / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        """Makes room."""
        (self.path / "fill").unlink(missing_ok=True)


class Trial:
    """A job whose script waits at gates."""

    def __init__(self, folder: pathlib.Path, disk: Disk, name: str, *words: str) -> None:
        self.disk, self.here = disk, folder / name
        self.here.mkdir()
        (self.here / "train.py").write_text(SCRIPT)
        request = JobRequest(
            name,
            SourceCode(str(self.here / "train.py")),
            {f"x{number}": word for number, word in enumerate(words)},
            metrics=(Metric("loss", "loss: ([0-9.]+)"),),
            environment={"HERE": str(self.here)},
        )
        self.job: JobFolder = launch.start(request, disk.path / "jobs")
        self.reach("begin")
        # A begun page takes text on a full disk, too: the test sees what the supervisor says.
        with self.job.supervisor_log.open("a") as log:
            log.write("begun\n")

    def reach(self, gate: str) -> None:
        """Waits until the script is at a gate."""
        wait_until((self.here / f"{gate}.reached").exists, f"the gate {gate}", SECONDS)

    def open(self, gate: str) -> None:
        """Lets the script pass."""
        (self.here / f"{gate}.open").touch()

    def wait_for_word(self, text: str) -> None:
        """Waits until the supervisor has said something."""
        wait_until(lambda: text in self.job.supervisor_log.read_text(), text, SECONDS)

    def check_end(self) -> None:
        """Checks that nothing is lost."""
        state = follow.wait(self.job)
        assert state.status == "Completed", state.failure_reason
        log = self.job.log("algo-1").read_text().splitlines()
        assert [int(line.split()[1]) for line in log] == list(range(LINES)), len(log)
        assert len(metrics.read(self.job.metrics)) == LINES


def start(folder: pathlib.Path, disk: Disk) -> None:
    """A job that has no room for its folder does not begin."""
    disk.fill()
    try:
        Trial(folder, disk, "start")
    except JobError as error:
        assert "needs room on the disk" in str(error), error
    else:
        raise AssertionError("it began")
    disk.empty()
    assert not (disk.path / "jobs/start").exists()


def log(folder: pathlib.Path, disk: Disk) -> None:
    """The disk is full while the script prints."""
    trial = Trial(folder, disk, "log")
    disk.fill()
    trial.open("begin")
    trial.reach("end")
    trial.wait_for_word("the log waits for room: [Errno 28]")
    disk.empty()
    trial.open("end")
    trial.check_end()


def log_by_script(folder: pathlib.Path, disk: Disk) -> None:
    """The script fills the disk, and empties it."""
    trial = Trial(folder, disk, "script", "own")
    trial.open("begin")
    trial.reach("printed")
    trial.wait_for_word("the log waits for room: [Errno 28]")
    trial.open("printed")
    trial.open("end")
    trial.check_end()


def upload(folder: pathlib.Path, disk: Disk) -> None:
    """The disk is full while the model is packed."""
    trial = Trial(folder, disk, "upload", "model")
    trial.open("begin")
    trial.reach("end")
    disk.fill()
    trial.open("end")
    trial.wait_for_word("the model.tar.gz of the job cannot be written now: [Errno 28]")
    disk.empty()
    trial.check_end()
    with tarfile.open(trial.job.model) as tar:
        assert [(m.name, m.size) for m in tar.getmembers()] == [("m", 50_000)]


def end(folder: pathlib.Path, disk: Disk) -> None:
    """The disk is full from the script's output to the end."""
    trial = Trial(folder, disk, "end")
    disk.fill()
    trial.open("begin")
    trial.open("end")
    trial.wait_for_word("the state of the job cannot be written now: [Errno 28]")
    assert not trial.job.read_state().is_final
    disk.empty()
    trial.check_end()


def main() -> None:
    """Tries each phase."""
    folder = pathlib.Path(sys.argv[1])
    disk = Disk(folder)
    for phase in (start, log, log_by_script, upload, end):
        phase(folder, disk)
        print(phase.__name__, flush=True)


if __name__ == "__main__":
    main()
