"""Arrays and batches that travel between processes, in shared memory.

- `arrays.py`: arrays in one block. `inputs.py`: each worker's share of them. `outputs.py`: results.
- `streams.py`: batches that the parent reads and hands out.
- `pipelines.py`: a `tf.data.Dataset` that another process reads.
- `datasets.py`: a dataset with `__getitem__`, and a reader's batches.
"""
