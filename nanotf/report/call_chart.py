"""The picture of a call's `Report`: a timeline of all processes, and the workers' sums.

Steps are too short and too many to be seen one by one. A worker's track shows how each small
interval of time was spent: a column of colors, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanotf.report import timeline
from nanotf.report.chart import Array, Chart, ProcessRow
from nanotf.wire import timing

BINS = 400  # intervals of time in a track

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLOURS = {
    "preparing": "#999999",
    "start-up": "#666666",
    "shipping": "#F0E442",
    "rebuild": "#CC79A7",
    "first step": "#7A4D73",
    "input": "#E69F00",
    "compute": "#0072B2",
    "comm.": "#56B4E9",
    "comm. wait": "#D55E00",
    "between": "#BBBBBB",
    "hooks": "#000000",
    "epoch ends": "#009E73",
    "finishing": "#8C6D46",
}
_OF_CALL = {
    "preparing": "preparing",
    "start-up": "start-up",
    "shipping": "shipping",
    "finishing": "finishing",
    "on_epoch_end": "epoch ends",
    "on_train_end": "epoch ends",
}  # and other hooks, see `_name_of_call`


def of_call(
    title: str,
    imbalance: str | None,
    call: timing.CallTimes,
    times: Sequence[timing.WorkerTimes],
    workers: Sequence[timeline.WorkerReport],
) -> Chart:
    """Returns the picture of a call.

    Args:
        imbalance: the title of the sums; None if this process did the work of the only worker.
        call, times: the recorded times of parent and workers.
        workers: their sums, by rank.
    """
    edges = np.linspace(call.began, call.ended, BINS + 1)
    names, sums, tracks = ["this process"], list(map(_sums, workers)), _tracks(call, times, edges)
    if imbalance is None:
        tracks = [_together(tracks)]
    else:
        names += [f"worker {worker.rank}" for worker in workers]
        sums = [{}, *sums]  # the parts of `COLUMNS` are of workers alone
    return Chart(
        title,
        [ProcessRow(*row) for row in zip(names, sums, map(_seen, tracks), strict=True)],
        whole=(call.began, call.ended),
        time_unit=1 / timeline.NS,
        time_label="seconds since the call",
        sums_label="seconds, sums",
        colours=COLOURS,
        sums_title=imbalance or "",
    )


def _seen(track: dict[str, Array]) -> dict[str, Array]:
    """Returns the shares of a track that are not zero, except for rounding."""
    return {name: share for name, share in track.items() if share.max() >= 1e-9}


def _sums(worker: timeline.WorkerReport) -> dict[str, float]:
    sums = ((name, getattr(worker, field)) for field, name in timeline.COLUMNS)
    return {name: seconds for name, seconds in sums if seconds}  # None: not measured


def _tracks(
    call: timing.CallTimes, times: Sequence[timing.WorkerTimes], edges: Array
) -> list[dict[str, Array]]:
    """Returns, for each track and name, the share (0 to 1) that it took of every interval."""
    # All names share one array: what follows replaces it, and never writes into it.
    of_call: dict[str, Array] = dict.fromkeys(COLOURS, np.zeros(len(edges) - 1))
    for piece in timeline.slices_of_call(call):
        name = _name_of_call(piece.name)
        if name is not None:  # None for "running", of which the workers' tracks tell
            of_call[name] = of_call[name] + _overlap(piece.began, piece.ended, edges)
    _add_hooks_not_kept(call, edges, of_call)
    return [of_call, *(_track_of_worker(each, edges) for each in times)]


def _together(tracks: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Returns the track of a process that did the work of all these tracks."""
    found: dict[str, Array] = {}
    for track in tracks:
        for name, share in track.items():
            found[name] = found[name] + share if name in found else share
    return found


def _name_of_call(name: str) -> str | None:
    """Returns the color's name for a slice of the parent's track; None to leave it blank."""
    return _OF_CALL.get(name, "hooks" if name.startswith("on_") else None)


def _add_hooks_not_kept(call: timing.CallTimes, edges: Array, shares: dict[str, Array]) -> None:
    """Spreads the time in hooks that were not kept over the rest of the call."""
    left = call.in_hooks - sum(ended - began for _, began, ended in call.hooks)
    last = max((ended for _, _, ended in call.hooks), default=call.sent)
    if left > 0 and call.done > last:  # else no time is left for it
        place = _overlap(last, call.done, edges)
        shares["hooks"] = shares["hooks"] + place * left / (call.done - last)


def _overlap(began: int, ended: int, edges: Array) -> Array:
    """Returns the share of every interval that lies between two times."""
    # Edges outside move to the nearer end, so that the rest of their interval has no length.
    inside = np.diff(np.clip(edges, began, ended))
    return np.asarray(inside / np.diff(edges))


