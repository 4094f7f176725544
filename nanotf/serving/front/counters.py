"""The server's metrics, with TensorFlow Serving's names where it has them, as Prometheus text.

Source: `monitoring/` of tensorflow/serving: names are paths with ":" for "/", and times are in
microseconds.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable

from nanotf.serving.front.status_names import status_name
from nanotf.serving.interface import REST

PATH = "/monitoring/prometheus/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Exponential buckets, 10 * 1.8 ** i: `util.cc` of tensorflow/serving.
_TIMES = tuple(10 * 1.8**i for i in range(33))
_ROWS = tuple(float(2**i) for i in range(15))
_Labels = tuple[tuple[str, str], ...]


class _Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1  # `le` includes the bound
        self.total += value


class Counters:
    """All metrics of a server.

    Attributes:
        gauges: dict of a name to a function that returns its value now.
        totals: the same, of values that never fall.
    """

    def __init__(self) -> None:
        self.gauges: dict[str, Callable[[], float]] = {}
        self.totals: dict[str, Callable[[], float]] = {}
        self._counts: collections.defaultdict[str, collections.Counter[_Labels]]
        self._counts = collections.defaultdict(collections.Counter)
        self._histograms: dict[str, dict[_Labels, _Histogram]] = collections.defaultdict(dict)

    def answered(
        self, model: str, verb: str, status: int, seconds: float, entrypoint: str = REST
    ) -> None:
        """Counts an answer.

        Args:
            verb: of `Request`.
            status: of HTTP.
            seconds: from the request's first byte to its answer.
            entrypoint: see `Interface.entrypoint`.
        """
        served = ":tensorflow:serving:"
        code = status_name(status)
        self._counts[served + "request_count"][("model_name", model), ("status", code)] += 1
        labels = (("model_name", model), ("API", verb), ("entrypoint", entrypoint))
        self._add(served + "request_latency", labels, _TIMES, seconds * 1e6)

    def computed(self, model: str, rows: int, seconds: float) -> None:
        """Counts a batch.

        Args:
            seconds: in the worker.
        """
        served = ":tensorflow:serving:"
        self._counts[served + "request_example_count_total"][(("model", model),)] += rows
        labels = (("model_name", model), ("runtime", "nanotf"))
        self._add(served + "runtime_latency", labels, _TIMES, seconds * 1e6)
        self._add("nanotf_batch_rows", (("model_name", model),), _ROWS, rows)

    def rejected(self, reason: str) -> None:
        """Counts a request that no worker has got."""
        self._counts["nanotf_rejected_total"][(("reason", reason),)] += 1

    def _add(self, name: str, labels: _Labels, bounds: tuple[float, ...], value: float) -> None:
        found = self._histograms[name].get(labels)
        if found is None:
            found = self._histograms[name][labels] = _Histogram(bounds)
        found.add(value)

    def text(self) -> bytes:
        """Returns all of them in Prometheus's text format, version 0.0.4."""
        lines: list[str] = []
        for kind, found in (("gauge", self.gauges), ("counter", self.totals)):
            for name, value_of in found.items():
                lines += [f"# TYPE {name} {kind}", f"{name} {value_of():g}"]
        for name, counts in self._counts.items():
            lines.append(f"# TYPE {name} counter")
            lines += [f"{name}{_braces(labels)} {value}" for labels, value in counts.items()]
        for name, histograms in self._histograms.items():
            lines.append(f"# TYPE {name} histogram")
            for labels, histogram in histograms.items():
                lines += _lines_of(name, labels, histogram)
        return ("\n".join(lines) + "\n").encode()


def _lines_of(name: str, labels: _Labels, histogram: _Histogram) -> list[str]:
    lines, count = [], 0
    for bound, here in zip((*histogram.bounds, None), histogram.counts, strict=True):
        count += here
        end = "+Inf" if bound is None else f"{bound:g}"
        lines.append(f"{name}_bucket{_braces((*labels, ('le', end)))} {count}")
    lines.append(f"{name}_sum{_braces(labels)} {histogram.total:g}")
    lines.append(f"{name}_count{_braces(labels)} {count}")
    return lines


def _braces(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
