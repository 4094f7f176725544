"""The picture of a report: a row for each process, its timeline and a bar of its sums."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from nanotf.report.timeline import Slice

Array = np.ndarray[Any, Any]

_HEIGHT = 0.8  # of a row, whose distance to the next is 1
_LABELED = 0.012  # of the whole time: a shorter slice has no room for its label


@dataclasses.dataclass(frozen=True)
class ProcessRow:
    """A process. Its parts have the names of colors."""

    name: str
    sums: Mapping[str, float]  # the bar's pieces, from left to right
    # The part of each of many intervals, 0 to 1, drawn as a column from bottom to top.
    shares: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    slices: Sequence[Slice] = ()  # instead, of a timeline whose parts can be seen one by one


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture."""

    title: str
    rows: Sequence[ProcessRow]
    whole: tuple[int, int]  # begin and end of the timelines, in nanoseconds
    time_unit: float  # of their axis, in nanoseconds
    time_label: str
    sums_label: str
    colours: Mapping[str, str]  # by name, in the order of the legend
    sums_title: str = ""

    def draw(self, file: str | os.PathLike[str] | IO[bytes]) -> None:
        """Draws it into a file, as PNG unless its name has another suffix."""
        # Not pyplot, which would choose a backend for the whole process and keep the figure.
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        count = len(self.rows)
        figure = Figure(figsize=(11, 2.0 + 0.6 * count), layout="constrained")
        axes, sums = figure.subplots(1, 2, width_ratios=(7, 2), sharey=True)
        used = set[str]()
        for place, row in enumerate(self.rows):
            used.update(row.sums, row.shares, (piece.name for piece in row.slices))
            self._draw_shares(axes, place, row.shares)
            self._draw_slices(axes, place, row.slices)
            left = 0.0
            for name, amount in row.sums.items():
                sums.barh(place, amount, _HEIGHT, left=left, color=self.colours[name])
                left += amount
        axes.set_yticks(range(count), [row.name for row in self.rows])
        axes.set_ylim(count - 0.4, -0.6)  # the first row is on top
        axes.set_xlim(0, self._at(self.whole[1]))
        axes.set_xlabel(self.time_label)
        axes.set_title(self.title, loc="left", fontsize=11)
        sums.set_xlabel(self.sums_label)
        if self.sums_title:
            sums.set_title(self.sums_title, loc="left", fontsize=10)
        for each in (axes, sums):
            each.spines[["top", "right"]].set_visible(False)
            each.tick_params(axis="y", length=0)
        # "outside" makes room only in a constrained layout, as above.
        handles = [Patch(color=c, label=name) for name, c in self.colours.items() if name in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
        figure.savefig(file, dpi=120)

    def _at(self, time: float) -> float:
        return (time - self.whole[0]) / self.time_unit

    def _draw_shares(self, axes: Any, place: int, shares: Mapping[str, Array]) -> None:
        bottom: Any = place + _HEIGHT / 2  # the axis is inverted
        for name, share in shares.items():
            edges = np.linspace(0, self._at(self.whole[1]), len(share) + 1)
            top = bottom - _HEIGHT * share
            axes.stairs(top, edges, baseline=bottom, fill=True, color=self.colours[name])
            bottom = top

    def _draw_slices(self, axes: Any, place: int, slices: Sequence[Slice]) -> None:
        for piece in slices:
            left, right = self._at(piece.began), self._at(piece.ended)
            # Slices with labels have neighbors of the same color.
            edge = {"edgecolor": "white", "linewidth": 0.8} if piece.label else {}
            colour = self.colours[piece.name]
            axes.barh(place, right - left, _HEIGHT, left=left, color=colour, **edge)
            if piece.label and right - left > _LABELED * self._at(self.whole[1]):
                middle = ((left + right) / 2, place)
                look = {"ha": "center", "va": "center", "color": "white", "weight": "bold"}
                axes.annotate(piece.label, middle, **look)
