"""Kills any process of the tree at any moment, starts included; the user's own process excepted.

Each case makes a call, undisturbed first: cold, and again with the processes that the first left.
Then a thread kills, at a random moment of a call, a random process below this one. The call must
end with the undisturbed result, or as the case documents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import tensorflow as tf
from faults import rows, small_model

import nanotf
from nanotf import smp
from nanotf.compat.versions import is_keras_3
from nanotf.errors import NanoError
from nanotf.keras import nano
from nanotf.sagemaker.jobs import follow, launch, record
from nanotf.sagemaker.jobs.record import JobRequest
from nanotf.sagemaker.jobs.source import SourceCode

_SEQUENCE: Any = tf.keras.utils.PyDataset if is_keras_3() else tf.keras.utils.Sequence
_EVERY = 0.05  # s, between looks for a process to kill
SLOWEST = 120.0  # s


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a disturbed call.

    Args:
        case: str.
        killed: str, the process; empty if the call was over.
        moment: float, seconds since its begin.
        result: str: "equal", an error's class that the case documents, or what went wrong.
        seconds: float, of the call.
    """

    case: str
    killed: str
    moment: float
    result: str
    seconds: float

    @property
    def is_as_documented(self) -> bool:
        return not self.result.startswith("WRONG")


class Killer:
    """Kills a process below this one, or below a job's supervisor, at a moment.

    Args:
        moment: float, seconds.
        draw: `random.Random`.
        roots: callable, returns the processes whose children it may kill, and that it may kill.
    """

    def __init__(self, moment: float, draw: random.Random, roots: Callable[[], list[int]]) -> None:
        self._moment, self._draw, self._roots = moment, draw, roots
        self._ended = threading.Event()
        self.killed = ""
        self._thread = threading.Thread(target=self._run, name="nanotf-test-killer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._ended.wait(self._moment):
            return
        while not self._ended.is_set() and not self.killed:
            found = self._targets()
            if found:
                target = self._draw.choice(sorted(found, key=lambda process: process.pid))
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    words = [word for word in target.cmdline() if "nanotf." in word][:1]
                    name = " ".join(words) or target.name()
                    target.send_signal(signal.SIGKILL)
                    self.killed = name
            time.sleep(_EVERY)

    def _targets(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for root in self._roots():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root)
                found += process.children(recursive=True)
                if root != psutil.Process().pid:
                    found.append(process)
        return found


def _mine() -> list[int]:
    return [psutil.Process().pid]


# -------------------------------------------------------------------------------------- cases
def fit(folder: pathlib.Path) -> Any:
    model = small_model()
    x, y = rows(2000)
    model.fit(x, y, batch_size=50, epochs=3, verbose=0, num_processes=2, max_restarts=3)
    return model.get_weights()


def loop(folder: pathlib.Path) -> Any:
    model, optimizer = small_model(), tf.keras.optimizers.SGD(0.01)
    data = tf.data.Dataset.from_tensor_slices(rows(400)).batch(50)

    @nano(num_processes=2, max_restarts=3)
    def train() -> None:
        for _ in range(3):
            for x, y in data:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                variables = model.trainable_variables
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, variables), variables, strict=True)
                )

    train()
    return model.get_weights()


def items(folder: pathlib.Path) -> Any:
    def work(item: int) -> Any:
        time.sleep(0.1)
        return np.full(1 << 14, float(item)) if item % 2 else [item]

    found = nanotf.map(work, range(12), 2, max_restarts=3, recycle_after=3, on_error="return")
    for result in found:
        if isinstance(result, Exception):
            raise result
    return [np.asarray(result, float) for result in found]


class _Rows(_SEQUENCE):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y = rows(2000)
        time.sleep(0.02)
        return x[index * 100 : index * 100 + 100], y[index * 100 : index * 100 + 100]


def readers(folder: pathlib.Path) -> Any:
    model = small_model()
    model.fit(_Rows(), epochs=2, verbose=0, shuffle=False, read_processes=2, max_restarts=3)
    return model.get_weights()


