"""The names of the transports: how workers exchange gradients.

"shm": through shared memory, on one host; no socket is opened. "grpc": TensorFlow's own
collectives, for comparison and for several hosts; its server in each worker listens on all
interfaces.
"""

TRANSPORTS = ("shm", "grpc")
DEFAULT_TRANSPORT = "shm"
