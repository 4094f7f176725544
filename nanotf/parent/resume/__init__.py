"""`fit(resume="folder")`: training that continues in another process, exactly.

- `checks.py`: refuses arguments with which it could not.
- `resumption.py`: where training continues, and what a checkpoint holds (`moments.py`).
- `writer.py`: when checkpoints are written: at epochs' ends, at the end, at SIGTERM (`sigterm.py`).
- `store.py`: the checkpoints in a folder, which one `fit` at a time uses.
- `encoding.py`, `callback_states.py`: values as JSON and arrays, which run no code when read.
"""
