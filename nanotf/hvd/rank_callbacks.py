"""Horovod's callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from nanotf.compat import keras_common, keras_optimizers
from nanotf.console import warn_once
from nanotf.errors import InvalidArgumentError
from nanotf.hvd import rank_facts
from nanotf.hvd.object_exchange import broadcast_variables
from nanotf.hvd.reductions import Average
from nanotf.hvd.tensor_exchange import reduce_all


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer state when training begins.

    Variables that only the first batch makes follow after it.

    Args:
        root_rank: int, the rank whose values all get.
        device: ignored.
        local_variables: ignored.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        # Both since training has begun: before, a rank may have changed its own.
        self._known: set[int] = set()  # ids of variables that are equal on all ranks
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._known, self._is_done = set(), False
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras makes an optimizer's slots, and a model without a known input, in the first batch.
        if not self._is_done:
            self._broadcast()
            self._is_done = True

    def _broadcast(self) -> None:
        if not self.model.built:  # Keras 2 raises if asked for its variables
            return
        # In one order on all ranks, since they build the same model.
        found = [keras_common.tf_variable(v) for v in self.model.variables]
        for optimizer in keras_optimizers.optimizers_of(self.model):
            found += keras_optimizers.optimizer_variables(optimizer)
        # The group moves numbers alone; a layer's vocabulary is part of the script.
        new = [v for v in found if id(v) not in self._known and v.dtype != tf.string]
        self._known |= {id(v) for v in new}
        broadcast_variables(new, self.root_rank)


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over ranks; later callbacks get the averages.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # The order of `logs` may differ between ranks; the names may not.
        names = sorted(logs or {})
        if names:
            # float64 has all digits of the numbers in `logs`.
            values = [tf.constant(float(logs[name]), tf.float64) for name in names]
            for name, value in zip(names, reduce_all(values, Average), strict=True):
                # Keras passes the same dict to the callbacks after this one.
                logs[name] = float(value)


class LearningRateScheduleCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Multiplies an initial learning rate by a function of the epoch.

    Args:
        initial_lr: float or None, the learning rate that is multiplied; None, as in Horovod before
            0.20, means that of the optimizer when training begins.
        multiplier: a number, default 1.0, or a function of the epoch; without `staircase` of its
            fraction, too.
        start_epoch: int, default 0, the first epoch that it changes.
        end_epoch: int or None, the first epoch that it no longer changes.
        staircase: bool, default True, changes the rate once an epoch, and not at each batch.
        momentum_correction: bool, default True; scales the momentum when the rate changes, if the
            optimizer keeps it in a variable.
        steps_per_epoch: int or None, for a rate that changes at each batch; default that of `fit`.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[Any], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self._takes_optimizers_rate = initial_lr is None  # read again by each `fit`
        # As in Horovod: a number applies as it is, from `start_epoch` on.
        is_function = callable(multiplier)
        self.staircase = staircase if is_function else True
        self.multiplier: Callable[[Any], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier
        )
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0  # `on_train_batch_begin` is told the batch alone
        self._momentum: Any = None  # to restore after the batch

    def on_train_begin(self, logs: Any = None) -> None:
        if self._takes_optimizers_rate:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if not self.staircase and not self.steps_per_epoch:
            # Keras knows it before the first epoch only for data of known length.
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise InvalidArgumentError(
                    "A learning rate that changes at each batch needs the number of batches. "
                    "Received: steps_per_epoch=None, and data of unknown length. Pass "
                    "steps_per_epoch to the callback."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:  # once an epoch, and before its first update
                self._set(epoch)
        else:
            assert self.steps_per_epoch is not None
            self._set(epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum.assign(self._momentum)
            self._momentum = None  # the next batch may keep its rate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # `History` and loggers show it by this name, as in Horovod.
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        assert self.initial_lr is not None
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        new = self.initial_lr * self.multiplier(epoch)
        # Keras assigns to a variable: a compiled step sees it.
        optimizer.learning_rate = new
        # The velocity has the old rate in it, see the paper of `LearningRateWarmupCallback`.
        if self.momentum_correction and old > 0 and new != old:
            self._correct(optimizer, new / old)

    def _correct(self, optimizer: Any, factor: float) -> None:
        momentum: Any = getattr(optimizer, "momentum", None)
        if hasattr(momentum, "assign"):
            self._momentum = float(momentum)
            momentum.assign(self._momentum * factor)
        elif momentum:  # 0 and None need no correction
            warn_once(
                "%s does not correct the momentum: this optimizer keeps it as a constant of its "
                "compiled step. Pass momentum_correction=False.",
                type(self).__name__,
            )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr` in the first epochs.

    Args:
        initial_lr: float or None, the rate after the warm-up: that of one rank, times `size()`;
            None as in `LearningRateScheduleCallback`.
        warmup_epochs: int, default 5.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: int, default 0; 1 prints a line when the warm-up ends.

    The formula is that of https://arxiv.org/abs/1706.02677, as Horovod applies it.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # Rates at the end of an epoch are round numbers.
            done = epoch + 1.0 / self.steps_per_epoch
            size = rank_facts.size()
            return 1.0 / size * (done * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        # On each rank, as in Horovod: scripts pass `verbose` on rank 0 alone.
        if epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model with the best value so far. Rank 0 writes.

    Args:
        filepath: str, the file.
        monitor, verbose, mode, save_freq: as in Keras's `ModelCheckpoint`.
    """

    def __init__(
        self,
        filepath: Any = None,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        if filepath is None:
            raise InvalidArgumentError(
                "BestModelCheckpoint needs a file. Received: filepath=None. Pass "
                'filepath="best.keras".'
            )
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=False,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With a number as `save_freq`, Keras saves here.
        if rank_facts.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Rank 0's value counts: that of its own rows, unless `MetricAverageCallback` comes before.
        if rank_facts.rank() == 0:
            super().on_epoch_end(epoch, logs)
