"""SageMaker's hosting interface for nanotf's model server.

- `invocations.py`: the paths that an endpoint answers. `nanotf.serving` calls it.
- `worker_models.py`: the models of a worker and their code.
- `model_code.py`: answers the requests for one model; `handler_code.py` and `toolkit_code.py` with
  the user's `inference.py`, in SageMaker's two forms; `user_calls.py`: calls of its functions.
- `module_scopes.py`, `code_requirements.py`: loads that code, and what it needs.
- `local_rest.py`: TensorFlow Serving's REST for handlers, in the worker itself.
- `model_bodies.py`: bodies by the signature of a model; `value_bodies.py`: bodies for a model of
  the user's own; `csv_bodies.py`, `numpy_bodies.py`: formats; `media_types.py`,
  `attributes_header.py`: headers.
- `container_settings.py`: the variables of SageMaker's containers, and their command `serve`.
"""
