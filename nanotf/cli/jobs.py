"""`nanotf jobs list | logs | describe | stop | wait`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nanotf.cli.parsers import Parser, add_json, whole_number
from nanotf.cli.train import add_output, report_end, wait_for
from nanotf.console import say
from nanotf.errors import JobError
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.jobs import follow, metrics, record
from nanotf.sagemaker.jobs.record import JobFolder


def add_command(commands: Any) -> None:
    """Adds `nanotf jobs` to the commands of a parser."""
    jobs = commands.add_parser(
        "jobs",
        help="list, read, describe, stop and wait for the jobs of `nanotf train`",
        description="Reads and steers jobs, from any terminal.",
        allow_abbrev=False,
    )
    actions = jobs.add_subparsers(
        dest="action", metavar="ACTION", title="actions", required=True, parser_class=Parser
    )
    every = _add(actions, "list", _list, "list the jobs of a folder", named=False)
    add_json(every)
    logs = _add(actions, "logs", _logs, "print a job's log")
    logs.add_argument("-f", "--follow", action="store_true", help="print more until the job ends")
    logs.add_argument("--host", help="print the log of one host, such as algo-2")
    logs.add_argument("--rank", type=whole_number, metavar="N", help="print a worker's own log")
    _add(actions, "describe", _describe, "print a job as JSON, with SageMaker's keys")
    _add(actions, "stop", _stop, "stop a job: SIGTERM, and SIGKILL after 120 s")
    wait = _add(actions, "wait", _wait, "wait for a job's end; exit with the script's code")
    wait.add_argument("--logs", action="store_true", help="print its log, too")


def _add(actions: Any, name: str, run: Any, about: str, *, named: bool = True) -> Any:
    parser = actions.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
    )
    if named:
        parser.add_argument("name", help="the job's name")
    add_output(parser)
    parser.set_defaults(run=run)
    return parser


def _job(parsed: argparse.Namespace) -> JobFolder:
    return record.find(parsed.name, parsed.output)


def _list(parsed: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for job in record.find_all(parsed.output):
        try:
            state = job.read_state()
        except JobError as error:  # the others are none the worse
            say(f"warning: {error}", sys.stderr)
            continue
        found = metrics.last_values(metrics.read(job.metrics))
        rows.append(
            {
                "name": job.name,
                "status": state.status,
                "created": state.created,
                "ended": state.ended,
                "metrics": found,
            }
        )
    rows.sort(key=lambda row: str(row["created"]))
    if parsed.json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"No jobs in {record.KIND.folder(parsed.output)}.")
    width = max((len(str(row["name"])) for row in rows), default=0)
    for row in rows:
        values = " ".join(f"{name}={value:g}" for name, value in row["metrics"].items())
        created = str(row["created"]).partition(".")[0]
        print(f"{row['name']:<{width}}  {row['status']:<10}  {created}  {values}".rstrip())
    return 0


def _logs(parsed: argparse.Namespace) -> int:
    job = _job(parsed)
    if parsed.follow:
        wait_for(job, logs=True, host=parsed.host, rank=parsed.rank)
    else:
        following.print_to(sys.stdout)(follow.LogReader(job, parsed.host, parsed.rank).read())
    return 0


def _describe(parsed: argparse.Namespace) -> int:
    print(json.dumps(follow.describe(_job(parsed)), indent=2))
    return 0


def _stop(parsed: argparse.Namespace) -> int:
    job = _job(parsed)
    state = follow.stop(job)
    say(f"job {job.name}: {state.status}")
    return 0


def _wait(parsed: argparse.Namespace) -> int:
    job = _job(parsed)
    return report_end(job, wait_for(job, logs=parsed.logs), logs=parsed.logs)
