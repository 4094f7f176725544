"""nanotf's goals next to the measurements. Pure functions of a result."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import ratios
from benchmarks.ratios import Maybe


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of rates between two contestants, taken within rounds.

    Args:
        title: str, for the table.
        above, below: tuple of a contestant and a measure, "steps", "epochs" or "processor".
    """

    title: str
    above: tuple[str, str]
    below: tuple[str, str]


RATIOS = {
    "ideal": Ratio("steps / ideal", ("shm", "steps"), ("ideal", "steps")),
    # Ratios of rates. For the processor time of a step the order is reversed.
    "processor": Ratio(
        "worker's / ideal's processor", ("ideal", "processor"), ("shm", "processor")
    ),
    "epochs": Ratio("epochs / plain epochs", ("shm", "epochs"), ("plain", "epochs")),
    "plain_16": Ratio("16 at once / plain epochs", ("plain_16", "epochs"), ("plain", "epochs")),
    "one": Ratio("one process / plain epochs", ("one", "epochs"), ("plain", "epochs")),
    "epochs_to_steps": Ratio("epochs / plain steps", ("shm", "epochs"), ("plain", "steps")),
    "auto": Ratio("auto's epochs / plain epochs", ("auto", "epochs"), ("plain", "epochs")),
    "steps": Ratio("steps / plain steps", ("shm", "steps"), ("plain", "steps")),
    "stock": Ratio("steps / stock", ("shm", "steps"), ("stock", "steps")),
    "ranks": Ratio("ranks / stock", ("ranks", "steps"), ("stock", "steps")),
    "grpc": Ratio("steps / nanotf grpc", ("shm", "steps"), ("grpc", "steps")),
    "headroom": Ratio("ideal / plain steps", ("ideal", "steps"), ("plain", "steps")),
    "plain_bf16": Ratio("bf16 / float32, plain", ("plain_bf16", "steps"), ("plain", "steps")),
    "shm_bf16": Ratio("bf16 / float32, nanotf", ("shm_bf16", "steps"), ("shm", "steps")),
    "peer": Ratio("epochs / peer epochs", ("shm", "epochs"), ("peer", "epochs")),
}


def seconds_per_step(contestant: Mapping[str, Any] | None, kind: str) -> list[Maybe]:
    """Returns seconds per step by round: of steps alone, of processor time, of whole epochs."""
    if contestant is None:
        return []
    if kind != "epochs":
        return [block[{"steps": "step"}.get(kind, kind)] for block in contestant["blocks"]]
    epochs = [block["epoch"] for block in contestant["blocks"]]
    return [None if epoch is None else epoch / contestant["steps"] for epoch in epochs]


def ratio_by_round(model: Mapping[str, Any], key: str) -> list[Maybe]:
    """The ratio `RATIOS[key]` of a model in each round; empty if a contestant is missing."""
    (above, above_kind), (below, below_kind) = RATIOS[key].above, RATIOS[key].below
    fast = seconds_per_step(model["contestants"].get(above), above_kind)
    slow = seconds_per_step(model["contestants"].get(below), below_kind)
    pairs = zip(slow, fast, strict=False)
    return [s / f if s is not None and f else None for s, f in pairs]


def ratio(model: Mapping[str, Any], key: str) -> Maybe:
    """The median of the ratio over the rounds."""
    return ratios.median(ratio_by_round(model, key))


