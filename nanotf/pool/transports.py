"""The names of the transports: ways in which workers exchange gradients.

"shm": through shared memory on a host, without sockets, and TCP between hosts. "grpc": TensorFlow's
own collectives, for comparison, on one host. Its server in each worker listens on all interfaces.
Workers of `nanotf.map` have no transport (`NO_TRANSPORT`), nor have the readers of datasets
(`READS`), nor those that run a function of nanotf's own (`CALLS`): each works by itself.
"""

from nanotf.collectives.native_library import check_available
from nanotf.errors import check_choice

TRANSPORTS = ("shm", "grpc")
DEFAULT_TRANSPORT = "shm"
# No argument accepts these.
NO_TRANSPORT = "none"
READS = "reads"
CALLS = "calls"


def check_transport(transport: str | None) -> str:
    """Checks an argument `transport` and returns the transport to use; None means the default.

    Raises:
        InvalidArgumentError: The transport is unknown.
    """
    if transport is None:
        return DEFAULT_TRANSPORT
    check_choice("transport", transport, TRANSPORTS)
    return transport


def check_can_exchange(transport: str) -> None:
    """Checks that several workers can exchange gradients here, before anything starts.

    Raises:
        NanoError: The native library is missing.
    """
    if transport == "shm":
        otherwise = 'On one host, transport="grpc" does without it; it opens ports.'
        check_available("Several workers need", otherwise)
