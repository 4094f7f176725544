"""Arguments of SageMaker's models and of `deploy`: those without effect here, and old ones."""

from __future__ import annotations

from nanotf.sagemaker.argument_names import ArgumentNames

MODEL = ArgumentNames(
    "TensorFlowModel()",
    "SageMaker's model",
    without_effect=(
        "additional_model_data_sources",
        "code_location",
        "container_log_level",
        "enable_network_isolation",
        "framework_version",
        "image_config",
        "image_uri",
        "model_kms_key",
        "model_reference_arn",
        "py_version",
        "resources",
        "role",
        "sagemaker_session",
        "vpc_config",
        "vpc_config_override",
    ),
    old={"image": "image_uri", "model_server_workers": "num_processes"},
    unsupported={"git_config": "Clone the repository yourself and pass source_dir."},
)
# In `TensorFlowModel()`'s signature.
OF_MODEL = frozenset(
    ("entry_point", "source_dir", "dependencies", "env", "name", "num_processes", "predictor_cls")
)
DEPLOY = ArgumentNames(
    "deploy()",
    "SageMaker's deploy()",
    without_effect=(
        "accelerator_type",
        "accept_eula",
        "async_inference_config",
        "data_capture_config",
        "endpoint_logging",
        "endpoint_type",
        "explainer_config",
        "inference_ami_version",
        "inference_component_name",
        "inference_config_spec",
        "inference_recommendation_id",
        "kms_key",
        "managed_instance_scaling",
        "model_data_download_timeout",
        "model_reference_arn",
        "resources",
        "role",
        "routing_config",
        "serverless_inference_config",
        "tags",
        "use_compiled_model",
        "volume_size",
    ),
    # Of version 1 of the SDK, where it exchanged the model of a running endpoint.
    unsupported={"update_endpoint": "Deploy another endpoint, then delete the old one."},
)


def of_model(name: str) -> bool:
    """Returns True for an argument of `TensorFlowModel` that `deploy` of an estimator passes on."""
    return name in OF_MODEL or name in MODEL.without_effect or name in MODEL.unsupported


TRANSFORMER = ArgumentNames(
    "transformer()",
    "SageMaker's transformer()",
    without_effect=(
        "enable_network_isolation",
        "kms_key",
        "model_name",
        "role",
        "vpc_config_override",
    ),
)
TRANSFORM = ArgumentNames(
    "transform()",
    "SageMaker's transform()",
    without_effect=(
        "batch_data_capture_config",
        "experiment_config",
        "job_name",
        "logs",
        "model_client_config",
        "wait",
    ),
    unsupported={
        "input_filter": "Filter the input yourself.",
        "output_filter": "Filter the output yourself.",
        "join_source": "Join input and output yourself: they have the same order.",
        "compression_type": "Decompress the files first.",
    },
)
