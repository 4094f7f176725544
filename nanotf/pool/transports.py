"""The names of the transports: ways in which workers exchange gradients.

"shm": through shared memory on a host, without sockets, and TCP between hosts. "grpc": TensorFlow's
own collectives, for comparison, on one host. Its server in each worker listens on all interfaces.
Workers of `nanotf.map` have no transport (`NO_TRANSPORT`), nor have the readers of datasets
(`READS`): each works by itself.
"""

from nanotf.errors import check_choice

TRANSPORTS = ("shm", "grpc")
DEFAULT_TRANSPORT = "shm"
# No argument accepts these.
NO_TRANSPORT = "none"
READS = "reads"


def check_transport(transport: str | None) -> str:
    """Checks an argument `transport` and returns the transport to use; None means the default.

    Raises:
        InvalidArgumentError: The transport is unknown.
    """
    if transport is None:
        return DEFAULT_TRANSPORT
    check_choice("transport", transport, TRANSPORTS)
    return transport
