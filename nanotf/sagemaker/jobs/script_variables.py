"""The environment variables of a script: `SM_*` and their company.

Follows `environment.py` and `mapping.py` of the SageMaker training toolkit, with one exception:
`SM_NUM_CPUS` is the number of cores that the process may use, not that of the machine.

Sets: SM_* (each of `_training_environment` and `variables`), TRAINING_JOB_NAME, TRAINING_JOB_ARN,
SAGEMAKER_JOB_NAME, SAGEMAKER_REGION, SAGEMAKER_BASE_DIR, CURRENT_HOST.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotf.machine.cpus import describe_machine
from nanotf.sagemaker.jobs import hyperparameters
from nanotf.sagemaker.jobs.tree import BASE_VARIABLE, Tree
from nanotf.wire import files

GROUP = "homogeneousCluster"  # SageMaker's name of the group where a job names none
INTERFACE = "eth0"  # as in a container
LOG_LEVEL = 20  # logging.INFO
# One of these hyperparameters makes the current group a group with distribution.
_DISTRIBUTIONS = (
    "sagemaker_mpi_enabled",
    "sagemaker_parameter_server_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
)


@dataclass(frozen=True)
class Counts:
    """Processors of a host."""

    cpus: int  # the cores that its processes may use
    gpus: int


def count_cpus() -> int:
    """Counts the usable cores."""
    return max(1, len(describe_machine().usable_cores()))


def count_gpus() -> int:
    """Counts the GPUs that `nvidia-smi` lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--list-gpus"]
    try:
        # 30 s: with a broken driver, the command may hang.
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def resource_config(
    hosts: list[str], current: str, instance_type: str = "local", interface: str = INTERFACE
) -> dict[str, Any]:
    """Returns the content of `resourceconfig.json`.

    Args:
        hosts: names of all hosts.
        current: this host's name.
        interface: the name of the network interface.
    """
    hosts = sorted(hosts)  # the first one is the master: all must agree
    group = {"instance_group_name": GROUP, "instance_type": instance_type, "hosts": hosts}
    return {
        "current_host": current,
        "current_instance_type": instance_type,
        "current_group_name": GROUP,
        "current_instance_group": GROUP,
        "hosts": hosts,
        "instance_groups": [group],
        "network_interface_name": interface,
    }


def format_value(value: Any) -> str:
    """Writes a value of an `SM_*` variable: text as it is, None as "", others as compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def with_present_names(environ: dict[str, str]) -> dict[str, str]:
    """Returns variables with `TF_ENABLE_ONEDNN_OPTS` where `TF_DISABLE_MKL` asks for that.

    SageMaker's documentation names `TF_DISABLE_MKL`, which TensorFlow no longer reads.
    """
    asks = environ.get("TF_DISABLE_MKL", "").lower() in ("1", "true")
    # In this order: the user's own value of the present name wins.
    return {"TF_ENABLE_ONEDNN_OPTS": "0", **environ} if asks else environ


def variables(
    tree: Tree, job_name: str, counts: Counts, seen: Tree | None = None
) -> dict[str, str]:
    """Returns the variables of a script on one host.

    Args:
        tree: that of the host, whose three JSON files exist.
        counts: those of the host.
        seen: the tree by the paths that the script is told, if they are not those of `tree`.
    """
    seen = seen or tree
    training = _training_environment(tree, seen, job_name, counts)
    arguments = hyperparameters.to_arguments(training["hyperparameters"])
    channels: dict[str, str] = training["channel_input_dirs"]
    values = {name: training[name] for name in _PLAIN}
    values |= {
        "hps": training["hyperparameters"],
        "framework_params": training["additional_framework_parameters"],
        "channels": sorted(channels),
        "training_env": training,
        "user_args": arguments,
    }
    values |= {name: training[name] for name in ("topology",) if name in training}
    values |= {f"channel_{name}": path for name, path in channels.items()}
    values |= {f"hp_{name}": value for name, value in training["hyperparameters"].items()}
    found = {f"SM_{name.upper()}": format_value(value) for name, value in values.items()}
    return found | {
        BASE_VARIABLE: str(seen.base),
        "TRAINING_JOB_NAME": job_name,
        "TRAINING_JOB_ARN": f"local:training-job/{job_name}",
        "SAGEMAKER_JOB_NAME": job_name,
        "SAGEMAKER_REGION": "",
        "CURRENT_HOST": training["current_host"],
    }


# Keys of the description whose SM_* variables have the same name and value.
_PLAIN = (
    "hosts",
    "network_interface_name",
    "user_entry_point",
    "resource_config",
    "input_data_config",
    "output_data_dir",
    "current_host",
    "current_instance_type",
    "current_instance_group",
    "current_instance_group_hosts",
    "instance_groups",
    "instance_groups_dict",
    "distribution_instance_groups",
    "is_hetero",
    "module_name",
    "log_level",
    "framework_module",
    "input_dir",
    "input_config_dir",
    "output_dir",
    "num_cpus",
    "num_gpus",
    "num_neurons",
    "model_dir",
    "module_dir",
    "output_intermediate_dir",
)


def _training_environment(tree: Tree, seen: Tree, job_name: str, counts: Counts) -> dict[str, Any]:
    """Returns the toolkit's description of a host: `SM_TRAINING_ENV`."""
    resources: dict[str, Any] = files.read_json(tree.resources)
    channels: dict[str, Any] = files.read_json(tree.input_data)
    with files.doubting(tree.config):
        everything = hyperparameters.decode(files.read_json(tree.hyperparameters))
        return _described(seen, job_name, counts, everything, resources, channels)


