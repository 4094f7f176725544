"""Pipe mode: records that arrive through FIFOs. Users import `nanotf.data`.

A dataset made here is an ordinary `tf.data.Dataset`, which `fit` reads like any other.

- `pipe_mode.py`: the dataset, which takes the next pipe for each iterator.
- `pipe_files.py`: the files of a Pipe mode channel: its configuration, its pipes, the next index.
- `records.py`: reads a pipe into records, which `collectives/native/records.cc` finds.
- `channel_feeder.py`: writes a channel's files to its pipes; `python -m nanotf.data.feed` calls it.
"""
