"""Checks that every private name of TensorFlow and Keras that nanotf uses is where nanotf looks.

If TensorFlow or Keras moves a name, these tests fail first, and name it. The other
`test_compat_*.py` run what uses these names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compiled_model import compiled_model

from nanotf.compat import (
    autograph,
    build_facts,
    containers,
    custom_gradients,
    distribute,
    keras_callbacks,
    keras_common,
    keras_compiling,
    keras_layers,
    keras_metrics,
    keras_models,
    keras_optimizers,
    keras_runs,
    one_replica,
    quiet_bars,
    step_errors,
    values,
    versions,
)
from nanotf.compat.generation import generation
from nanotf.compat.keras_epochs import DataArguments
from nanotf.compat.keras_session import KerasSession
from nanotf.compat.replacements import Override
from nanotf.ranks import rank_overrides
from nanotf.region import overrides
from nanotf.sagemaker.smp import steps
from nanotf.shipping.objects import heap

pytestmark = pytest.mark.both_generations

IS_KERAS_3 = versions.is_keras_3()
L = tf.keras.layers


def _module(path: str) -> Any:
    return importlib.import_module(f"tensorflow.python.distribute.{path}")


def test_values_of_checkpoints() -> None:
    module = importlib.import_module("tensorflow.python.trackable.base")
    value = object.__new__(module.CheckpointInitialValue)
    value.wrapped_value = 1.0
    assert float(distribute.initial_tensor(value, tf.float32)) == 1.0


def test_session_of_keras() -> None:
    """It is used when a layer is named, or a graph made; else it is as it was."""
    session = KerasSession()
    assert session.is_used()  # nobody knows what was before
    session.clear()
    session.begins()
    assert not session.is_used()
    L.Dense(1)
    assert session.is_used()
    session.clear()
    session.begins()
    with tf.compat.v1.get_default_graph().as_default():
        tf.constant(1)
    assert session.is_used()
    session.clear()


def test_default_strategy() -> None:
    default = _module("distribute_lib")._get_default_strategy()
    assert default is tf.distribute.get_strategy()
    for name in one_replica.STRATEGIES:
        cls = functools.reduce(getattr, name.split("."), tf.distribute)
        assert issubclass(cls, tf.distribute.Strategy)


DISTRIBUTE = [
    ("collective_all_reduce_strategy", "CollectiveAllReduceExtended"),
    ("cross_device_ops", "CollectiveAllReduce"),
    ("cross_device_utils", "CollectiveReplicaLauncher"),
    ("cluster_resolver.cluster_resolver", "SimpleClusterResolver"),
    ("cluster_resolver.cluster_resolver", "ClusterSpec"),
]


@pytest.mark.parametrize(("module", "name"), DISTRIBUTE)
def test_tensorflow_module(module: str, name: str) -> None:
    assert inspect.isclass(getattr(_module(module), name))


@pytest.mark.parametrize(
    "name", ["_initialize_local", "_get_variable_creator_initial_value", "_initialize_multi_worker"]
)
def test_methods_of_the_strategy(name: str) -> None:
    assert callable(getattr(distribute.Extended, name))


@pytest.mark.parametrize("name", ["all_reduce", "batch_all_reduce", "_all_gather", "all_gather"])
def test_methods_of_the_launcher(name: str) -> None:
    assert callable(getattr(distribute.Launcher, name))


@pytest.fixture(scope="module")
def local_strategy() -> Any:
    """Returns a strategy in its local mode: no server, one worker."""
    resolver = distribute.empty_cluster()
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


ATTRIBUTES = [
    "_num_workers",
    "_id_in_cluster",
    "_is_chief",
    "_task_type",
    "_task_id",
    "_cross_device_ops",
    "_host_cross_device_ops",
    "_collective_keys",
    "_communication_options",
    "_worker_device",
]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_a_local_strategy(local_strategy: Any, name: str) -> None:
    assert hasattr(local_strategy.extended, name)


def test_attributes_of_the_collectives(local_strategy: Any) -> None:
    operations = local_strategy.extended._cross_device_ops
    assert list(operations._devices)
    launcher = operations._launchers[0]
    assert launcher._device


def test_collectives_are_rebuilt_with_another_launcher() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=distribute.empty_cluster()
    )
    devices: list[str] = []
    distribute.use_launcher(strategy.extended, 3, lambda device: devices.append(device) or device)
    operations = strategy.extended._cross_device_ops
    assert operations._launchers == list(operations._devices)
    assert operations._group_size == 3 * len(operations._devices)
    assert len(devices) == len(operations._devices) + 1, "the host's collectives as well"


def test_eager_reductions_make_no_pool_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=distribute.empty_cluster()
    )
    made: list[int] = []

    def refuse(threads: int) -> Any:
        made.append(threads)
        raise OSError("no semaphores")

    monkeypatch.setattr(_module("cross_device_ops").multiprocessing.pool, "ThreadPool", refuse)
    operations = strategy.extended._cross_device_ops
    options = strategy.extended._communication_options

    def reduced(value: Any) -> Any:
        three = _module("values").PerReplica((value,))
        return operations.reduce_implementation(tf.distribute.ReduceOp.SUM, three, three, options)

    with pytest.raises(OSError, match="no semaphores"):
        reduced(tf.constant(3.0))
    distribute.reduce_without_semaphores(strategy.extended)
    assert float(reduced(tf.constant(3.0))) == 3.0
    assert float(tf.function(reduced)(tf.constant(3.0))) == 3.0
    assert made == [1]


def test_rank_can_be_set() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=distribute.empty_cluster()
    )
    distribute.set_rank(strategy.extended, 1, 2)
    assert strategy.num_replicas_in_sync == 2


def test_keras_classes() -> None:
    assert inspect.isclass(keras_models.functional_class())
    assert issubclass(keras_models.functional_class(), tf.keras.Model)
    assert inspect.isclass(keras_models.callback_list_class())
    assert keras_models.model_class() is tf.keras.Model
    assert keras_models.sequential_class() is tf.keras.Sequential
    assert keras_models.embedding_class() is L.Embedding
    assert keras_optimizers.adam_class() is tf.keras.optimizers.Adam


def test_the_build_reports_its_use_of_onednn() -> None:
    facts = build_facts.build_facts()
    assert facts["tensorflow"] == tf.__version__
    assert facts["keras"].split()[0] == versions.keras_module_name()
    assert type(build_facts.uses_onednn()) is bool


def test_compile_state() -> None:
    model = compiled_model()
    assert generation().is_compiled(model)
    assert not generation().is_compiled(tf.keras.Sequential([L.Dense(1)]))
    arguments = keras_compiling.compile_arguments(model)
    assert arguments["loss"] == "mse"
    assert arguments["metrics"] == ["mae"]


def test_layers_of_a_model_in_order() -> None:
    layers = list(compiled_model()._flatten_layers(include_self=False))
    assert [type(layer).__name__ for layer in layers if layer.weights] == ["Dense"]


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's names")
def test_keras_3_names() -> None:
    assert callable(tf.keras.Model._maybe_symbolic_build)
    assert tf.keras.Sequential()._distribute_strategy is None
    assert callable(keras_common.source_module("backend").compute_output_spec)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's names")
def test_keras_3_names_of_a_trained_model() -> None:
    model = compiled_model()
    specs = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))
    keras_optimizers.build_for_training(model, specs)
    assert model.optimizer.built
    assert keras_metrics.metric_variables(model)
    assert isinstance(model._compile_loss.metrics, list)
    assert model.optimizer.use_ema is False


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 2's names")
def test_keras_2_names() -> None:
    model = compiled_model()
    assert int(model._train_counter) == int(model._test_counter) == 0
    assert callable(model.compiled_loss.build)
    assert callable(model.compiled_metrics.build)


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's names")
def test_data_adapters_of_keras_3() -> None:
    base = keras_common.source_module("trainers.epoch_iterator").EpochIterator
    names = "_enumerate_iterator", "_get_iterator", "catch_stop_iteration", "reset"
    assert all(callable(getattr(base, name)) for name in names)
    assert callable(base._interrupted_warning)
    loop = base(np.zeros((5, 2)), batch_size=2)
    assert loop._current_iterator is loop._epoch_iterator is None
    adapters = keras_common.source_module("trainers.data_adapters")
    adapter = loop.data_adapter
    assert isinstance(adapter, adapters.ArrayDataAdapter)
    assert (adapter._size, adapter._batch_size, len(adapter._inputs)) == (3, 2, 5)
    assert (adapter._num_samples, adapter._shuffle) == (5, False)
    dataset = tf.data.Dataset.range(3).batch(2)
    assert isinstance(base(dataset).data_adapter, adapters.TFDatasetAdapter)
    slicing = keras_common.source_module("trainers.data_adapters.array_slicing")
    assert callable(slicing.convert_to_sliceable)
    assert callable(slicing.train_validation_split)
    assert hasattr(adapters.PyDatasetAdapter(_Batches()), "enqueuer")
    for name in ("get_numpy_iterator", "get_tf_dataset", "num_batches"):
        assert hasattr(adapters.GeneratorDataAdapter, name)


def test_batches_that_keras_looks_at() -> None:
    data = _Batches()
    generation().open_data(compiled_model(), DataArguments(data))
    assert data.read == list(range(generation().batches_looked_at()))


class _Batches(getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return np.zeros((3, 2)), np.zeros(3)


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 2's names")
def test_data_adapters_of_keras_2() -> None:
    keras = keras_common.source_module("engine.data_adapter")
    names = (
        "select_data_adapter train_validation_split _check_data_cardinality "
        "_make_class_weight_map_fn pack_x_y_sample_weight _is_pandas_series"
    )
    assert all(callable(getattr(keras, name)) for name in names.split())
    assert callable(
        keras_common.source_module("engine.training_utils").handle_partial_sample_weights
    )
    handler = keras.DataHandler(_Batches(), model=compiled_model())
    assert isinstance(handler._adapter, keras.KerasSequenceAdapter)
    assert issubclass(keras.KerasSequenceAdapter, keras.GeneratorDataAdapter)
    assert isinstance(handler._dataset, tf.data.Dataset)
    assert handler._insufficient_data is False
    assert handler._adapter._enqueuer is None
    assert callable(handler._adapter._standardize_batch)
    parameters = list(inspect.signature(handler._adapter._handle_multiprocessing).parameters)
    assert parameters == ["x", "workers", "use_multiprocessing", "max_queue_size"]
    assert keras.select_data_adapter([1.0], None) is keras.ListsOfScalarsDataAdapter
    assert keras.select_data_adapter(np.ones(3), None) is keras.TensorLikeDataAdapter
    assert keras.select_data_adapter(tf.data.Dataset.range(3), None) is keras.DatasetAdapter
    assert int(compiled_model()._steps_per_execution.numpy()) == 1


def test_compile_checks() -> None:
    generation().check_compiled(compiled_model(), "fit")
    with pytest.raises((ValueError, RuntimeError), match="compile"):
        generation().check_compiled(tf.keras.Sequential([L.Dense(1)]), "evaluate")


def test_names_of_evaluate_and_predict() -> None:
    trainer = keras_common.source_module(
        "backend.tensorflow.trainer" if IS_KERAS_3 else "engine.training"
    )
    parameters = list(inspect.signature(trainer.reduce_per_replica).parameters)
    assert parameters == ["values", "strategy", "reduction"]
    joined = keras_runs.join_batches([tf.ones([2, 3]), tf.ones([1, 3])])
    assert joined.shape == (3, 3)
    assert isinstance(keras_runs.join_batches([tf.ones([2, 3]), tf.ones([1, 2])]), tf.RaggedTensor)
    model = compiled_model()
    keras_metrics.build_metrics(model, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])))
    assert len(keras_optimizers.optimizer_variables(model.optimizer)) <= 2, "no slots"
    logs = {"mae": 2.0, "loss": 1.0}
    assert generation().metrics_in_order(model, logs)[0] == 1.0
    assert generation().metrics_in_order(model, {"loss": 1.0}) == 1.0
    keras_runs.set_step_count(model, "predict", None if IS_KERAS_3 else 3)
    assert keras_runs.step_count(model, "predict") == (None if IS_KERAS_3 else 3)


def test_names_of_embedding_and_adam() -> None:
    assert callable(keras_optimizers.adam_class()._clip_gradients)
    assert IS_KERAS_3 or callable(keras_optimizers.adam_class()._deduplicate_sparse_grad)
    layer = L.Embedding(3, 2)
    layer.build((None,))
    table = layer._embeddings if IS_KERAS_3 else layer.embeddings
    assert keras_layers.variable_here(table) is keras_common.tf_variable(table)
    optimizer = tf.keras.optimizers.Adam(amsgrad=True)
    optimizer.build([table])
    for slot in keras_optimizers.adam_slots(optimizer, keras_common.tf_variable(table)):
        assert isinstance(slot, tf.Variable) and slot.shape == (3, 2)
    if not IS_KERAS_3:
        assert callable(optimizer.aggregate_gradients)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        mirrored = tf.Variable(1.0)
    assert callable(mirrored._get)


def test_autograph_rules() -> None:
    rules = autograph.config.CONVERSION_RULES
    named = [rule for rule in rules if getattr(rule, "_prefix", None) == "tensorflow"]
    assert named, "each rule names its packages"
    own = {"tf_keras", "nanotf"}
    without = tuple(rule for rule in rules if getattr(rule, "_prefix", None) not in own)
    with_it = autograph.leave_alone(without)
    assert len(with_it) == len(without) + 2
    assert autograph.leave_alone(with_it) == with_it


# ------------------------------------------------------------- Keras's callbacks and batch hooks
def test_private_names_of_callbacks(tmp_path: Any) -> None:
    path = str(tmp_path / "x.weights.h5")
    k = tf.keras.callbacks
    saver = k.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    assert [saver._should_save_on_batch(batch) for batch in range(4)] == [False, True] * 2
    backup = k.BackupAndRestore(str(tmp_path), save_freq=2)
    assert hasattr(backup, "_should_save_on_batch" if IS_KERAS_3 else "_batches_count")
    board = k.TensorBoard(str(tmp_path), profile_batch=0)
    if IS_KERAS_3:
        assert (board._start_batch, board._stop_batch) == (0, 0)
        assert board.write_steps_per_second is False
    else:
        assert not board._implements_train_batch_hooks()
    assert board.update_freq == "epoch"


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's names")
def test_metrics_of_an_earlier_compile_stay() -> None:
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    model.compile("sgd", "mse")
    assert model._compile_metrics._user_metrics == ["mae"]
    assert keras_compiling.compile_arguments(model)["metrics"] == ["mae"]


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's name")
def test_an_open_evaluation_can_be_forgotten() -> None:
    callbacks = tf.keras.callbacks.CallbackList([])
    callbacks.on_train_begin()
    callbacks.on_test_begin()
    keras_callbacks.forget_open_evaluation(callbacks)
    callbacks.on_test_begin()
    callbacks.on_test_end()
    callbacks.on_train_end()
    assert getattr(callbacks, "_in_begin_end_block_count", 0) == 0  # 3.10.0 does not count
    assert getattr(callbacks, "_executor", None) is None


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 3's names")
def test_keras_3_names_of_losses_and_metrics() -> None:
    model = compiled_model()
    keras_optimizers.build_for_training(model, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])))
    assert callable(model._compile_loss._flat_losses[0].loss)
    assert callable(model._loss_tracker.update_state)
    assert [m.name for m in model._compile_metrics.metrics] == ["mae"]
    assert callable(model._compile_metrics.metrics[0]._fn)
    assert callable(model.optimizer.scale_loss)
    assert len(generation().seed_variables(model)) == 1


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 2's names")
def test_keras_2_names_of_losses_and_metrics() -> None:
    assert callable(keras_common.source_module("utils.losses_utils").apply_mask)
    model = compiled_model()
    keras_optimizers.build_for_training(model, (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])))
    losses = model.compiled_loss
    assert losses._user_losses == "mse"
    assert model.compiled_metrics._conform_to_outputs([1, 2], 3) == [3, 3]
    loss = tf.keras.losses.MeanSquaredError()
    assert loss._allow_sum_over_batch_size is False
    assert callable(losses._losses[0])
    assert callable(losses._losses[0].fn)
    assert callable(losses._total_loss_mean.update_state)
    assert losses._per_output_metrics == [None]
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    assert len(keras_optimizers.optimizer_variables(scaled)) >= 3
    assert L.BatchNormalization(synchronized=True).synchronized is True


def test_names_of_compiled_models() -> None:
    model = compiled_model()
    assert model.jit_compile in (None, False)
    model.jit_compile = False
    assert keras_models.has_call(model)
    assert hasattr(tf.keras.Model().build, "_is_default")
    assert not hasattr(L.Dense(1).build, "_is_default")
    assert keras_optimizers.optimizers_of(model) == [model.optimizer]
    assert generation().steps_at_once(model) == 1


def test_attributes_of_a_variable() -> None:
    variable = tf.Variable([[1.0, 2.0]], name="own", trainable=False)
    variable.factor = 3.0
    cls, kind = values.class_of(variable), values.kind_of(variable)
    copy = values.without_value(cls, variable.shape, variable.dtype.name, kind)
    values.set_attributes(copy, values.attributes(variable))
    assert {"_unique_id", "_trainable", "factor"} <= values.attributes(variable).keys()
    assert not {"_handle", "_graph_key"} & values.attributes(variable).keys()
    assert type(copy) is type(variable) and copy.name == "own:0" and not copy.trainable
    assert copy._unique_id == variable._unique_id
    values.write(copy, [[4.0, 5.0]])
    assert copy.numpy().tolist() == [[4.0, 5.0]] and variable.numpy().tolist() == [[1.0, 2.0]]
    assert values.behind(copy) is copy


def test_attributes_that_loops_leave_in_a_model() -> None:
    model = tf.keras.Sequential([L.Input((2,)), L.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((2, 2)), np.ones((2, 1))
    model.fit(x, y, verbose=0)
    model.predict(x, verbose=0)
    names = {"history", "_self_unconditional_checkpoint_dependencies"}
    if IS_KERAS_3:
        names |= {"_eval_epoch_iterator"}
    elif versions.keras_module_name() == "tf_keras":  # the Keras of 2.14 and 2.15 does not note it
        names |= {"_called"}
    assert names <= set(vars(model))
    assert "predict_function" in model._self_unconditional_dependency_names
    left = {"predict_function", "history"}
    sent = generation().for_another_process(model, vars(model))
    assert not left & {name for name, value in sent.items() if value is not None}
    assert "predict_function" not in sent["_self_unconditional_dependency_names"]


def test_attributes_of_wrapped_dicts() -> None:
    module = tf.Module()
    module.held = {"a": 1}
    assert all(hasattr(module.held, name) for name in containers.OF_WRAPPERS)
    copy = heap_of(module.held)
    assert copy == module.held == {"a": 1}
    assert copy._self_last_wrapped_dict_snapshot == {"a": 1}
    copy["a"] = 2
    assert module.held == {"a": 1}


def heap_of(value: Any) -> Any:
    """Returns the unpickled copy of a heap that holds a value."""
    data, _ = heap.dump({"A value": value}, heap.HeapPickler)
    return heap.load(heap.Unpickler(io.BytesIO(data)))[0]


OF_RANKS = (*rank_overrides.KERAS, *rank_overrides.FILES)
OF_WORKERS = (*overrides.TABLE, *custom_gradients.TABLE, *quiet_bars.TABLE, *step_errors.TABLE)
TABLES = (*OF_WORKERS, *OF_RANKS, *steps.TABLE)
REPLACED = [row for row in TABLES if row.applies()]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "row", REPLACED, ids=lambda row: f"{row.target}{' of ranks' * (row in OF_RANKS)}"
)
def test_functions_replaced_in_workers(row: Override) -> None:
    """Each exists, and takes its replacement's arguments."""
    stock = row.found()
    assert (stock is None) == row.adds
    ours = _function(row.replacement(stock, None))
    if stock is None or not callable(ours):
        return
    given = [*inspect.signature(ours, follow_wrapped=False).parameters.values()]
    taken = [*inspect.signature(_function(stock)).parameters.values()]
    if not any(p.kind is p.VAR_POSITIONAL for p in given):
        names = [
            (p.name, q.name)
            for p, q in zip(given, taken, strict=True)
            if p.kind is not p.POSITIONAL_ONLY
        ]
        assert all(ours == theirs for ours, theirs in names)


def _function(attribute: Any) -> Any:
    """Returns the function in an attribute of a class."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


def test_registry_of_gradients() -> None:
    ops = importlib.import_module("tensorflow.python.framework.ops")
    assert ops.gradient_registry.lookup("MatMul") is not None
    assert "MatMul" in ops.gradient_registry._registry
    assert ops.RegisterGradient("A")._op_type == "A"
