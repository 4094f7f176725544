"""Hyperparameters: the JSON file, the arguments of a script, options of the command line."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.sagemaker.jobs import hyperparameters

VALUES = {
    "epochs": 10,
    "lr": 0.1,
    "opt": "adam",
    "flag": True,
    "off": False,
    "nothing": None,
    "b": 2,
    "sizes": [1, 2],
    "mix": {"b": 1, "a": "x"},
    "text": "with space",
}


def test_each_value_is_json_text() -> None:
    assert hyperparameters.encode({"epochs": 10, "opt": "adam", "flag": True}) == {
        "epochs": "10",
        "opt": '"adam"',
        "flag": "true",
    }


def test_decoding_undoes_encoding() -> None:
    assert hyperparameters.decode(hyperparameters.encode(VALUES)) == VALUES


def test_a_text_that_is_no_json_is_the_value() -> None:
    assert hyperparameters.decode({"opt": "adam", "lr": "1e-3"}) == {"opt": "adam", "lr": 0.001}


def test_arguments_follow_the_toolkit() -> None:
    assert hyperparameters.to_arguments(VALUES) == [
        *("-b", "2", "--epochs", "10", "--flag", "True", "--lr", "0.1"),
        *("--mix", "a=x,b=1", "--nothing", "", "--off", "False", "--opt", "adam"),
        *("--sizes", "[1, 2]", "--text", "with space"),
    ]


PLATFORM = {
    "sagemaker_program": "train.py",
    "sagemaker_submit_directory": "s3://b/sourcedir.tar.gz",
    "sagemaker_job_name": "x",
    "sagemaker_container_log_level": 20,
    "sagemaker_region": "eu-central-1",
    "sagemaker_enable_cloudwatch_metrics": False,
    "sagemaker_s3_output": "s3://b",
    "default_user_module_name": "train",
    "_tuning_objective_metric": "acc",
}
FRAMEWORK = {"sagemaker_mpi_enabled": True, "sagemaker_parameter_server_enabled": True}


def test_a_script_gets_no_hyperparameters_of_the_platform() -> None:
    values = {**PLATFORM, **FRAMEWORK, "mp_parameters": {"partitions": 2}, "epochs": 1}
    assert hyperparameters.of_script(values) == {"mp_parameters": {"partitions": 2}, "epochs": 1}
    assert hyperparameters.of_framework(values) == FRAMEWORK


def test_options() -> None:
    options = ["epochs=3", "lr=0.1", "opt=adam", "eq=a=b", "flag=true", 'd={"a": 1}', "empty="]
    assert hyperparameters.parse_options(options) == {
        "epochs": 3,
        "lr": 0.1,
        "opt": "adam",
        "eq": "a=b",
        "flag": True,
        "d": {"a": 1},
        "empty": "",
    }


def test_a_script_gets_what_was_typed(caplog: pytest.LogCaptureFixture) -> None:
    typed = ["1.10", "12e3", "007", "1e-3", "NaN", "-0", "+1", "1_000"]
    values = hyperparameters.parse_options([f"{n}={text}" for n, text in enumerate(typed)])
    assert list(values.values()) == typed
    (record,) = caplog.records
    assert "0=1.10 (SageMaker passes 1.1), 1=12e3 (SageMaker passes 12000.0)," in record.message
    assert "007" not in record.message  # a text there, too
    alike = hyperparameters.parse_options(["a=10", "b=0.5", "c=-3", "d=1e-05"])
    assert list(alike.values()) == [10, 0.5, -3, 1e-05]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["epochs"], "name=value. Received: -p epochs"),
        (["=3"], "name=value. Received: -p =3"),
        (["a=1", "a=2"], "once. Received: -p a= twice"),
    ],
)
def test_wrong_options(options: list[str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        hyperparameters.parse_options(options)


def test_a_value_that_json_cannot_hold() -> None:
    with pytest.raises(InvalidArgumentTypeError, match=r"Received: path=<object.*float\(\)"):
        hyperparameters.encode({"path": object()})


@pytest.mark.parametrize("value", [True, False, "True", "False"])
def test_booleans_are_warned_of(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanotf"):
        hyperparameters.warn_of_booleans({"epochs": 1, "augment": value})
    (record,) = caplog.records
    assert f"Received: augment={value}." in record.getMessage()
    assert 'type=bool makes True of the text "False"' in record.getMessage()


def test_other_values_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fine = {"epochs": 1, "opt": "adam", "zero": 0, "list": [True]}
    hyperparameters.warn_of_booleans({**fine, "sagemaker_mpi_enabled": True})  # the estimator's own
    assert caplog.records == []
