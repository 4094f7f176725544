"""Timelines in the Trace Event Format of https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.report.timeline import Track


def write(path: str | os.PathLike[str], title: str, tracks: Sequence[Track]) -> None:
    """Writes a JSON file with a row for each track, from the first slice's begin on."""
    text = json.dumps({"traceEvents": list(_events(title, tracks)), "displayTimeUnit": "ms"})
    pathlib.Path(path).write_text(text, encoding="utf-8")


def _events(title: str, tracks: Sequence[Track]) -> Iterator[dict[str, Any]]:
    """Yields complete events ("X") in microseconds, and names of tracks."""
    # The monotonic clock counts from the machine's start; a trace begins at 0.
    origin = min(piece.began for track in tracks for piece in track.slices)
    yield _metadata("process_name", 0, f"nanotf: {title}")
    for number, track in enumerate(tracks):
        yield _metadata("thread_name", number, track.name)
        # Without it, viewers choose the order of the tracks.
        yield {**_metadata("thread_sort_index", number, ""), "args": {"sort_index": number}}
        for piece in track.slices:
            if piece.ended == piece.began:  # a stage that this call did not have
                continue
            yield {
                "name": f"{piece.name} {piece.label}".rstrip(),
                "ph": "X",
                "pid": 0,
                "tid": number,
                "ts": (piece.began - origin) / 1e3,
                "dur": (piece.ended - piece.began) / 1e3,
                "args": piece.numbers,
            }


def _metadata(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
