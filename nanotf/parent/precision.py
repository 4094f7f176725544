"""The names of the precisions that `patch_tensorflow` and `nanotf run` take.

"float32" leaves Keras's global dtype policy as it is; "mixed_bfloat16" computes in bfloat16 and
keeps variables in float32.
"""

from typing import Any

from nanotf.choices import check_choice

PRECISIONS = ("float32", "mixed_bfloat16")


def check_precision(precision: Any) -> str:
    """The value of an argument `precision`.

    Raises:
        InvalidArgumentError: There is no such precision.
    """
    check_choice("precision", precision, PRECISIONS)
    return str(precision)
