"""The commands and variables of a job's programs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import Any

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.machine.processes import begin
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.jobs import commands, launch, script_variables
from nanotf.sagemaker.jobs.record import JobRequest
from nanotf.sagemaker.jobs.script_variables import Counts
from nanotf.sagemaker.jobs.source import SourceCode


def test_options_of_nanotf_run() -> None:
    def options(**changes: Any) -> list[str] | None:
        return commands.run_options(JobRequest("a", SourceCode("t.py"), **changes))

    assert options() is None  # plain Python
    assert options(num_processes="2") == ["-n", "2"]
    assert options(num_processes="auto", hosts="a:2,b:2") == ["-n", "auto", "--hosts", "a:2,b:2"]
    assert options(instances=2) == []
    assert options(num_processes="2", ranks=True) == ["--ranks", "-n", "2"]
    assert options(num_processes="2", ranks=True, instances=2) == ["--ranks", "-n", "2"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_processes": None}, "Ranks need their number. Received: -n None"),
        ({"num_processes": "auto"}, "Ranks need their number. Received: -n auto"),
    ],
)
def test_requests_for_ranks_that_cannot_be_met(
    given: dict[str, Any], text: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "train.py").touch()
    source = SourceCode(str(tmp_path / "train.py"))
    request = JobRequest("a", source, **{"num_processes": "1", "ranks": True} | given)
    with pytest.raises(InvalidArgumentError, match=text):
        launch.check(request)


def test_hosts_outside_the_job_have_a_secret_and_an_interface_of_their_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nanotf run` would take them from these variables, as it does in SageMaker."""
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    (tmp_path / "train.py").touch()
    request = JobRequest("a", SourceCode(str(tmp_path / "train.py")))
    job = launch.start(request, tmp_path / "jobs")

    def names(hosts: str | None) -> set[str]:
        wanted = dataclasses.replace(request, hosts=hosts)
        return set(commands.variables(job, wanted, "algo-1", Counts(1, 0)))

    assert names(None) - names("h1,h2") == {
        "TRAINING_JOB_ARN",
        "SM_NETWORK_INTERFACE_NAME",
    }


def test_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    found = commands.python_path(pathlib.Path("/code"), pathlib.Path("/aliases"))
    assert found.split(os.pathsep)[:2] == ["/code", "/mine"]
    assert found.split(os.pathsep)[-1] == "/aliases"


def test_simulated_hosts_find_each_other() -> None:
    """`nanotf run` reads these variables."""
    request = JobRequest("a", SourceCode("t.py"), instances=2)
    found = commands.variables_of_hosts(request)
    assert found["NANOTF_HOST_ADDRESSES"] == "algo-1=127.0.0.1,algo-2=127.0.0.2"
    assert int(found["NANOTF_PORT"]) > 0
    assert len(found["NANOTF_SECRET"]) == 64
    assert commands.variables_of_hosts(dataclasses.replace(request, instances=1)) == {}


def test_a_variable_that_tensorflow_no_longer_reads() -> None:
    def found(**environ: str) -> str | None:
        return script_variables.with_present_names(environ).get("TF_ENABLE_ONEDNN_OPTS")

    assert found(TF_DISABLE_MKL="1") == "0"
    assert found(TF_DISABLE_MKL="1", TF_ENABLE_ONEDNN_OPTS="1") == "1"
    assert found(TF_DISABLE_MKL="0") is found() is None


def test_the_last_line_of_a_long_error_keeps_what_it_begins_with() -> None:
    program = begin([sys.executable, "-c", ""], "a", ".", os.environ)
    program.process.communicate()
    program.note_error(b"Traceback:\nValueError: " + b"x" * 5000 + b" the end\n")
    text = program.last_errors()
    assert text.startswith("ValueError: x") and text.endswith("x the end") and len(text) == 600
    program.note_error(b"short\n")
    assert program.last_errors() == "short"