def _track_of_worker(times: timing.WorkerTimes, edges: Array) -> dict[str, Array]:
    if times.steps:
        rows = np.array(times.steps, np.float64).reshape(-1, timing.STEP_COLUMNS)
    else:  # steps were not recorded: each pass counts as one, and not as a first one
        whole = timeline.outer_passes(times)
        rows = np.array([[0, p.began, p.ended, 0, p.in_calls, p.waited, 1] for p in whole], float)
        rows = rows.reshape(-1, timing.STEP_COLUMNS)
    kind, began, ended, waiting, in_calls, waited, _ = rows.T
    first = np.zeros(len(rows), bool)
    if times.steps:
        first[[np.flatnonzero(kind == k)[0] for k in np.unique(kind)]] = True
    # Most of a first step is tracing, so it has a color of its own as a whole.
    parts = {
        "first step": np.where(first, ended - began, 0),
        "input": np.where(first, 0, waiting),
        "compute": np.where(first, 0, ended - began - waiting - in_calls),
        "comm.": np.where(first, 0, in_calls - waited),
        "comm. wait": np.where(first, 0, waited),
    }
    shares = {name: _spread(began, ended, amount, edges) for name, amount in parts.items()}
    _add_steps_not_kept(times, edges, shares)
    in_steps = sum(shares.values(), np.zeros(len(edges) - 1))
    in_passes = np.zeros(len(edges) - 1)
    for one in timeline.outer_passes(times):
        in_passes += _overlap(one.began, one.ended, edges)
    begin = timeline.begin_of_passes(times)
    shares["rebuild"] = _overlap(times.began, begin, edges)
    between = np.clip(in_passes - in_steps, 0, 1)
    shares["hooks"] = _hooks_of_worker(times, edges, between)
    shares["between"] = np.clip(between - shares["hooks"], 0, 1)
    shares["epoch ends"] = np.clip(
        _overlap(begin, times.ended, edges) - np.maximum(in_passes, in_steps), 0, 1
    )
    return {name: shares[name] for name in COLOURS if name in shares}  # bottom to top


def _hooks_of_worker(times: timing.WorkerTimes, edges: Array, between: Array) -> Array:
    """Returns the share of hooks in every interval; those not kept are spread between steps."""
    began, ended = np.array(times.hooks, np.float64).reshape(-1, timing.HOOK_COLUMNS).T
    share = _spread(began, ended, ended - began, edges)
    left = sum(p.hooks for p in times.passes) - (ended - began).sum()
    last = times.hooks[-1] if times.hooks else times.began
    place = np.minimum(between, _overlap(last, times.ended, edges))
    room = (place * np.diff(edges)).sum()
    return share + place * min(1, left / room) if left > 0 and room > 0 else share


def _spread(began: Array, ended: Array, amount: Array, edges: Array) -> Array:
    """Spreads amounts evenly over their steps; returns the share in every interval."""
    if len(began) == 0:
        return np.zeros(len(edges) - 1)
    # Steps follow one another, so these times ascend, as `np.interp` needs.
    times = np.stack([began, ended], 1).reshape(-1)
    grown = np.cumsum(np.stack([np.zeros_like(amount), amount], 1).reshape(-1))
    return np.asarray(np.diff(np.interp(edges, times, grown)) / np.diff(edges))


def _add_steps_not_kept(times: timing.WorkerTimes, edges: Array, shares: dict[str, Array]) -> None:
    """Spreads the sums of steps that were not kept over the rest of their passes."""
    rows = list(timeline.rows_of_steps(times))
    if len(rows) < timing.STEPS_KEPT:  # all were kept
        return
    last = rows[-1][2]
    first = {row[0]: row for row in reversed(rows)}  # by kind; the sums are without these
    rows = [row for row in rows if row is not first[row[0]]]
    for one in times.passes:
        if one.ended <= last:
            continue
        kept = [r for r in rows if one.began <= r[1] and timing.KINDS[r[0]] == one.kind]
        inside, waiting, in_calls, waited = (
            max(0, total - sum(values))
            for total, values in (
                (one.inside, [r[2] - r[1] for r in kept]),
                (one.input, [r[3] for r in kept]),
                (one.in_calls, [r[4] for r in kept]),
                (one.waited, [r[5] for r in kept]),
            )
        )
        place = _overlap(max(one.began, last), one.ended, edges)
        span = one.ended - max(one.began, last)
        amounts = {
            "input": waiting,
            "compute": max(0, inside - waiting - in_calls),
            "comm.": max(0, in_calls - waited),
            "comm. wait": waited,
        }
        for name, amount in amounts.items():
            shares[name] = shares[name] + place * amount / span
