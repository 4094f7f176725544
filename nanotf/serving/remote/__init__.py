"""Interfaces that clients call by gRPC.

- `remote_interface.py`: what they have in common. `front/grpc_listener.py` takes the calls.
- `prediction_service.py`: TensorFlow Serving's services; its messages in `serving_messages.py`,
  tensors in `tensor_protos.py`; a worker reads and writes them by `serving_bodies.py`.
- `inference_service.py`: the Open Inference Protocol; its messages in `inference_messages.py`,
  a worker reads and writes them by `inference_bodies.py`.
"""
