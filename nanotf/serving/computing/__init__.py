"""A worker of a server: it loads the models, and answers requests for them.

- `worker_entry.py`: its beginning, which the front names. `serving_loop.py`: what it then runs,
  from its first message to the front to its last.
- `loaded_model.py`: a version of a model, and how to compute rows with it.
- `warm_up.py`: its first calls, before clients ask.
- `answering.py`: requests become answers. `batches.py`: rows of several are computed at once.
"""
