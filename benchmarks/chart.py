"""Chart of a result."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks import goals, ratios, report

# Contestant and measure, color. The line at 1 is plain Keras's steps alone.
_BARS = (
    (("plain", "epochs"), "#b8b8b8"),
    (("stock", "steps"), "#d1843c"),
    (("peer", "epochs"), "#8c5aa8"),
    (("grpc", "steps"), "#8fb8de"),
    (("shm", "epochs"), "#3f7fbf"),
    (("shm", "steps"), "#12487f"),
    (("ideal", "steps"), "#4f9d58"),
    (("shm_bf16", "steps"), "#b04a5a"),
)


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG: training throughput by model, and all-reduce by message size.

    Args:
        result: mapping, as `cli` writes it to JSON.
        path: path of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models, sizes = result.get("models", {}), result.get("collectives") or []
    panels = [p for p, there in ((_throughput, models), (_all_reduce, sizes)) if there]
    if not panels:
        return
    height = 4.6 * len(panels)
    figure = Figure(figsize=(max(8.0, 1.5 * len(models) + 3), height), layout="constrained")
    FigureCanvasAgg(figure)
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(len(panels), 1, number), result)
    figure.savefig(path, dpi=130)


def _throughput(axes: Any, result: Mapping[str, Any]) -> None:
    models = result["models"]
    bars = [
        (what, colour)
        for what, colour in _BARS
        if any(_relative(model, *what) is not None for model in models.values())
    ]
    width = 0.84 / max(1, len(bars))
    for place, (what, colour) in enumerate(bars):
        at = [number - 0.42 + (place + 0.5) * width for number in range(len(models))]
        heights = [_relative(model, *what) or 0.0 for model in models.values()]
        drawn = axes.bar(at, heights, width * 0.94, color=colour)
        drawn.set_label(f"{report.TITLES[what[0]]}, {what[1]}")
        if what == ("shm", "steps"):
            axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), [m["title"].replace(" ", "\n", 1) for m in models.values()])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("training throughput,\nplain Keras's steps alone = 1")
    size = result.get("options", {}).get("num_processes", "?")
    axes.set_title(f"Training with {size} processes, median of ratios within a round")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _relative(model: Mapping[str, Any], name: str, kind: str) -> float | None:
    """A contestant's rate relative to plain Keras's steps alone."""
    contestants = model["contestants"]
    plain = goals.seconds_per_step(contestants.get("plain"), "steps")
    own = goals.seconds_per_step(contestants.get(name), kind)
    return ratios.median_ratio(plain, own) if len(plain) == len(own) else None


def _all_reduce(axes: Any, result: Mapping[str, Any]) -> None:
    rows = result["collectives"]
    sizes = [row["bytes"] for row in rows]
    for name, label, colour in (
        ("seconds", "all-reduce through shared memory", "#12487f"),
        ("memcpy_seconds", "one memcpy", "#8a8a8a"),
    ):
        axes.plot(sizes, [row[name] * 1e6 for row in rows], marker="o", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [_size(nbytes) for nbytes in sizes], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("message")
    axes.set_ylabel("microseconds")
    axes.set_title("All-reduce between the workers")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _size(nbytes: float) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.0f} {unit}"
    return f"{nbytes:.0f} B"
