"""The pool of this process, kept warm between calls. There is one: its workers own the cores."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterator, Sequence

from nanotf.console import logger, silent
from nanotf.errors import NanoError
from nanotf.machine import neighbours, topology
from nanotf.pool import backends, local, settings
from nanotf.pool.items import ItemPool
from nanotf.pool.plans import AnyPlan
from nanotf.pool.pool import Pool
from nanotf.pool.starts import started
from nanotf.pool.transports import NO_TRANSPORT, check_can_exchange, check_transport
from nanotf.tracebacks import raising_at_the_call

IDLE_SECONDS = 600.0

# Held while a call runs. A callback of that call may take it again, as `shutdown` does.
_lock = threading.RLock()
_pool: Pool | None = None
_idle_timer: threading.Timer | None = None
_guests = 0  # calls whose readers are forks of the zygote; written under `_counting`
_counting = threading.Lock()
_lent_to: int | None = None  # the thread that runs a call; that thread writes it, under `_lock`


@contextlib.contextmanager
def pool_for(plan: AnyPlan, transport: str) -> Iterator[Pool]:
    """Lends the warm pool, or a new one if plan or transport differ or a worker died.

    There is one pool per process, since its workers own the cores. A second thread waits
    until the first has ended its call.
    """
    global _lent_to
    idle_seconds()  # raises now, not after training
    _stop_idle_timer()
    with _lock:
        try:
            pool = _current(plan, transport)
            _lent_to = threading.get_ident()
            try:
                yield pool
            except BaseException:
                # Late answers of an unfinished call would reach the next one.
                if not pool.is_alive():
                    _end_pool()
                raise
        finally:
            _lent_to = None
            _start_idle_timer()  # also without a pool: back ends keep what they have started


@contextlib.contextmanager
def keeping_zygote() -> Iterator[None]:
    """Keeps the idle timer from ending the zygote, and so its forks, in this context."""
    global _guests
    idle_seconds()  # raises now
    with _counting:
        _guests += 1
    try:
        yield
    finally:
        with _counting:
            _guests -= 1
        _start_idle_timer()


def is_warm(plan: AnyPlan, transport: str) -> bool:
    """Returns True if `pool_for` would lend an existing pool.

    False while another thread runs a call on it or starts it, which may take any time.
    """
    if not _lock.acquire(blocking=False):
        return False
    try:
        return _pool is not None and _is_usable(_pool, plan, transport)
    finally:
        _lock.release()


def _is_usable(pool: Pool, plan: AnyPlan, transport: str) -> bool:
    mine = pool.owner == os.getpid()  # not one of the process that forked this one
    same = mine and (pool.plan, pool.transport) == (plan, transport) and pool.is_alive()
    return same and backends.holds_places_of(plan)


def lent_to() -> int | None:
    """Returns the thread that runs a call on this process's workers, or None."""
    lent = _pool is not None and _pool.owner == os.getpid()
    return _lent_to if lent else None


def check_not_lent(received: str) -> None:
    """Rejects a call inside another, mainly in a callback: the workers wait for that callback.

    Args:
        received: the call, as the user wrote it.

    Raises:
        NanoError: This thread already runs a call.
    """
    if lent_to() == threading.get_ident():
        raise NanoError(
            "The workers are in the middle of a call, and wait for this callback. "
            f"Received: {received} inside another call with num_processes. Leave num_processes "
            "out there: the call then runs in this process, on the model's current weights."
        )


def _current(plan: AnyPlan, transport: str) -> Pool:
    global _pool
    if _pool is not None and _pool.owner != os.getpid():
        _pool = None  # this is a fork: the workers belong to the other process
    if _pool is not None and not _is_usable(_pool, plan, transport):
        _end_pool()
    if _pool is None:
        _pool = _start(plan, transport)
    return _pool


def _start(plan: AnyPlan, transport: str) -> Pool:
    def start() -> Pool:
        if transport == NO_TRANSPORT:
            assert isinstance(plan, topology.Plan), plan
            return ItemPool(plan)
        return Pool(plan, transport)

    try:
        return started(start)
    finally:
        # Last registered, first called: workers end before the Ray that started them.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


