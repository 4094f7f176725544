"""Every message between the parent and a worker.

Messages are sent as pickles over a Unix socket. Before anything is unpickled, its two ends
show each other the pool's secret key (`multiprocessing.connection`, HMAC challenge in both
directions). File descriptors of shared blocks follow on the same socket as ancillary data,
in the order in which the message names them.

The life of a pool, from top to bottom:

    parent                                     worker `rank`
      |  Fork (rank, cores, key) ->              |   to the zygote, which forks the worker
      |  <- Hello (pid, cores, port)             |   pinned; TensorFlow has run nothing yet
      |  Setup (paths, cluster or group) ->      |   imports TensorFlow, makes its strategy
      |  <- Ready | SetupFailed                  |
      |  Order (a model, data, arguments) ->     |   for each call, one after another
      |  <- OpenStream, SlotRead, CloseStream    |   every rank, if the parent reads the data
      |  Batch, EndOfStream ->                   |
      |  <- DataFailed                           |   rank 0: data that workers read are unusable
      |  <- Event                                |   rank 0, at a hook that it does not wait at
      |  <- Waiting                              |   every rank, at a hook; maybe with its state
      |  Proceed (stop?, new state?) ->          |   every rank, so that all decide the same
      |  Pause ->                                |   every rank; all then wait after one step
      |  <- Progress                             |   every rank, at intervals, if it made progress
      |  <- Stalled                              |   a rank whose step does not end, with "grpc"
      |  <- Outputs                              |   every rank, in predict
      |  <- Summary, Printed, Warned, Logged     |   rank 0: what its code has written
      |  <- Saved, Restored, Returned            |   rank 0, in a @nano function
      |  <- Wrote; Wrote ->                      |   rank 0 in such a function; then every rank
      |  <- Reached                              |   every rank in such a function, with "grpc"
      |  <- ItemEnded                            |   any worker of `nanotf.map`
      |  <- OrderDone | OrderFailed              |   every rank
      |  Stop ->                                 |

`Woken`, and a `DataFailed` of the thread that reads the user's data, never leave the parent's
process: its threads post them to the queue of messages that its call reads.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from nanotf.wire.failures import Failure
from nanotf.wire.parts import Part

Logs = dict[str, Any]
# The block's index in the call, offset and size in bytes.
Written = tuple[tuple[int, int, int], ...]


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
    """

    rank: int
    cores: tuple[int, ...]  # the logical CPUs to pin it to; empty for `usable`
    usable: tuple[int, ...]  # the parent's own logical CPUs
    numa_node: int | None  # the node whose memory it prefers; None for no preference
    # One of the names in `pool.transports`.
    transport: str
    environ: dict[str, str]  # all of its environment variables
    key: bytes  # the pool's secret, which both ends of the socket show first


@dataclasses.dataclass(frozen=True)
class Hello(Message):
    """Worker -> parent: the process runs and is pinned. TensorFlow has run nothing yet."""

    port: int | None = None  # a TCP port that was free just now (only with transport "grpc")
    warnings: tuple[str, ...] = ()  # of steps that failed (pinning, memory binding)


@dataclasses.dataclass(frozen=True)
class Setup(Message):
    """Parent -> worker: the facts that it needs before it imports TensorFlow."""

    state: Any  # `process_state.ProcessState` of the parent, the part without TensorFlow
    size: int  # number of workers
    # How long a step may last before the worker sends `Stalled` (only with transport "grpc").
    stall_seconds: float
    cluster: tuple[str, ...] = ()  # "host:port" by rank (only with transport "grpc")
    # `collectives.GroupSpec` or None; the descriptor of the group's memory follows (only with
    # transport "shm").
    group: Any = None
    # `collectives.HostsSpec` if the workers run on several hosts, else None; `group` is then the
    # group of the worker's host.
    hosts: Any = None
    # The number of descriptors that follow the group's: the connections to other hosts, for one
    # worker of each host.
    connections: int = 0
    # Whether the worker's messages must list the parts of the order's blocks that it has written,
    # since it does not share the parent's memory (see `pool.hosts.remote`).
    says_written: bool = False


@dataclasses.dataclass(frozen=True)
class Ready(Message):
    """Worker -> parent: TensorFlow is imported and the strategy is ready."""


@dataclasses.dataclass(frozen=True)
class SetupFailed(Message):
    """Worker -> parent: the strategy could not be made."""

    retry: bool  # whether starting again, with new ports, may help
    summary: str  # the exception in one line
    traceback: str


@dataclasses.dataclass(frozen=True)
class Stop(Message):
    """Parent -> worker: exit."""


