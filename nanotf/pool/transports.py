"""The names of the transports: how workers exchange gradients.

"shm": through shared memory, on one host; no socket is opened. "grpc": TensorFlow's own
collectives, for comparison and for several hosts; its server in each worker listens on all
interfaces.
"""

from nanotf.errors import check_choice

TRANSPORTS = ("shm", "grpc")
DEFAULT_TRANSPORT = "shm"


def check_transport(transport: str | None) -> str:
    """The transport to use for an argument `transport`; None means the default.

    Raises:
        InvalidArgumentError: There is no such transport.
    """
    if transport is None:
        return DEFAULT_TRANSPORT
    check_choice("transport", transport, TRANSPORTS)
    return transport
