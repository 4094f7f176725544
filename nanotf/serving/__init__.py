"""Serves models: a front that speaks HTTP and gRPC, and warm workers with cores of their own.

- `interface.py`: what the ways to ask for predictions have in common.
- `front/`: what clients reach. `computing/`: what a worker runs. `worker_messages.py`, `link.py`:
  what the two say to each other, and how.
- `repository/`: the models on disk, and which of their versions are wanted.
- `tensorflow_rest.py`: TensorFlow Serving's REST; its bodies in `tensorflow_predict.py` and
  `tensorflow_examples.py`.
- `remote/`: interfaces of gRPC; their messages are classes that `message_tables.py` makes.
- `open_inference.py`: the Open Inference Protocol; its tensors in `open_tensors.py`.
- `json_text.py`, `json_tensors.py`: JSON with NaN, and nested lists that are tensors.
- `common_rows.py`: the rows of a request, by which requests are computed together.
- `served_versions.py`: the versions of a model that answer.
"""