# ------------------------------------------------------------------------------ one order
@dataclasses.dataclass(frozen=True)
class Order(Message):
    """Parent -> worker: do a worker's part of one call."""

    order: int  # counts up in the parent's process; every answer carries it
    # One of `shipping.orders`, pickled by `shipping.objects.pickling.dumps`; for a `CallSession` a
    # pickled tuple of a function of nanotf's own and its arguments.
    body: bytes
    # The sizes in bytes of the shared blocks whose file descriptors follow, in order.
    blocks: tuple[int, ...] = ()
    # Further file descriptors, which follow those. The receiver's message has the receiver's
    # numbers.
    descriptors: tuple[int, ...] = ()
    state: Any = None  # `process_state.ProcessState` of the parent


@dataclasses.dataclass(frozen=True)
class Event(Message):
    """Worker -> parent, rank 0: a callback hook was reached."""

    order: int
    hook: str  # the name of the Keras callback method, like "on_epoch_begin"
    index: int | None = None  # the epoch or batch that the hook gets; None if it gets neither
    logs: Logs | None = None


@dataclasses.dataclass(frozen=True)
class Summary(Message):
    """Worker -> parent, rank 0: a step has written to a writer of summaries."""

    order: int
    writer: int  # the number of the writer among the program's objects; -1 for the default one
    kind: str  # what the model does: "train", "test" or "predict"; "" in a custom loop
    step: int | None  # None for the default step
    # `numpy.ndarray`s and bytes: value, tag and metadata; or the whole summary.
    content: tuple[Any, ...]
    counts: tuple[int, ...] = ()  # the values of the model's counters at that moment


@dataclasses.dataclass(frozen=True)
class Progress(Message):
    """Worker -> parent: it has made progress since its last `Progress`, see `pool.silence`."""


@dataclasses.dataclass(frozen=True)
class Stalled(Message):
    """Worker -> parent: its step does not end (only with transport "grpc")."""

    began: int  # when the step began, in ns of the worker's clock; identifies the step


@dataclasses.dataclass(frozen=True)
class Waiting(Message):
    """Worker -> parent, every rank: it has reached a hook, and the parent decides how to proceed.

    In a `@nano` function, `hook` names a point at which all ranks meet.
    """

    order: int
    hook: str
    index: int | None = None  # as in `Event`
    logs: Logs | None = None  # only from rank 0
    state: bool = False  # whether the rank's variables are in its part of the state block
    # The parts of the order's blocks that it has written, if `Setup` asked for that.
    written: Written = ()
    # Of rank 0's model, see `keras_models.plain_attributes`, if steps that run eagerly have changed
    # any; else empty.
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None  # from rank 0 and with its state: see `Generation.drawn_seeds`


@dataclasses.dataclass(frozen=True)
class Proceed(Message):
    """Parent -> worker: the answer to `Waiting`, the same for every rank."""

    order: int
    stop: bool = False  # whether `model.stop_training` or its like was set
    reload: bool = False  # whether the parent changed variables; they are in the state block
    reload_metrics: bool = False  # whether it changed metrics
    # Whether a callback needs the state at this hook: the workers then store it and report the
    # hook again.
    store: bool = False
    abandon: bool = False  # whether the call ends here because the user's data raised
    written: Written = ()  # the parts of the order's blocks that the parent has written
    # Of the model, see `keras_models.plain_attributes`, if callbacks have changed any; else empty.
    attributes: tuple[dict[str, Any], ...] = ()
    seeds: Any = None  # see `Generation.drawn_seeds`; None if callbacks have drawn none


@dataclasses.dataclass(frozen=True)
class Pause(Message):
    """Parent -> worker: pause after a step, so that the parent can write a checkpoint."""

    order: int


@dataclasses.dataclass(frozen=True)
class Woken(Message):
    """Parent -> itself: something has happened in its own process."""


@dataclasses.dataclass(frozen=True)
class OrderDone(Message):
    """Worker -> parent: it has done its part of the call."""

    order: int
    rank: int
    result: Any = None  # depends on the kind of order, see `shipping.orders`
    times: Any = None  # `timing.WorkerTimes`; None for items of `nanotf.map`
    written: Written = ()  # the parts of the order's blocks written at its end, as in `Waiting`
    parts: tuple[Part, ...] = ()  # how it has computed the program's parts


@dataclasses.dataclass(frozen=True)
class OrderFailed(Message):
    """Worker -> parent: its part of the call raised."""

    order: int
    rank: int
    kind: str  # the name of the exception's class
    reason: str  # its text, without TensorFlow's stacks
    code: str  # the user's lines in which it occurred, as in a traceback; empty if there are none
    traceback: str
    exception: bytes = b""  # the pickled exception; empty if it cannot be pickled
    failure: Failure | None = None  # of the collective that raised (only with transport "shm")


