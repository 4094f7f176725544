"""`nanotf train`, `nanotf jobs`, the estimator: real jobs, whose scripts need no TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from processes import ROOT, SECONDS, run_python
from waiting import freeze, wait_until

from nanotf.errors import InvalidArgumentError, JobError
from nanotf.estimator import TensorFlow
from nanotf.sagemaker.jobs import follow, launch, record
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode

pytestmark = pytest.mark.own_pool

SCRIPT = """
import argparse, json, os, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--model_dir", default="")
parser.add_argument("--sm-model-dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--train", default=os.environ["SM_CHANNEL_TRAIN"])
options = parser.parse_args()
print("arguments", json.dumps(sys.argv[1:]))
print("data", pathlib.Path(options.train, "x.txt").read_text())
print("here", pathlib.Path.cwd().name, "ok" if pathlib.Path("train.py").exists() else "")
for epoch in range(options.epochs):
    print(f"val_accuracy: 0.{epoch}")
pathlib.Path(options.sm_model_dir, "model.txt").write_text("the model")
pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "plot.txt").write_text("a plot")
print("a warning", file=sys.stderr)
"""
# Prints a line, then waits for a file, which tests create or not.
WAITING = """
import os, pathlib, signal, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", os.getpid(), flush=True)
while not pathlib.Path(os.environ["GATE"]).exists():
    time.sleep(0.02)
print("done", flush=True)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder with data; its jobs end with the test."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x.txt").write_text("x")
    yield tmp_path
    for job in record.find_all(tmp_path / "jobs"):
        owner = job.read_state().owner
        if not job.read_state().is_final:
            os.kill(owner.pid, signal.SIGKILL)
        wait_until(lambda owner=owner: not owner.is_alive(), f"{job.name} ends")


def _write(folder: pathlib.Path, source: str) -> str:
    (folder / "train.py").write_text(textwrap.dedent(source))
    return str(folder / "train.py")


def _waiting(folder: pathlib.Path, name: str = "a", **changes: Any) -> JobFolder:
    """Starts a job that waits for the file `gate`; returns once its script has begun."""
    source = SourceCode(_write(folder, WAITING))
    request = JobRequest(name, source, environment={"GATE": str(folder / "gate")}, **changes)
    job = launch.start(request, folder / "jobs")
    wait_until(lambda: "begun" in follow.LogReader(job).read(), "the script begins")
    return job


def _script_pid(job: JobFolder) -> int:
    return int(follow.LogReader(job).read().split()[1])


def test_train(folder: pathlib.Path) -> None:
    _write(folder, SCRIPT)
    command = ["-m", "nanotf", "train", "train.py", "--channel", "train=data", "--name", "a"]
    command += ["-p", "epochs=3", "-p", "lr=0.1", "--metric", "val:acc=val_accuracy: ([0-9.]+)"]
    printed = run_python(folder, *command).splitlines()
    assert printed[0] == 'arguments ["--epochs", "3", "--lr", "0.1"]'
    assert printed[1:3] == ["data x", "here code ok"]
    assert "a warning" in printed
    job = record.find("a", folder / "jobs")
    for archive, name, text in (
        (job.model, "model.txt", "the model"),
        (job.output, "plot.txt", "a plot"),
    ):
        with tarfile.open(archive) as tar:
            assert tar.getnames() == [name]
            file = tar.extractfile(name)
            assert file is not None
            assert file.read().decode() == text
    found = json.loads(run_python(folder, "-m", "nanotf", "jobs", "describe", "a"))
    assert found["TrainingJobStatus"] == "Completed"
    assert found["FinalMetricDataList"] == [{"MetricName": "val:acc", "Value": 0.2}]
    assert found["HyperParameters"] == {"epochs": 3, "lr": 0.1}
    assert found["ExitCodes"] == {"algo-1": 0}
    assert job.tree("algo-1").success.is_file()
    assert run_python(folder, "-m", "nanotf", "jobs", "logs", "a").splitlines() == printed
    (listed,) = json.loads(run_python(folder, "-m", "nanotf", "jobs", "list", "--json"))
    assert (listed["name"], listed["metrics"]) == ("a", {"val:acc": 0.2})


