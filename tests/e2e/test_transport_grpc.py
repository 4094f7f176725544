"""Runs one test over transport "grpc" for each kind of exchange, and for each end of a worker.

The parent works the same with both transports, so other tests run over "shm".
This is a separate module because another transport starts other workers.
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
import test_custom_loop as custom_loop
import test_evaluate as evaluate
import test_failures as failures
import test_numerics as numerics
import test_parity as parity
import test_predict as predict
import test_sparse_embedding as embedding

from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError
from nanotf.keras import nano
from nanotf.keras.layers import Embedding
from nanotf.pool import transports, warm

pytestmark = pytest.mark.own_pool


def two_workers() -> Any:
    """Returns `nano` for two workers over the default transport, set by the fixture."""
    return nano(num_processes=2)


CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    # sums of gradients: dense, with a last batch of fewer rows than workers; of rows; in bfloat16;
    # in a custom loop
    (parity.test_arrays_float64, {"rows": 201, "batch_size": 50}),
    (embedding.test_the_penalty_with_two_processes, {"layer": Embedding, "mask_zero": False}),
    (bfloat16.test_exact_sums, {"policy": "mixed_bfloat16", "optimizer": "Adam"}),
    (custom_loop.test_follows_one_process, {"run_on": two_workers, "optimizer": "adam"}),
    # gathers: of predictions for a loss, of values in a custom loop
    (numerics.test_losses, {"name": "dice"}),
    (bfloat16.test_gathers_and_variables, {}),
    # sums and averages of a step beside gradients
    (arguments.test_synchronized_batch_normalization, {}),
    (captured.test_variables_of_losses, {"sets": True}),
    # several steps without an optimizer
    (evaluate.test_two_outputs_with_stateful_metrics, {"return_dict": True}),
    (predict.test_arrays, {}),
    # state sent to a callback and back, and from call to call
    (callbacks.test_changes_by_a_batch_hook_hold_from_the_next_step, {}),
    (parity.test_two_processes_one_process_and_two_again, {}),
    # ends of workers
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


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_same_results_as_over_shm(case: Any, request: pytest.FixtureRequest) -> None:
    test, given = case
    names = inspect.signature(test).parameters
    test(
        **{name: given[name] if name in given else request.getfixturevalue(name) for name in names}
    )
    assert warm._pool is not None
    assert warm._pool.transport == "grpc", "the test ran over another transport"


def test_several_steps_in_one_execution() -> None:
    if not is_keras_3():
        arguments.test_ways_to_run_steps(None, {"steps_per_execution": 3})
        return
    model = parity.small_cnn()
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    x, y = parity.digits(20)
    with pytest.raises(InvalidArgumentError, match=r"Received: .*steps_per_execution=2.*'shm'"):
        model.fit(x, y, verbose=0, num_processes=2)