@dataclasses.dataclass(frozen=True)
class ItemEnded(Message):
    """Worker -> parent: an item of `nanotf.map` has ended, and its end does not fit the pipe.

    That has the ends of most items, see `item_pipes`. A worker sends this message after what else
    it sends for the item: text, or large arrays.
    """

    order: int
    item: int
    seconds: float  # with everything that the worker does for an item
    result: Any = None  # `shipping.objects.packing.Pickled`; None if it failed, or has come before
    failed: OrderFailed | None = None


@dataclasses.dataclass(frozen=True)
class Outputs(Message):
    """Worker -> parent: the model's outputs for this worker's rows of the next batches.

    The file descriptor of a shared block with the arrays follows.
    """

    order: int
    structure: bytes  # the pickled structure of one batch's outputs; see `shipping.data.outputs`
    steps: int  # number of batches
    arrays: tuple[Any, ...]  # `shipping.data.arrays.ArrayRef`s, batch by batch
    nbytes: int  # the block's size in bytes


@dataclasses.dataclass(frozen=True)
class Warned(Message):
    """Worker -> parent, rank 0: `warnings.warn` in a model's step."""

    order: int
    text: str
    category: type[Warning]  # a class of Python's own: the parent may not have another
    file: str  # of the code that it warns of
    line: int


@dataclasses.dataclass(frozen=True)
class Logged(Message):
    """Worker -> parent, rank 0: a warning of one of `console.LIBRARIES` in a model's step."""

    order: int
    logger: str  # its name
    level: int  # as in `logging`
    text: str


@dataclasses.dataclass(frozen=True)
class Printed(Message):
    """Worker -> parent: text printed by a `@nano` function or a model's step, on rank 0.

    Any worker sends it for an item of `nanotf.map`.
    """

    order: int
    stream: str  # "stdout" or "stderr"
    text: str
    item: int | None = None  # of `nanotf.map`, which runs or has run last


@dataclasses.dataclass(frozen=True)
class Wrote(Message):
    """Rank 0 -> parent -> all workers: a `@nano` function has written a file."""

    order: int
    what: str  # the name that all ranks use for it
    path: str | None  # the result of the function that writes; None if that is no text


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
    """

    order: int
    rank: int
    count: int  # this and the rest as in `collectives.tally.CollectiveProgress`
    fingerprint: int
    what: str


@dataclasses.dataclass(frozen=True)
class Returned(Message):
    """Worker -> parent, rank 0: the result of a `@nano` function, and what it has changed.

    Any worker sends it for an item of `nanotf.map` whose result has large arrays, and a reader for
    a batch that lies in new memory. The file descriptor of a shared block with the arrays follows.
    """

    order: int
    value: Any  # `shipping.objects.packing.Pickled`; of a reader, the number of the slot
    nbytes: int  # the block's size in bytes


# ---------------------------------------------------- batches that the parent hands out
@dataclasses.dataclass(frozen=True)
class OpenStream(Message):
    """Worker -> parent: an iterator over stream `stream` begins; `turn` counts the iterators.

    This message, `CloseStream` and `SlotRead` carry the order's number: an iterator may be dropped,
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
    """Parent -> worker: a slot of the stream's ring holds one global batch."""

    stream: int
    turn: int
    slot: int  # `SlotRead` returns it when the worker has copied its rows
    # Offset, shape, dtype and nbytes of each, in flattened order; see `shipping.data.arrays`.
    arrays: tuple[tuple[int, tuple[int, ...], str, int], ...]
    rows: int  # of the global batch; 0 if its arrays differ in rows
    # The size in bytes of a new, larger ring if the batch did not fit the old ring. Its file
    # descriptor follows.
    block: int | None = None
    may_differ: bool = False  # see `shipping.data.streams.StreamInput`


@dataclasses.dataclass(frozen=True)
class EndOfStream(Message):
    """Parent -> worker: the iterator `turn` of `stream` has no further batch."""

    stream: int
    turn: int
    failed: bool = False  # whether the user's data raised; later turns have no batches either


@dataclasses.dataclass(frozen=True)
class DataFailed(Message):
    """Reader thread -> parent: the user's data raised in the thread that reads them for a call.

    Worker -> parent, rank 0: a batch that workers read themselves cannot be used. All workers
    abandon the call at the same step.
    """

    order: int
    stream: int | None  # None for data that workers read
    error: BaseException


@dataclasses.dataclass(frozen=True)
class SlotRead(Message):
    """Worker -> parent: this worker has copied its rows out of `slot`."""

    order: int
    stream: int
    slot: int