@raising_at_the_call
def warm_up(
    num_processes: int,
    cores_per_process: int | None = None,
    transport: str | None = None,
    cores: Sequence[int] | None = None,
    backend: str | None = None,
) -> None:
    """Starts the workers in the background, without waiting for them.

    Call this at the top of a script, so that the start overlaps with the work before the first
    `fit(num_processes=...)`, which waits for the rest. That `fit` raises any error in starting.

    Before TensorFlow has done anything in a program with one thread, this imports TensorFlow and
    Keras here, and the workers are forked from this process. Set TensorFlow's environment variables
    before. Later, and in notebooks, a second process imports TensorFlow, which takes some seconds
    and 250 MB.

    Args:
        num_processes, cores_per_process, transport, cores, backend: as in `fit`; a `fit` with the
            same arguments uses the pool.

    Raises:
        NanoError: An argument cannot be used.
    """
    transport = check_transport(transport)
    check_can_exchange(transport)
    plan = backends.plan(backend, num_processes, cores_per_process, cores)
    if isinstance(plan, topology.Plan):
        local.begin_here()

    def start() -> None:
        with _lock:
            if _pool is None or not _pool.is_alive():
                # The call that needs them raises it. The program prints meanwhile.
                with contextlib.suppress(NanoError), silent(True):
                    _current(plan, transport)
                _start_idle_timer()

    threading.Thread(target=start, name="nanotf-warm-up", daemon=True).start()


def start_within(plan: AnyPlan, transport: str, seconds: float) -> bool:
    """Starts the pool of a plan unless it is warm, and waits at most `seconds`.

    Returns:
        False if it was not ready in time. It then ends as soon as it is, in the background.

    Raises:
        Exception: The workers cannot be started, such as a `NanoError`.
    """
    failed: list[Exception] = []
    verdict: list[bool] = []
    deciding = threading.Lock()

    def is_in_time(mine: bool) -> bool:
        """Returns what the first caller has said."""
        with deciding:
            if not verdict:
                verdict.append(mine)
            return verdict[0]

    def start() -> None:
        with _lock:
            try:
                _current(plan, transport)
            except Exception as error:
                failed.append(error)
            in_time = is_in_time(True)
            if failed and not in_time:
                logger.info("A start that nobody waited for has failed: %s", failed[0])
            if failed or not in_time:
                shutdown()
            else:
                _start_idle_timer()

    # In a copy of this context: it says whether the user wants to see a line.
    target = functools.partial(contextvars.copy_context().run, start)
    thread = threading.Thread(target=target, name="nanotf-start", daemon=True)
    thread.start()
    try:
        thread.join(max(0.0, seconds))
    finally:
        in_time = is_in_time(False)
    if in_time:
        thread.join()
        if failed:
            raise failed[0]
    return in_time


def shutdown() -> None:
    """Stops the workers of this process, if there are any. The next call starts new ones."""
    _stop_idle_timer()
    with _lock:
        _end_pool()
        backends.stop_what_was_started()


def end_pool() -> None:
    """Stops the workers, but keeps the zygote or Ray that starts them."""
    _stop_idle_timer()
    with _lock:
        _end_pool()


def _end_pool() -> None:
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        try:
            pool.close()
        finally:
            neighbours.forget()


def _stop_idle_timer() -> None:
    global _idle_timer
    timer, _idle_timer = _idle_timer, None
    if timer is not None:
        timer.cancel()


def _start_idle_timer() -> None:
    global _idle_timer
    _stop_idle_timer()
    timer = threading.Timer(idle_seconds(), close_if_idle)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # the system allows no further thread; a result must not be lost for it
        logger.warning("The workers stay until this process ends: no thread can be started.")
        return
    _idle_timer = timer


def close_if_idle() -> None:
    """Stops the workers, and what has started them, unless a call uses them or they start now."""
    if not _guests and _lock.acquire(blocking=False):  # fails if a call has just begun
        try:
            shutdown()
        finally:
            _lock.release()


def idle_seconds() -> float:
    """Returns how long a warm pool waits for the next call: NANOTF_IDLE_SECONDS, default 600 s.

    Raises:
        NanoError: The variable is not a number above 0.
    """
    return settings.seconds("NANOTF_IDLE_SECONDS", IDLE_SECONDS)


def worker_pids() -> tuple[int, ...]:
    """Returns the process ids of the live workers, by rank; empty if there is no pool."""
    pool = _pool
    if pool is None or pool.owner != os.getpid():
        return ()
    return tuple(worker.process.pid for worker in pool.workers)


def _at_exit() -> None:
    if _lock.acquire(blocking=False):
        _lock.release()
        shutdown()
    elif _pool is not None:  # a daemon thread runs a call; the process does not wait for it
        _pool.kill_workers()


def _after_fork() -> None:
    """Resets the lock, whose thread does not exist in a child. The cores are the parent's."""
    global _lock, _lent_to
    _lock, _lent_to = threading.RLock(), None
    neighbours.forget()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
