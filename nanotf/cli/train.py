"""`nanotf train`: runs a script as a job."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from nanotf.cli.detached import add_output
from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.machine import cluster
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.jobs import data_channels, follow, hyperparameters, launch, metrics, record
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.sagemaker.jobs.source import SourceCode

STOPPED = 3  # the exit code for a job that was stopped


def add_command(commands: Any) -> None:
    """Adds `nanotf train` to the commands of a parser."""
    train = commands.add_parser(
        "train",
        help="run a script as a job with hyperparameters, data channels and a folder of results",
        usage="nanotf train [options] script.py",
        description="Runs a script as SageMaker's script mode does, on this machine. The script "
        "gets the hyperparameters as arguments, and SM_* variables that name the folders of its "
        "data and results. A detached process owns the job, which outlives this terminal. Prints "
        "the log, and ends with the script's exit code.",
        allow_abbrev=False,
    )
    train.add_argument("script", help="the entry point; with --source-dir, relative to it")
    _add_job_options(train)
    _add_run_options(train)
    train.set_defaults(run=_train)


def _add_job_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--channel",
        action="append",
        default=[],
        metavar="NAME=SOURCE[,KEY=VALUE...]",
        help="data, as SM_CHANNEL_NAME: a path, file://, s3://, gs://. Keys: mode=File|FastFile|"
        "Pipe, content-type, distribution=FullyReplicated|ShardedByS3Key; with mode=Pipe also "
        "shuffle=SEED, compression=Gzip, record-wrapping=RecordIO",
    )
    train.add_argument(
        "-p",
        "--hyperparameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the script; VALUE is a number that prints alike, JSON, or a text",
    )
    train.add_argument(
        "--source-dir", metavar="DIR", help="copy this folder as the code; default the script alone"
    )
    train.add_argument(
        "--dependency",
        action="append",
        default=[],
        metavar="PATH",
        help="copy this file or folder beside the script",
    )
    train.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help="a metric to find in the log; the name ends at the first =, and the expression has a "
        "group around the number",
    )
    train.add_argument(
        "--checkpoints",
        metavar="SOURCE",
        help="keep checkpoints here: a path, file://, s3://, gs://; default the job's folder",
    )
    add_output(train, record.KIND)
    train.add_argument("--name", help="the job's name; default the script's name and the time")
    train.add_argument(
        "--no-wait", action="store_true", help="print the job's name and return at once"
    )


def _add_run_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "-n",
        "--num-processes",
        metavar="N",
        help='run every fit that names no number with N workers, as `nanotf run -n N`; "auto" '
        "measures; default plain Python",
    )
    train.add_argument(
        "--ranks",
        action="store_true",
        help="run the script in N processes, as `nanotf run --ranks -n N`: for Horovod's API and "
        "strategies of tf.distribute",
    )
    train.add_argument(
        "--hosts", help="hosts that lend workers, as `nanotf run --hosts`; default this one"
    )
    train.add_argument(
        "--instances",
        type=int,
        default=1,
        metavar="N",
        help="simulate N hosts on this machine, algo-1 to algo-N; default %(default)s",
    )
    train.add_argument(
        "--max-run",
        type=float,
        metavar="SECONDS",
        help="stop the script after this time; default no limit",
    )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raises `InvalidArgumentError` if a launcher runs this command several times."""
    launcher, count = cluster.launched(environ)
    if count > 1:
        raise InvalidArgumentError(
            "`nanotf train` starts a job, so it must run once. Received: "
            f"{count} processes that {launcher} has started. Call `nanotf train` without "
            f"{launcher}, or run the script on all hosts without a job: `{launcher} nanotf run`."
        )


def _train(parsed: argparse.Namespace) -> int:
    _check_alone(os.environ)
    request = JobRequest(
        name=parsed.name or record.KIND.make_name(pathlib.Path(parsed.script).stem),
        source=SourceCode(parsed.script, parsed.source_dir, tuple(parsed.dependency)),
        hyperparameters=hyperparameters.parse_options(parsed.hyperparameter),
        channels=tuple(data_channels.parse_options(parsed.channel)),
        num_processes=parsed.num_processes,
        ranks=parsed.ranks,
        hosts=parsed.hosts,
        instances=parsed.instances,
        metrics=tuple(metrics.parse_options(parsed.metric)),
        max_run=parsed.max_run,
        checkpoints=parsed.checkpoints,
    )
    job = launch.start(request, parsed.output)
    if parsed.no_wait:
        print(job.name)  # alone on stdout, for scripts
        return 0
    say(f"job {job.name} in {job.path}", sys.stderr)  # stdout has the script's log alone
    return report_end(job, wait_for(job, logs=True), logs=True)


def wait_for(
    job: JobFolder, *, logs: bool, host: str | None = None, rank: int | None = None
) -> JobState:
    """Waits for a job's end. At Ctrl-C the job continues, and a line says how to return to it."""
    try:
        return follow.wait(job, following.print_to(sys.stdout) if logs else None, host, rank)
    except KeyboardInterrupt:
        say(
            f"job {job.name} continues. `nanotf jobs logs -f {job.name}` follows it, "
            f"`nanotf jobs stop {job.name}` ends it.",
            sys.stderr,
        )
        raise SystemExit(130) from None  # 128 + SIGINT, as shells report Ctrl-C


def report_end(job: JobFolder, state: JobState, *, logs: bool) -> int:
    """Says how a job has ended. Returns the exit code of the command.

    Args:
        state: the state that `wait_for` returned.
        logs: whether the terminal shows the job's log, which is not repeated then.
    """
    if state.status == record.COMPLETED:
        say(f"job {job.name} completed{follow.told_of_model(job)}", sys.stderr)
        return 0
    if state.status == record.STOPPED:
        say(f"job {job.name} was stopped ({state.phase})", sys.stderr)
        return STOPPED
    reason = (state.failure_beside_log if logs else None) or state.failure_reason
    say(f"job {job.name} failed: {reason}", sys.stderr)
    # 1 if its data could not be fetched, or its results not be delivered.
    return next((code for code in state.exit_codes.values() if code), 1)
