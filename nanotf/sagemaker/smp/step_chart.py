"""The picture of a `StepReport`: the pipeline, a row for each process, and its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

# Not pyplot, which would choose a backend for the whole process and keep the figure.
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanotf.report.chart import COLOURS
from nanotf.sagemaker.smp.rank_report import RankReport
from nanotf.sagemaker.smp.schedule import Half
from nanotf.sagemaker.smp.times import Interval

_OF_KIND = {Half.FORWARD: COLOURS["compute"], Half.BACKWARD: COLOURS["input"]}
_WAITING, _OTHER = "#E4E4E4", "#8C8C8C"
_OF_MEMORY = {
    "weights": COLOURS["epoch ends"],
    "other variables": COLOURS["rebuild"],
    "rest of the peak": "#B9D3E8",
}
_HEIGHT = 0.7  # of a row, whose distance to the next is 1
_NUMBERED = 0.012  # of the step: a shorter pass has no room for its number


def draw(
    path: str | os.PathLike[str], title: str, ranks: Sequence[RankReport], whole: Interval
) -> None:
    """Draws the picture into a file.

    Args:
        path: the suffix sets the format.
        title: above the pipeline.
        ranks: of several partitions.
        whole: the interval of the step.
    """
    count = len(ranks)
    figure = Figure(figsize=(11, 1.9 + 0.62 * count), layout="constrained")
    axes, sums = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    for row, each in enumerate(ranks):
        _draw_times(axes, row, each, whole)
        _draw_memory(sums, row, each)
    labels = [f"rank {each.rank}\npartition {each.partition}" for each in ranks]
    axes.set_yticks(range(count), labels)
    axes.set_ylim(count - 0.5, -0.5)  # the first process is on top
    axes.set_xlim(0, whole.length / 1e6)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left", fontsize=11)
    sums.set_xlabel("MiB, peak of the process")
    for one in (axes, sums):
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(axis="y", length=0)
    colours = {
        "forward": _OF_KIND[Half.FORWARD],
        "backward": _OF_KIND[Half.BACKWARD],
        "waiting": _WAITING,
        "messages, other": _OTHER,
        **_OF_MEMORY,
    }
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def _draw_times(axes: Any, row: int, each: RankReport, whole: Interval) -> None:
    execution = each.execution
    assert execution is not None  # with several partitions

    def bar(interval: Any, colour: str, **options: Any) -> None:
        left = (interval.began - whole.began) / 1e6
        axes.barh(row, interval.length / 1e6, _HEIGHT, left=left, color=colour, **options)

    bar(execution.whole, _OTHER)
    for wait in execution.waits:
        bar(wait, _WAITING)
    for block in execution.blocks:
        bar(block.time, _OF_KIND[block.kind], edgecolor="white", linewidth=0.8)
        if block.time.length > _NUMBERED * whole.length:
            middle = (block.time.began + block.time.ended) / 2
            place = ((middle - whole.began) / 1e6, row)
            axes.annotate(
                str(block.microbatch), place, ha="center", va="center", color="white", weight="bold"
            )


def _draw_memory(axes: Any, row: int, each: RankReport) -> None:
    known = each.weight_bytes, each.other_variable_bytes
    left = 0.0
    for colour, number in zip(
        _OF_MEMORY.values(), (*known, each.peak_bytes - sum(known)), strict=True
    ):
        axes.barh(row, max(0, number) / 2**20, _HEIGHT, left=left, color=colour)
        left += max(0, number) / 2**20
