"""Reports where the time of a call went: `history.nanotf`, `nanotf.last_report()`.

- `call_report.py`: the report and its table.
- `timeline.py`: times of parent and workers, as sums and as slices.
- `chart.py`: their picture.

Called by `parent`. May import `wire`, `errors` and `console`.
"""