def of_blocks(model: Mapping[str, Any], name: str, what: str) -> Maybe:
    """The median over the rounds of one time of one contestant, in seconds."""
    contestant = model["contestants"].get(name)
    return ratios.median(b[what] for b in contestant["blocks"]) if contestant else None


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal and its measurement.

    Args:
        text: str, describes the measure.
        target: float.
        at_least: bool, whether a higher value is better.
        measured: float or None if it was not measured.
        unit: str.
        where: str, the worst model, for goals about the worst model.
    """

    text: str
    target: float
    at_least: bool
    measured: Maybe
    unit: str = "x"
    where: str = ""

    @property
    def met(self) -> bool | None:
        """Returns True if the goal is met; None if it was not measured."""
        if self.measured is None:
            return None
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def goals(result: Mapping[str, Any]) -> list[Goal]:
    """Returns all goals, with a result's measurements."""
    models = result.get("models", {})

    def mean(key: str) -> Maybe:
        return ratios.geometric_mean(ratio(model, key) for model in models.values())

    def worst(
        value: Callable[[Any], Maybe], choose: Callable[..., tuple[float, str]]
    ) -> tuple[Maybe, str]:
        known = [
            (v, name) for name, v in ((n, value(m)) for n, m in models.items()) if v is not None
        ]
        return choose(known) if known else (None, "")

    def waited(model: Any) -> Maybe:
        first, step = of_blocks(model, "shm", "first_batch"), of_blocks(model, "shm", "step")
        return None if first is None or step is None else first - step

    def of_memory() -> Maybe:
        found = result.get("memory")
        return found["extra_bytes"] / 1e9 if found and found["array_bytes"] == 1 << 30 else None

    small, large = _all_reduce(result, 1 << 10), _all_reduce(result, 94 << 20)
    ideal, ideal_where = worst(lambda m: ratio(m, "ideal"), min)
    dear, dear_where = worst(lambda m: ratio(m, "processor"), max)
    strict, strict_where = worst(lambda m: ratio(m, "epochs_to_steps"), min)
    one, one_where = worst(lambda m: ratio(m, "one"), min)
    auto, auto_where = worst(lambda m: ratio(m, "auto"), min)
    first, first_where = worst(waited, max)
    boundary, boundary_where = worst(lambda m: of_blocks(m, "shm", "boundary"), max)
    return [
        Goal("steps against ideal, geometric mean", 0.90, True, mean("ideal")),
        Goal("steps against ideal, worst model", 0.80, True, ideal, where=ideal_where),
        Goal(
            "processor time of a step, worker's against ideal's",
            1.05,
            False,
            dear,
            where=dear_where,
        ),
        Goal("epochs against plain Keras's epochs, geometric mean", 1.25, True, mean("epochs")),
        Goal(
            "epochs against plain Keras's steps alone, geometric mean",
            1.1,
            True,
            mean("epochs_to_steps"),
        ),
        Goal(
            "epochs against plain Keras's steps alone, worst model",
            0.9,
            True,
            strict,
            where=strict_where,
        ),
        Goal("one process: epochs against plain Keras's, geometric mean", 1.15, True, mean("one")),
        Goal("one process: the same, worst model", 0.99, True, one, where=one_where),
        Goal('"auto" against plain Keras, epochs, worst model', 0.97, True, auto, where=auto_where),
        Goal("steps against stock gRPC, geometric mean", 2.0, True, mean("stock")),
        Goal("warm pool: the first batch begins after", 0.5, False, first, "s", first_where),
        Goal("epoch boundary", 20.0, False, _times(boundary, 1e3), "ms", boundary_where),
        Goal("all-reduce of 1 KB", 60.0, False, _times(small and small["seconds"], 1e6), "us"),
        Goal(
            "all-reduce of 94 MB, against one memcpy",
            2.5,
            False,
            large and large["seconds"] / large["memcpy_seconds"],
        ),
        Goal("Pipe mode: 100 kB records on one core", 200.0, True, _pipe_mode(result), "MB/s"),
        Goal("1 GB array: memory beyond the parent's copy", 1.1, False, of_memory(), "GB"),
        *_serving(result),
    ]


RIVALS = ("predict", "function")  # of `benchmarks.serving`


def times_cheaper(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], rival: str) -> Maybe:
    """Returns a rival's processor time per request, of the same model, over that of a server."""
    for other in rows:
        if (other["model"], other["server"]) == (row["model"], rival):
            return ratios.median_ratio(other["processors"], row["processors"])
    return None


def clients_in_time(block: Mapping[str, Any]) -> bool:
    """Returns False if the clients were too slow to tell how fast the server was."""
    seen = block["seen"]
    return bool(seen["late"] <= 0.1 * seen["answers"]["200"]["p99"])


def _serving(result: Mapping[str, Any]) -> list[Goal]:
    """Returns the goals of servers: of the small CNN with the cheapest engine."""
    rows = (result.get("serving") or {}).get("rows", ())
    of_small = [r for r in rows if r["model"] == "cnn8" and r["server"] not in RIVALS]
    best = min(of_small, key=lambda r: ratios.median(r["processors"]) or 0.0, default=None)
    against = {rival: best and times_cheaper(rows, best, rival) for rival in RIVALS}
    front = late = goodput = None  # the last two also if the clients were late
    where = best["server"] if best else ""
    if best and "overload" in best:
        front = best.get("front, wrk") or ratios.median(best["fronts"])
        if clients_in_time(best["70 %"]):
            late = best["70 %"]["seen"]["answers"]["200"]["p99"] / best["70 %"]["batch"]
        if clients_in_time(best["overload"]):
            goodput = best["overload"]["rate"] / best["overload"]["capacity"]
    return [
        Goal("serving: CPU, FastAPI and predict / ours", 200, True, against["predict"], "x", where),
        Goal("serving: CPU, Starlette / ours", 10, True, against["function"], "x", where),
        Goal("serving: the front per request", 60, False, _times(front, 1e6), "us", where),
        Goal("serving: p99 at 70 % load / a batch", 2, False, late, "x", where),
        Goal("serving: goodput at twice the load / capacity", 0.9, True, goodput, "x", where),
    ]


def _all_reduce(result: Mapping[str, Any], nbytes: int) -> Any:
    return next((row for row in result.get("collectives") or () if row["bytes"] == nbytes), None)


def _pipe_mode(result: Mapping[str, Any]) -> Maybe:
    """Returns MB/s of the slowest format with large records, read by the native library."""
    rows = [r for r in result.get("records") or () if r["reader"] == "native"]
    return min((r["megabytes"] for r in rows if r["bytes"] == 100_000), default=None)


def _times(value: Maybe, factor: float) -> Maybe:
    return None if value is None else value * factor


def spread(values: list[Maybe]) -> tuple[float, float, float] | None:
    """Returns median, minimum and maximum of the values that are not None."""
    known = [value for value in values if value is not None]
    return (statistics.median(known), min(known), max(known)) if known else None
