"""The engines that compute programs: TensorFlow's own, and those of other packages.

- `inference_engine.py`: the interface.
- `engine_table.py`: the engines by name, and the check that one can be used here.
- `tensorflow_engine.py`, `frozen_engine.py`, `xla_engine.py`: TensorFlow's.
- `openvino_engine.py`, `onnxruntime_engine.py`, `litert_engine.py`: of optional packages.

Importing an engine's module imports neither TensorFlow nor its package; `convert` and `load` do.
"""
