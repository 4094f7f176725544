"""One microbatch's way through this process's stage: forward, results, backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from nanotf.errors import UnavailableError
from nanotf.sagemaker.smp import bodies, runtime
from nanotf.sagemaker.smp.cut import EVERYWHERE, Crossing, Cut, GradientFlow
from nanotf.sagemaker.smp.exchange import Line
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import Label


class MicrobatchPass:
    """A microbatch in this process's stage.

    Args:
        cut: of the microbatch's call of the model.
        inputs: the tensors among the call's arguments.
        variables: the stage's trainable ones.
        flow: the partitions through which gradients flow.
        line: shared by all passes of the step.
        tag: unique to the step and microbatch, and the same in all partitions.
        microbatch: counts from 0.
    """

    def __init__(
        self,
        cut: Cut,
        inputs: Sequence[Any],
        variables: list[Any],
        flow: GradientFlow,
        line: Line,
        tag: str,
        microbatch: int,
    ) -> None:
        self._cut, self._stage, self.flow = cut, cut.stage, flow
        self._inputs, self._variables, self._line = inputs, variables, line
        self._tag, self._microbatch = tag, microbatch
        self._ended: Half | None = None  # a computation, until an operation notes its end
        self._arrived: list[Any] = []  # in the order of `Stage.arrivals`
        self._values: list[Any] = []  # of `Stage.function`: departures, then results
        self._tape: Any = None  # of the stage alone, from `forward` to the gradients
        self.has_gradients = False  # the body has asked for them, which it may do once
        self.gives_gradients = False  # for any of this partition's variables
        self._wanted: set[int] = set()  # places of the results that what it asks for depends on
        # What all ranks compute around the model's call, for a comparison.
        self.seen: dict[str, list[Any]] = {}

    # ---------------------------------------------------------------------------- forward
    def forward(self) -> None:
        """Makes the operations of the stage: receives, computes, sends."""
        with self._line.following():  # what only depends on inputs would run at once
            inputs = [tf.identity(tensor) for tensor in self._inputs]
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
            like = [self._stage.arrivals[i].tensor for i in places]
            found.update(zip(places, self._receive(source, "forward", like), strict=True))
        return [found[i] for i in range(len(found))]

    def _send_forward(self) -> None:
        departures = self._stage.departures
        for consumer in _consumers(departures):
            places = [i for i, c in enumerate(departures) if consumer in c.consumers]
            self._send([consumer], "forward", [self._values[i] for i in places])
        # Results come last: partitions need them for the loss alone, after the last stage.
        own = [
            value
            for value, result in zip(
                self._values[len(departures) :], self._stage.results, strict=True
            )
            if self._cut.owners[result] is not EVERYWHERE  # those, every partition has computed
        ]
        others = [n for n in range(runtime.mp_size()) if n != runtime.mp_rank()]
        if own:
            self._send(others, "results", own)

    # ---------------------------------------------------------------------------- results
    def answer(self) -> Callable[[], Any]:
        """Makes the operations for the results; returns a function that the body calls for them."""
        results = self._results()

        def joined() -> Any:
            flat = self._joined(results)
            return tf.nest.pack_sequence_as(self._cut.structure, flat, expand_composites=True)

        return joined

    def _results(self) -> list[Any]:
        """Makes the operations that receive the call's results; returns all results."""
        computed = self._values[len(self._stage.departures) :]
        found = dict(zip(self._stage.results, computed, strict=True))
        for owner in sorted({o for o in self._cut.owners if o is not EVERYWHERE}):
            if owner != runtime.mp_rank():
                places = [i for i, o in enumerate(self._cut.owners) if o == owner]
                like = [self._cut.outputs[i] for i in places]
                found.update(zip(places, self._receive(owner, "results", like), strict=True))
        # `_joined` connects them with the gradients of all partitions.
        return [tf.stop_gradient(found[i]) for i in range(len(found))]

    def _joined(self, results: Sequence[Any]) -> list[Any]:
        """Returns the results, with gradients. Called where the user's tape records."""
        # The gradients arrive at reads of the variables, so that a tape and `tf.gradients` both
        # find them.
        reads = [variable.read_value() for variable in self._variables]
        guarded = [_without_gradient(tensor) for tensor in _floating(self._inputs)]
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
                # Not None, which would end the way to an input before `_without_gradient` raises.
                zeros = [tf.zeros_like(tensor) for tensor in guarded]
                with bodies.current().reads.paused():  # `check_reads` refuses the user's reads
                    found = this._backward(cotangents)
                return [*found, *zeros, *(None for _ in kept)]

            return [tf.identity(tensor) for tensor in kept], gradient

        joined = join(*reads, *guarded, *results)
        return [self._noting(place, tensor) for place, tensor in enumerate(joined)]

    def _noting(self, place: int, result: Any) -> Any:
        """Returns a result whose gradient, if the user's code asks for it, is noted.

        `_backward` comes after that. It gets zeros for results that the loss does not depend on.
        """
        weak = weakref.ref(self)

        @tf.custom_gradient
        def note(tensor: Any) -> Any:
            def gradient(cotangent: Any) -> Any:
                if (this := weak()) is not None:  # else the next gradient raises
                    this._wanted.add(place)
                return cotangent

            return tf.identity(tensor), gradient

        has_gradients = result.dtype.is_floating or result.dtype.is_complex
        return note(result) if has_gradients else result

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
        if self.flow.asking[0] == runtime.mp_rank():  # all that ask have equal ones: one sends
            for number in self.flow.passive:
                wanted = [of_results[i] for i in self._floating_results(number)]
                if wanted:
                    self._send([number], "cotangents", wanted)
        if runtime.mp_rank() not in self.flow.carrying:  # the call uses no variable of these
            return [None for _ in self._variables]
        # Zeros are none: an optimizer leaves a variable without a gradient alone.
        dependent = [self._cut.dependent.get(id(v.handle), set()) for v in self._variables]
        pairs = zip(self._computed(of_results), dependent, strict=True)
        found = [gradient if places & self._wanted else None for gradient, places in pairs]
        self.gives_gradients = any(gradient is not None for gradient in found)
        return found

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
        like = [self._cut.outputs[i] for i in places]
        found: dict[int, Any] = {}
        if like:
            received = self._receive(self.flow.asking[0], "cotangents", like)
            found = dict(zip(places, received, strict=True))
        self._computed([found.get(i) for i in range(len(self._cut.outputs))])

    def _computed(self, of_results: Sequence[Any]) -> list[Any]:
        targets, cotangents = self._cotangents(of_results)
        arrived = _floating(self._arrived)
        found = self._tape.gradient(
            targets, [*arrived, *self._variables], output_gradients=cotangents
        )
        # The earlier partition waits for a dense tensor, whether the loss needs it or not.
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
            like = [departures[i].tensor for i in places]
            arrived = self._receive(consumer, "backward", like) if like else []
            for place, tensor in zip(places, arrived, strict=True):
                received[place].append(tensor)
        # Copies: else the last stage's gradients would run ahead of their turn.
        own = self._line.copies([of_results[i] for i in self._stage.results])
        summed = [tf.add_n(parts) if parts else None for parts in received]  # one per consumer
        pairs = zip(self._values, [*summed, *own], strict=True)
        kept = [(v, c) for v, c in pairs if v.dtype.is_floating and c is not None]
        return [value for value, _ in kept], [cotangent for _, cotangent in kept]

    def _send_backward(self, of_arrived: Sequence[Any]) -> None:
        floating = [c for c in self._stage.arrivals if c.tensor.dtype.is_floating]
        # Others compute no gradients, and do not receive any.
        for source in sorted({c.source for c in floating} & {*self.flow.carrying}):
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
            self._line.note(self._label(waits=False))

    def _label(self, waits: bool) -> Label:
        ended, self._ended = self._ended, None
        return Label(self._microbatch, ended, waits)

    def _send(self, partitions: Sequence[int], what: str, tensors: Sequence[Any]) -> None:
        self._line.send(partitions, f"{self._tag}.{what}", tensors, self._label(waits=False))

    def _receive(self, partition: int, what: str, like: Sequence[Any]) -> list[Any]:
        return self._line.receive(partition, f"{self._tag}.{what}", like, self._label(waits=True))


def _floating(tensors: Sequence[Any]) -> list[Any]:
    return [tensor for tensor in tensors if tensor.dtype.is_floating]


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
