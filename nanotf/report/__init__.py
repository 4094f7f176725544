"""Reports where the time of a call went: `history.nanotf`, `nanotf.last_report()`.

- `timed_report.py`: what users can do with any report of times, also with one of a package above:
  print a table (`table.py`), draw a picture (`chart.py`), write a trace (`chrome_trace.py`).
- `stopwatch.py`: records a worker's times, in the classes of `wire.timing`.
- `timeline.py`: the times of processes, as slices of tracks and as sums.
- `call_report.py`: the report of a call. `call_chart.py`: its picture.

Called by `parent`; `worker` has the stopwatch. May import `wire`, `errors` and `console`.
"""
