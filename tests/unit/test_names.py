"""Public names, and exceptions: bases, attributes after a pickle, the description of an exit."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pathlib
import pickle
import signal

import pytest

import nanotf
from nanotf import errors, tracebacks

BASES = {
    "InvalidArgumentError": ValueError,
    "InvalidArgumentTypeError": TypeError,
    "PlacementError": ValueError,
    "UndividedError": ValueError,
    "ModelError": ValueError,
    "ShippingError": ValueError,
    "UnsupportedVersionError": ImportError,
    "CollectiveError": RuntimeError,
    "ReaderDied": RuntimeError,
    "RecordError": ValueError,
    "ConversionError": RuntimeError,
    "JobError": RuntimeError,
    "EndpointError": RuntimeError,
    "UnavailableError": NotImplementedError,
    "DivergedError": RuntimeError,
    "WorkerError": RuntimeError,
    "WorkerDied": RuntimeError,
    "WorkerStuck": RuntimeError,
}


def test_stub_has_the_names_of_the_package() -> None:
    """Each comes from its module at run time, or is defined in the stub."""
    body = ast.parse(pathlib.Path(nanotf.__file__).with_suffix(".pyi").read_text()).body
    imported = {
        alias.name: node.module
        for node in body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nanotf")
        for alias in node.names
    }
    assert imported.items() <= {n: home or "nanotf" for n, home in nanotf._HOMES.items()}.items()
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    assert sorted([*imported, *defined, "__version__"]) == sorted(nanotf.__all__) == dir(nanotf)
    (listed,) = [
        ast.literal_eval(n.value)
        for n in body
        if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)
    ]
    assert listed == dir(nanotf)


def test_a_system_on_which_nanotf_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(os, "name", "nt")
        with pytest.raises(errors.UnsupportedVersionError) as raised:
            importlib.reload(nanotf)
    assert str(raised.value).startswith("nanotf runs on Linux. Received: os.name='nt'.")


def test_python_can_suggest_the_right_name() -> None:
    with pytest.raises(AttributeError) as raised:
        nanotf.acelerate  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("acelerate", nanotf)


def test_every_exception_derives_from_nano_error_and_a_builtin() -> None:
    found = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__ and kind is not errors.NanoError
    }
    assert sorted(found) == sorted(BASES)
    for name, kind in found.items():
        assert issubclass(kind, errors.NanoError), name
        assert issubclass(kind, BASES[name]), name


def test_worker_error_survives_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.WorkerDied(
        "It ended.",
        rank=1,
        pid=4711,
        cores=(2, 3),
        exit_code=None,
        signal=9,
        remote_traceback="Traceback ...",
        log_tail="last words",
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.WorkerDied
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert str(copy).startswith("It ended.")
    assert "last words" not in str(copy), "a traceback says more"
    monkeypatch.setenv(tracebacks.VARIABLE, "full")
    for part in ("It ended.", "Traceback ...", "last words"):
        assert part in str(copy)


def test_errors_tell_the_cause_apart_from_its_consequences() -> None:
    assert errors.WorkerDied("It ended.").what == "It ended."
    error = errors.WorkerStuck("It hangs. The others were stopped.", rank=1, what="It hangs.")
    for copy in (error, pickle.loads(pickle.dumps(error))):
        assert (copy.what, str(copy)) == ("It hangs.", "It hangs. The others were stopped.")


ENDS = [
    (0, "exited with code 0", 0, None),
    (7, "exited with code 7", 7, None),
    (-signal.SIGSEGV, "was killed by SIGSEGV", None, signal.SIGSEGV),
    (-signal.SIGKILL, "was killed by SIGKILL", None, signal.SIGKILL),
    (-63, "was killed by signal 63", None, 63),
    (None, "still running", None, None),
]


@pytest.mark.parametrize(("returncode", "text", "exit_code", "number"), ENDS)
def test_describe_exit(
    returncode: int | None, text: str, exit_code: int | None, number: int | None
) -> None:
    phrase, found_code, found_signal = errors.describe_exit(returncode)
    assert text in phrase
    assert (found_code, found_signal) == (exit_code, number)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_kill_is_the_kernels_only_if_it_has_killed(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_KILLS_BEFORE", errors.kills_for_memory() - kills)
    phrase, _, _ = errors.describe_exit(-signal.SIGKILL)
    assert ("memory ran out" in phrase) == bool(kills)
