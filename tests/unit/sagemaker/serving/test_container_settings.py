"""The variables of SageMaker's containers."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.serving.container_settings import from_environment

TFS = "SAGEMAKER_TFS_"
BATCHES = {f"{TFS}ENABLE_BATCHING": "True"}


def test_defaults() -> None:
    found = from_environment({f"{TFS}MAX_BATCH_SIZE": "", "OTHER": "x"})
    assert dataclasses.asdict(found) == {
        "folder": pathlib.Path("/opt/ml/model"),
        "port": 8080,
        "multi_model": False,
        "default_model": None,
        "workers": None,
        "threads": None,
        "max_batch": None,
        "queue": None,
        "timeout": 60.0,
        "start_timeout": 300.0,
        "max_body": 100 * 2**20,
        "accept": "application/json",
    }


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"SAGEMAKER_BIND_TO_PORT": "9000"}, {"port": 9000}),
        (
            {"SAGEMAKER_MULTI_MODEL": "TRUE", "SAGEMAKER_BASE_DIR": "/base"},
            {"multi_model": True, "folder": pathlib.Path("/base/models")},
        ),
        ({f"{TFS}DEFAULT_MODEL_NAME": "half"}, {"default_model": "half"}),
        ({f"{TFS}INSTANCE_COUNT": "2"}, {"workers": 2}),
        ({f"{TFS}INSTANCE_COUNT": "2", "SAGEMAKER_MODEL_SERVER_WORKERS": "3"}, {"workers": 3}),
        ({f"{TFS}INTRA_OP_PARALLELISM": "0"}, {"threads": None}),
        ({f"{TFS}INTRA_OP_PARALLELISM": "2"}, {"threads": 2}),
        (BATCHES, {"max_batch": 8, "queue": None}),
        ({f"{TFS}ENABLE_BATCHING": "false", f"{TFS}MAX_BATCH_SIZE": "4"}, {"max_batch": None}),
        (
            {**BATCHES, f"{TFS}MAX_BATCH_SIZE": "4", f"{TFS}MAX_ENQUEUED_BATCHES": "10"},
            {"max_batch": 4, "queue": 40},
        ),
        ({"SAGEMAKER_MODEL_SERVER_TIMEOUT": "5"}, {"timeout": 5.0}),
        ({"SAGEMAKER_STARTUP_TIMEOUT": "7"}, {"start_timeout": 7.0}),
        (
            {"SAGEMAKER_STARTUP_TIMEOUT": "7", f"{TFS}WAIT_TIME_SECONDS": "8"},
            {"start_timeout": 8.0},
        ),
        ({"SAGEMAKER_MAX_PAYLOAD_IN_MB": "6"}, {"max_body": 6 * 2**20}),
        ({"SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT": "text/csv"}, {"accept": "text/csv"}),
        ({"SAGEMAKER_PROGRAM": "inference.py"}, {}),
    ],
)
def test_variables(variables: dict[str, str], wanted: dict[str, Any]) -> None:
    assert from_environment(variables) == dataclasses.replace(from_environment({}), **wanted)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        (f"{TFS}ENABLE_BATCHING", "yes", "must be 'true' or 'false'. Received: 'yes'."),
        ("SAGEMAKER_MULTI_MODEL", "1", "must be 'true' or 'false'. Received: '1'."),
        ("SAGEMAKER_BIND_TO_PORT", "65536", "must be a number from 1 to 65535."),
        ("SAGEMAKER_BIND_TO_PORT", "http", "must be a number from 1 to 65535."),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "0", "must be a number of at least 1."),
        (f"{TFS}INSTANCE_COUNT", "-1", "must be a number of at least 1."),
        (f"{TFS}INTRA_OP_PARALLELISM", "x", "must be a number of at least 0."),
        (f"{TFS}MAX_BATCH_SIZE", "1.5", "must be a number of at least 1."),
        (f"{TFS}MAX_ENQUEUED_BATCHES", "0", "must be a number of at least 1."),
        ("SAGEMAKER_MODEL_SERVER_TIMEOUT", "1m", "must be a number of at least 1."),
        (f"{TFS}WAIT_TIME_SECONDS", "0", "must be a number of at least 1."),
        ("SAGEMAKER_STARTUP_TIMEOUT", "0", "must be a number of at least 1."),
        ("SAGEMAKER_MAX_PAYLOAD_IN_MB", "0", "must be a number of at least 1."),
        ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "text/html", "must be one of application/json"),
        ("SAGEMAKER_PROGRAM", "serve.py", "must be one of inference.py. Received: 'serve.py'."),
    ],
)
def test_values_that_cannot_be_used(name: str, given: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} {text}"):
        from_environment({name: given})
