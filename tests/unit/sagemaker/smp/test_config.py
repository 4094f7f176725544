"""The configuration of smp: defaults, and errors by the original's rules."""

from __future__ import annotations

from typing import Any

import pytest

from nanotf.errors import NanoError, UnavailableError
from nanotf.sagemaker.smp import config


def test_defaults() -> None:
    found = config.check({"partitions": 2})
    assert (found.microbatches, found.pipeline, found.placement_strategy) == (
        1,
        "interleaved",
        "cluster",
    )
    assert (found.optimize, found.memory_weight, found.active_microbatches) == ("memory", 0.8, 4)
    assert config.check({"partitions": 1, "optimize": "speed"}).memory_weight == 0.2


def test_json_of_the_environment() -> None:
    environ = {config.VARIABLE: '{"partitions": 1, "microbatches": 4}'}
    assert config.load(None, environ).microbatches == 4
    assert config.load({"partitions": 1}, environ).microbatches == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "must contain 'partitions'"),
        ({"partitions": 0}, "The number of partitions must be a positive integer"),
        ({"partitions": True}, "The number of partitions must be a positive integer"),
        ({"partitions": 1, "microbatches": 1.5}, "The number of microbatches must be a positive"),
        ({"partitions": 1, "pipeline": "1f1b"}, "pipeline must be a value in: .*'_only_forward'"),
        ({"partitions": 1, "placement_strategy": "x"}, "placement_strategy must be a value in"),
        ({"partitions": 1, "auto_partition": 1}, "auto_partition must be a value in"),
        ({"partitions": 1, "optimize": "x"}, "optimize must be a value in"),
        ({"partitions": 1, "auto_partition": False}, "default_partition must be supplied"),
        ({"partitions": 2, "default_partition": 2}, "less than the number of partitions!"),
        ({"partitions": 1, "memory_weight": 1.5}, "memory_weight must be between 0.0 and 1.0!"),
        ({"partitions": 1, "partition_file": 3}, "'partition_file' must be a str."),
        ({"partitions": 1, "horovd": True}, "the key 'horovd'"),
        ([], "must be a dict"),
    ],
)
def test_rules(given: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text) as caught:
        config.check(given)
    assert isinstance(caught.value, NanoError)
    assert "Received: " in str(caught.value)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [("horovod", "hvd.allreduce. Leave out both"), ("load_partition", "Leave it")],
)
def test_requests_that_nanotf_refuses(key: str, remedy: str) -> None:
    with pytest.raises(UnavailableError, match=f"{key}=True.*{remedy}"):
        config.check({"partitions": 1, key: True})


@pytest.mark.parametrize(
    ("environ", "text"),
    [({}, "Pass smp.init"), ({config.VARIABLE: "{"}, "must hold a dict in JSON")],
)
def test_no_configuration(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        config.load(None, environ)


def test_keys_without_effect_say_so() -> None:
    plain = {"partitions": 1, "xla": False, "deterministic_server": True, "contiguous": True}
    assert config.check(plain).without_effect() == []
    found = config.check({"partitions": 1, "xla": True, "ddp": True, "partition_file": "a"})
    texts = found.without_effect()
    assert [text.split()[1] for text in texts] == ["partition_file='a'", "xla=True", "ddp=True"]
