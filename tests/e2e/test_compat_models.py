"""Models and optimizers of Keras are read and changed as nanotf needs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from compiled_model import compiled_model

from nanotf.compat import (
    keras_common,
    keras_compiling,
    keras_layers,
    keras_metrics,
    keras_models,
    keras_optimizers,
    versions,
)
from nanotf.compat.generation import generation

pytestmark = pytest.mark.both_generations

IS_KERAS_3 = versions.is_keras_3()
L = tf.keras.layers


def test_seeds_of_keras() -> None:
    tf.keras.utils.set_random_seed(3)

    def drawn() -> list[float]:
        if IS_KERAS_3:
            return [float(tf.keras.random.uniform([])) for _ in range(2)]
        return np.ravel(tf.keras.initializers.GlorotUniform()((1, 2))).tolist()

    drawn()
    with keras_compiling.kept_random_states():
        inside = drawn()
        tf.keras.utils.set_random_seed(4)
        drawn()
    assert drawn() == inside
    assert drawn() != inside


def test_a_class_is_saved_as_another() -> None:
    registering = tf.keras.utils

    @registering.register_keras_serializable(package="of_test")
    class Known(tf.keras.layers.Layer):  # type: ignore[misc, name-defined]
        pass

    class Other(Known):
        pass

    keras_models.save_as(Other, Known)
    assert registering.get_registered_name(Other) == "of_test>Known"
    assert registering.get_registered_object("of_test>Known") is Known


def test_global_policy_can_be_restored() -> None:
    before = generation().global_policy()
    tf.keras.mixed_precision.set_global_policy("float64")
    assert generation().global_policy().name == "float64"
    tf.keras.mixed_precision.set_global_policy(before)
    assert generation().global_policy() is before


OPTIMIZERS = ["SGD", "Adam"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_variables(name: str) -> None:
    model = compiled_model()
    model.compile(getattr(tf.keras.optimizers, name)(0.01), "mse")
    keras_optimizers.build_optimizer(model)
    found = keras_optimizers.optimizer_variables(model.optimizer)
    assert all(isinstance(variable, tf.Variable) for variable in found)
    slots = {"SGD": (0, 1, 2), "Adam": (2,)}[name]  # of each trainable variable
    extra = len(found) - 2  # the step count and the learning rate
    assert extra in {s * len(model.trainable_variables) for s in slots}


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 2 alone has tf.keras.optimizers.legacy")
def test_legacy_optimizer_variables() -> None:
    model = compiled_model()
    model.compile(tf.keras.optimizers.legacy.Adam(0.01), "mse")
    keras_optimizers.build_optimizer(model)
    assert len(keras_optimizers.optimizer_variables(model.optimizer)) >= 5


def test_model_variables_are_tensorflows() -> None:
    model = compiled_model()
    model.build((None, 3))
    assert all(isinstance(v, tf.Variable) for v in generation().model_variables(model))


def test_metrics_exist_before_the_first_step() -> None:
    model = compiled_model()
    before = len(keras_metrics.metric_variables(model))
    keras_optimizers.build_for_training(
        model, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2], tf.float32))
    )
    assert len(keras_metrics.metric_variables(model)) > before
    model.fit(tf.zeros([4, 3]), tf.zeros([4, 2]), verbose=0)


def test_the_model_tells_where_a_resumed_training_begins() -> None:
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(1)])
    assert generation().place_to_resume(model, 3, 10) == (3, 0)
    if IS_KERAS_3:
        model._initial_epoch = 5
        assert generation().place_to_resume(model, 3, 10) == (5, 0)
    else:
        generation().begin_at(model, 5, 2)
        assert generation().place_to_resume(model, 3, 10) == (5, 2)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Lion", "Adadelta", "Adamax", "AdamW"])
def test_slots_are_in_lists_of_the_optimizer(name: str) -> None:
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(3)])
    model.compile(getattr(tf.keras.optimizers, name)(), "mse")
    keras_optimizers.build_optimizer(model)
    slots = keras_optimizers.optimizer_slots(model.optimizer)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    assert slots and all([tuple(v.shape) for v in slot] == shapes for slot in slots.values())
    assert keras_optimizers.updates_elements_apart(model.optimizer, [name])
    assert keras_layers.layers_below(model)[-1] is model.layers[-1]


def test_variables_without_a_slot() -> None:
    """Adafactor keeps a placeholder for a vector, which is a variable of its own in Keras 3."""
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(3)])
    model.compile(tf.keras.optimizers.Adafactor(), "mse")
    assert keras_optimizers.optimizer_slots(model.optimizer) == {}, "not built yet"
    keras_optimizers.build_optimizer(model)
    slots = keras_optimizers.optimizer_slots(model.optimizer).values()
    shapes = {tuple(() if v is None else tuple(v.shape) for v in slot) for slot in slots}
    assert shapes == {((2,), ()), ((3,), ()), ((2, 3), (3,))}
    assert any(v is None for slot in slots for v in slot) == (not IS_KERAS_3)


def test_variables_that_an_optimizer_was_built_for() -> None:
    model, other = (tf.keras.Sequential([L.Input((2,)), L.Dense(1)]) for _ in range(2))
    optimizer = tf.keras.optimizers.Adam()
    assert keras_optimizers.is_built_for(optimizer, model.trainable_variables), "not built yet"
    optimizer.build(model.trainable_variables)
    assert keras_optimizers.is_built_for(optimizer, model.trainable_variables)
    assert not keras_optimizers.is_built_for(optimizer, model.trainable_variables[:1])
    assert not keras_optimizers.is_built_for(optimizer, other.trainable_variables)


def test_a_twin_of_an_optimizer() -> None:
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.25)
    optimizer.build(model.trainable_variables)
    twin = keras_optimizers.unbuilt_twin(optimizer)
    assert not keras_optimizers.is_built(twin) and keras_optimizers.is_built(optimizer)
    optimizer.learning_rate = 0.5
    assert float(twin.learning_rate) == 0.5
    assert keras_common.tf_variable(twin.iterations) is keras_common.tf_variable(
        optimizer.iterations
    )
