"""SageMaker's headers that choose a model: custom attributes, and the target model."""

from __future__ import annotations

from collections.abc import Mapping

# In lower case, as a `Request` has the names of headers.
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
TARGET = "x-amzn-sagemaker-target-model"


def attributes_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the custom attributes of a request, by name.

    They are written as `tfs-model-name=half,tfs-method=predict`. What has no such form is for
    the user's code, and is left out.

    Args:
        headers: names in lower case.
    """
    pairs = (each.partition("=") for each in headers.get(ATTRIBUTES, "").split(","))
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}