def _described(
    tree: Tree,
    job_name: str,
    counts: Counts,
    everything: dict[str, Any],
    resources: dict[str, Any],
    channels: dict[str, Any],
) -> dict[str, Any]:
    program = everything.get("sagemaker_program")
    environment = {
        "additional_framework_parameters": hyperparameters.of_framework(everything),
        "channel_input_dirs": {name: str(tree.data / name) for name in channels},
        "framework_module": None,
        "hyperparameters": hyperparameters.of_script(everything),
        "input_config_dir": str(tree.config),
        "input_data_config": channels,
        "input_dir": str(tree.input),
        "is_modelparallel_enabled": None,
        "job_name": job_name,
        "log_level": everything.get("sagemaker_container_log_level", LOG_LEVEL),
        "model_dir": str(tree.model),
        "module_dir": str(everything.get("sagemaker_submit_directory", tree.code)),
        "module_name": None if program is None else str(program).removesuffix(".py"),
        "num_cpus": counts.cpus,
        "num_gpus": counts.gpus,
        "num_neurons": 0,
        "output_data_dir": str(tree.output_data),
        "output_dir": str(tree.output),
        "output_intermediate_dir": str(tree.intermediate),
        "resource_config": resources,
        "user_entry_point": program,
    }
    return environment | _hosts(resources, environment["additional_framework_parameters"])


def _hosts(resources: Mapping[str, Any], framework: Mapping[str, Any]) -> dict[str, Any]:
    current, hosts = resources["current_host"], list(resources["hosts"])
    group = resources.get("current_group_name", GROUP)
    groups = {each["instance_group_name"]: each for each in resources.get("instance_groups", [])}
    is_distributed = any(framework.get(name, False) for name in _DISTRIBUTIONS)
    distributed = framework.get(
        "sagemaker_distribution_instance_groups", [group] if is_distributed else []
    )
    distribution_hosts = [
        host for name in groups if name in distributed for host in groups[name]["hosts"]
    ]
    if not groups:  # a resourceconfig.json from before instance groups
        distribution_hosts = hosts
    master = (distribution_hosts or hosts)[0]
    found = {
        "current_host": current,
        "current_instance_group": group,
        "current_instance_group_hosts": groups[group]["hosts"] if group in groups else [],
        "current_instance_type": resources.get("current_instance_type", "local"),
        "distribution_hosts": distribution_hosts,
        "distribution_instance_groups": distributed,
        "hosts": hosts,
        "instance_groups": list(groups),
        "instance_groups_dict": groups,
        "is_hetero": len(groups) > 1,
        "is_master": current == master,
        "master_hostname": master,
        "network_interface_name": resources.get("network_interface_name", INTERFACE),
    }
    topology = resources.get("topology")
    return found | ({} if topology is None else {"topology": topology})
