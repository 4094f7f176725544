"""SageMaker's endpoints, on this machine: models, endpoints, predictors, batch transform.

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
