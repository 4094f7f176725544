"""A call of a model's method: the parent's base of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

from nanotf.compat import (
    eager_context,
    keras_build,
    keras_common,
    keras_compiling,
    keras_layers,
    keras_metrics,
    keras_optimizers,
    keras_runs,
    step_errors,
)
from nanotf.compat.chance import Chance
from nanotf.compat.generation import generation
from nanotf.errors import ModelError
from nanotf.machine import processor
from nanotf.parent import calls, rejections, traced
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.fit_arguments import FitArguments
from nanotf.parent.reading.fit_data import FitData, Stream
from nanotf.pool import interrupts
from nanotf.shipping import orders, summaries
from nanotf.shipping.objects import heap, identities
from nanotf.shipping.state import SharedVariables, StateLayout
from nanotf.wire import messages, timing
from nanotf.wire.blocks import Block


class ModelCall(calls.Call):
    """A call of a model's method, checked and prepared before workers are needed.

    Args:
        model: a Keras model.
        size: number of workers.
        sharding: which processes read datasets, see `FitData`.

    Attributes:
        callbacks: `ParentCallbacks`, set by `begin`.
    """

    callbacks: ParentCallbacks
    can_be_abandoned = True
    quiet = False  # whether the model's prints stay out of the user's terminal
    trains = False

    def __init__(
        self, model: Any, arguments: FitArguments, size: int, sharding: str = "parent"
    ) -> None:
        super().__init__(size)
        self.model = model
        self.arguments = arguments
        self.data = FitData(model, arguments, calls.STATE_BLOCK + 1, sharding, trains=self.trains)
        # Keras's `except:` would swallow Ctrl-C, and a half-built metric ends all later calls.
        with interrupts.deferred():
            self._prepare()

    def _prepare(self) -> None:
        """Builds the model, and looks at the code of its step."""
        model = self.model
        known = set(map(id, keras_metrics.metric_state(model)))
        with keras_compiling.scope_of(model):
            step_errors.reason_first(self.build)
        # In one process Keras builds these metrics in its first step, too late to reset them before
        # the first epoch: what they hold counts.
        new = {i: v for i, v in enumerate(keras_metrics.metric_state(model)) if id(v) not in known}
        values = {place: variable.numpy() for place, variable in new.items()}
        self.unreset = {place: value for place, value in values.items() if value.any()}
        if keras_layers.computes_in_bfloat16(model):
            processor.warn_of_slow_bfloat16(
                f"bfloat16, in which the model {model.name!r} computes,"
            )
        self.traced = traced.traced(model, *self.dumped(), self.specs_by_step())
        self.numbered = self.traced.numbered
        own = self.variables_to_send()
        known = set(map(id, own + self.variables_apart()))
        self.captured = tuple(  # numbers of variables that are not the model's own
            number
            for number, obj in enumerate(self.numbered)
            if identities.has_value(obj) and id(obj) not in known
        )
        self.held = [self.numbered[number] for number in self.captured]
        self.variables = own + self.held
        self.layout = StateLayout.of(self.variables, self.size)
        self.clock.prepared = timing.now()

    def build(self) -> None:
        """Builds the user's model, as the first step in a single process would."""
        model, (specs, method) = self.model, self.first_step()
        if not keras_build.needs_call(model):
            return
        step = f"{rejections.STEPS[method]}_step"
        if keras_common.has_own_step(model, step) and not model.run_eagerly:
            # It may call the model, or parts of it, on something other than the data's inputs.
            if self.method != "predict":
                specs = self.data.keras_specs(self.data.train)  # with the rows that Keras knows
            keras_compiling.trace_step(model, step, specs)
            return
        self._call_model(specs[0] if isinstance(specs, tuple) else specs)
        if keras_build.needs_call(model) and not model.built:
            raise ModelError(
                "A model must be built before workers can get its weights. Received: model "
                f"{model.name!r}, which a call on data {specs} did not build."
            )

    def _call_model(self, x: Any) -> None:
        try:
            generation().call_on_specs(self.model, x)
        except Exception as error:
            raise ModelError(
                "A model must be built before workers can get its weights, and its inputs did "
                f"not build it. Received: model {self.model.name!r}, inputs {x}, and calling it "
                f"raised {type(error).__name__}: {error}. Call the model on a batch once, or "
                "give it an Input layer."
            ) from error

    def variables_to_send(self) -> list[Any]:
        """Returns the variables whose values the workers need."""
        return generation().model_variables(self.model)

    def variables_apart(self) -> list[Any]:
        """Returns the model's variables whose values are not sent with the others."""
        found = map(keras_optimizers.slot_variables, keras_optimizers.optimizers_of(self.model))
        return list(itertools.chain.from_iterable(found))  # large, and only training needs them

    def data_streams(self) -> list[Stream]:
        return self.data.streams

    def first_step(self) -> tuple[Any, str]:
        """Returns the specs of the first step's batch, and the name of its method."""
        return self.data.specs, self.method

    def specs_by_step(self) -> dict[str, Any]:
        """Returns Keras's specs of a batch by what the call runs: "train", "test" or "predict"."""
        return {rejections.STEPS[self.method]: self.data.keras_specs(self.data.train)}

    def dumped(self) -> tuple[bytes, list[Any]]:
        """Returns the pickled model, and the objects that are sent by number."""
        return heap.dump_model(self.model)

    def state_and_blocks(self) -> list[Block]:
        """Makes the call's blocks, and `state` in the first."""
        blocks = [self.workers.state_block(self.layout.nbytes), *self.data.blocks()]
        self.state = SharedVariables(self.layout, blocks[calls.STATE_BLOCK], self.variables)
        return blocks

    def release(self) -> None:
        del self.state

    def common(self) -> dict[str, Any]:
        """Returns the fields of `orders.ModelOrder`."""
        return {
            "heap": self.traced.heap,
            "trace": self.traced.number,
            "specs": self.data.specs,
            "layout": self.layout,
            "captured": self.captured,
            "state_block": calls.STATE_BLOCK,
            "events": self.callbacks.events,
            "waits": self.callbacks.waits,
            "chance": Chance.capture(),
            "seeding": eager_context.seeding(),
            "terminal": orders.Terminal.capture(),
            "quiet": self.quiet,
            "unreset": self.unreset,
            "summaries": summaries.has_default(),
        }

    def on_event(self, rank: int, message: messages.Event) -> None:
        """Calls a hook for which no worker waits; returns at once after the data have failed."""
        if not self._is_over(message.hook):
            self.callbacks.call(message.hook, message.index, message.logs)

    def _on_summary(self, rank: int, message: messages.Summary) -> None:
        counters = keras_runs.counters_of_steps(self.model)
        summaries.write(message, self.numbered, self.traced.summaries, counters)

    HANDLERS: ClassVar[Mapping[type, str]] = {
        **calls.Call.HANDLERS,
        messages.Event: "on_event",
        messages.Summary: "_on_summary",
    }
