"""Every private name of TensorFlow and Keras that nanotf touches, and nothing else.

Each is listed with the versions it was seen in and why no public name will do.
`tests/e2e/test_compat.py` looks all of them up and fails first when one moves. Workers replace
the names in `nanotf.region.overrides.TABLE`.
"""
