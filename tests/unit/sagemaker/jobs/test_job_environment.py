"""The variables of a script, byte by byte, as the SageMaker training toolkit writes them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from nanotf.sagemaker.jobs import hyperparameters, script_variables
from nanotf.sagemaker.jobs.script_variables import Counts
from nanotf.sagemaker.jobs.tree import Tree
from nanotf.wire import files

VALUES = {
    "epochs": 10,
    "learning-rate": 0.1,
    "opt": "ad\u00e4m",
    "flag": True,
    "nothing": None,
    "sagemaker_program": "train.py",
    "sagemaker_submit_directory": "/opt/ml/code",
    "sagemaker_container_log_level": 20,
    "sagemaker_job_name": "job-1",
    "sagemaker_parameter_server_enabled": True,
}
CHANNELS = {
    "train": {
        "TrainingInputMode": "File",
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": "None",
    },
    "test": {"TrainingInputMode": "Pipe", "ContentType": "x"},
}
# `BASE` is the base folder.
EXPECTED = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_HPS": r'{"epochs":10,"flag":true,"learning-rate":0.1,"nothing":null,"opt":"ad\u00e4m"}',
    "SM_USER_ENTRY_POINT": "train.py",
    "SM_FRAMEWORK_PARAMS": '{"sagemaker_parameter_server_enabled":true}',
    "SM_RESOURCE_CONFIG": '{"current_group_name":"homogeneousCluster","current_host":"algo-2",'
    '"current_instance_group":"homogeneousCluster","current_instance_type":"local",'
    '"hosts":["algo-1","algo-2"],"instance_groups":[{"hosts":["algo-1","algo-2"],'
    '"instance_group_name":"homogeneousCluster","instance_type":"local"}],'
    '"network_interface_name":"eth0"}',
    "SM_INPUT_DATA_CONFIG": '{"test":{"ContentType":"x","TrainingInputMode":"Pipe"},'
    '"train":{"RecordWrapperType":"None","S3DistributionType":"FullyReplicated",'
    '"TrainingInputMode":"File"}}',
    "SM_OUTPUT_DATA_DIR": "BASE/output/data",
    "SM_CHANNELS": '["test","train"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_CURRENT_INSTANCE_TYPE": "local",
    "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster",
    "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-1","algo-2"]',
    "SM_INSTANCE_GROUPS": '["homogeneousCluster"]',
    "SM_INSTANCE_GROUPS_DICT": '{"homogeneousCluster":{"hosts":["algo-1","algo-2"],'
    '"instance_group_name":"homogeneousCluster","instance_type":"local"}}',
    "SM_DISTRIBUTION_INSTANCE_GROUPS": '["homogeneousCluster"]',
    "SM_IS_HETERO": "false",
    "SM_MODULE_NAME": "train",
    "SM_LOG_LEVEL": "20",
    "SM_FRAMEWORK_MODULE": "",
    "SM_INPUT_DIR": "BASE/input",
    "SM_INPUT_CONFIG_DIR": "BASE/input/config",
    "SM_OUTPUT_DIR": "BASE/output",
    "SM_NUM_CPUS": "3",
    "SM_NUM_GPUS": "0",
    "SM_NUM_NEURONS": "0",
    "SM_MODEL_DIR": "BASE/model",
    "SM_MODULE_DIR": "/opt/ml/code",
    "SM_USER_ARGS": r'["--epochs","10","--flag","True","--learning-rate","0.1","--nothing","",'
    r'"--opt","ad\u00e4m"]',
    "SM_OUTPUT_INTERMEDIATE_DIR": "BASE/output/intermediate",
    "SM_CHANNEL_TEST": "BASE/input/data/test",
    "SM_CHANNEL_TRAIN": "BASE/input/data/train",
    "SM_HP_EPOCHS": "10",
    "SM_HP_LEARNING-RATE": "0.1",
    "SM_HP_OPT": "ad\u00e4m",
    "SM_HP_FLAG": "true",
    "SM_HP_NOTHING": "",
    "TRAINING_JOB_NAME": "job-1",
    "TRAINING_JOB_ARN": "local:training-job/job-1",
    "SAGEMAKER_JOB_NAME": "job-1",
    "SAGEMAKER_REGION": "",
    "SAGEMAKER_BASE_DIR": "BASE",
    "CURRENT_HOST": "algo-2",
}


def _tree(base: pathlib.Path, **resources: Any) -> Tree:
    tree = Tree(base)
    tree.make()
    files.write_json(tree.hyperparameters, hyperparameters.encode(VALUES))
    configuration = script_variables.resource_config(["algo-2", "algo-1"], "algo-2")
    files.write_json(tree.resources, configuration | resources)
    files.write_json(tree.input_data, CHANNELS)
    return tree


def test_variables(tmp_path: pathlib.Path) -> None:
    found = script_variables.variables(_tree(tmp_path), "job-1", Counts(3, 0))
    training = found.pop("SM_TRAINING_ENV")
    assert found == {n: v.replace("BASE", str(tmp_path)) for n, v in EXPECTED.items()}
    assert training == json.dumps(json.loads(training), sort_keys=True, separators=(",", ":"))


def test_the_paths_that_a_script_sees(tmp_path: pathlib.Path) -> None:
    seen = Tree(pathlib.Path("/seen"))
    found = script_variables.variables(_tree(tmp_path), "job-1", Counts(3, 0), seen)
    assert str(tmp_path) not in found.pop("SM_TRAINING_ENV")
    assert found == {n: v.replace("BASE", "/seen") for n, v in EXPECTED.items()}


def test_the_description_of_the_training_environment(tmp_path: pathlib.Path) -> None:
    found = script_variables.variables(_tree(tmp_path), "job-1", Counts(3, 0))
    training = json.loads(found["SM_TRAINING_ENV"])
    assert training["hyperparameters"] == json.loads(EXPECTED["SM_HPS"])
    assert training["channel_input_dirs"]["train"] == f"{tmp_path}/input/data/train"
    assert (training["is_master"], training["master_hostname"]) == (False, "algo-1")
    assert training["distribution_hosts"] == ["algo-1", "algo-2"]
    assert training["job_name"] == "job-1"
    assert set(training) == {
        *("additional_framework_parameters", "channel_input_dirs", "current_host"),
        *("current_instance_group", "current_instance_group_hosts", "current_instance_type"),
        *("distribution_hosts", "distribution_instance_groups", "framework_module", "hosts"),
        *("hyperparameters", "input_config_dir", "input_data_config", "input_dir"),
        *("instance_groups", "instance_groups_dict", "is_hetero", "is_master"),
        *("is_modelparallel_enabled", "job_name", "log_level", "master_hostname", "model_dir"),
        *("module_dir", "module_name", "network_interface_name", "num_cpus", "num_gpus"),
        *("num_neurons", "output_data_dir", "output_dir", "output_intermediate_dir"),
        *("resource_config", "user_entry_point"),
    }


def test_topology_only_if_there_is_one(tmp_path: pathlib.Path) -> None:
    tree = _tree(tmp_path, topology={"rack": 1})
    found = script_variables.variables(tree, "job-1", Counts(1, 0))
    assert found["SM_TOPOLOGY"] == '{"rack":1}'


def test_files_without_optional_keys(tmp_path: pathlib.Path) -> None:
    tree = _tree(tmp_path)
    files.write_json(tree.resources, {"current_host": "a", "hosts": ["a"]})
    found = script_variables.variables(tree, "job-1", Counts(1, 0))
    assert found["SM_NETWORK_INTERFACE_NAME"] == "eth0"
    assert found["SM_CURRENT_INSTANCE_GROUP"] == "homogeneousCluster"
    assert found["SM_INSTANCE_GROUPS"] == "[]"
    assert found["SM_IS_HETERO"] == "false"


@pytest.mark.parametrize(
    ("value", "text"),
    [("a b", "a b"), (None, ""), (1, "1"), (1.5, "1.5"), (False, "false"), ({"b": 1, "a": [1, 2]},
     '{"a":[1,2],"b":1}')],
)  # fmt: skip
def test_values(value: Any, text: str) -> None:
    assert script_variables.format_value(value) == text


def test_counts_are_those_of_usable_cores() -> None:
    from nanotf.machine.cpus import describe_machine

    assert script_variables.count_cpus() == len(describe_machine().usable_cores())
