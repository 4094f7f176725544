"""What nanotf is worth on this machine: `make bench`, or `python -m benchmarks [--help]`.

Contestants, each on the same data, batch size, optimizer and model:

- `plain`: Keras `fit` in one process on all cores of the plan, with the caller's environment.
- `ideal`: N processes, pinned and set up as nanotf's workers are, each with its share of the batch
  and no communication: what no exchange of gradients can beat.
- `shm`, `grpc`: nanotf, `fit(num_processes=N, transport=...)`.
- `auto`: nanotf, `fit(num_processes="auto")`, with workers that are there already: a block takes
  less time than their start, for which alone it would choose one process.
- `stock`: stock `MultiWorkerMirroredStrategy` over gRPC, N processes. Its `fit` fails with Keras 3,
  so it runs a custom loop (`strategy.run`, `apply_gradients`), pinned and with the threads of
  nanotf's workers, without callbacks and metrics: better than users get it.
- `plain_bf16`, `shm_bf16`: `plain` and `shm` with Keras's policy `mixed_bfloat16`. The report says
  what the processor has for bfloat16, and whether it gains anything.
- `peer`: BigDL-Nano's `fit(num_processes=N)`, in another interpreter (`--peer-python`).

**Interleaved.** A machine is shared and drifts, so figures of different minutes cannot be compared.
For each model every contestant is started once, warmed up (two untimed `fit`s), and stays. A round
runs one block of each, one after another; the others sleep. Ratios are taken within a round; the
medians over the rounds are reported.

**Steps alone.** Every contestant's clock is the same Keras callback. It notes when training steps
end, and steps alone are the time from the end of an epoch's first step to the end of its last one,
over the steps between. What happens at the boundary of epochs is in no contestant's steps: neither
tf.data's stall (up to the length of the epoch again), which would make `ideal` and `plain` look
slow, nor nanotf's exchange of state. In nanotf the callback runs in the parent, and a user's batch
hook would cost an exchange of state per step; the clock says `nanotf_needs = "progress"`, so the
first worker sends it the number of the step that has ended, without waiting and at most every
50 ms, as it does for the progress bar. Should that change, nanotf gets
slower in this table, not faster. The error is the delay of one message in a window of a second.

`ideal` starts its processes at an agreed time of the system-wide monotonic clock, and its block is
one long epoch, so that no process is stalled while the others enjoy the memory bandwidth; its time
is that of the slowest process, for the samples of all.

**Whole epochs** are the times from one `on_epoch_end` to the next in one call of `fit`: the steps,
and all that happens between epochs. **Epoch boundary** is the time from the end of an epoch's last
step to the end of the next epoch's first, less one step alone. **First batch** is the time from the
call of `fit` to the end of the first step, with all that the call ships.

**Noise.** The report says how much of the cores other programs used during the blocks, and warns
when that is too much. The spread over the rounds stands behind each ratio.

**Memory** is the sum of the proportional set sizes (PSS) of all processes of a contestant, which
counts shared pages once. It is sampled in an extra block that is not timed.

**More cores** are the subject of two programs of their own: `python -m benchmarks.scaling` trains
with 2, 4, 8, ... workers, up to one for each core, and `python -m benchmarks.forecast` computes
from measurements on this machine what to expect of larger ones.

Modules: `cli` puts it together. `options`, `models`, `contestants` (start and command processes),
`rounds` (who runs when), `timeline` and `ratios` (arithmetic), `goals`; in the contestants'
processes run `task` and one of `by_fit`, `by_strategy`, `by_peer`; `memory`, `start_up` and
`collectives` are measurements of their own; `report` and `chart` show the result. What runs in a
contestant's process does without Python 3.9's news, since a peer's interpreter is old.
"""
