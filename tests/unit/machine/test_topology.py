"""Cores and plans: on described machines, on made-up `/sys` files, on this machine."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest
from machines import flat, laptop, two_sockets

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, PlacementError
from nanotf.machine import cgroups
from nanotf.machine.cpus import LogicalCpu, Machine, describe_machine
from nanotf.machine.topology import Placement, check_num_processes, plan


def cores_of(machine: Machine, *arguments: int, **named: object) -> list[tuple[int, ...]]:
    made = plan(*arguments, machine=machine, **named)  # type: ignore[arg-type]
    return [placement.cores for placement in made.placements]


def straddlers(machine: Machine, num_processes: int) -> int:
    placements = plan(num_processes, machine=machine).placements
    return sum(placement.numa_node is None for placement in placements)


# ------------------------------------------------------------------------------ shares
def test_one_worker_per_node_gets_its_physical_cores_without_hyper_threads() -> None:
    assert plan(2, machine=two_sockets()).placements == (
        Placement(0, tuple(range(28)), 0),
        Placement(1, tuple(range(28, 56)), 1),
    )


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 5, 7, 8, 9, 28, 55, 56])
def test_every_worker_has_the_same_number_of_cores_and_none_twice(num_processes: int) -> None:
    made = plan(num_processes, machine=two_sockets())
    assert [p.rank for p in made.placements] == list(range(num_processes))
    assert len({len(p.cores) for p in made.placements}) == 1
    assert len(set(made.cores())) == len(made.cores())
    assert len({core % 56 for core in made.cores()}) == len(made.cores()), "a sibling was used"


@pytest.mark.parametrize("num_processes", [2, 4, 6, 8, 14, 28, 56])
def test_even_shares_stay_on_one_node(num_processes: int) -> None:
    assert straddlers(two_sockets(), num_processes) == 0


def test_three_workers_on_two_nodes_keep_their_share_and_one_straddles() -> None:
    # On one node each, workers would use 14 of 18 cores and leave a quarter of the machine idle.
    shares = cores_of(two_sockets(), 3)
    assert [len(share) for share in shares] == [18, 18, 18]
    assert straddlers(two_sockets(), 3) == 1
    assert shares[2] == (*range(18, 28), *range(46, 54))


def test_a_slightly_smaller_share_avoids_straddling() -> None:
    machine = Machine(tuple(LogicalCpu(n, n, numa_node=n // 21) for n in range(40)))
    # Nodes of 21 and 19: two workers could have 20 each, one across both nodes; 19 is near enough.
    placements = plan(2, machine=machine).placements
    assert [(len(p.cores), p.numa_node) for p in placements] == [(19, 0), (19, 1)]


def test_workers_spread_over_nodes_and_neighbors_share_a_node() -> None:
    placements = plan(4, 4, two_sockets()).placements
    assert [p.numa_node for p in placements] == [0, 0, 1, 1]
    assert [p.cores[0] for p in placements] == [0, 4, 28, 32]


@pytest.mark.parametrize(
    ("num_processes", "nodes"), [(2, 2), (3, 1), (4, 2), (5, 1), (14, 2), (56, 2)]
)
def test_nodes_with_equal_numbers_of_workers(num_processes: int, nodes: int) -> None:
    assert plan(num_processes, machine=two_sockets()).like_nodes() == nodes
    assert plan(num_processes, machine=flat(56)).like_nodes() == 1


def test_an_odd_core_count_leaves_the_rest_to_the_parent() -> None:
    assert cores_of(flat(7), 2) == [(0, 1, 2), (3, 4, 5)]
    assert cores_of(flat(7), 3) == [(0, 1), (2, 3), (4, 5)]


def test_plans_are_deterministic_and_serve_as_keys() -> None:
    assert plan(3, machine=two_sockets()) == plan(3, machine=two_sockets())
    assert len({plan(3, machine=two_sockets()), plan(3, machine=two_sockets())}) == 1
    assert plan(2, machine=two_sockets()) != plan(3, machine=two_sockets())


# ------------------------------------------------------------------------- what is usable
def test_only_cores_in_the_affinity_mask_and_the_cpuset_count() -> None:
    machine = flat(8, affinity=frozenset({1, 2, 3, 4}), cpuset=frozenset({2, 3, 4, 5}))
    assert cores_of(machine, 3) == [(2,), (3,), (4,)]


def test_a_sibling_is_used_where_the_first_hyper_thread_is_not_allowed() -> None:
    machine = Machine(two_sockets().cpus, affinity=frozenset({0, 57, 58, 2}))
    assert cores_of(machine, 3) == [(0,), (57,), (2,)]  # 57 is core 1


def test_offline_cpus_do_not_count() -> None:
    machine = Machine(tuple(LogicalCpu(n, n, online=n % 2 == 0) for n in range(8)))
    assert cores_of(machine, 2) == [(0, 2), (4, 6)]


@pytest.mark.parametrize(("quota", "cores"), [(3.5, 3), (2.0, 2), (0.5, 1), (99.0, 8)])
def test_a_quota_counts_in_whole_cores(quota: float, cores: int) -> None:
    assert len(flat(8, quota=quota).usable_cores()) == cores


def test_a_quota_keeps_the_cores_on_one_node_and_pins_no_worker() -> None:
    machine = Machine(two_sockets().cpus, quota=14.0)
    made = plan(2, machine=machine)
    assert made.cores() == tuple(range(14))
    assert [p.numa_node for p in made.placements] == [None, None]
    # The quota grants 14 CPUs, not the first 14, which every container of the host would take.
    assert not any(p.pin for p in made.placements)
    assert all(p.pin for p in plan(2, machine=two_sockets()).placements)


def test_performance_cores_are_preferred() -> None:
    assert cores_of(laptop(), 3) == [(0, 2), (4, 6), (8, 10)]
    assert cores_of(laptop(), 4) == [(0,), (2,), (4,), (6,)]


def test_efficiency_cores_are_used_if_the_others_are_too_few() -> None:
    assert len(cores_of(laptop(), 14)) == 14
    assert cores_of(laptop(), 2, 7)[0][:6] == (0, 2, 4, 6, 8, 10)


# ------------------------------------------------------------------- caps, names, others
def test_max_cores_caps_the_total_of_all_workers() -> None:
    assert cores_of(flat(8), 2, max_cores=4) == [(0, 1), (2, 3)]


def test_named_cores_are_used_as_they_are() -> None:
    machine = Machine(two_sockets().cpus, quota=2.0)
    made = plan(2, machine=machine, cores=[57, 1, 0, 56], max_cores=1)
    assert [p.cores for p in made.placements] == [(0, 1), (56, 57)]
    assert all(p.pin for p in made.placements)


@pytest.mark.parametrize("cores", [[0, 0], [0, 9], [0, 3], [0, 5], []])
def test_named_cores_must_be_usable(cores: list[int]) -> None:
    machine = flat(8, affinity=frozenset(range(6)))
    with pytest.raises(PlacementError, match=r"Received: cores=\[.*Choose from \[0, 1, 2, 4\]"):
        plan(1, machine=machine, cores=cores, avoid={3, 5})


def test_another_pools_cores_and_their_siblings_are_avoided() -> None:
    assert cores_of(two_sockets(), 1, 2, avoid={0, 57}) == [(28, 29)]
    machine = Machine(two_sockets().cpus, affinity=frozenset({0, 1, 2, 56, 57, 58}))
    assert cores_of(machine, 1, avoid={56, 1}) == [(2,)]


def test_cores_of_another_pool_use_up_the_quota() -> None:
    machine = flat(8, quota=4.0)
    assert cores_of(machine, 1, avoid={0, 1, 2}) == [(3,)]
    with pytest.raises(PlacementError, match="another pool has"):
        plan(1, machine=machine, avoid={0, 1, 2, 3})


# ------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("value", [True, False, 2.0, "four", "2", None, [2]])
def test_num_processes_must_be_an_integer(value: object) -> None:
    text = r"integer\. Received: num_processes=.* Only fit\(\) and nanotf.map\(\) take"
    with pytest.raises(InvalidArgumentTypeError, match=text):
        check_num_processes(value)


@pytest.mark.parametrize("value", [0, -1])
def test_num_processes_must_be_positive(value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"at least 1. Received: num_processes={value}"):
        plan(value, machine=flat(4))


def test_other_integers_are_integers() -> None:
    class Four:
        def __index__(self) -> int:
            return 4

    assert check_num_processes(Four()) == 4


@pytest.mark.parametrize("name", ["cores_per_process", "max_cores"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(0, InvalidArgumentError), (1.5, InvalidArgumentTypeError), (True, InvalidArgumentTypeError)],
)
def test_core_counts_are_checked(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"`{name}` .*Received: {name}={value}"):
        plan(1, machine=flat(4), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (flat(2), "2 usable cores: 2 physical cores online"),
        (flat(8, affinity=frozenset({1})), r"1 of them in the affinity mask \(taskset\)"),
        (flat(8, cpuset=frozenset({1, 2})), "2 of them in the cgroup's cpuset"),
        (flat(8, quota=3.5), "CPU quota is 3.5 CPUs"),
    ],
)
def test_too_many_workers_are_refused_with_the_reason(machine: Machine, reason: str) -> None:
    usable = len(machine.usable_cores())
    with pytest.raises(PlacementError, match=reason) as caught:
        plan(5, machine=machine)
    assert "Received: num_processes=5" in str(caught.value)
    assert f"Pass num_processes={usable} or less" in str(caught.value)


def test_the_cap_is_named_as_a_reason() -> None:
    with pytest.raises(PlacementError, match="no more than 2 may be used"):
        plan(3, machine=flat(8), max_cores=2)


def test_cores_per_process_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"cores_per_process=5.*Pass cores_per_process=4 or"):
        plan(2, 5, flat(8))


def test_a_machine_without_usable_cores_is_refused() -> None:
    with pytest.raises(PlacementError, match="0 usable cores"):
        plan(1, machine=flat(2, affinity=frozenset({7})))


# ------------------------------------------------------------------- reading a machine
Tree = Callable[[dict[str, str]], Machine]


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> Tree:
    """Writes files below a directory and returns the machine that they describe."""

    def write(files: dict[str, str]) -> Machine:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return describe_machine(tmp_path, environ={})

    return write


def sys_files(cpus: int, threads: int = 1, sockets: int = 1) -> dict[str, str]:
    """Returns /sys and /proc files of a machine whose siblings are numbered n, n + cores."""
    cores = cpus // threads
    files = {"proc/self/status": f"Name:\tx\nCpus_allowed_list:\t0-{cpus - 1}\nMems_allowed: 1"}
    files["sys/devices/system/cpu/online"] = f"0-{cpus - 1}"
    for cpu in range(cpus):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology/"
        siblings = ",".join(str(cpu % cores + cores * n) for n in range(threads))
        files[topology + "thread_siblings_list"] = siblings
        # `core_id` restarts in every socket, so it identifies no core.
        files[topology + "core_id"] = str(cpu % cores % (cores // sockets))
        files[topology + "physical_package_id"] = str(cpu % cores * sockets // cores)
    for node in range(sockets):
        part = [c for c in range(cpus) if c % cores * sockets // cores == node]
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(map(str, part))
    return files


def v2_files(path: str, limits: dict[str, str]) -> dict[str, str]:
    mount = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
    files = {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": mount}
    files[f"sys/fs/cgroup/{path.strip('/')}/cgroup.procs"] = "1"
    return files | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}


def test_two_sockets_are_read(tree: Tree) -> None:
    machine = tree(sys_files(112, threads=2, sockets=2))
    assert machine.cpus == two_sockets().cpus
    assert machine.can_pin
    assert machine.quota is None
    assert len(machine.usable_cores()) == 56


def test_offline_cpus_are_read(tree: Tree) -> None:
    files = sys_files(4) | {"sys/devices/system/cpu/online": "0,2-3"}
    del files["sys/devices/system/cpu/cpu1/topology/thread_siblings_list"]
    machine = tree(files)
    assert [cpu.online for cpu in machine.cpus] == [True, False, True, True]
    assert [cpu.id for cpu in machine.usable_cores()] == [0, 2, 3]


def test_efficiency_cores_are_read(tree: Tree) -> None:
    machine = tree(sys_files(6) | {"sys/devices/cpu_atom/cpus": "4-5"})
    assert [cpu.id for cpu in machine.cpus if cpu.efficiency] == [4, 5]


def test_the_affinity_mask_is_read(tree: Tree) -> None:
    machine = tree(sys_files(8) | {"proc/self/status": "Cpus_allowed_list:\t2,4-5"})
    assert [cpu.id for cpu in machine.usable_cores()] == [2, 4, 5]


def test_a_main_thread_bound_by_openmp_does_not_hide_the_other_cores(
    tree: Tree, tmp_path: pathlib.Path
) -> None:
    files = sys_files(4) | {
        "proc/self/status": "Cpus_allowed_list:\t0",
        "proc/self/task/1/status": "Cpus_allowed_list:\t0",
        "proc/self/task/2/status": "Cpus_allowed_list:\t1-2",
    }
    assert tree(files).affinity == {0}, "a mask that the user chose after threads had started"
    bound = describe_machine(tmp_path, environ={"KMP_AFFINITY": "granularity=fine,compact"})
    assert bound.affinity == {0, 1, 2}


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"a/b/cpu.max": "350000 100000"}, 3.5),
        ({"a/b/cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ({"a/b/cpu.max": "200000 100000", "a/cpu.max": "400000 100000"}, 2.0),
        ({"cpu.max": "100000 50000"}, 2.0),
        ({"a/b/cpu.max": "nonsense"}, None),
        ({"other/cpu.max": "100000 100000"}, None),
    ],
)
def test_cgroup_v2_quotas_of_the_group_and_its_ancestors(
    tree: Tree, limits: dict[str, str], quota: float | None
) -> None:
    assert tree(sys_files(8) | v2_files("/a/b", limits)).quota == quota


def test_a_group_outside_the_mount_is_ignored(tree: Tree) -> None:
    # A process that was moved out of its cgroup namespace reads a path with `..` in it.
    files = v2_files("/../other", {"cpu.max": "200000 100000"})
    files["sys/fs/other/cpu.max"] = "100000 100000"
    assert tree(sys_files(8) | files).quota == 2.0


def test_cgroup_v2_cpuset(tree: Tree) -> None:
    limits = {"a/cpuset.cpus.effective": "1-3", "cpuset.cpus.effective": "0-7"}
    machine = tree(sys_files(8) | v2_files("/a", limits))
    assert [cpu.id for cpu in machine.usable_cores()] == [1, 2, 3]


def v1_files(path: str, mount_root: str, limits: dict[str, str]) -> dict[str, str]:
    mounts = [
        f"31 30 0:27 {mount_root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
        f"32 30 0:28 {mount_root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset",
        f"33 30 0:29 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    ]
    groups = [f"4:cpu,cpuacct:{path}", f"3:cpuset:{path}", f"2:memory:{path}", "0::/"]
    files = {"proc/self/cgroup": "\n".join(groups), "proc/self/mountinfo": "\n".join(mounts)}
    return files | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}


@pytest.mark.parametrize("mount_root", ["/docker/abc", "/", "/elsewhere"])
def test_cgroup_v1_container(tree: Tree, mount_root: str) -> None:
    # A container sees its own group at the mount point, whatever path /proc/self/cgroup says.
    limits = {
        "cpu,cpuacct/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "cpuset/cpuset.cpus": "4-7",
    }
    machine = tree(sys_files(8) | v1_files("/docker/abc", mount_root, limits))
    assert (machine.quota, machine.cpuset) == (2.5, {4, 5, 6, 7})
    assert [cpu.id for cpu in machine.usable_cores()] == [4, 5]


def test_processes_that_the_kernel_has_ended_for_lack_of_memory(tmp_path: pathlib.Path) -> None:
    """The group itself counts them, in both versions of cgroups."""
    events = "low 0\noom 9\noom_kill 3\noom_group_kill 1"
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 2"
    for number, (files, kills) in enumerate(
        (
            (v2_files("/a", {"a/memory.events": events}), 3),
            (v1_files("/a", "/a", {"memory/memory.oom_control": control}), 2),
            (v2_files("/a", {}), None),
        )
    ):
        root = tmp_path / str(number)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        assert cgroups.memory_kills(root) == kills


def test_cgroup_v1_ancestors_and_no_limit(tree: Tree) -> None:
    limits = {
        "cpu,cpuacct/pod/cpu.cfs_quota_us": "300000",
        "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/pod/me/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/pod/me/cpu.cfs_period_us": "100000",
        "cpuset/pod/cpuset.cpus": "0-5",
        "cpuset/pod/me/cpuset.cpus": "",
    }
    machine = tree(sys_files(8) | v1_files("/pod/me", "/", limits))
    assert (machine.quota, machine.cpuset) == (3.0, {0, 1, 2, 3, 4, 5})


def test_without_sys_every_allowed_cpu_is_a_core(tree: Tree) -> None:
    machine = tree({"proc/self/status": "Cpus_allowed_list:\t0-2"})
    assert [cpu.id for cpu in machine.usable_cores()] == [0, 1, 2]
    assert machine.can_pin
    assert "missing" in machine.notes[0]


def test_without_proc_and_sys_cores_are_counted_and_not_pinned(tree: Tree) -> None:
    machine = tree({})
    assert len(machine.usable_cores()) >= 1
    assert not machine.can_pin
    assert not plan(1, machine=machine).placements[0].pin


# --------------------------------------------------------------------------- this machine
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("NANOTF_ENV", raising=False)
    usable = {cpu.id for cpu in describe_machine().usable_cores()}
    assert usable
    made = plan(1)
    assert set(made.cores()) <= usable
    if hasattr(os, "sched_getaffinity"):
        assert set(made.cores()) <= os.sched_getaffinity(0)
    with pytest.raises(PlacementError, match=f"but {len(usable)} can be used"):
        plan(len(usable) + 1)


def test_on_this_machine_the_users_thread_count_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOTF_ENV", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert len(plan(1).cores()) == 1
    with pytest.raises(PlacementError, match="Received: num_processes=2"):
        plan(2)
