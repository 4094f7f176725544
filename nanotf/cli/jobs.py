"""`nanotf jobs list | logs | describe | stop | wait`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nanotf.cli.detached import add_actions, print_list
from nanotf.cli.parsers import add_json, whole_number
from nanotf.cli.train import report_end, wait_for
from nanotf.console import say
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.jobs import follow, metrics, record
from nanotf.sagemaker.jobs.record import JobFolder


def add_command(commands: Any) -> None:
    """Adds `nanotf jobs` to the commands of a parser."""
    add = add_actions(
        commands,
        record.KIND,
        "list, read, describe, stop and wait for the jobs of `nanotf train`",
        "Reads and steers jobs, from any terminal.",
    )
    every = add("list", _list, "list the jobs of a folder", named=False)
    add_json(every)
    logs = add("logs", _logs, "print a job's log")
    logs.add_argument("-f", "--follow", action="store_true", help="print more until the job ends")
    logs.add_argument("--host", help="print the log of one host, such as algo-2")
    logs.add_argument("--rank", type=whole_number, metavar="N", help="print a worker's own log")
    add("describe", _describe, "print a job as JSON, with SageMaker's keys")
    add("stop", _stop, "stop a job: SIGTERM, and SIGKILL after 120 s")
    wait = add("wait", _wait, "wait for a job's end; exit with the script's code")
    wait.add_argument("--logs", action="store_true", help="print its log, too")


def _job(parsed: argparse.Namespace) -> JobFolder:
    return record.find(parsed.name, parsed.output)


def _list(parsed: argparse.Namespace) -> int:
    return print_list(JobFolder, parsed.output, _row, _words, is_json=parsed.json)


def _row(job: JobFolder) -> dict[str, Any]:
    state = job.read_state()
    return {
        "name": job.name,
        "status": state.status,
        "created": state.created,
        "ended": state.ended,
        "metrics": metrics.last_values(metrics.read(job.metrics)),
    }


def _words(row: dict[str, Any]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in row["metrics"].items())


def _logs(parsed: argparse.Namespace) -> int:
    job = _job(parsed)
    if parsed.follow:
        wait_for(job, logs=True, host=parsed.host, rank=parsed.rank)  # exits with 0, unlike `_wait`
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