def search(folder: pathlib.Path) -> Any:
    def build(units: int) -> Any:
        model = tf.keras.Sequential([tf.keras.Input((64,)), tf.keras.layers.Dense(units)])
        model.add(tf.keras.layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    space = {"units": [2, 4, 8, 16]}
    study = f"sqlite:///{folder}/study-{time.time_ns()}.db"
    found = nanotf.search(
        *(build, space, rows(400), "loss", 4, 2),
        storage=study,
        study_name="a",
        seed=1,
        epochs=1,
        verbose=0,
        max_restarts=3,
    )
    complete = [row for row in found.table if row["state"] == "complete"]
    return [np.asarray(sorted(row["params"]["units"] for row in complete), float)]


def partitions(folder: pathlib.Path) -> Any:
    model = smp.DistributedModel.from_keras(small_model(), partitions=2, microbatches=2)
    model.compile("sgd", "mse")
    x, y = rows(400)
    model.fit(x, y, batch_size=50, epochs=2, verbose=0)
    return model.get_weights()


TRAIN = """
import numpy as np, tensorflow as tf
tf.keras.utils.set_random_seed(1)
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=4, epochs=3, verbose=0)
print("loss", history.history["loss"][-1])
"""
_job: list[Any] = []


def job(folder: pathlib.Path, instances: int = 1) -> Any:
    (folder / "train.py").write_text(TRAIN)
    name = record.KIND.make_name("a")
    source = SourceCode(str(folder / "train.py"))
    request = JobRequest(name, source, num_processes=str(2 // instances), instances=instances)
    _job[:] = [launch.start(request, folder / "jobs")]
    state = follow.wait(_job[0])
    if state.status != record.COMPLETED:
        raise NanoError(str(state.failure_reason))
    said = follow.LogReader(_job[0]).read()
    return [np.asarray(float(said.split("loss ")[1].split()[0]))]


def hosts(folder: pathlib.Path) -> Any:
    return job(folder, 2)


def _of_job() -> list[int]:
    with contextlib.suppress(NanoError, OSError, IndexError):
        owner = _job[0].read_state().owner
        return [owner.pid] if owner.is_supervisor and owner.is_alive() else []
    return []


# Cases that must end with the undisturbed result; in the others an error of nanotf's is allowed.
RESTARTED = (fit, loop, items, readers, search)
CASES = (*RESTARTED, partitions, job, hosts)


@contextlib.contextmanager
def _folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield pathlib.Path(folder)


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A case when nobody kills.

    Args:
        result: list of arrays.
        cold: float, seconds of a call that starts the processes.
        warm: float, seconds of a call that finds them.
    """

    result: Any
    cold: float
    warm: float

    @classmethod
    def of(cls, case: Any) -> Undisturbed:
        nanotf.shutdown()
        with _folder() as folder:
            began = time.monotonic()
            result = case(folder)
            cold = time.monotonic() - began
        with _folder() as folder:
            began = time.monotonic()
            case(folder)
            return cls(result, cold, time.monotonic() - began)


def kills(count: int, seed: int, cases: Sequence[Any] = CASES) -> list[Ended]:
    """Makes disturbed calls, of the cases in turn, until `count` processes are killed.

    A call may be over before its moment; three calls for each kill are the limit.
    """
    draw = random.Random(seed)
    known: dict[Any, Undisturbed] = {}
    found: list[Ended] = []
    for case in itertools.islice(itertools.cycle(cases), 3 * count):
        if sum(bool(ended.killed) for ended in found) == count:
            break
        if case not in known:
            known[case] = Undisturbed.of(case)
        is_cold = draw.random() < 0.5
        # After another case, the processes may be of another kind.
        nanotf.shutdown()
        if not is_cold:
            with _folder() as folder:
                case(folder)
        moment = draw.uniform(0, known[case].cold if is_cold else known[case].warm)
        with _folder() as folder:
            found.append(_disturbed(case, known[case].result, moment, draw, folder))
            print(found[-1], flush=True)
    return found


def _disturbed(
    case: Any, expected: Any, moment: float, draw: random.Random, folder: pathlib.Path
) -> Ended:
    killer = Killer(moment, draw, _of_job if case in (job, hosts) else _mine)
    began = time.monotonic()
    try:
        _job.clear()
        result = case(folder)
        killer.end()
        same = len(result) == len(expected) and all(
            np.allclose(a, b, rtol=1e-10, atol=0) for a, b in zip(result, expected, strict=True)
        )
        said = "equal" if same else "WRONG: another result"
    except NanoError as error:
        killer.end()
        is_allowed = case not in RESTARTED and killer.killed
        said = f"{'' if is_allowed else 'WRONG: '}{type(error).__name__}: {str(error)[:300]}"
    except Exception as error:
        killer.end()
        said = f"WRONG: {type(error).__name__}: {str(error)[:300]}"
    took = time.monotonic() - began
    if took > SLOWEST:
        said = f"WRONG: {took:.0f} s; {said}"
    return Ended(case.__name__, killer.killed, moment, said, took)


def table(found: Sequence[Ended]) -> str:
    """Returns a table of the ends, by case."""
    lines = ["case        kills  too late  equal  said so  wrong  slowest s"]
    for case in dict.fromkeys(each.case for each in found):
        of_case = [each for each in found if each.case == case]
        late = sum(not each.killed for each in of_case)
        equal = sum(bool(each.killed) and each.result == "equal" for each in of_case)
        wrong = sum(not each.is_as_documented for each in of_case)
        said = len(of_case) - late - equal - wrong
        slowest = max(each.seconds for each in of_case)
        counts = f"{len(of_case):>5}{late:>10}{equal:>7}{said:>9}{wrong:>7}{slowest:>11.1f}"
        lines.append(f"{case:<12}{counts}")
    return "\n".join(lines)