# As the guide of SageMaker's training compiler has it, and as scripts of containers save.
OF_A_CONTAINER = """
import json, os, socket
def set_sm_dist_config():
    DEFAULT_PORT = '8890'
    DEFAULT_CONFIG_FILE = '/opt/ml/input/config/resourceconfig.json'
    with open(DEFAULT_CONFIG_FILE) as f:
        config = json.loads(f.read())
        current_host = config['current_host']
    tf_config = {'cluster': {'worker': []}, 'task': {'type': 'worker', 'index': -1}}
    for i, host in enumerate(config['hosts']):
        tf_config['cluster']['worker'].append("%s:%s" % (host, DEFAULT_PORT))
        if current_host == host:
            tf_config['task']['index'] = i
    os.environ['TF_CONFIG'] = json.dumps(tf_config)
set_sm_dist_config()
print(os.environ['TF_CONFIG'])
try:
    print(socket.gethostbyname('algo-1'))
except socket.gaierror:
    print('unknown beside a link:', os.path.islink('/opt/ml'))
with open('/opt/ml/input/data/train/x.txt') as data, open('/opt/ml/model/m', 'w') as model:
    model.write(data.read())
os.system('ls /opt/ml/model')
folders = '/opt/ml/model', os.environ['SM_MODEL_DIR']
for one, other, kept in (*folders, 'n'), (*folders[::-1], 'o'), (os.getcwd(), folders[1], 'p'):
    open(f'{one}/part', 'w').close()
    os.rename(f'{one}/part', f'{other}/{kept}')
print(folders[1] in folders[0] or os.path.realpath('/opt/ml'))
"""


def test_the_folders_of_a_container(folder: pathlib.Path) -> None:
    before = pathlib.Path("/opt/ml").exists()
    channel = DataChannel("train", str(folder / "data"))
    source = SourceCode(_write(folder, OF_A_CONTAINER))
    try:
        job = launch.start(JobRequest("a", source, channels=(channel,)), folder / "jobs")
    except InvalidArgumentError as error:
        pytest.skip(f"this machine allows neither mounts nor a link: {error}")
    state = follow.wait(job)
    assert state.status == record.COMPLETED, state.failure_reason
    cluster, address, *printed = follow.LogReader(job).read().splitlines()
    assert json.loads(cluster) == {
        "cluster": {"worker": ["algo-1:8890"]},
        "task": {"type": "worker", "index": 0},
    }
    by_mounts = address == "127.0.0.1"
    assert by_mounts or address == "unknown beside a link: True"
    assert printed == ["m", "True" if by_mounts else str(job.tree("algo-1").base)]
    with tarfile.open(job.model) as tar:
        assert tar.getnames() == ["m", "n", "o", "p"]
    assert pathlib.Path("/opt/ml").exists() == before


