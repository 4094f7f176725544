"""`nanotf.job()`: in a job, in a container, in plain Python."""

from __future__ import annotations

import logging
import pathlib
import sys
from typing import Any

import pytest

import nanotf
from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import hyperparameters, script_variables
from nanotf.sagemaker.jobs.tree import Tree
from nanotf.wire import files

VALUES = {"epochs": 3, "lr": 1, "opt": "adam", "augment": "False", "sagemaker_program": "t.py"}


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A container's folders, without any SM_* variable."""
    tree = Tree(tmp_path)
    tree.make()
    files.write_json(tree.hyperparameters, hyperparameters.encode(VALUES))
    files.write_json(
        tree.resources, script_variables.resource_config(["algo-2", "algo-1"], "algo-1")
    )
    files.write_json(tree.input_data, {"train": {"TrainingInputMode": "File"}})
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    return tree


@pytest.fixture
def plain(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Plain Python, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["t.py"])
    return tmp_path


def test_in_a_job(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_JOB_NAME", "job-1")
    job = nanotf.job({"lr": 0.5, "augment": True, "more": 7})
    assert job.name == "job-1"
    assert job.hyperparameters == {
        "epochs": 3,
        "lr": 1.0,
        "opt": "adam",
        "augment": False,
        "more": 7,
    }
    assert isinstance(job.hyperparameters["lr"], float)
    assert job.channels == {"train": tree.data / "train"}
    assert (job.hosts, job.current_host) == (["algo-1", "algo-2"], "algo-1")
    assert job.is_chief
    assert job.model_dir == tree.model
    assert job.output_data_dir == tree.output_data
    assert job.checkpoint_dir == tree.checkpoints
    assert job.checkpoint_dir.is_dir()


def test_variables_of_the_platform_win(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/elsewhere")
    monkeypatch.setenv("SM_MODEL_DIR", str(tree.base / "other"))
    monkeypatch.setenv("SM_NUM_CPUS", "5")
    job = nanotf.job()
    assert job.channel("train") == pathlib.Path("/elsewhere")
    assert job.model_dir == tree.base / "other"
    assert job.num_cpus == 5


def test_only_one_process_is_the_chief(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOTF_RANK", "1")
    assert not nanotf.job().is_chief
    monkeypatch.setenv("NANOTF_RANK", "0")
    assert nanotf.job().is_chief
    files.write_json(
        tree.resources, script_variables.resource_config(["algo-2", "algo-1"], "algo-2")
    )
    assert not nanotf.job().is_chief


def test_the_first_failure_counts(tree: Tree) -> None:
    nanotf.job().failure("the first")
    nanotf.job().failure("the second")
    assert tree.failure.read_text() == "the first"


def test_an_unknown_channel(tree: Tree) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        nanotf.job().channel("x")
    assert "one of the job's: train. Received: channel='x'" in str(caught.value)
    assert "--channel x=PATH" in str(caught.value)


@pytest.mark.parametrize(
    ("default", "value"),
    [(1, "many"), (1, 1.5), (True, "perhaps"), (0.5, "x")],
)
def test_values_of_another_type(tree: Tree, default: Any, value: Any) -> None:
    files.write_json(tree.hyperparameters, hyperparameters.encode({"a": value}))
    with pytest.raises(InvalidArgumentError, match="of the type of its default"):
        nanotf.job({"a": default})


@pytest.mark.parametrize(
    ("default", "value", "found"),
    [(1, "2", 2), (1, 2.0, 2), ("x", 3, "3"), (False, 1, True), (False, "true", True),
     (None, "x", "x"), (0.5, None, None), ([1], [2], [2])],
)  # fmt: skip
def test_values_get_the_type_of_their_default(
    tree: Tree, default: Any, value: Any, found: Any
) -> None:
    files.write_json(tree.hyperparameters, hyperparameters.encode({"a": value}))
    got = nanotf.job({"a": default}).hyperparameters["a"]
    assert (got, type(got)) == (found, type(found))


def test_in_plain_python(plain: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    job = nanotf.job({"epochs": 3}, channels={"train": "data"})
    assert job.name is None
    assert job.hyperparameters == {"epochs": 3}
    assert job.channel("train") == pathlib.Path("data")
    assert (job.hosts, job.current_host, job.is_chief) == (["algo-1"], "algo-1", True)
    assert list(plain.iterdir()) == []
    assert job.model_dir == plain / "model"
    assert job.output_data_dir == plain / "output"
    assert job.checkpoint_dir == plain / "checkpoints"
    assert len(list(plain.iterdir())) == 3
    with caplog.at_level(logging.ERROR, "nanotf"):
        job.failure("no data")
    assert "The job failed: no data" in caplog.text
    assert job.num_cpus >= 1
    assert job.num_gpus >= 0


def test_the_command_line_in_plain_python(
    plain: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["t.py", "--epochs", "5", "--other", "x", "-b", "2"])
    assert nanotf.job({"epochs": 3, "b": 1}).hyperparameters == {"epochs": 5, "b": 2}


def test_channels_of_variables_in_plain_python(
    plain: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/data")
    assert nanotf.job().channels == {"train": pathlib.Path("/data")}


def test_the_text_of_a_job(tree: Tree) -> None:
    assert repr(nanotf.job()).startswith("Job(name=None, hyperparameters={'epochs': 3")
