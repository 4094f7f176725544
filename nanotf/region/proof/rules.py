"""All rules, by the kinds of operations that they are about."""

from nanotf.region.proof import (  # noqa: F401  fill the table
    axis_rules,
    element_rules,
    elementwise_rules,
    product_rules,
    shape_rules,
)
from nanotf.region.proof.rule_table import RULES, TAKES

__all__ = ["RULES", "TAKES"]
