"""Arguments of SageMaker's estimators: old names, names without effect here, `distribution`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanotf.console import warn_once
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UnavailableError,
    meant,
)
from nanotf.machine import tensorflow_build, topology
from nanotf.machine.topology import AUTO
from nanotf.sagemaker import argument_names
from nanotf.sagemaker.argument_names import ArgumentNames

# Version 1 of the SageMaker Python SDK.
OLD_NAMES = {
    "train_instance_count": "instance_count",
    "train_instance_type": "instance_type",
    "train_max_run": "max_run",
    "train_max_wait": "max_wait",
    "train_use_spot_instances": "use_spot_instances",
    "train_volume_size": "volume_size",
    "train_volume_kms_key": "volume_kms_key",
    "distributions": "distribution",
    "image_name": "image_uri",
}
# They configure containers, images or the cloud, and have no effect on this machine.
WITHOUT_EFFECT = (
    "code_location",
    "compiler_config",
    "container_log_level",
    "debugger_hook_config",
    "disable_profiler",
    "enable_cloudwatch_metrics",
    "enable_network_isolation",
    "enable_sagemaker_metrics",
    "encrypt_inter_container_traffic",
    "image_uri",
    "image_uri_region",
    "keep_alive_period_in_seconds",
    "max_retry_attempts",
    "max_wait",
    "output_kms_key",
    "profiler_config",
    "py_version",
    "role",
    "rules",
    "sagemaker_session",
    "security_group_ids",
    "subnets",
    "tags",
    "tensorboard_output_config",
    "use_spot_instances",
    "volume_kms_key",
    "volume_size",
)
_UNSUPPORTED = {
    "git_config": "Clone the repository yourself and pass source_dir, or leave it out.",
    "instance_groups": "Pass instance_count, or leave it out.",
    # Script Mode forbids these: they are of the SDK's version 1, whose containers ran the training.
    "checkpoint_path": "Pass checkpoint_s3_uri; the script saves in nanotf.job().checkpoint_dir.",
    "evaluation_steps": "Pass it in hyperparameters, and let the script read it.",
    "requirements_file": "Name it requirements.txt, beside the script, and pass source_dir.",
    "training_steps": "Pass it in hyperparameters, and let the script read it.",
}
# Of each kind of `distribution`; of parts of "smdistributed", too.
_KEYS = {
    "parameter_server": ("enabled",),
    "multi_worker_mirrored_strategy": ("enabled",),
    "mpi": ("enabled", "processes_per_host", "custom_mpi_options"),
    "smdistributed": ("modelparallel", "dataparallel"),
    "modelparallel": ("enabled", "parameters"),
    "dataparallel": ("enabled", "custom_mpi_options"),
}
_KINDS = ("parameter_server", "multi_worker_mirrored_strategy", "mpi", "smdistributed", "nanotf")


NAMES = ArgumentNames(
    "TensorFlow()", "SageMaker's estimator", WITHOUT_EFFECT, OLD_NAMES, _UNSUPPORTED
)


def check_instance_type(instance_type: str) -> None:
    """Rejects machines other than this one. Raises `UnavailableError`."""
    argument_names.check_instance_type(
        instance_type,
        "On another machine, install nanotf there and call fit() or `nanotf train`; in a SageMaker "
        "container, run the script by `nanotf run`.",
    )


def take_checked(given: dict[str, Any]) -> int:
    """Takes arguments that are only checked. Returns the number of instances.

    Raises:
        InvalidArgumentError: `instance_count` is not a whole number above 0.
        UnavailableError: `script_mode` is False.
    """
    count = given.pop("instance_count", None)
    if count is None:
        count = 1
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgumentError(
            "`instance_count` must be a whole number of hosts, at least 1. Received: "
            f"instance_count={count!r}."
        )
    if given.pop("script_mode", None) is False:  # version 1 then called functions of the script
        raise UnavailableError(
            "nanotf runs scripts in Script Mode. Received: script_mode=False. Let the script train "
            "when it is run as a program, and leave script_mode out."
        )
    _compare_version(given.pop("framework_version", None))
    return count


def _compare_version(wanted: Any) -> None:
    if wanted is None:
        return
    found = tensorflow_build.installed_packages()
    minor = str(wanted).split(".")[:2]  # "2.15" may be given, too
    if minor not in [text.rpartition(" ")[2].split(".")[:2] for text in found]:
        warn_once(
            "Scripts run with the installed TensorFlow. Received: framework_version=%r; installed: "
            "%s.",
            str(wanted),
            ", ".join(found) or "none",
        )


@dataclass(frozen=True)
class DistributionWorkers:
    """Workers, or ranks, that `distribution` asks for."""

    num_processes: str | None = None  # on each host, as `-n` takes them; None for none
    are_ranks: bool = False  # each runs the whole script
    is_mpi: bool = False  # "mpi" is among the kinds; it has another default of `model_dir`
    # What the platform tells the script about `distribution`.
    hyperparameters: dict[str, Any] = field(default_factory=dict)


def read_distribution(
    distribution: Mapping[str, Any] | None, instance_count: int
) -> DistributionWorkers:
    """Reads the argument `distribution`: ranks or synchronous workers of nanotf.

    "mpi" and "dataparallel" start ranks on each host, as in the original.

    Args:
        distribution: as SageMaker takes it; None for none.
        instance_count: the number of hosts. On one, a kind that names no number of processes lets
            each `fit` measure what is fastest, but for "mpi", which has one rank, and
            "dataparallel", which has `topology.default_count()`; on several, each host has one
            worker or rank, as in the original.

    Raises:
        InvalidArgumentError: nanotf does not know the kind, or a key of it.
        InvalidArgumentTypeError: The argument, a kind or a part of one is not a dict.
    """
    _check_dict("distribution", distribution, _KINDS)
    distribution = dict(distribution or {})
    distribution.pop("instance_groups", None)  # all hosts are in one group
    unknown = sorted(map(str, set(distribution) - set(_KINDS)))
    if unknown:
        raise InvalidArgumentError(
            f"`distribution` must have keys among {', '.join(_KINDS)}. Received: {unknown}."
        )
    _check_keys(distribution)
    found: dict[str, Any] = {}
    mpi = _enabled(distribution, "mpi")
    if _enabled(distribution, "parameter_server"):
        _tell_of_parameter_servers()
        found["sagemaker_parameter_server_enabled"] = True
    if _enabled(distribution, "multi_worker_mirrored_strategy"):
        found["sagemaker_multi_worker_mirrored_strategy_enabled"] = True
    parts = distribution.get("smdistributed") or {}
    own = _number_of_workers(distribution)
    is_dataparallel = _enabled(parts, "dataparallel") is not None
    if parallel := _enabled(parts, "modelparallel"):
        # The SDK's name; `nanotf.smp` reads it as SM_HP_MP_PARAMETERS.
        found["mp_parameters"] = parallel.get("parameters", {})
    number = own if mpi is None else mpi.get("processes_per_host")
    if mpi is not None:
        found |= {
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": number or 1,
            "sagemaker_mpi_custom_mpi_options": mpi.get("custom_mpi_options", ""),
        }
    is_smdistributed = is_dataparallel or _enabled(parts, "modelparallel") is not None
    if not found and not is_smdistributed and own is None:
        return DistributionWorkers()
    # The kind "nanotf" asks for workers of one script, whatever other kinds are beside it.
    are_ranks = own is None and (mpi is not None or is_dataparallel)
    default: int | str = 1 if instance_count > 1 or mpi is not None else AUTO
    if are_ranks and mpi is None and instance_count == 1:
        default = topology.default_count()
    return DistributionWorkers(str(number or default), are_ranks, mpi is not None, found)


def _number_of_workers(distribution: Mapping[str, Any]) -> int | None:
    """Returns the number of workers on each host that the kind "nanotf" names."""
    if "nanotf" not in distribution:
        return None
    given = distribution["nanotf"]
    number = given.get("processes_per_host") if isinstance(given, Mapping) else None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidArgumentError(
            '`distribution` must hold {"nanotf": {"processes_per_host": N}}, N at least 1. '
            f"Received: nanotf={given!r}."
        )
    return number


def _check_keys(kinds: Mapping[str, Any]) -> None:
    """Rejects misspelled keys inside `distribution`, which would silently change nothing."""
    for name, given in kinds.items():
        if name not in _KEYS or given is None:
            continue
        _check_dict(name, given, _KEYS[name])
        unknown = sorted(map(str, set(given) - set(_KEYS[name])))
        if unknown:
            right = meant(unknown[0], _KEYS[name])
            hint = f" Did you mean {right!r}?" if right else ""
            raise InvalidArgumentError(
                f"{name!r} of `distribution` must have keys among {', '.join(_KEYS[name])}. "
                f"Received: {unknown}.{hint}"
            )
        if name == "smdistributed":
            _check_keys(given)


def _check_dict(name: str, given: Any, keys: Sequence[str]) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgumentTypeError(
            f"`distribution` must be a dict that holds dicts. Received: {name}={given!r}. Pass a "
            f"dict with keys among {', '.join(keys)}."
        )


def _enabled(kinds: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns the dict of a kind that is to be used, or None. `_check_keys` has seen it."""
    value: Mapping[str, Any] = kinds.get(name) or {}
    return value if value.get("enabled", False) else None


def _tell_of_parameter_servers() -> None:
    warn_once(
        "Parameter servers trained asynchronously. nanotf's workers train synchronously "
        "instead: each step uses the whole batch, with the results of one process."
    )
