"""`nanotf endpoints list | logs | describe | stop`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nanotf.cli.detached import add_actions, print_list
from nanotf.cli.parsers import add_json
from nanotf.console import say
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.endpoints import endpoint_record, endpoint_start
from nanotf.sagemaker.endpoints.endpoint_record import EndpointFolder
from nanotf.wire.log_files import LogTail


def add_command(commands: Any) -> None:
    """Adds `nanotf endpoints` to the commands of a parser."""
    add = add_actions(
        commands,
        endpoint_record.KIND,
        "list, read, describe and stop the endpoints of deploy()",
        "Reads and stops endpoints, from any terminal.",
    )
    every = add("list", _list, "list the endpoints of a folder", named=False)
    add_json(every)
    logs = add("logs", _logs, "print the log of an endpoint's server")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="print more until the endpoint ends"
    )
    add("describe", _describe, "print an endpoint as JSON, with SageMaker's keys")
    add("stop", _stop, "stop an endpoint: SIGTERM to its server, and SIGKILL after 30 s")


def _endpoint(parsed: argparse.Namespace) -> EndpointFolder:
    return endpoint_record.find(parsed.name, parsed.output)


def _list(parsed: argparse.Namespace) -> int:
    return print_list(EndpointFolder, parsed.output, _row, _words, is_json=parsed.json)


def _row(endpoint: EndpointFolder) -> dict[str, Any]:
    state = endpoint.read_state()
    return {
        "name": endpoint.name,
        "status": state.status,
        "created": state.created,
        "ended": state.ended,
        "url": state.url,
        "restarts": state.restarts,
    }


def _words(row: dict[str, Any]) -> str:
    return row["url"] or ""  # None before it has answered


def _logs(parsed: argparse.Namespace) -> int:
    endpoint = _endpoint(parsed)
    tail, write = LogTail(endpoint.server_log), following.print_to(sys.stdout)
    if not parsed.follow:
        write(tail.read())
        return 0
    try:
        following.wait(endpoint, write, tail.read)
    except KeyboardInterrupt:
        say(
            f"endpoint {endpoint.name} continues. `nanotf endpoints stop {endpoint.name}` ends it.",
            sys.stderr,
        )
        raise  # `main` makes the exit code 130 of it
    return 0


def _describe(parsed: argparse.Namespace) -> int:
    print(json.dumps(endpoint_record.describe(_endpoint(parsed)), indent=2))
    return 0


def _stop(parsed: argparse.Namespace) -> int:
    endpoint = _endpoint(parsed)
    endpoint_start.stop_and_wait(endpoint)
    say(f"endpoint {endpoint.name}: {endpoint.read_state().status}")
    return 0
