"""The names of the transports: how workers exchange gradients."""

TRANSPORTS = ("grpc",)
DEFAULT_TRANSPORT = "grpc"
