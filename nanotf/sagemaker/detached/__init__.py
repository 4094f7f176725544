"""Folders on disk that outlive the process that made them, each owned by a supervisor.

`jobs` and `endpoints` build on it: a job and an endpoint are such folders.

    launching process              supervisor (detached)             any process
      | starting.create             |                                 |
      |   the folder, its state     |                                 |
      | starting.start_supervisor   |                                 |
      |   ---- takes over ---->     | owns and writes the state,      | folders: reads the state
      |                             |   starts processes, writes      | following: logs, wait, stop
      |                             |   their output to logs          |   -- SIGTERM --> supervisor

- `owner.py`: which process owns a folder, and if it still lives.
- `folders.py`: the folder, its request and its state, how it is found by name.
- `starting.py`: makes a folder and hands it to a supervisor.
- `detached_supervisor.py`: the duties of every supervisor.
- `machine/processes.py`, `wire/log_files.py`: its programs, and what they print.
- `following.py`: reads and steers from any process.
"""
