"""Objects that travel between processes: pickles, and what belongs beside them.

- `pickling.py`: functions, classes, tensors. `packing.py`: large arrays beside a pickle.
- `heap.py`: Keras's objects, which keep their identity (`identities.py`) from call to call.
- `whole.py`: copies of everything, values included.
- `mutables.py`, `attributes.py`: what a call has changed, sent home.
- `programs.py`: a `@nano` function with all that it refers to.
- `user_modules.py`: the user's modules. `outlines.py`: checks that what arrived is what was sent.
"""
