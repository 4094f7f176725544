"""Hosts that join, are refused or never come. No TensorFlow is involved."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from waiting import SECONDS, wait_until

from nanotf.errors import InvalidArgumentError, NanoError
from nanotf.machine.cluster import Cluster
from nanotf.pool import backends
from nanotf.pool.hosts import agent, agent_messages, members
from nanotf.pool.hosts.agent import Agent
from nanotf.pool.hosts.crew import counts_of
from nanotf.pool.hosts.members import Hosts
from nanotf.pool.hosts.remote import taken_over
from nanotf.pool.hosts.secret import secret_of
from nanotf.pool.plans import HostsPlan
from nanotf.wire import network

SECRET = b"a secret of this test"
NAMES = ("first", "second")


def _hosts() -> Hosts:
    return Hosts(_found(0), 2, SECRET, "127.0.0.1", (0,))


def _found(host: int) -> Cluster:
    return Cluster(NAMES, NAMES[host], "--hosts", (2, 3))


def _free_ports(count: int) -> list[int]:
    listeners = [network.listen("127.0.0.1") for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _agent(hosts: Hosts, secret: bytes = SECRET, workers: int = 3) -> Agent:
    found = _found(1)
    address, port = hosts.address
    return Agent(found, workers, secret, "127.0.0.1", (address, (port,)))


def test_an_agent_ends_with_the_scripts_exit_code() -> None:
    hosts, codes = _hosts(), []
    thread = threading.Thread(target=lambda: codes.append(_agent(hosts).run()))
    thread.start()
    hosts.wait_for_all(SECONDS)
    assert hosts.total() == 5
    assert [member.name for member in hosts.members()] == ["second"]
    hosts.dismiss(7)
    thread.join(SECONDS)
    assert codes == [7]


def test_an_agent_knows_its_packages_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the look takes longer than a peer has to say who it is."""
    versions, connect, seen = members.versions, network.connect, []

    def look() -> Sequence[tuple[str, str]]:
        if threading.current_thread() is thread:  # and not the first host's, for a comparison
            seen.append("looks")
        return versions()

    def note(*args: Any) -> Any:
        seen.append("connects")
        return connect(*args)

    hosts = _hosts()
    thread = threading.Thread(target=_agent(hosts).run)
    monkeypatch.setattr(members, "versions", look)
    monkeypatch.setattr(network, "connect", note)
    thread.start()
    hosts.wait_for_all(SECONDS)
    hosts.dismiss(0)
    thread.join(SECONDS)
    assert seen == ["looks", "connects"]


def test_a_process_beside_an_agent_waits_for_the_end() -> None:
    hosts, codes = _hosts(), []
    thread = threading.Thread(target=lambda: codes.append(_agent(hosts, workers=0).run()))
    thread.start()
    wait_until(lambda: hosts._waiting, "it has joined")
    assert hosts.members() == []
    hosts.dismiss(0)
    thread.join(SECONDS)
    assert codes == [0]


def test_all_processes_of_a_launcher_are_waited_for() -> None:
    """Also those that lend nothing: they come to an open port however short the script is."""
    found = dataclasses.replace(_found(0), launched=(1, 2))
    hosts, codes = Hosts(found, 2, SECRET, "127.0.0.1", (0,)), []

    def start(workers: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: codes.append(_agent(hosts, workers=workers).run()))
        thread.start()
        return thread

    threads = [start(3)]
    wait_until(hosts.members, "the host has joined")
    with pytest.raises(NanoError, match=r"Received: nothing from second"):
        hosts.wait_for_all(0.1)
    threads.append(start(0))
    hosts.wait_for_all(SECONDS)
    hosts.dismiss(3)
    for thread in threads:
        thread.join(SECONDS)
    assert codes == [3, 3]


def test_a_host_that_cannot_take_part_ends_the_wait() -> None:
    hosts = _hosts()
    thread = threading.Thread(target=lambda: _agent(hosts, workers=0).decline("too few", SECONDS))
    thread.start()
    with pytest.raises(NanoError, match=r"Host second cannot take part: too few"):
        hosts.wait_for_all(SECONDS)
    thread.join(SECONDS)
    hosts.dismiss(1)


