"""One microbatch's way through this process's stage: forward, results, backward.

The operations of all passes form one line, in the order of the schedule: each begins when the one
before it has ended (`Line`). So a partition has as many activations at a time as its schedule says,
and only one operation waits for another process at a time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.errors import UnavailableError
from nanotf.sagemaker.smp import bodies, exchange, runtime
from nanotf.sagemaker.smp.cut import EVERYWHERE, Crossing, Cut, GradientFlow
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import Label, StepTimes


class Line:
    """The order in which a partition's operations run.

    Args:
        times: those of the step.

    Attributes:
        last: the `tf.Operation`s that the next one waits for.
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.last: list[Any] = []

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Makes operations of this context wait for those before it."""
        with tf.control_dependencies(self.last):
            yield

    def ends_with(self, tensors: Sequence[Any]) -> None:
        """Makes the next operation wait for these tensors.

        TensorFlow may inline the call that computes a tensor. What depends on the call's operation
        then waits for its side effects alone; what depends on a copy of a result, for the result.
        """
        self.last = [tf.identity(tensor).op for tensor in tensors if tensor is not None]


class MicrobatchPass:
    """A microbatch in this process's stage.

    Args:
        cut: of the microbatch's call of the model.
        variables: the stage's trainable ones.
        flow: the partitions through which gradients flow.
        line: shared by all passes of the step.
        step: unique to the step and the same in all partitions.
        microbatch: counts from 0.
    """

    def __init__(
        self,
        cut: Cut,
        variables: list[Any],
        flow: GradientFlow,
        line: Line,
        step: str,
        microbatch: int,
    ) -> None:
        self._cut, self._stage, self._flow = cut, cut.stage, flow
        self._variables, self._line = variables, line
        self._tag, self._microbatch = f"{step}.{microbatch}", microbatch
        self._ended: Half | None = None  # a computation, until an operation notes its end
        self._arrived: list[Any] = []
        self._values: list[Any] = []
        self._tape: Any = None
        self.has_gradients = False
        # What all ranks compute around the model's call, for a comparison.
        self.seen: dict[str, list[Any]] = {}

    # ---------------------------------------------------------------------------- forward
    def forward(self, inputs: Sequence[Any]) -> None:
        """Makes the operations of the stage: receives, computes, sends."""
        # The copies wait for the line. What only depends on inputs would run at once.
        with self._line.following():
            inputs = [tf.identity(tensor) for tensor in inputs]
        self.seen["the model's inputs"] = list(inputs)
        self._arrived = self._receive_arrivals()
        with tf.GradientTape(watch_accessed_variables=False) as self._tape:
            self._tape.watch([*_floating(self._arrived), *self._variables])
            self._values = list(self._stage.function(*inputs, *self._arrived))
        self._line.ends_with(self._values)
        with self._ending(Half.FORWARD):
            self._send_forward()

    def _receive_arrivals(self) -> list[Any]:
        found: dict[int, Any] = {}
        for source in sorted({c.source for c in self._stage.arrivals}):
            places = [i for i, c in enumerate(self._stage.arrivals) if c.source == source]
            specs = [_spec(self._stage.arrivals[i].tensor) for i in places]
            found.update(zip(places, self._receive(source, "forward", specs), strict=True))
        return [found[i] for i in range(len(found))]

    def _send_forward(self) -> None:
        departures = self._stage.departures
        for consumer in _consumers(departures):
            places = [i for i, c in enumerate(departures) if consumer in c.consumers]
            self._send([consumer], "forward", [self._values[i] for i in places])
        own = [
            value
            for value, result in zip(
                self._values[len(departures) :], self._stage.results, strict=True
            )
            if self._cut.owners[result] is not EVERYWHERE
        ]
        others = [n for n in range(runtime.mp_size()) if n != runtime.mp_rank()]
        if own:
            self._send(others, "results", own)

    # ---------------------------------------------------------------------------- results
    def results(self) -> list[Any]:
        """Makes the operations that receive the call's results; returns all results."""
        computed = self._values[len(self._stage.departures) :]
        found = dict(zip(self._stage.results, computed, strict=True))
        for owner in sorted({o for o in self._cut.owners if o is not EVERYWHERE}):
            if owner != runtime.mp_rank():
                places = [i for i, o in enumerate(self._cut.owners) if o == owner]
                specs = [self._cut.outputs[i] for i in places]
                found.update(zip(places, self._receive(owner, "results", specs), strict=True))
        # `joined` connects them with the gradients of all partitions.
        return [tf.stop_gradient(found[i]) for i in range(len(found))]

    def joined(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns the results, with gradients. Called where the user's tape records.

        Args:
            inputs: the tensors among the call's arguments.
            results: those of `results`.
        """
        # The gradients arrive at reads of the variables, so that a tape and `tf.gradients` both
        # find them.
        reads = [variable.read_value() for variable in self._variables]
        guarded = [_without_gradient(tensor) for tensor in _floating(inputs)]
        # TensorFlow keeps the function `gradient` for good, and so would keep the model.
        weak = weakref.ref(self)

        @tf.custom_gradient
        def join(*tensors: Any) -> Any:
            kept = tensors[len(reads) + len(guarded) :]

            def gradient(*cotangents: Any) -> list[Any]:
                this = weak()
                if this is None:
                    raise UnavailableError(
                        "Gradients are computed in the function decorated by smp.step. Received: "
                        "a call of tape.gradient or smp.gradients after it. Return them from there."
                    )
                zeros = [tf.zeros_like(tensor) for tensor in guarded]
                with bodies.current().reads.paused():
                    found = this._backward(cotangents)
                return [*found, *zeros, *(None for _ in kept)]

            return [tf.identity(tensor) for tensor in kept], gradient

        return list(join(*reads, *guarded, *results))

    # --------------------------------------------------------------------------- backward
    def _backward(self, of_results: Sequence[Any]) -> list[Any]:
        """Makes the operations of the gradients; returns those of the stage's variables.

        Args:
            of_results: the gradients of the loss by the call's results. Each partition computes
                them from the same results; only the one that computed a result uses its gradient.
        """
        self._check_gradients()
        self.has_gradients = True
        given = [cotangent for cotangent in of_results if cotangent is not None]
        self.seen["the loss's gradients by the model's results"] = _floating(given)
        if self._flow.asking[0] == runtime.mp_rank():
            for number in self._flow.passive:
                wanted = [of_results[i] for i in self._floating_results(number)]
                if wanted:
                    self._send([number], "cotangents", wanted)
        if runtime.mp_rank() not in self._flow.carrying:  # the call uses no variable of these
            return [None for _ in self._variables]
        return self._computed(of_results)

    def _floating_results(self, partition: int) -> list[int]:
        """Returns the indices of the results of numbers that a partition computes."""
        return [
            i
            for i, (owner, spec) in enumerate(zip(self._cut.owners, self._cut.outputs, strict=True))
            if owner in (partition, EVERYWHERE) and spec.dtype.is_floating
        ]

    def backward_for_others(self) -> None:
        """Makes the operations of the gradients that earlier partitions need.

        For a partition without trainable variables, whose function does not ask for gradients.
        """
        places = self._floating_results(runtime.mp_rank())
        specs = [self._cut.outputs[i] for i in places]
        found: dict[int, Any] = {}
        if specs:
            received = self._receive(self._flow.asking[0], "cotangents", specs)
            found = dict(zip(places, received, strict=True))
        self._computed([found.get(i) for i in range(len(self._cut.outputs))])

    def _computed(self, of_results: Sequence[Any]) -> list[Any]:
        targets, cotangents = self._cotangents(of_results)
        arrived = _floating(self._arrived)
        found = self._tape.gradient(
            targets, [*arrived, *self._variables], output_gradients=cotangents
        )
        of_arrived = [
            tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
            for tensor, gradient in zip(arrived, found[: len(arrived)], strict=True)
        ]
        gradients = list(found[len(arrived) :])
        self._line.ends_with([*of_arrived, *gradients])
        with self._ending(Half.BACKWARD):
            self._send_backward(of_arrived)
        return gradients

    def _check_gradients(self) -> None:
        if runtime.current().pipeline == "_only_forward":
            raise UnavailableError(
                'A step with pipeline="_only_forward" computes no gradients. Received: a call of '
                'tape.gradient or smp.gradients. Use "interleaved" or "simple".'
            )
        if self.has_gradients:
            raise UnavailableError(
                "A step with several partitions computes gradients once for each microbatch. "
                "Received: a second call of tape.gradient or smp.gradients. Add up the losses, and "
                "ask for all gradients in one call."
            )

    def _cotangents(self, of_results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        departures = self._stage.departures
        received: list[list[Any]] = [[] for _ in departures]
        for consumer in _consumers(departures):
            places = [
                i
                for i, c in enumerate(departures)
                if consumer in c.consumers and c.tensor.dtype.is_floating
            ]
            specs = [_spec(departures[i].tensor) for i in places]
            arrived = self._receive(consumer, "backward", specs) if specs else []
            for place, tensor in zip(places, arrived, strict=True):
                received[place].append(tensor)
        with self._line.following():
            own = [
                None if of_results[i] is None else tf.identity(of_results[i])
                for i in self._stage.results
            ]
        summed = [tf.add_n(parts) if parts else None for parts in received]
        pairs = zip(self._values, [*summed, *own], strict=True)
        kept = [(v, c) for v, c in pairs if v.dtype.is_floating and c is not None]
        return [value for value, _ in kept], [cotangent for _, cotangent in kept]

    def _send_backward(self, of_arrived: Sequence[Any]) -> None:
        floating = [c for c in self._stage.arrivals if c.tensor.dtype.is_floating]
        for source in sorted({c.source for c in floating} & {*self._flow.carrying}):
            pairs = zip(floating, of_arrived, strict=True)
            self._send([source], "backward", [g for c, g in pairs if c.source == source])

    # ----------------------------------------------------------------------------- mailbox
    @contextlib.contextmanager
    def _ending(self, kind: Half) -> Iterator[None]:
        """Makes the first message of this context note that a computation has ended.

        Without messages, an operation of its own does.
        """
        self._ended = kind
        yield
        if self._ended is not None:
            with self._line.following():
                self._line.last = [exchange.note(self._line.times, self._label(waits=False))]

    def _label(self, waits: bool) -> Label:
        ended, self._ended = self._ended, None
        return Label(self._microbatch, ended, waits)

    def _send(self, partitions: Sequence[int], what: str, tensors: Sequence[Any]) -> None:
        tag, label = f"{self._tag}.{what}", self._label(waits=False)
        with self._line.following():
            self._line.last = [exchange.send(partitions, tag, tensors, self._line.times, label)]

    def _receive(self, partition: int, what: str, specs: Sequence[Any]) -> list[Any]:
        tag, label = f"{self._tag}.{what}", self._label(waits=True)
        with self._line.following():
            found = exchange.receive(partition, tag, specs, self._line.times, label)
        self._line.last = [found[0].op]  # one operation gives them all
        return found


def _floating(tensors: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor.dtype.is_floating]


def _spec(tensor: Any) -> Any:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _consumers(crossings: Sequence[Crossing]) -> list[int]:
    return sorted({consumer for crossing in crossings for consumer in crossing.consumers})


@tf.custom_gradient
def _without_gradient(tensor: Any) -> Any:
    def gradient(_: Any) -> Any:
        raise UnavailableError(
            "A model in several partitions gives gradients of its variables, not of its inputs. "
            f"Received: a gradient through an input of shape {tensor.shape}. Put what computes the "
            "input into the model's call."
        )

    return tf.identity(tensor), gradient
