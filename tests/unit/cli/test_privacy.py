"""The private parts of a report."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from healthy import GOOD

from nanotf.cli import doctor
from nanotf.cli.privacy import HIDDEN, home_directories, redacted, shown_variables
from nanotf.cli.report_text import render
from nanotf.machine.installed import Installed


def test_only_variables_that_matter_are_shown() -> None:
    shown = shown_variables(
        {
            "TF_NUM_INTRAOP_THREADS": "2",
            "KERAS_BACKEND": "torch",
            "KMP_BLOCKTIME": "1",
            "NANOTF_VECTORS": "avx2",
            "NANOTF_ENV": "{}",
            "OMP_NUM_THREADS": "4",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "HOME": "/home/user",
            "HOSTNAME": "host",
        }
    )
    assert shown == {
        "KERAS_BACKEND": "torch",
        "KMP_BLOCKTIME": "1",
        "NANOTF_VECTORS": "avx2",
        "OMP_NUM_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "2",
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("TF_CONFIG", HIDDEN),
        ("KERAS_API_KEY", HIDDEN),
        ("KERAS_api_key", HIDDEN),
        ("TF_HUB_AUTH_TOKEN", HIDDEN),
        ("TF_REDIS_URL", HIDDEN),
        ("TF_PWD", HIDDEN),
        ("NANOTF_SECRET", HIDDEN),
        ("NANOTF_HOST_ADDRESSES", HIDDEN),
        ("KERAS_HOME", HIDDEN),
        ("TF_VAR_db_password", None),
        ("TF_TOKEN_app_terraform_io", None),
    ],
)
def test_possible_secrets_have_no_value(name: str, shown: str | None) -> None:
    assert shown_variables({name: "secret"}).get(name) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:pa@ss@host:1/0", "redis://host:1/0"),
        ("https://token@host/path@x", "https://host/path@x"),
        ("a@b.org", "a@b.org"),
    ],
)
def test_addresses_have_no_user(text: str, shown: str) -> None:
    assert redacted({"a": [f"see {text} there"]}, ()) == {"a": [f"see {shown} there"]}


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/home/ann", "~"),
        ("/home/ann/venv/bin/python", "~/venv/bin/python"),
        ("a:/home/ann/lib.so:/home/ann/b", "a:~/lib.so:~/b"),
        ("No module named 'x' ('/home/ann/x')", "No module named 'x' ('~/x')"),
        ("/home/anna/x", "/home/anna/x"),
        ("/home/ann.old/x", "/home/ann.old/x"),
        ("/mnt/home/ann", "/mnt/home/ann"),
    ],
)
def test_the_home_directory_is_shortened(text: str, short: str) -> None:
    value = {"a": [text, 1, None], "b": {"c": (text,)}}
    assert redacted(value, ["/home/ann"]) == {"a": [short, 1, None], "b": {"c": [short]}}


def test_users_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("/"))
    assert home_directories() == ()
    monkeypatch.setattr(pathlib.Path, "home", nobody)
    assert home_directories() == ()
    assert redacted(("/x",), ()) == ["/x"]


def test_a_home_directory_that_is_a_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "ann").symlink_to("server")
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    paths = [f"{tmp_path}/ann/x", f"{tmp_path.resolve()}/server/x"]
    assert redacted(paths, home_directories()) == ["~/x", "~/x"]


def test_a_report_does_not_name_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    library = "/home/ann/lib/libtcmalloc.so"
    facts = dataclasses.replace(
        GOOD,
        build=dataclasses.replace(GOOD.build, tensorflow="", error="failed: /home/ann/venv"),
        installed=Installed(allocators=(("tcmalloc", library),)),
        environ={"LD_PRELOAD": library, "TF_CONFIG": "a host"},
    )
    report = doctor.examine(facts=facts)
    for shown in (render(report), json.dumps(report)):
        assert "/home/ann" not in shown
        assert "a host" not in shown
        assert "~/venv" in shown
        assert "~/lib/libtcmalloc.so" in shown