def test_a_first_host_that_gives_up_tells_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    """Tells those that are here, and one that comes then."""
    found = dataclasses.replace(_found(0), launched=(1, 2))
    hosts, codes = Hosts(found, 2, SECRET, "127.0.0.1", (0,)), []
    agents = [_agent(hosts, workers=workers) for workers in (0, 3)]
    here, later = (
        threading.Thread(target=lambda one=one: codes.append(one.run())) for one in agents
    )
    here.start()
    wait_until(lambda: hosts._waiting, "it has joined")
    gives_up = threading.Thread(target=hosts.give_up, args=("no such file", SECONDS))
    gives_up.start()
    here.join(SECONDS)
    later.start()
    for thread in (later, gives_up):
        thread.join(SECONDS)
    assert codes == [1, 1]
    said = capfd.readouterr().err
    assert said.count("host first does not run the script: no such file") == 2


def test_an_agent_notices_that_the_first_host_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    hosts, codes = _hosts(), []
    thread = threading.Thread(target=lambda: codes.append(_agent(hosts).run()))
    thread.start()
    hosts.wait_for_all(SECONDS)
    hosts.members()[0]._channel.shut_down()
    thread.join(SECONDS)
    assert codes == [agent.LOST_CODE]
    assert "lost the connection to host first, which runs the script" in capsys.readouterr().out
    hosts.dismiss(0)


def test_a_host_that_never_comes_is_named() -> None:
    hosts = _hosts()
    with pytest.raises(NanoError, match=r"Received: nothing from second; this host, first"):
        hosts.wait_for_all(0.1)
    hosts.dismiss(1)


def test_a_first_host_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(members.JOIN_VARIABLE, "2")
    hosts = _hosts()
    late = _agent(hosts)
    hosts.dismiss(1)
    with pytest.raises(NanoError, match=r"within 2 s .*Received: host first, 127\.0\.0\.1 port"):
        late.run()


def test_a_wrong_secret_is_refused_by_both() -> None:
    hosts = _hosts()
    with pytest.raises(NanoError, match=r"need the same secret\. .*Set NANOTF_SECRET"):
        _agent(hosts, b"another secret").run()
    wait_until(lambda: hosts._refused, "the first host has noted it")
    with pytest.raises(NanoError, match=r"does not know this run's secret"):
        hosts.wait_for_all(0.1)
    hosts.dismiss(1)


def test_two_runs_on_the_same_hosts_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run finds the first one's port taken, and its agent is not told of secrets."""
    one, other = _free_ports(2)
    runs = [dataclasses.replace(_found(0), run=name) for name in ("run 1", "run 2")]
    hosts = [Hosts(run, 2, SECRET, "127.0.0.1", (one, other)) for run in runs]
    assert [each.address[1] for each in hosts] == [one, other]
    codes: list[int] = []
    second = dataclasses.replace(_found(1), run="run 2")
    joins = Agent(second, 3, SECRET, "127.0.0.1", ("127.0.0.1", (one, other)))
    thread = threading.Thread(target=lambda: codes.append(joins.run()))
    thread.start()
    hosts[1].wait_for_all(SECONDS)
    assert hosts[0].members() == []
    hosts[1].dismiss(4)
    thread.join(SECONDS)
    assert codes == [4]
    monkeypatch.setenv(members.JOIN_VARIABLE, "1")
    with pytest.raises(NanoError, match=r"OtherRun: another run, or another program, uses"):
        Agent(second, 3, b"unlike", "127.0.0.1", ("127.0.0.1", (one,))).run()
    hosts[0].dismiss(1)


def test_ports_of_runs() -> None:
    ports = network.ports_of("a run")
    assert ports == network.ports_of("a run") != network.ports_of("another run")
    assert all(20000 <= port < 32000 for port in ports)


def test_a_stranger_that_says_nothing_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_SECONDS", 0.2)
    hosts = _hosts()
    with socket.create_connection(hosts.address) as stranger:
        stranger.settimeout(SECONDS)
        while stranger.recv(1000):  # the challenge, then the end
            pass
    hosts.dismiss(1)


def _idle(hosts: members.Hosts, count: int) -> list[socket.socket]:
    return [socket.create_connection(hosts.address) for _ in range(count)]


