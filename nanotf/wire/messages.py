"""Every message between the parent and a worker.

Messages are sent as pickles over a Unix socket. Before anything is unpickled, its two ends
show each other the pool's secret key (`multiprocessing.connection`, HMAC challenge in both
directions). File descriptors of shared blocks follow on the same socket as ancillary data,
in the order in which the message names them.

The life of a pool, from top to bottom:

    parent                                     worker `rank`
      |  <- Hello (pid, address it could serve)  |   started by `pool.local`
      |  Setup (paths, cluster) ->               |   imports TensorFlow, makes its strategy
      |  <- Ready                                |
      |  Job (a model, data, arguments) ->       |
      |  <- EpochBegin, BatchEnd, TestBegin ...  |   rank 0 reports, for callbacks
      |  <- Progress                             |   every rank, at intervals, if it made progress
      |  <- Stalled                              |   a rank whose step does not end
      |  <- EpochEnd                             |   every rank, its state in the shared block
      |  Proceed (stop?, new state?) ->          |   every rank, so that all decide the same
      |  Pause ->                                |   every rank, which then waits after a step
      |  <- Outputs                              |   every rank, in predict
      |  <- Printed, Saved, Restored, Returned   |   rank 0, in a @nano function
      |  <- Reached                              |   every rank in such a function, with "grpc"
      |  <- OrderDone | OrderFailed              |
      |  Stop ->                                 |
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from nanotf.wire.failures import Failure
from nanotf.wire.parts import Part

Logs = dict[str, Any]
Written = tuple[
    tuple[int, int, int], ...
]  # the block's index in the call, offset and size in bytes


def written(block: int, spans: tuple[tuple[int, int], ...]) -> Written:
    """Describes pieces of a block for a message, see `shipping.state.SharedVariables.spans`."""
    return tuple((block, offset, nbytes) for offset, nbytes in spans)


class Message:
    """Base class of all messages."""


# ---------------------------------------------------------------- start and end of a pool
STATUS = struct.Struct("i")  # on a forked worker's pipe: its process id, then its exit code


@dataclasses.dataclass(frozen=True)
class Fork(Message):
    """Parent -> zygote: fork a worker.

    Four descriptors follow: the worker's socket; the file to which it prints; its working
    directory, which may have been deleted; and the pipe on which the zygote reports the worker's
    process id (or minus an `errno`) and later its exit code.

    Args:
        rank: int.
        cores: tuple of int, the logical CPUs to pin it to; empty for `usable`.
        usable: tuple of int, the parent's own logical CPUs.
        numa_node: int or None, the node whose memory it prefers.
        transport: str.
        environ: dict of str to str, all of its environment variables.
        key: bytes, the pool's secret key.
    """

    rank: int
    cores: tuple[int, ...]
    usable: tuple[int, ...]
    numa_node: int | None
    transport: str
    environ: dict[str, str]
    key: bytes


@dataclasses.dataclass(frozen=True)
class Hello(Message):
    """Worker -> parent: the process runs and is pinned. TensorFlow has run nothing yet.

    Args:
        rank: int.
        pid: int.
        cores: tuple of int, the affinity mask as the kernel reports it.
        port: int or None, a TCP port that was free just now (only with transport "grpc").
        warnings: tuple of str, for steps that failed (pinning, memory binding).
    """

    rank: int
    pid: int
    cores: tuple[int, ...]
    port: int | None = None
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setup(Message):
    """Parent -> worker: the facts that it needs before it imports TensorFlow.

    Args:
        state: `process_state.ProcessState` of the parent, the part without TensorFlow.
        size: int, number of workers.
        stall_seconds: float, how long a step may last before the worker sends `Stalled`
            (only with transport "grpc").
        cluster: tuple of str, `host:port` by rank (only with transport "grpc").
        group: `collectives.GroupSpec` or None; the descriptor of the group's memory follows
            (only with transport "shm").
        hosts: `collectives.HostsSpec` if the workers run on several hosts; `group` is then the
            group of the worker's host.
        connections: int, the number of descriptors that follow the group's: the connections to
            other hosts, for one worker of each host.
        says_written: bool, whether the worker's messages must list the parts of the call's blocks
            that it has written, since it does not share the parent's memory (see
            `pool.remote`).
    """

    state: Any
    size: int
    stall_seconds: float
    cluster: tuple[str, ...] = ()
    group: Any = None
    hosts: Any = None
    connections: int = 0
    says_written: bool = False


@dataclasses.dataclass(frozen=True)
class Ready(Message):
    """Worker -> parent: TensorFlow is imported and the strategy is ready."""

    rank: int


@dataclasses.dataclass(frozen=True)
class SetupFailed(Message):
    """Worker -> parent: the strategy could not be made.

    Args:
        retry: bool, whether starting again may help: with new ports, or without the native
            collectives.
        summary: str, the exception in one line.
        traceback: str.
        native_unusable: str or None, why the native collectives cannot be used here.
    """

    rank: int
    retry: bool
    summary: str
    traceback: str
    native_unusable: str | None = None


@dataclasses.dataclass(frozen=True)
class Stop(Message):
    """Parent -> worker: exit."""


# ------------------------------------------------------------------------------- one call
@dataclasses.dataclass(frozen=True)
class Order(Message):
    """Parent -> worker: run one call.

    Args:
        order: int, counts up in the parent's process; every answer carries it.
        body: bytes, the shipped call (see `shipping.objects.pickling`).
        blocks: tuple of int, the sizes in bytes of the shared blocks whose file
            descriptors follow, in order.
        descriptors: tuple of int, further file descriptors, which follow those. The receiver's
            message has the receiver's numbers.
        state: `process_state.ProcessState` of the parent.
    """

    order: int
    body: bytes
    blocks: tuple[int, ...] = ()
    descriptors: tuple[int, ...] = ()
    state: Any = None


@dataclasses.dataclass(frozen=True)
class Event(Message):
    """Worker -> parent, rank 0: a callback hook was reached.

    Args:
        order: int.
        hook: str, the name of the Keras callback method, like "on_epoch_begin".
        index: int or None, the epoch or batch that the hook gets.
        logs: dict of str to float, or None.
    """

    order: int
    hook: str
    index: int | None = None
    logs: Logs | None = None


@dataclasses.dataclass(frozen=True)
class Summary(Message):
    """Worker -> parent, rank 0: a step has written to a writer of summaries.

    Args:
        order: int.
        writer: int, the number of the writer among the program's objects; -1 for the default one.
        kind: str, what the model does: "train", "test" or "predict"; "" in a custom loop.
        step: int, or None for the default step.
        content: tuple of `numpy.ndarray` and bytes: value, tag and metadata; or the whole summary.
        counts: tuple of int, the values of the model's counters at that moment.
    """

    order: int
    writer: int
    kind: str
    step: int | None
    content: tuple[Any, ...]
    counts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Progress(Message):
    """Worker -> parent: it has made progress since its last `Progress`, see `pool.silence`."""


@dataclasses.dataclass(frozen=True)
class Stalled(Message):
    """Worker -> parent: its step does not end (only with transport "grpc").

    Args:
        began: int, when the step began, by the worker's clock. Identifies the step.
    """

    began: int


@dataclasses.dataclass(frozen=True)
class Waiting(Message):
    """Worker -> parent, every rank: it has reached a hook, and the parent decides how to proceed.

    If `state` is true, the rank's variables are in its part of the state block. `written` lists
    the parts that it has written there, if `Setup` asked for that. `attributes`, from rank 0: see
    `keras_names.plain_attributes`, those of the model, if steps that run eagerly have changed any.
    `seeds`, from rank 0 and with its state: see `Generation.drawn_seeds`.
    """

    order: int
    rank: int
    hook: str
    index: int | None = None
    logs: Logs | None = None
    state: bool = False
    written: Written = ()
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None


@dataclasses.dataclass(frozen=True)
class Proceed(Message):
    """Parent -> worker: the answer to `Waiting`, the same for every rank.

    Args:
        order: int.
        stop: bool, whether `model.stop_training` was set.
        reload: bool, whether the parent changed variables; they are in the state block.
        reload_metrics: bool, whether it changed metrics.
        store: bool, whether a callback needs the state at this hook: the workers then store it
            and report the hook again.
        abandon: bool, whether the call ends here because the user's data raised.
        written: the parts of the call's blocks that the parent has written.
        attributes: see `keras_names.plain_attributes`, those of the model, if callbacks have
            changed any.
        seeds: see `Generation.drawn_seeds`, if callbacks have drawn from them.
    """

    order: int
    stop: bool = False
    reload: bool = False
    reload_metrics: bool = False
    store: bool = False
    abandon: bool = False
    written: Written = ()
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None


@dataclasses.dataclass(frozen=True)
class Pause(Message):
    """Parent -> worker: pause after a step, so that the parent can write a checkpoint."""

    order: int


@dataclasses.dataclass(frozen=True)
class Woken(Message):
    """Parent -> itself: something has happened in its own process."""


@dataclasses.dataclass(frozen=True)
class OrderDone(Message):
    """Worker -> parent: the call ended.

    Args:
        order: int.
        rank: int.
        result: object, the worker's result for the call's kind; see `orders`.
        times: `timing.WorkerTimes`.
        parts: tuple of `parts.Part`, how it has computed the program's parts.
        written: the parts of its blocks that the call has written at its end, as in `Waiting`.
    """

    order: int
    rank: int
    result: Any = None
    times: Any = None
    written: Written = ()
    parts: tuple[Part, ...] = ()


@dataclasses.dataclass(frozen=True)
class OrderFailed(Message):
    """Worker -> parent: the call raised.

    Args:
        order: int.
        rank: int.
        summary: str, the exception in one line.
        traceback: str.
        exception: bytes, the pickled exception; empty if it cannot be pickled.
        failure: `Failure` of the collective that raised, or None (only with transport "shm").
    """

    order: int
    rank: int
    summary: str
    traceback: str
    exception: bytes = b""
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True)
class Outputs(Message):
    """Worker -> parent: the model's outputs for this worker's rows of the next batches.

    The file descriptor of a shared block with the arrays follows.

    Args:
        order: int.
        rank: int.
        structure: bytes, the pickled structure of one batch's outputs; see `shipping.data.outputs`.
        steps: int, number of batches.
        arrays: tuple of `shipping.data.arrays.ArrayRef`, batch by batch.
        nbytes: int, the block's size in bytes.
    """

    order: int
    rank: int
    structure: bytes
    steps: int
    arrays: tuple[Any, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Warned(Message):
    """Worker -> parent, rank 0: `warnings.warn` in a model's step.

    Args:
        order: int.
        text: str.
        category: type, a class of Python's own.
        file: str, of the code that it warns of.
        line: int.
    """

    order: int
    text: str
    category: type[Warning]
    file: str
    line: int


@dataclasses.dataclass(frozen=True)
class Logged(Message):
    """Worker -> parent, rank 0: a warning of one of `console.LIBRARIES` in a model's step.

    Args:
        order: int.
        logger: str, its name.
        level: int.
        text: str.
    """

    order: int
    logger: str
    level: int
    text: str


@dataclasses.dataclass(frozen=True)
class Printed(Message):
    """Worker -> parent, rank 0: text printed by a `@nano` function or a model's step.

    Args:
        order: int.
        stream: str, "stdout" or "stderr".
        text: str.
    """

    order: int
    stream: str
    text: str


@dataclasses.dataclass(frozen=True)
class Wrote(Message):
    """Rank 0 -> parent -> all workers: a `@nano` function has written a file.

    Args:
        order: int.
        what: str, the name that all ranks use for it.
        path: str, the result of the function that writes; or None.
    """

    order: int
    what: str
    path: str | None


@dataclasses.dataclass(frozen=True)
class Saved(Message):
    """Worker -> parent, rank 0: a `CheckpointManager` has saved; a restart continues from there."""

    order: int
    path: str


@dataclasses.dataclass(frozen=True)
class Restored(Message):
    """Worker -> parent, rank 0: a `CheckpointManager` has restored from this path."""

    order: int
    path: str


@dataclasses.dataclass(frozen=True)
class Reached(Message):
    """Worker -> parent, every rank: its progress in a `@nano` function with transport "grpc".

    A rank sends it when it has begun no collective for a while, and when it has returned or raised.

    Args:
        call, rank: int.
        count, fingerprint, what: as in `collectives.tally.CollectiveProgress`.
    """

    order: int
    rank: int
    count: int
    fingerprint: int
    what: str


@dataclasses.dataclass(frozen=True)
class Returned(Message):
    """Worker -> parent, rank 0: the result of a `@nano` function, and what it has changed.

    The file descriptor of a shared block with the arrays follows.

    Args:
        order: int.
        value: `shipping.objects.packing.Pickled`.
        nbytes: int, the block's size in bytes.
    """

    order: int
    value: Any
    nbytes: int


# ---------------------------------------------------- batches that the parent hands out
@dataclasses.dataclass(frozen=True)
class OpenStream(Message):
    """Worker -> parent: an iterator over stream `stream` begins; `turn` counts the iterators.

    This message, `CloseStream` and `SlotRead` carry the call's number: an iterator may be dropped,
    and report that, after the next call has begun.
    """

    order: int
    stream: int
    turn: int


@dataclasses.dataclass(frozen=True)
class CloseStream(Message):
    """Worker -> parent: the iterator is not read any further."""

    order: int
    stream: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Batch(Message):
    """Parent -> worker: a slot of the stream's ring holds one global batch.

    Args:
        stream: int.
        turn: int.
        slot: int; `SlotRead` returns it when the worker has copied its rows.
        arrays: tuple of `(offset, shape, dtype, nbytes)` of each array, in flattened order; see
            `shipping.data.arrays.ArrayRef`.
        rows: int, rows of the global batch; 0 if its arrays differ in rows.
        block: int or None, the size in bytes of a new, larger ring if the batch did not fit the old
            ring. Its file descriptor follows.
        may_differ: bool, see `shipping.data.streams.StreamInput`.
    """

    stream: int
    turn: int
    slot: int
    arrays: tuple[tuple[int, tuple[int, ...], str, int], ...]
    rows: int
    block: int | None = None
    may_differ: bool = False


@dataclasses.dataclass(frozen=True)
class EndOfStream(Message):
    """Parent -> worker: the iterator `turn` of `stream` has no further batch.

    Args:
        stream: int.
        turn: int.
        failed: bool, whether the user's data raised. Later turns have no batches either.
    """

    stream: int
    turn: int
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class DataFailed(Message):
    """Reader thread -> parent: the user's data raised in the thread that reads them for a call.

    Worker -> parent, rank 0: a batch that workers read themselves cannot be used. All workers
    abandon the call at the same step.

    Args:
        order: int.
        stream: int, or None for data that workers read.
        error: the exception.
    """

    order: int
    stream: int | None
    error: BaseException


@dataclasses.dataclass(frozen=True)
class SlotRead(Message):
    """Worker -> parent: this worker has copied its rows out of `slot`."""

    order: int
    stream: int
    slot: int
