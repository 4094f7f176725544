"""The telling tests of each group, over transport "grpc"; elsewhere they run over "shm".

What one process reads, checks and calls is the same with both, so one test of a kind is enough.
They stand in one module because another transport starts other workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import test_arguments as arguments
import test_bfloat16 as bfloat16
import test_callbacks as callbacks
import test_captured as captured
import test_evaluate as evaluate
import test_failures as failures
import test_inputs as inputs
import test_models as models
import test_numerics as numerics
import test_parity as parity
import test_predict as predict
import test_trainer as trainer
import test_whole_batch_metrics as whole_batch_metrics

from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError
from nanotf.pool import transports, warm

pytestmark = pytest.mark.own_pool

CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    # inputs
    (parity.test_arrays_float64, {"rows": 201, "batch_size": 50}),
    (parity.test_arrays_float64, {"rows": 3, "batch_size": 1}),
    (parity.test_two_inputs_two_outputs, {"form": "dict", "source": "dataset"}),
    (inputs.test_kinds_of_arrays, {"name": "data_frame"}),
    (inputs.test_strings, {"source": "tensor"}),
    (inputs.test_generator, {"form": "x, y, w"}),
    (inputs.test_data_that_raise_leave_the_workers_for_the_next_call, {"name": "second_epoch"}),
    (inputs.test_data_that_raise_leave_the_workers_for_the_next_call, {"name": "validation"}),
    (inputs.test_py_dataset, {"steps": None}),
    (inputs.test_pipelines_that_workers_run, {"name": "fewer_rows_than_workers"}),
    # arguments
    (parity.test_validation_batches_steps_and_frequency, {}),
    (parity.test_sample_weight, {}),
    (arguments.test_own_steps, {"cls": arguments.OwnSteps}),
    (arguments.test_own_compile_with_two_optimizers, {}),
    (arguments.test_how_steps_are_run, {"compiled": {"run_eagerly": True}}),
    (arguments.test_mixed_precision, {"policy": "mixed_float16", "of": "all"}),
    (arguments.test_random_layers_differ_between_workers_and_steps, {"name": "dropout"}),
    (arguments.test_moving_statistics_are_the_mean_over_workers, {}),
    (arguments.test_synchronized_batch_normalisation, {}),
    (bfloat16.test_exact_sums, {"policy": "mixed_bfloat16", "optimizer": "Adam"}),
    (bfloat16.test_exact_sums, {"policy": "bfloat16", "optimizer": "momentum"}),
    (bfloat16.test_gathers_and_variables, {}),
    (bfloat16.test_embedding, {}),
    # numerics
    (parity.test_optimizers, {"name": "adam"}),
    (numerics.test_optimizers, {"name": "global_clipnorm"}),
    (numerics.test_optimizers, {"name": "accumulating"}),
    (numerics.test_losses, {"name": "dice"}),
    (numerics.test_add_loss_and_regularizers, {}),
    (numerics.test_masked_targets, {"reduction": None, "weighted": True, "batch_size": 20}),
    # callbacks
    (callbacks.test_early_stopping_restores_the_best_weights, {}),
    (callbacks.test_batch_hooks_see_the_state_and_the_logs_of_all_workers, {}),
    (callbacks.test_what_a_batch_hook_changes_holds_from_the_next_step_on, {}),
    (callbacks.test_terminate_on_nan_stops_all_workers_at_that_batch, {}),
    # models
    (models.test_accelerate_takes_a_model_of_keras_applications, {}),
    (models.test_embedding_gets_sparse_gradients, {}),
    (trainer.test_metric_of_a_layer, {}),
    # evaluate and predict
    (evaluate.test_two_outputs_with_stateful_metrics, {"return_dict": True}),
    (predict.test_arrays, {}),
    (predict.test_batches_of_different_widths, {}),
    # what lies beside a model
    (captured.test_variables_of_losses, {"sets": True}),
    (captured.test_variables_of_steps, {}),
    (whole_batch_metrics.test_metrics_of_compile, {}),
    # state, and what ends it
    (parity.test_two_processes_one_process_and_two_again, {}),
    (failures.test_loss_that_raises_in_a_worker, {}),
    (failures.test_worker_killed_from_outside, {"rank": 1}),
]


def _name(case: tuple[Callable[..., Any], dict[str, Any]]) -> str:
    test, given = case
    module = test.__module__.removeprefix("test_")
    values = [getattr(value, "__name__", str(value)) for value in given.values()]
    return "-".join([module, test.__name__.removeprefix("test_"), *values])


@pytest.fixture(autouse=True)
def _default_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "DEFAULT_TRANSPORT", "grpc")


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.either_generation
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_as_over_shm(case: Any, request: pytest.FixtureRequest) -> None:
    test, given = case
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "skipif" and mark.args[0]:
            pytest.skip(mark.kwargs["reason"])
    if inspect.getmodule(test) is trainer:
        request.getfixturevalue("float64")
    names = inspect.signature(test).parameters
    test(
        **{name: given[name] if name in given else request.getfixturevalue(name) for name in names}
    )
    assert warm._pool is not None
    assert warm._pool.transport == "grpc", "the test ran over another transport"


def test_several_steps_in_one_execution() -> None:
    if not is_keras_3():
        arguments.test_how_steps_are_run(None, {"steps_per_execution": 3})
        return
    model = parity.small_cnn()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    x, y = parity.digits(20)
    with pytest.raises(InvalidArgumentError, match=r"Received: .*steps_per_execution=2.*'shm'"):
        model.fit(x, y, verbose=0, num_processes=2)