def test_a_byte_at_a_time_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all that a guest says, not for each read."""
    monkeypatch.setattr(network, "HANDSHAKE_SECONDS", 0.5)
    hosts = _hosts()
    (stranger,) = _idle(hosts, 1)
    ended, began = False, time.monotonic()
    with stranger:
        stranger.settimeout(0.1)
        while not ended and time.monotonic() < began + SECONDS:
            try:
                stranger.send(b"\0")
                ended = stranger.recv(1000) == b""
            except TimeoutError:
                pass
            except OSError:
                ended = True
    assert ended
    hosts.dismiss(1)


@pytest.mark.parametrize("is_first", [True, False])
def test_idle_connections_keep_nobody_out(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest must go, whether they come before a host or around it."""
    monkeypatch.setattr(network, "GUESTS", 4)
    hosts = _hosts()
    strangers = _idle(hosts, 20) if is_first else []
    thread = threading.Thread(target=_agent(hosts).run)
    thread.start()
    strangers += _idle(hosts, 20)
    hosts.wait_for_all(SECONDS)
    assert sum(each.name == "nanotf-guest" for each in threading.enumerate()) <= 40
    for stranger in strangers:
        stranger.close()
    hosts.dismiss(0)
    thread.join(SECONDS)


def test_no_descriptors_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _hosts()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = _idle(hosts, 10)
    used = max(int(each.name) for each in pathlib.Path("/proc/self/fd").iterdir()) + 1
    outside = subprocess.Popen(
        [sys.executable, "-c", _IDLE, *map(str, hosts.address)], stdout=subprocess.PIPE
    )
    assert outside.stdout is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, before[1]))
    try:
        assert outside.stdout.readline() == b"connected\n"
        time.sleep(1.0)  # more than this process can accept
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    thread = threading.Thread(target=_agent(hosts).run)
    thread.start()
    hosts.wait_for_all(SECONDS)
    outside.kill()
    outside.wait()
    outside.stdout.close()
    for stranger in strangers:
        stranger.close()
    hosts.dismiss(0)
    thread.join(SECONDS)


_IDLE = """
import socket, sys, time
kept = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(50)]
print("connected", flush=True)
time.sleep(100)
"""


