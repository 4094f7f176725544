"""Every private name of TensorFlow and Keras that nanotf touches, and nothing else.

Each name stands with the reason why no public one does, and the versions in which it was
seen; `tests/e2e/test_compat.py` looks all of them up and fails first when one moves. Those that
workers replace stand in `nanotf.region.overrides.TABLE`.
"""
