"""Measures nanotf's gain on this machine: `make bench`, or `python -m benchmarks [--help]`.

Every contestant uses the same data, batch size, optimizer and model:

- `plain`: Keras `fit` in one process on all cores of the plan, with the caller's environment.
- `ideal`: N processes, pinned and set up like nanotf's workers, each with its share of the batch
  and no communication: the upper bound for any exchange of gradients.
- `plain_16`: `plain`, compiled with `steps_per_execution=16`.
- `one`: nanotf, `fit()` without workers, on the cores of `plain`.
- `shm`, `grpc`: nanotf, `fit(num_processes=N, transport=...)`.
- `auto`: nanotf, `fit(num_processes="auto")`, with workers already started. A block takes less
  time than starting them, so "auto" would otherwise always choose one process.
- `stock`: stock `MultiWorkerMirroredStrategy` over gRPC, N processes. Its `fit` fails with Keras 3,
  so it runs a custom loop (`strategy.run`, `apply_gradients`), pinned and with the threads of
  nanotf's workers, without callbacks and metrics: faster than in users' programs.
- `ranks`: the script of `stock`, under `nanotf run --ranks -n N`.
- `plain_bf16`, `shm_bf16`: `plain` and `shm` with Keras's policy `mixed_bfloat16`. The report names
  the processor's bfloat16 instructions, and the gain or loss.
- `peer`: BigDL-Nano's `fit(num_processes=N)`, in another interpreter (`--peer-python`).

**Interleaved.** A shared machine drifts, so figures measured minutes apart are not comparable. For
each model, every contestant starts once, warms up (two untimed `fit`s), and stays. A round runs one
block of each in turn, while the others sleep. Ratios are taken within a round. The report gives
medians over the rounds.

**Steps alone.** Every contestant's clock is the same Keras callback, which notes when training
steps end. Steps alone are the time from the end of an epoch's first step to the end of its last
step, divided by the number of steps between. No contestant's steps include work at epoch
boundaries: neither tf.data's stall (up to one more epoch), which would make `ideal` and `plain`
look slow, nor nanotf's exchange of state. In nanotf the callback runs in the parent, where a user's
batch hook costs an exchange of state per step. The clock therefore sets `nanotf_needs` to
"progress": the first worker sends the number of the step that ended, without waiting and at most
every 50 ms, as for the progress bar. If nanotf ignored the setting, it would look slower in this
table, not faster. The error is the delay of one message in a window of a second.

`ideal` starts its processes at an agreed time of the system-wide monotonic clock. Its block is one
long epoch, so that no process stalls while the others have the memory bandwidth to themselves. Its
time is the slowest process's time, for the samples of all processes.

**Whole epochs** are the times from one `on_epoch_end` to the next in one call of `fit`: the steps,
and everything between epochs. **Epoch boundary** is the time from the end of an epoch's last
step to the end of the next epoch's first step, less one step alone. **First batch** is the time
from the call of `fit` to the end of the first step, including all data that the call sends.

**Noise.** The report gives the share of the cores that other programs used during the blocks, and
warns when it is too high. Each ratio is followed by its spread over the rounds.

**Memory** is the sum of the proportional set sizes (PSS) of all processes of a contestant, which
counts shared pages once. It is sampled in an extra block that is not timed.

**More cores** have two programs of their own: `python -m benchmarks.scaling` trains with 2, 4, 8,
... workers, up to one per core, and `python -m benchmarks.forecast` predicts the speed of larger
machines from measurements on this one.

Modules: `cli` is the entry point. `options`, `models`, `contestants` (starts and commands
processes), `rounds` (schedules them), `timeline` and `ratios` (arithmetic), `goals`. The
contestants' processes run `task` and one of `by_fit`, `by_strategy`, `by_peer`. `memory`,
`start_up`, `collectives`, `hosts` (collectives between hosts), `records` (Pipe mode), `items` (many
small models), `readers` (datasets decoded in Python), `partitions` (a model in parts), `bfloat16`
(with its accuracy), `install` (pip, from a clone) and `serving` (`nanotf serve` against servers
that users write, with `servers`, `web_servers`, `served_models` and `load_generator`) are separate
measurements; `apart` gives them processes of their own. `report` and `chart` show the result. Code
that runs in a contestant's process avoids features newer than Python 3.8, since a peer's
interpreter is old.
"""