def test_garbage_is_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    hosts = _hosts()
    for _ in range(30):
        with socket.create_connection(hosts.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(OSError):
                stranger.recv(1000)
                stranger.recv(1000)
    wait_until(lambda: hosts._refused.total() == 30, "all are refused")
    with pytest.raises(NanoError, match=r"Refused 30 times: A process on 127\.0\.0\.1"):
        hosts.wait_for_all(0.1)
    lines = [record for record in caplog.records if "without this run's secret" in record.message]
    assert len(lines) == 1, "and the rest a minute later"
    hosts.dismiss(1)


def test_a_listener_that_hangs_up_is_not_a_wrong_secret() -> None:
    listener = network.listen("127.0.0.1")

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    with pytest.raises(network.Unreachable, match="ConnectionError"):
        port = listener.getsockname()[1]
        network.connect("127.0.0.1", (port,), SECRET, time.monotonic() + 1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(SECONDS)


def test_other_versions_are_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, here = _hosts(), members.versions()
    older = [("nanotf", "0.0.9"), *here[1:]]
    monkeypatch.setattr(members, "versions", lambda: older)
    joins = _agent(hosts)
    versions = iter([older, here])  # the agent's, then the first host's
    monkeypatch.setattr(members, "versions", lambda: next(versions))
    with pytest.raises(NanoError, match=r"Host second has nanotf 0\.0\.9 there, .* here"):
        joins.run()
    hosts.dismiss(1)


def test_a_host_joins_once() -> None:
    hosts = _hosts()
    thread = threading.Thread(target=_agent(hosts).run)
    thread.start()
    hosts.wait_for_all(SECONDS)
    with pytest.raises(NanoError, match="Host second has joined already"):
        _agent(hosts).run()
    hosts.dismiss(0)
    thread.join(SECONDS)


def test_a_host_that_has_been_silent_for_long_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its power was lost, and nobody has told this host."""
    monkeypatch.setattr(agent_messages, "BEAT_SECONDS", 100.0)
    hosts, codes = _hosts(), []
    threads = [threading.Thread(target=lambda: codes.append(_agent(hosts).run())) for _ in "12"]
    threads[0].start()
    hosts.wait_for_all(SECONDS)
    (before,) = hosts.members()
    before.heard -= 60
    threads[1].start()
    wait_until(lambda: before.lost, "another connection has replaced it")
    threads[0].join(SECONDS)
    assert codes == [agent.LOST_CODE]
    assert [member is before for member in hosts.members()] == [False]
    hosts.dismiss(0)
    threads[1].join(SECONDS)
    assert codes == [agent.LOST_CODE, 0]


def test_listeners_bind_one_address() -> None:
    hosts = _hosts()
    assert hosts.address[0] == "127.0.0.1"
    lends = Agent(Cluster(NAMES, "second", "--hosts", (2, 3)), 1, SECRET, "127.0.0.2", ("", (1,)))
    assert lends._gate is not None
    assert lends._address[0] == "127.0.0.2"
    lends._close_gate()
    hosts.dismiss(1)


def test_connections_are_tried_again_until_the_host_listens() -> None:
    tried = []
    reserved = network.listen("127.0.0.1")
    port = reserved.getsockname()[1]
    reserved.close()
    listeners: list[socket.socket] = []

    def waits() -> None:
        tried.append(1)
        if len(tried) == 1:
            listeners.append(network.listen("127.0.0.1", port))
            threading.Thread(
                target=lambda: network.accept(listeners[0].accept()[0], SECRET).close()
            ).start()

    network.connect("127.0.0.1", (port,), SECRET, time.monotonic() + SECONDS, waits).close()
    assert tried == [1]
    listeners[0].close()


def test_workers_fill_the_hosts_in_order() -> None:
    assert counts_of(3, [4, 4]) == [3, 0]
    assert counts_of(6, [4, 4]) == [4, 2]
    assert counts_of(8, [4]) == [8]  # the other host is lost
    assert counts_of(9, [4, 2]) == [6, 3]


def test_hosts_are_the_default_back_end_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = _hosts()
    with pytest.raises(InvalidArgumentError, match="backend='hosts' needs the hosts of a run"):
        backends.check_backend("hosts")
    monkeypatch.setattr(members, "current", hosts)
    assert backends.check_backend(None) == "hosts"
    assert backends.plan(None, 5) == HostsPlan(5)
    with pytest.raises(InvalidArgumentError, match=r"`cores` .* backend='hosts'"):
        backends.plan(None, 5, cores=[0])
    with pytest.raises(InvalidArgumentError, match=r"Received: transport='grpc'"):
        backends.crew_of(HostsPlan(5), "grpc", b"")
    with pytest.raises(InvalidArgumentError, match=r"Received: backend='hosts'"):
        backends.check_can_measure(None)
    hosts.dismiss(0)


def test_secrets_and_what_describes_one_host_stay_there() -> None:
    kept = {"NANOTF_SECRET": "x", "NANOTF_CURRENT_HOST": "a", "TF_CONFIG": "{}"}
    assert taken_over({**kept, "TF_ENABLE_ONEDNN_OPTS": "0"}) == {"TF_ENABLE_ONEDNN_OPTS": "0"}


def test_secret_of_the_variable_and_of_the_job(tmp_path: pathlib.Path) -> None:
    assert secret_of({"NANOTF_SECRET": "long enough"}) == secret_of(
        {"NANOTF_SECRET": "long enough"}
    )
    assert secret_of({"NANOTF_SECRET": "long enough"}) != secret_of(
        {"NANOTF_SECRET": "long enougH"}
    )
    with pytest.raises(NanoError, match=r"at least 8 characters\. Received: 5"):
        secret_of({"NANOTF_SECRET": "short"})
    job = {"TRAINING_JOB_ARN": "arn:1", "SAGEMAKER_BASE_DIR": str(tmp_path)}
    before = secret_of(job)
    (tmp_path / "input" / "config").mkdir(parents=True)
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text("{}")
    assert secret_of(job) not in (before, secret_of({**job, "TRAINING_JOB_ARN": "arn:2"}))


def test_secret_of_the_home(tmp_path: pathlib.Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    path = tmp_path / "nanotf" / "secret"
    assert secret_of(home) == secret_of(home) == path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o644)
    with pytest.raises(NanoError, match="Only you may read the secret of your runs"):
        secret_of(home)


def test_messages_of_the_link_travel() -> None:
    ours, theirs = socket.socketpair()
    one, other = members.Channel(ours), members.Channel(theirs)
    one.send_with(agent_messages.Fill(1, ("job", 0), 0, 3), b"abc", b"")
    assert other.receive() == agent_messages.Fill(1, ("job", 0), 0, 3)
    got = bytearray(3)
    other.receive_into(got)
    other.receive_into(bytearray(0))
    assert bytes(got) == b"abc"
    one.close()
    other.close()
