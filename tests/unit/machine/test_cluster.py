"""The hosts of a run, from the variables and files of launchers."""

from __future__ import annotations

import json
import pathlib
import socket

import pytest

from nanotf.errors import InvalidArgumentError
from nanotf.machine import cluster
from nanotf.machine.cluster import Cluster, find
from nanotf.machine.slurm import expand_nodes

SLURM = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_LOCALID": "3",
}


def _sagemaker(folder: pathlib.Path, **config: object) -> dict[str, str]:
    path = folder / "input" / "config"
    path.mkdir(parents=True)
    (path / "resourceconfig.json").write_text(json.dumps(config))
    return {"SAGEMAKER_BASE_DIR": str(folder)}


def test_this_machine_alone() -> None:
    found = find({"SAGEMAKER_BASE_DIR": "/nowhere"})
    assert (found.hosts, found.rank, found.size) == ((socket.gethostname(),), 0, 1)
    assert found.source == cluster.THIS_MACHINE


def test_flag() -> None:
    found = find({cluster.CURRENT_VARIABLE: "h2"}, "h1:4,h2")
    assert found == Cluster(("h1", "h2"), "h2", "--hosts", (4, None))
    assert (found.rank, found.size) == (1, 2)


def test_flag_finds_this_host_by_name_and_by_address() -> None:
    assert find({}, f"elsewhere.invalid:1,{socket.gethostname()}:1").rank == 1
    assert find({}, "elsewhere.invalid:1,127.0.0.1:1").rank == 1
    assert find({"SLURMD_NODENAME": "n2"}, "n1,n2").rank == 1


@pytest.mark.parametrize("flag", ["", "h1:0,h2", "h1:x", "h1,,h2", "h1:2:3"])
def test_flag_of_another_form(flag: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"or names alone\. Received: --hosts"):
        find({}, flag)


def test_flag_that_names_a_host_twice() -> None:
    with pytest.raises(InvalidArgumentError, match=r"each host once\. Received: h1 more than once"):
        find({}, "h1:2,h1:2")


def test_flag_without_this_host() -> None:
    with pytest.raises(InvalidArgumentError, match=r"a.invalid, b.invalid, of which none"):
        find({}, "a.invalid:1,b.invalid:1")
    with pytest.raises(InvalidArgumentError, match=r"NANOTF_CURRENT_HOST='c', and the hosts a, b"):
        find({cluster.CURRENT_VARIABLE: "c"}, "a,b")


def test_flag_wins_over_the_environment(tmp_path: pathlib.Path) -> None:
    environ = _sagemaker(tmp_path, hosts=["algo-1"], current_host="algo-1")
    assert find({**environ, **SLURM, cluster.CURRENT_VARIABLE: "x"}, "x:1,y:1").hosts == ("x", "y")
    assert find({**environ, **SLURM}, "auto").hosts == ("algo-1",)


def test_resourceconfig_of_sagemaker(tmp_path: pathlib.Path) -> None:
    environ = _sagemaker(tmp_path, hosts=["algo-2", "algo-1"], current_host="algo-2")
    found = find(environ)
    assert (found.hosts, found.rank, found.workers) == (("algo-1", "algo-2"), 1, (None, None))
    assert found.source.endswith("resourceconfig.json")


def test_sm_hosts() -> None:
    environ = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-1"}
    assert find({**environ, "SAGEMAKER_BASE_DIR": "/nowhere"}).hosts == ("algo-1", "algo-2")


@pytest.mark.parametrize("config", [{}, {"hosts": ["a"], "current_host": "b"}, {"hosts": []}])
def test_wrong_resourceconfig(tmp_path: pathlib.Path, config: dict[str, object]) -> None:
    environ = _sagemaker(tmp_path, **config)
    with pytest.raises(InvalidArgumentError, match=r"must name the hosts of this run"):
        find(environ)


def test_step_of_slurm() -> None:
    found = find({**SLURM, "SAGEMAKER_BASE_DIR": "/nowhere"})
    assert found == Cluster(("n1", "n2"), "n2", "Slurm", (4, 4), local_rank=3, launched=(4, 4))


def test_slurm_with_a_task_per_node_says_nothing_about_workers() -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    assert find(environ).workers == (None, None)


def test_batch_script_of_slurm_without_srun_runs_on_one_host() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert find(environ).size == 1