def test_other_processes_follow_stop_and_wait(folder: pathlib.Path) -> None:
    job = _waiting(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def begin(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "nanotf", "jobs", *arguments, "a"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with begin("logs", "-f") as following, begin("wait") as waiting:
        assert following.stdout is not None
        assert following.stdout.readline().startswith("begun")  # while the job runs
        with begin("stop") as stopping:
            assert stopping.communicate(timeout=SECONDS)[0].startswith("nanotf: job a: Stop")
        following.communicate(timeout=SECONDS)
        _, said = waiting.communicate(timeout=SECONDS)
        assert (following.returncode, waiting.returncode) == (0, 3)
    assert "nanotf: job a was stopped (Stopped)" in said
    assert not psutil.pid_exists(_script_pid(job))
    with begin("stop") as again:
        _, said = again.communicate(timeout=SECONDS)
    assert again.returncode == 2
    assert "Only a job in progress can be stopped. Received: a, whose status is Stopped" in said


def test_a_job_that_is_being_stopped_cannot_be_stopped(folder: pathlib.Path) -> None:
    """Its script ignores SIGTERM, so it gets SIGKILL."""
    job = _waiting(folder, hyperparameters={"x": "ignore"}, stop_seconds=5.0)
    follow.stop(job)
    with pytest.raises(InvalidArgumentError, match="whose status is Stopp"):
        follow.stop(job)
    assert follow.wait(job).status == "Stopped"
    assert follow.describe(job)["ExitCodes"] == {"algo-1": 128 + signal.SIGKILL}


def test_a_killed_supervisor(folder: pathlib.Path) -> None:
    """The job has failed, and its script has ended, too."""
    job = _waiting(folder)
    os.kill(job.read_state().owner.pid, signal.SIGKILL)
    state = follow.wait(job)
    assert state.status == "Failed"
    assert "ended without recording an end" in str(state.failure_reason)
    wait_until(lambda: not psutil.pid_exists(_script_pid(job)), "the script ends")


CHILDREN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", child.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_supervisor_leaves_no_children_of_the_script(folder: pathlib.Path) -> None:
    request = JobRequest("a", SourceCode(_write(folder, CHILDREN)))
    job = launch.start(request, folder / "jobs")
    wait_until(lambda: "begun" in follow.LogReader(job).read(), "the script begins")
    child = _script_pid(job)
    os.kill(job.read_state().owner.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(child), "the script's child ends")


def test_a_stopped_supervisor_is_named(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = _waiting(folder)
    owner = job.read_state().owner.pid

    class Continue(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.kill(owner, signal.SIGCONT)

    logger, when_named = logging.getLogger("nanotf"), Continue()
    logger.addHandler(when_named)
    freeze(owner)
    try:
        (folder / "gate").touch()
        assert follow.wait(job).status == "Completed"
    finally:
        logger.removeHandler(when_named)
        os.kill(owner, signal.SIGCONT)
    (line,) = [r.message for r in caplog.records if "SIGSTOP" in r.message]
    assert f"kill -CONT {owner}" in line


def test_only_the_user_enters_a_job(folder: pathlib.Path) -> None:
    job = _waiting(folder)
    (folder / "gate").touch()
    assert follow.wait(job).status == "Completed"
    assert job.path.stat().st_mode & 0o777 == 0o700
    hyperparameters = job.tree("algo-1").hyperparameters
    assert hyperparameters.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("processes", [None, "2"])
def test_modules_named_as_the_librarys(processes: str | None, folder: pathlib.Path) -> None:
    """They are the script's own; nanotf and TensorFlow import the library's."""
    code = folder / "code"
    code.mkdir()
    for name in ("secrets", "queue", "socket", "selectors", "json"):
        (code / f"{name}.py").write_text("raise ImportError('this is not for libraries')")
    (code / "train.py").write_text("import sys\nprint('script', len(sys.argv))")
    if processes:
        (code / "train.py").write_text(WITH_WORKERS)
    request = JobRequest("a", SourceCode("train.py", str(code)), num_processes=processes)
    job = launch.start(request, folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Completed", follow.LogReader(job).read()
    assert "script" in follow.LogReader(job).read()
    assert (processes is None) or job.log("algo-1", 1).is_file()


WITH_WORKERS = """
import numpy as np
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
print("script", history.epoch)
"""


def test_a_job_outlives_the_process_and_session_that_started_it(folder: pathlib.Path) -> None:
    _write(folder, WAITING)
    gate = folder / "gate"
    command = ["-m", "nanotf", "train", "train.py", "--name", "a", "--no-wait"]
    assert run_python(folder, *command, GATE=str(gate)) == "a\n"
    job = record.find("a", folder / "jobs")
    wait_until(lambda: "begun" in follow.LogReader(job).read(), "the script begins")
    owner = psutil.Process(job.read_state().owner.pid)
    assert os.getsid(owner.pid) != os.getsid(0)
    assert owner.terminal() is None
    gate.touch()
    assert follow.wait(job).status == "Completed"


def test_max_run(folder: pathlib.Path) -> None:
    environment = {"GATE": str(folder / "gate")}  # the script may be stopped before it begins
    source = SourceCode(_write(folder, WAITING))
    request = JobRequest("a", source, environment=environment, max_run=0.5)
    state = follow.wait(launch.start(request, folder / "jobs"))
    assert (state.status, state.phase) == ("Stopped", "MaxRuntimeExceeded")


FAILING = """
import pathlib, sys
if "own" in sys.argv:
    import nanotf
    nanotf.job().failure("There are no labels. " + 2000 * "x")
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.every_case
@pytest.mark.parametrize("own", [False, True])
def test_a_script_that_fails(own: bool, folder: pathlib.Path) -> None:
    estimator = TensorFlow(
        entry_point=_write(folder, FAILING),
        output_path=str(folder / "jobs"),
        hyperparameters={"x": "own"} if own else {},
        model_dir=False,
    )
    with pytest.raises(JobError, match="job a failed: "):
        estimator.fit(job_name="a", logs=False)
    assert estimator.latest_training_job is not None
    found = estimator.latest_training_job.describe()
    reason = found["FailureReason"]
    beside_log = record.find("a", folder / "jobs").read_state().failure_beside_log
    if own:
        assert reason.startswith("There are no labels. xxx")
        assert len(reason) == 1024
        assert beside_log is None
    else:
        command = f"{sys.executable} train.py"
        assert reason == (
            f'ExecuteUserScriptError:\nExitCode 7\nErrorMessage "to stderr"\nCommand "{command}"'
        )
        assert beside_log == f'ExecuteUserScriptError:\nExitCode 7\nCommand "{command}"'
    assert found["ExitCodes"] == {"algo-1": 7}


def test_a_script_that_is_killed(folder: pathlib.Path) -> None:
    script = _write(folder, "import os; os.kill(os.getpid(), 9)")
    state = follow.wait(launch.start(JobRequest("a", SourceCode(script)), folder / "jobs"))
    assert state.exit_codes == {"algo-1": 137}
    reason = str(state.failure_reason)
    assert 'ExtraInfo "Process killed by SIGKILL (signal 9)"' in reason  # not for lack of memory


@pytest.mark.parametrize("stops", [False, True])
def test_an_estimator_says_that_a_job_was_stopped(
    stops: bool, folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call of `fit` returns it and warns."""
    estimator = TensorFlow(
        entry_point=_write(folder, WAITING),
        output_path=str(folder / "jobs"),
        environment={"GATE": str(folder / "gate")},
        max_run=None if stops else 0.5,
        model_dir=False,
    )
    with caplog.at_level(logging.WARNING, "nanotf"):
        if stops:
            assert estimator.fit(job_name="a", wait=False) is None
            job = estimator.jobs[0]
            wait_until(lambda: "begun" in job.logs(), "the script begins", SECONDS)
            job.stop()
            assert job.wait(logs=False) == "Stopped"
        else:
            assert estimator.fit(job_name="a", logs=False) == "Stopped"
    phase = "Stopped" if stops else "MaxRuntimeExceeded"
    assert f"Job a was stopped before its script had ended ({phase})." in caplog.text


def test_an_estimator_in_two_processes(folder: pathlib.Path) -> None:
    output = str(folder / "jobs")
    estimator = TensorFlow(
        entry_point=_write(folder, SCRIPT),
        hyperparameters={"epochs": 2},
        output_path=output,
        metric_definitions=[{"Name": "val:acc", "Regex": "val_accuracy: ([0-9.]+)"}],
    )
    estimator.fit({"train": f"file://{folder}/data"}, wait=False, job_name="a")
    code = f"""
import json
from nanotf.estimator import TensorFlow
estimator = TensorFlow.attach("a", output_path={output!r})
job = estimator.latest_training_job
print(json.dumps([job.name, job.describe()["TrainingJobStatus"], estimator.model_data,
                  [each["value"] for each in estimator.metrics], estimator.hyperparameters()]))
"""
    *log, last = run_python(folder, "-c", code).splitlines()
    shared = f"{output}/a/hosts/algo-1/shared/model"
    assert f'arguments ["--epochs", "2", "--model_dir", "{shared}"]' in log
    assert json.loads(last) == [
        *("a", "Completed", f"{output}/a/model.tar.gz", [0.0, 0.1]),
        {"epochs": 2},  # `model_dir` was not an argument
    ]


def test_examples_of_sagemakers_documentation(folder: pathlib.Path) -> None:
    """With paths instead of S3, and this machine instead of one in the cloud."""
    (folder / "src").mkdir()
    (folder / "lib").mkdir()
    (folder / "lib/helper.py").write_text("TEXT = 'helped'")
    (folder / "src/train.py").write_text(
        textwrap.dedent(
            """
            import argparse, os
            from lib.helper import TEXT
            parser = argparse.ArgumentParser()
            parser.add_argument("--model_dir", type=str)
            parser.add_argument("--learning-rate", type=float, default=0.1)
            parser.add_argument("--hosts", default=os.environ["SM_HOSTS"])
            parser.add_argument("--training", default=os.environ.get("SM_CHANNEL_TRAINING"))
            args = parser.parse_args()
            print(TEXT, args.learning_rate, args.hosts, os.listdir(args.training))
            """
        )
    )
    estimator = TensorFlow(
        entry_point="train.py",
        source_dir=str(folder / "src"),
        dependencies=[str(folder / "lib")],
        role="SageMakerRole",
        train_instance_count=1,
        train_instance_type="local",
        framework_version="2.2",
        py_version="py37",
        hyperparameters={"learning-rate": 0.5},
        output_path=f"file://{folder}/jobs",
        base_job_name="tf_scriptmode",
    )
    estimator.fit(f"file://{folder}/data", logs=False)
    job = estimator.latest_training_job
    assert job is not None
    assert job.name.startswith("tf-scriptmode-")
    assert job.logs() == "helped 0.5 [\"algo-1\"] ['x.txt']\n"


def test_checkpoints_are_kept_for_the_next_job(folder: pathlib.Path) -> None:
    source = """
    import nanotf
    file = nanotf.job().checkpoint_dir / "count"
    count = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(count))
    print("count", count)
    """
    script, kept = SourceCode(_write(folder, source)), str(folder / "kept")
    for name, count in (("a", 1), ("b", 2)):
        job = launch.start(JobRequest(name, script, checkpoints=kept), folder / "jobs")
        assert follow.wait(job).status == "Completed"
        assert follow.LogReader(job).read() == f"count {count}\n"


def test_remote_data_checkpoints_and_results(folder: pathlib.Path) -> None:
    """`local://` stands for `s3://`: fsspec reads and writes it like any other storage."""
    pytest.importorskip("fsspec")
    source = """
    import os, pathlib, nanotf
    job = nanotf.job()
    count = job.checkpoint_dir / "count"
    count.write_text(count.read_text() + "1" if count.exists() else "1")
    print(count.read_text(), os.listdir(job.channel("train")))
    (job.model_dir / "model.txt").touch()
    """
    estimator = TensorFlow(
        entry_point=_write(folder, source),
        output_path=f"local://{folder}/results",
        checkpoint_s3_uri=f"local://{folder}/kept",
        model_dir=False,
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("NANOTF_JOBS", str(folder / "jobs"))
        for name, count in (("a", "1"), ("b", "11")):
            estimator.fit({"train": f"local://{folder}/data"}, logs=False, job_name=name)
            assert estimator.latest_training_job is not None
            assert estimator.latest_training_job.logs() == f"{count} ['x.txt']\n"
            assert estimator.model_data == f"local://{folder}/results/{name}/output/model.tar.gz"
        assert TensorFlow.attach("b").model_data == estimator.model_data
    assert (folder / "kept/count").read_text() == "11"
    with tarfile.open(folder / "results/b/output/model.tar.gz") as tar:
        assert tar.getnames() == ["model.txt"]


# A storage that never takes what it is sent, and catches what an upload may raise.
ENDLESS = """
import time
from fsspec import AbstractFileSystem
class Endless(AbstractFileSystem):
    protocol = "endless"
    def put_file(self, *_, **__):
        while True:
            try:
                print("sending", flush=True)
                time.sleep(600)
            except Exception:
                pass
"""


@pytest.mark.parametrize("stops", [0, 1, 2])
def test_a_stop_ends_an_upload(stops: int, folder: pathlib.Path) -> None:
    """The archive is kept. With two stops, the first one is for the script; without, it is killed.

    No reader is sent to an object that does not exist.
    """
    pytest.importorskip("fsspec")
    (folder / "endless.py").write_text(ENDLESS)
    (folder / "endless-1.dist-info").mkdir()
    (folder / "endless-1.dist-info/METADATA").write_text("Name: endless\nVersion: 1\n")
    points = "[fsspec.specs]\nendless = endless:Endless\n"
    (folder / "endless-1.dist-info/entry_points.txt").write_text(points)
    script = """
    import os, pathlib, time
    pathlib.Path(os.environ["SM_MODEL_DIR"], "m").touch()
    print("saved", flush=True)
    time.sleep(600 if os.environ["STOPS"] == "2" else 0)
    """
    program = f"""
    from nanotf.sagemaker.jobs import launch
    from nanotf.sagemaker.jobs.record import JobRequest
    from nanotf.sagemaker.jobs.source import SourceCode
    source = SourceCode({_write(folder, script)!r})
    variables = {{"STOPS": "{stops}"}}
    request = JobRequest("a", source, environment=variables, upload="endless://bucket")
    launch.start(request, {str(folder / "jobs")!r})
    """
    run_python(folder, "-c", textwrap.dedent(program), PYTHONPATH=f"{ROOT}:{folder}")
    job = record.find("a", folder / "jobs")
    if stops == 2:
        wait_until(lambda: "saved" in follow.LogReader(job).read(), "the script saves", SECONDS)
        assert follow.stop(job).status == "Stopping"
    wait_until(lambda: "sending" in job.supervisor_log.read_text(), "the upload", SECONDS)
    if stops:
        assert follow.stop(job).status == "Stopped"
    else:
        os.kill(job.read_state().owner.pid, signal.SIGKILL)
        wait_until(lambda: job.read_state().status == "Failed", "it has ended", SECONDS)
    assert follow.model_data(job) == str(job.model)
    with tarfile.open(job.model) as tar:
        assert tar.getnames() == ["m"]


def test_data_that_are_not_there(folder: pathlib.Path) -> None:
    """Remote storage is first asked by the job."""
    pytest.importorskip("fsspec")
    channel = DataChannel("train", f"local://{folder}/nothing")
    script = SourceCode(_write(folder, "print('never')"))
    job = launch.start(JobRequest("a", script, channels=(channel,)), folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Failed"
    assert str(state.failure_reason).startswith("The data must exist. Received: local://")
    log = job.supervisor_log  # written after the final state
    wait_until(lambda: log.read_text().startswith("Traceback"), "a traceback in the log")


PIPES = """
import os, pathlib, time
folder = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"]).parent
for epoch in range(2):
    pipe = folder / f"train_{epoch}"
    while not pipe.exists():
        time.sleep(0.02)
    print("epoch", epoch, pipe.read_text().split())
"""


def test_pipe_mode(folder: pathlib.Path) -> None:
    """A feeder writes each epoch of the channel; it ends with the job."""
    channel = DataChannel("train", str(folder / "data"), "Pipe")
    script = SourceCode(_write(folder, PIPES))
    job = launch.start(JobRequest("a", script, channels=(channel,)), folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Completed", state.failure_reason
    assert follow.LogReader(job).read() == "epoch 0 ['x']\nepoch 1 ['x']\n"


def test_a_feeder_that_fails(folder: pathlib.Path) -> None:
    """The script would wait for data until its time is up."""
    channel = DataChannel("train", str(folder / "data"), "Pipe", compression="Gzip")
    script = SourceCode(_write(folder, PIPES.replace("range(2)", "range(1)") + "time.sleep(600)"))
    job = launch.start(JobRequest("a", script, channels=(channel,)), folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Failed"
    assert "nanotf.data.feed" in str(state.failure_reason)


def test_shell_scripts(folder: pathlib.Path) -> None:
    script = folder / "train.sh"
    script.write_text('#!/bin/sh\necho "$SM_HP_A" "$@"\n')
    job = launch.start(JobRequest("a", SourceCode(str(script)), {"a": "x y"}), folder / "jobs")
    assert follow.wait(job).status == "Completed"
    assert follow.LogReader(job).read() == "x y -a x y\n"


TRAINING = """
import numpy as np
import tensorflow as tf
import nanotf

job = nanotf.job({"epochs": 1})

class Report(tf.keras.layers.Layer):
    def call(self, x):
        print("traced in a worker")
        return x

model = tf.keras.Sequential([tf.keras.layers.Input((4,)), Report(), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(np.ones((8, 4)), np.ones(8), epochs=job.hyperparameters["epochs"], verbose=0)
print("processes", history.nanotf.size, "epochs", len(history.epoch), job.is_chief)
model.save(job.model_dir / "model.keras")
"""


def test_workers_of_two_hosts(folder: pathlib.Path) -> None:
    """Simulated ones, on this machine. Each worker has a log of its own."""
    source = SourceCode(_write(folder, TRAINING))
    request = JobRequest("a", source, {"epochs": 2}, num_processes="1", instances=2)
    job = launch.start(request, folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Completed", state.failure_reason
    assert state.exit_codes == {"algo-1": 0, "algo-2": 0}
    assert "algo-1: processes 2 epochs 2 True\n" in follow.LogReader(job).read()
    assert "host algo-2 lends 1 worker to algo-1" in follow.LogReader(job, "algo-2").read()
    with tarfile.open(job.model) as tar:
        assert tar.getnames() == ["model.keras"]
    assert "traced in a worker" in follow.LogReader(job, "algo-2", rank=1).read()
    with pytest.raises(
        InvalidArgumentError, match=r"worker of algo-1. Received: rank=1; this host has the ranks 0"
    ):
        follow.LogReader(job, "algo-1", rank=1)


@pytest.mark.thorough
def test_a_host_that_dies(folder: pathlib.Path) -> None:
    """The job fails, and names it."""
    source = """
    import os, signal, nanotf
    print("begun")
    if nanotf.job().is_chief:
        signal.pause()
    """
    request = JobRequest("a", SourceCode(_write(folder, source)), num_processes="1", instances=2)
    job = launch.start(request, folder / "jobs")
    wait_until(lambda: "begun" in follow.LogReader(job).read(), "the script begins", SECONDS)
    supervisor = psutil.Process(job.read_state().owner.pid)
    (other,) = (
        child
        for child in supervisor.children()
        if child.environ().get("SM_CURRENT_HOST") == "algo-2"
    )
    other.kill()
    state = follow.wait(job)
    assert state.status == "Failed"
    assert state.exit_codes["algo-2"] == 128 + signal.SIGKILL
    assert 'Host "algo-2"' in str(state.failure_reason)


def test_the_reason_is_of_the_host_that_failed(folder: pathlib.Path) -> None:
    """The other one ends with it, and sooner: the failed script has much to do at its end."""
    source = "raise ValueError('why')"
    request = JobRequest("a", SourceCode(_write(folder, source)), num_processes="1", instances=2)
    state = follow.wait(launch.start(request, folder / "jobs"))
    assert state.exit_codes == {"algo-1": 1, "algo-2": 0}
    assert 'ValueError: why"\nHost "algo-1"' in str(state.failure_reason)


def test_the_reason_is_of_the_host_whose_worker_died(folder: pathlib.Path) -> None:
    source = TRAINING.replace(
        'print("traced in a worker")',
        "os = __import__('os'); os.environ['SM_CURRENT_HOST'] == 'algo-2' and os._exit(7)",
    )
    request = JobRequest("a", SourceCode(_write(folder, source)), num_processes="1", instances=2)
    state = follow.wait(launch.start(request, folder / "jobs"))
    reason = str(state.failure_reason)
    assert state.exit_codes["algo-2"] == 7, reason
    assert 'Host "algo-2"' in reason and "worker 1 (process" in reason
    assert "exited with code 7" in reason and "ExitCode 7" in reason


REQUIREMENT = """
import sys, numpy, needed
print(needed.TEXT, sys.prefix.endswith("packages"), "nanotf" in sys.modules)
import nanotf
"""


@pytest.mark.thorough
def test_requirements_are_installed_for_the_job_alone(folder: pathlib.Path) -> None:
    """numpy, which this environment has, is seen; the wheel beside the script is installed."""
    code = folder / "src"
    code.mkdir()
    (code / "train.py").write_text(REQUIREMENT)
    (code / "requirements.txt").write_text("./needed-1-py3-none-any.whl\nnumpy\n")
    with zipfile.ZipFile(code / "needed-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", "TEXT = 'here'\n")
        about = "needed-1.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", tag)
        wheel.writestr(f"{about}/RECORD", "")
    request = JobRequest("a", SourceCode("train.py", str(code)))
    job = launch.start(request, folder / "jobs")
    state = follow.wait(job)
    assert state.status == "Completed", job.supervisor_log.read_text()
    assert follow.LogReader(job).read() == "here True False\n"
    assert importlib.util.find_spec("needed") is None
