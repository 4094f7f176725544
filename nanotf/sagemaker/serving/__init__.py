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
Users import `nanotf.estimator`; `cli` lists and stops endpoints. Never imports TensorFlow: the
server does, `nanotf serve`, in its own processes.

    TensorFlowModel.deploy         supervisor (detached)            nanotf serve
      | endpoint_start: folder,      |                                |
      |   model, command  --------> | endpoint_supervisor: starts it, |
      | waits for InService <------ |   again if it dies  ----------> | answers /ping
      | TensorFlowPredictor  ------------------- POST /invocations --> |

- `serializers.py`, `deserializers.py`: bodies of requests and answers, in the SDK's names.
- `http_client.py`, `predictor.py`: send them.
- `model_source.py`: the model, and the code that is packed with it.
- `endpoint_record.py`: an endpoint's folder. `endpoint_command.py`: its server's command.
- `endpoint_start.py`, `endpoint_supervisor.py`: start it, and keep it in service.
- `model_arguments.py`, `tensorflow_model.py`, `transformer.py`: the SDK's classes.
"""
