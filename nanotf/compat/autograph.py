"""A rule that AutoGraph lacks (TensorFlow 2.16 with tf_keras).

`tensorflow.python.autograph.core.config.CONVERSION_RULES` names the packages whose code is
not converted. In 2.16 it names `keras` but not `tf_keras`, so that the first trace of every
legacy model converts all of tf_keras, which takes 11 to 16 s. Later versions have the rule.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config


def leave_tf_keras_alone() -> None:
    """Adds the missing rule to AutoGraph, in this process."""
    rules = config.CONVERSION_RULES
    if any(getattr(rule, "_prefix", None) == "tf_keras" for rule in rules):
        return
    config.CONVERSION_RULES = (config.DoNotConvert("tf_keras"), *rules)
