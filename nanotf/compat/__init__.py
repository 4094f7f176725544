"""All private names of TensorFlow and Keras that nanotf uses, and nothing else.

Each name is listed with the versions in which it was seen, and the reason why no public name
suffices. `tests/e2e/test_compat*.py` look up all of them and fail first if one moves. Workers
replace the names in `nanotf.region.overrides.TABLE`.
"""