def test_mpirun_in_a_batch_script_of_slurm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The step of its daemons misses the node on which it runs itself."""
    _replace_mpi(monkeypatch, tmp_path, 'print(\'[["n0", "n1"], 1, "x"]\')')
    step = {"SLURM_STEP_NODELIST": "n1", "SLURM_NODEID": "0"}
    found = find({**step, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert (found.hosts, found.current, found.source) == (("n0", "n1"), "n1", "MPI")


@pytest.mark.parametrize(
    "broken",
    [
        {"SLURM_NODEID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "1"},
        {"SLURM_STEP_NODELIST": "n[1-"},
    ],
)
def test_wrong_step_of_slurm(broken: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="Slurm's step must name the hosts"):
        find({**SLURM, **broken})


def test_lists_of_slurm() -> None:
    assert expand_nodes("n1") == ("n1",)
    assert expand_nodes("rack[1-2]n[08-10],login") == (
        *("rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"),
        "login",
    )
    assert expand_nodes("n[1,3-4]-ib") == ("n1-ib", "n3-ib", "n4-ib")
    with pytest.raises(ValueError, match=r"n\[1-"):
        expand_nodes("n[1-")


def test_a_rank_that_is_no_number() -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a number.*SLURM_LOCALID='x'"):
        find({**SLURM, "SLURM_LOCALID": "x"})


def test_mpi_on_one_host() -> None:
    environ = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    found = find({**environ, "PMIX_NAMESPACE": "prterun-h1-77@1"})
    assert (found.size, found.workers, found.local_rank) == (1, (2,), 1)
    assert (found.run, find(environ).run) == ("prterun-h1-77@1", "")
    assert found.source == "MPI"


def _replace_mpi(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, source: str) -> None:
    """Makes a module stand for the one that asks MPI, which needs `mpirun`."""
    (folder / "fake_mpi_hosts.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(cluster, "_MPI_MODULE", "fake_mpi_hosts")


def test_mpi_names_no_hosts_without_mpi4py(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    _replace_mpi(monkeypatch, tmp_path, "import nanotf_has_no_such_module")
    environ = {"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
    with pytest.raises(InvalidArgumentError, match=r"4 processes, .*Install mpi4py .* --hosts"):
        find(environ)


def test_mpi_asks_for_the_names(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    _replace_mpi(monkeypatch, tmp_path, 'print(\'[["a", "a", "b", "b"], 2, "x"]\')')
    environ = {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
    assert find(environ) == Cluster(("a", "b"), "b", "MPI", (2, 2), run="x", launched=(2, 2))


def test_the_launcher_names_the_run(tmp_path: pathlib.Path) -> None:
    assert find({**SLURM, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}).run == "7.0"
    assert find(SLURM).run == ""
    sagemaker = {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "SAGEMAKER_BASE_DIR": "/none"}
    assert find({**sagemaker, "TRAINING_JOB_ARN": "arn:x"}).run == "arn:x"


def test_tf_config() -> None:
    config = {
        "cluster": {"chief": ["a:1"], "worker": ["a:2", "b:3"]},
        "task": {"type": "worker", "index": 0},
    }
    found = find({"TF_CONFIG": json.dumps(config)})
    run = json.dumps(config["cluster"])
    assert found == Cluster(("a", "b"), "a", "TF_CONFIG", (2, 1), local_rank=1, run=run)


@pytest.mark.parametrize("text", ["{", '{"cluster": {"worker": ["a:1"]}}', "[]"])
def test_wrong_tf_config(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="TF_CONFIG must name the hosts"):
        find({"TF_CONFIG": text})


def test_addresses() -> None:
    environ = {cluster.ADDRESSES_VARIABLE: "algo-1=10.0.0.4, algo-2=10.0.0.5"}
    assert cluster.address_of("algo-2", environ) == "10.0.0.5"
    assert cluster.address_of("algo-3", environ) == "algo-3"
    with pytest.raises(InvalidArgumentError, match="NAME=ADDRESS"):
        cluster.address_of("algo-1", {cluster.ADDRESSES_VARIABLE: "10.0.0.4"})


def test_set_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_chosen", [Cluster(("a", "b"), "b", "--hosts", (1, 1))])
    monkeypatch.setenv("TF_CONFIG", "")
    cluster.set_tf_config(port=99)
    assert json.loads(cluster.os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:99", "b:99"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", 1)),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}, ("", 1)),  # a batch script
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "1"}, ("srun", 1)),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, ("srun", 2)),
        ({"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, ("srun", 10)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, ("", 1)),
        ({"PMI_SIZE": "4"}, ("mpirun", 4)),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "PMI_SIZE": "2"}, ("srun", 2)),
        # mpirun's daemons are tasks of Slurm.
        ({"SLURM_STEP_NODELIST": "n[1-2]", "OMPI_COMM_WORLD_SIZE": "8"}, ("mpirun", 8)),
    ],
)
def test_processes_of_a_launcher(environ: dict[str, str], expected: tuple[str, int]) -> None:
    assert cluster.launched(environ) == expected


def test_wrong_variables_of_slurm() -> None:
    environ = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "4"}
    with pytest.raises(InvalidArgumentError, match="SLURM_STEP_TASKS_PER_NODE='4'"):
        cluster.launched(environ)
