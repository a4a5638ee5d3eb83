"""What a worker sees: exactly the contract's variables, with the stated precedence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nodeagent.model.job import Checkpoint, Control, JobRecord
from nodeagent.model.jobspec import Array, JobSpec
from nodeagent.model.node import Gpu, Incarnation, NodeFacts, NodeRecord
from nodeagent.model.world import Cause, Generation, Member, Place
from nodeagent.pods.environment import MOST_VALUE, roles_file, split_address, worker_environments
from nodeagent.shim.forkserver.client import MOST_REPORTED
from nodeagent.train.context import context

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}


def a_job(**changes: Any) -> JobRecord:
    spec: dict[str, Any] = {
        "name": "resnet",
        "roles": ({"command": ("python", "t.py"), "nodes": {"min": 1, "max": 2, "target": 2}},),
        "working_dir": "/shared/resnet",
        "user": "train1",
        "submitter": {"user": "train1", "uid": 1, "gid": 1, "host": "h", "cwd": "/"},
    }
    return JobRecord(
        uid="uid1",
        name="resnet",
        owner=1,
        spec=JobSpec.model_validate(spec | changes),
        control=Control(rev=1, target=2),
        phase="running",
        reason="",
        submitted=0.0,
        restarts=3,
    )


def a_generation(devices_b: tuple[str, ...] = ("GPU-1", "GPU-2"), **changes: Any) -> Generation:
    members = {
        "a": Member(node="a", life="l", group_rank=0, first_rank=0, workers=1, devices=("cpu0",)),
        "b": Member(node="b", life="l", group_rank=1, first_rank=1, workers=2, devices=devices_b),
    }
    settings: dict[str, Any] = {
        "number": 7,
        "id": "x",
        "state": "active",
        "members": members,
        "cause": Cause(kind="node_lost", text="n3 was lost"),
        "address": "10.0.0.1:29400",
        "store_hosted": True,
        "since": 0,
        "outside": {"n3": "lost"},
    }
    return Generation(**(settings | changes))


def a_node(name: str = "b", **changes: Any) -> NodeRecord:
    facts: dict[str, Any] = {
        "address": ADDRESSES[name],
        "hostname": name,
        "boot_id": "boot",
        "agent_pid": 1,
        "agent_version": "0",
        "started": 0.0,
        "cpu_slots": 2,
    }
    return NodeRecord(id=name, incarnation=Incarnation(life="l", start=1), joined=0, facts=NodeFacts(**facts | changes))


def nodes(**others: NodeRecord) -> dict[str, NodeRecord]:
    return {"a": a_node("a"), "b": a_node()} | others


def test_every_variable_of_a_second_node() -> None:
    first, second = worker_environments(a_job(checkpoint_dir="ckpt"), a_generation(), a_node(), nodes())
    task = json.loads(second.pop("TF_CONFIG"))
    assert task == {
        "cluster": {"worker": ["10.0.0.1:29400", "10.0.0.2:29400", "10.0.0.2:29401"]},
        "task": {"type": "worker", "index": 2},
    }
    assert json.loads(second.pop("NODEAGENT_FAULTY")) == {"nodes": {"n3": "lost"}, "devices": {}}
    assert second == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "worker",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "uid1",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "10",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
        "PADDLE_TRAINER_ID": "2",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_MASTER": "10.0.0.1:29400",
        "PADDLE_GLOBAL_RANK": "2",
        "PADDLE_GLOBAL_SIZE": "3",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_NNODES": "2",
        "FLAGS_selected_gpus": "1",
        "JAX_LOCAL_DEVICE_IDS": "1",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:29401",
        "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:29401",
        "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:29400,10.0.0.2:29400,10.0.0.2:29401",
        "PADDLE_PSERVERS_IP_PORT_LIST": "",
        "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
        "DISTRIBUTED_TRAINER_ENDPOINTS": "10.0.0.1:29400,10.0.0.2:29400,10.0.0.2:29401",
        "PADDLE_ELASTIC_JOB_ID": "resnet",
        "PADDLE_ELASTIC_NP": "1:2",
        "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": "2",
        "TRAINING_ROLE": "TRAINER",
        "POD_IP": "10.0.0.2",
        "RANK_ID": "2",
        "MS_NODE_ID": "2",
        "RANK_SIZE": "3",
        "DEVICE_ID": "1",
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": "3",
        "MS_SCHED_HOST": "10.0.0.1",
        "MS_SCHED_PORT": "29400",
        "NODEAGENT_JOB": "resnet",
        "NODEAGENT_NODE": "b",
        "NODEAGENT_GENERATION": "7",
        "NODEAGENT_RESTARTS": "3",
        "NODEAGENT_REASON": "n3 was lost",
        "NODEAGENT_CHECKPOINT_DIR": "/shared/resnet/ckpt",
    }
    assert (first["RANK"], first["LOCAL_RANK"], first["PADDLE_CURRENT_ENDPOINT"]) == ("1", "0", "10.0.0.2:29400")


def test_the_checkpoint_that_was_committed_last() -> None:
    pointer = Checkpoint(name="step-100", step=100, number=6, order=1)
    job = a_job().model_copy(update={"checkpoint": pointer})
    first, *_ = worker_environments(job, a_generation(), a_node(), nodes())
    assert first["NODEAGENT_CHECKPOINT"] == "step-100"


def test_what_is_left_of_a_time_limit_when_the_generation_starts() -> None:
    job, generation = a_job(), a_generation()
    limited = job.spec.model_copy(update={"time_limit": 60.0})
    ran = {
        "spec": limited,
        "phase": "running",
        "ran": 20_500,
        "first_active": generation.since,
        "since": generation.since,
    }
    first, *_ = worker_environments(job.model_copy(update=ran), generation, a_node(), nodes())
    assert first["NODEAGENT_TIME_LEFT"] == "39.5"
    assert context(first).time_left == 39.5


def test_a_member_of_an_array_knows_its_index() -> None:
    job = a_job()
    array = Array(name="sweep", id="a1", index=7, count=3, first=5, last=9)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"array": array})})
    first, *_ = worker_environments(job, a_generation(), a_node(), nodes())
    assert {k: v for k, v in first.items() if k.startswith("NODEAGENT_ARRAY")} == {
        "NODEAGENT_ARRAY": "sweep", "NODEAGENT_ARRAY_INDEX": "7", "NODEAGENT_ARRAY_COUNT": "3",
        "NODEAGENT_ARRAY_MIN": "5", "NODEAGENT_ARRAY_MAX": "9",
    }  # fmt: skip


def test_one_cpu_worker_has_no_gpu_variable_and_its_own_thread_count() -> None:
    (env,) = worker_environments(a_job(), a_generation(store_hosted=False), a_node("a"), nodes())
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert "OMP_NUM_THREADS" not in env
    assert "NODEAGENT_CHECKPOINT_DIR" not in env
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_the_job_overrides_defaults_but_not_the_world() -> None:
    mine = {"OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "ib0", "RES_OPTIONS": "x", "RANK": "9", "MINE": "1"}
    env, _ = worker_environments(a_job(env=mine), a_generation(), a_node(data_interface="eth1"), nodes())
    assert (env["OMP_NUM_THREADS"], env["NCCL_SOCKET_IFNAME"], env["RES_OPTIONS"]) == ("4", "ib0", "x")
    assert (env["GLOO_SOCKET_IFNAME"], env["RANK"], env["MINE"]) == ("eth1", "1", "1")


def test_nodes_that_share_an_address_share_no_endpoint() -> None:
    """TensorFlow starts no two servers at one port, and each rank has to know all of them alike."""
    together = {"a": a_node("a"), "b": a_node("b", address=ADDRESSES["a"])}
    seen = [env for node in together.values() for env in worker_environments(a_job(), a_generation(), node, together)]
    endpoints = ["10.0.0.1:29400", "10.0.0.1:29401", "10.0.0.1:29402"]
    assert [env["PADDLE_CURRENT_ENDPOINT"] for env in seen] == endpoints
    assert {env["PADDLE_TRAINER_ENDPOINTS"] for env in seen} == {",".join(endpoints)}
    assert all(json.loads(env["TF_CONFIG"])["cluster"] == {"worker": endpoints} for env in seen)
    assert {env["JAX_COORDINATOR_ADDRESS"] for env in seen} == {"10.0.0.1:29403"}


@pytest.mark.parametrize(("hosted", "where"), [(True, "10.0.0.1:29401"), (False, "10.0.0.1:29400")])
def test_jaxs_coordinator_never_meets_a_store_that_is_served_already(hosted: bool, where: str) -> None:
    seen = [
        env
        for node in nodes().values()
        for env in worker_environments(a_job(), a_generation(store_hosted=hosted), node, nodes())
    ]
    assert [env["JAX_COORDINATOR_ADDRESS"] for env in seen] == [where] * 3


def test_paddle_meets_through_gloo_where_there_are_no_gpus_unless_the_job_says_otherwise() -> None:
    (cpu,) = worker_environments(a_job(), a_generation(), a_node("a"), nodes())
    (mine,) = worker_environments(a_job(env={"PADDLE_DISTRI_BACKEND": "xccl"}), a_generation(), a_node("a"), nodes())
    gpu, _ = worker_environments(a_job(), a_generation(), a_node(), nodes())
    assert (cpu["PADDLE_DISTRI_BACKEND"], mine["PADDLE_DISTRI_BACKEND"]) == ("gloo", "xccl")
    assert "PADDLE_DISTRI_BACKEND" not in gpu
    assert "FLAGS_selected_gpus" not in cpu
    assert "JAX_LOCAL_DEVICE_IDS" not in cpu


def test_devices_per_worker_and_faulty_devices() -> None:
    node = a_node(gpus=(Gpu(uuid="GPU-9", index=4, healthy=False, why="Xid 79"),))
    _, env = worker_environments(a_job(), a_generation(("G1", "G2", "G3", "G4")), node, nodes(b=node))
    assert env["DEVICE_ID"] == "2"
    assert (env["FLAGS_selected_gpus"], env["JAX_LOCAL_DEVICE_IDS"]) == ("2,3", "2,3")
    assert env["CUDA_VISIBLE_DEVICES"] == "G1,G2,G3,G4"
    assert json.loads(env["NODEAGENT_FAULTY"])["devices"] == {"b": {"GPU-9": "Xid 79"}}


@pytest.mark.parametrize("virtual", [False, True])
def test_each_vendors_devices_are_shown_by_its_own_variable(virtual: bool) -> None:
    npus = (Gpu(uuid=f"ascend-{n}", index=n, variable="ASCEND_RT_VISIBLE_DEVICES", visible=str(n)) for n in range(4))
    node = a_node(gpus=(*npus, Gpu(uuid="GPU-1", index=0)))
    role = {"command": ("true",), "nodes": {"min": 1, "max": 2, "target": 2}, "virtual_local_rank": virtual}
    generation = a_generation(("ascend-1", "ascend-2", "ascend-3", "GPU-1"))
    first, second = worker_environments(a_job(roles=(role,)), generation, node, nodes(b=node))
    shown = [(e.get("ASCEND_RT_VISIBLE_DEVICES"), e.get("CUDA_VISIBLE_DEVICES")) for e in (first, second)]
    assert shown == ([("1,2", ""), ("3", "GPU-1")] if virtual else [("1,2,3", "GPU-1")] * 2)


def test_with_virtual_local_ranks_each_worker_sees_its_own_devices_only() -> None:
    role = {"command": ("true",), "nodes": {"min": 1, "max": 2, "target": 2}, "virtual_local_rank": True}
    job, node = a_job(roles=(role,)), a_node()
    envs = worker_environments(job, a_generation(("G1", "G2", "G3", "G4")), node, nodes(b=node))
    assert [(e["RANK"], e["LOCAL_RANK"], e["CUDA_VISIBLE_DEVICES"]) for e in envs] == [
        ("1", "0", "G1,G2"), ("2", "0", "G3,G4"),
    ]  # fmt: skip
    assert {e["LOCAL_WORLD_SIZE"] for e in envs} == {"2"}
    assert {(e["FLAGS_selected_gpus"], e["PADDLE_LOCAL_RANK"], e["JAX_LOCAL_DEVICE_IDS"]) for e in envs} == {
        ("0,1", "0", "0,1")
    }
    assert "NODEAGENT_NUMA_BINDING" not in envs[0]
    bound = worker_environments(a_job(roles=(role | {"numa_binding": "socket"},)), a_generation(), node, nodes(b=node))
    assert {e["NODEAGENT_NUMA_BINDING"] for e in bound} == {"socket"}
    assert "NODEAGENT_NUMA_NODES" not in bound[0], "nobody knows where these GPUs are"
    envs = worker_environments(job, a_generation(("cpu0", "cpu1")), node, nodes(b=node))
    assert [(e["LOCAL_RANK"], "CUDA_VISIBLE_DEVICES" in e) for e in envs] == [("0", False), ("0", False)]


def test_of_workers_that_are_bound_all_learn_where_the_jobs_gpus_are() -> None:
    node = a_node(gpus=tuple(Gpu(uuid=f"G{i}", index=i, numa=numa) for i, numa in enumerate([0, 1, 1, None])))
    role = {"command": ("true",), "nodes": {"min": 1, "max": 2, "target": 2}, "numa_binding": "node"}
    for devices, numa in (("G1", "G2"), "1"), (("G1", "G0"), "0,1"), (("G1", "G3"), None), (("cpu0", "cpu1"), None):
        for more in {}, {"virtual_local_rank": True}:
            envs = worker_environments(a_job(roles=(role | more,)), a_generation(devices), node, nodes(b=node))
            assert [env.get("NODEAGENT_NUMA_NODES") for env in envs] == [numa, numa]
    unbound = worker_environments(a_job(), a_generation(("G1", "G2")), node, nodes(b=node))
    assert "NODEAGENT_NUMA_NODES" not in unbound[0]


def test_every_worker_learns_of_the_devices_left_out_on_any_member() -> None:
    sick = a_node("a", gpus=(Gpu(uuid="GPU-7", index=0, healthy=False, why="ECC"), Gpu(uuid="GPU-8", index=1)))
    reported = {
        name: worker_environments(a_job(), a_generation(), node, nodes(a=sick))[0]["NODEAGENT_FAULTY"]
        for name, node in nodes(a=sick).items()
    }
    assert reported["a"] == reported["b"]
    assert json.loads(reported["a"]) == {"nodes": {"n3": "lost"}, "devices": {"a": {"GPU-7": "ECC"}}}


def test_ipv6() -> None:
    six = {name: a_node(name, address=f"fd00::{n}") for n, name in enumerate("ab", 1)}
    env, _ = worker_environments(a_job(), a_generation(address="[fd00::1]:29400"), a_node(), six)
    assert env["MASTER_ADDR"] == "fd00::1"
    assert env["PADDLE_CURRENT_ENDPOINT"] == "[fd00::2]:29400"


@pytest.mark.parametrize("address", ["", "29400", ":1"])
def test_no_address_yet(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)


LISTS = {
    "TF_CONFIG", "PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_TRAINERS", "NODEAGENT_FAULTY",
}  # fmt: skip


def of_many(size: int, **changes: Any) -> dict[str, str]:
    """The environment of a worker in a gang of so many, each on a node of its own."""
    members = {
        f"node{i:04}": Member(node=f"node{i:04}", life="l", group_rank=i, first_rank=i, workers=1, devices=("cpu0",))
        for i in range(size)
    }
    records = {name: a_node(address="2001:db8:1234:5678::1").model_copy(update={"id": name}) for name in members}
    generation = a_generation(members=members, address="[2001:db8:1234:5678::1]:29400", **changes)
    (env,) = worker_environments(a_job(env={"MINE": "x" * 30_000}), generation, records["node0000"], records)
    return env


def test_of_a_small_gang_every_list_is_there() -> None:
    assert of_many(500).keys() >= LISTS


@pytest.mark.parametrize("size", [600, 800, 1000, 2000, 4000])
def test_lists_that_are_too_long_are_left_out_so_that_a_fork_server_takes_the_rest(size: int) -> None:
    env = of_many(size)
    assert all(len(value) <= MOST_VALUE for name, value in env.items() if name != "MINE")
    assert len(json.dumps([["python", "t.py"], env])) < MOST_REPORTED, "with what the job sets itself"
    assert (env["WORLD_SIZE"], len(env["MINE"])) == (str(size), 30_000)
    assert size < 4000 or not env.keys() & (LISTS - {"NODEAGENT_FAULTY"})


def test_faults_without_number_start_a_worker_too() -> None:
    assert "NODEAGENT_FAULTY" not in of_many(1, outside={f"node{i}": "is cordoned" for i in range(5000)})


# --- several roles ----------------------------------------------------------------------------------

ONE = {"min": 1, "max": 1, "target": 1}
ROLES = (
    {
        "name": "pserver",
        "command": ("python", "s.py"),
        "nodes": {"min": 1, "max": 2, "target": 2},
        "replicas": {"min": 2, "max": 2, "target": 2},
    },
    {"name": "big-trainer", "command": ("python", "t.py"), "nodes": ONE, "env": {"A": "role's", "B": "2"}},
)


def roles_generation() -> Generation:
    place = {"workers": 1, "devices": ("cpu0",)}
    servers = [Place(role="pserver", index=i, **place) for i in range(2)]
    trainer = Place(role="big-trainer", index=0, workers=2, devices=("GPU-1", "GPU-2"))
    members = {
        "a": Member(node="a", life="l", group_rank=0, first_rank=0, workers=1, devices=("cpu0",), places=(servers[0],)),
        "b": Member(
            node="b", life="l", group_rank=1, first_rank=1, workers=3, devices=("cpu0", "GPU-1", "GPU-2"),
            places=(servers[1], trainer),
        ),
    }  # fmt: skip
    return a_generation(members=members, ports={"a": (30000, 30001), "b": (30002, 30003, 30004, 30005)})


def test_each_role_is_a_world_of_its_own() -> None:
    job = a_job(roles=ROLES, env={"A": "job's"})
    server, first, second = worker_environments(job, roles_generation(), a_node(), nodes())
    assert {k: server[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "A")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "ROLE_NAME": "pserver", "A": "job's",
    }  # fmt: skip
    assert (server["MASTER_ADDR"], server["MASTER_PORT"], server["NODEAGENT_PORT"]) == ("10.0.0.1", "30001", "30002")
    assert "CUDA_VISIBLE_DEVICES" not in server
    assert {k: second[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
    }  # fmt: skip
    assert (second["MASTER_ADDR"], second["MASTER_PORT"], second["NODEAGENT_PORT"]) == ("10.0.0.2", "30005", "30004")
    assert (second["A"], second["B"], second["CUDA_VISIBLE_DEVICES"]) == ("role's", "2", "GPU-1,GPU-2")
    assert [first[k] for k in ("NODEAGENT_ROLE", "NODEAGENT_ROLE_INDEX")] == ["big-trainer", "0"]
    assert first["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # the role's rank 0 hosts its rendezvous


def test_every_worker_knows_where_every_role_is() -> None:
    servers = "10.0.0.1:30000,10.0.0.2:30002"
    cluster = {"pserver": servers.split(","), "big-trainer": ["10.0.0.2:30003", "10.0.0.2:30004"]}
    server, first, second = worker_environments(a_job(roles=ROLES), roles_generation(), a_node(), nodes())
    for env in (server, first, second):
        assert env["NODEAGENT_HOSTS_PSERVER"] == env["PADDLE_PSERVERS_IP_PORT_LIST"] == servers
        assert env["NODEAGENT_HOSTS_BIG_TRAINER"] == "10.0.0.2:30003"
    assert json.loads(second["TF_CONFIG"]) == {"cluster": cluster, "task": {"type": "big-trainer", "index": 1}}
    assert (server["TRAINING_ROLE"], first["TRAINING_ROLE"]) == ("PSERVER", "TRAINER")


def paddle_generation(trainers: str) -> Generation:
    """Two servers and three trainers, on two nodes."""
    counts = {"a": (("pserver", 0, 1), (trainers, 0, 2)), "b": (("pserver", 1, 1), (trainers, 1, 1))}
    members, first = {}, 0
    for group_rank, (node, placed) in enumerate(counts.items()):
        places = tuple(Place(role=role, index=i, workers=n, devices=("cpu0",) * n) for role, i, n in placed)
        workers = sum(place.workers for place in places)
        members[node] = Member(
            node=node, life="l", group_rank=group_rank, first_rank=first, workers=workers,
            devices=("cpu0",) * workers, places=places,
        )  # fmt: skip
        first += workers
    return a_generation(
        members=members, ports={"a": (30000, 30001, 30002, 30003, 30004), "b": (30005, 30006, 30007, 30008)}
    )


@pytest.mark.parametrize(("trainers", "completes"), [("trainer", ""), ("train", "train"), ("worker", "")])
def test_parameter_servers_know_how_many_trainers_there_are(trainers: str, completes: str) -> None:
    roles = (ROLES[0], ROLES[1] | {"name": trainers})
    job, generation = a_job(roles=roles, completes=completes), paddle_generation(trainers)
    keys = ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_GLOBAL_SIZE", "PADDLE_NNODES", "PADDLE_MASTER")
    first, *_ = worker_environments(job, generation, a_node("a"), nodes())
    second, trainer = worker_environments(job, generation, a_node("b"), nodes())
    endpoints = "10.0.0.1:30002,10.0.0.1:30003,10.0.0.2:30006"
    for server in (first, second):
        assert [server[key] for key in keys[:4]] == ["3", endpoints, "3", "2"]
        assert server["PADDLE_PSERVERS_IP_PORT_LIST"] == "10.0.0.1:30000,10.0.0.2:30005"
        assert (server["WORLD_SIZE"], server["TRAINING_ROLE"]) == ("2", "PSERVER"), "for torch it is its own world"
    assert [trainer[key] for key in keys[:4]] == ["3", endpoints, "3", "2"]
    assert [env["PADDLE_PORT"] for env in (first, second, trainer)] == ["30000", "30005", "30006"]
    assert [env["PADDLE_ROLE"] for env in (first, second, trainer)] == ["PSERVER", "PSERVER", "TRAINER"]
    for env in (first, second, trainer):
        assert env["PADDLE_GLOO_HTTP_ENDPOINT"] == "10.0.0.1:30001", "held by the first server's node, for its rank 0"
        assert [env[key] for key in ("PADDLE_WITH_GLOO", "PADDLE_GLOO_RENDEZVOUS")] == ["1", "3"]
        assert "PADDLE_ELASTIC_NP" not in env, "the size of a role is a number"
        assert (env["PADDLE_TRAINERS"], env["DISTRIBUTED_TRAINER_ENDPOINTS"]) == ("10.0.0.1,10.0.0.2", endpoints)


def test_without_parameter_servers_paddle_learns_of_none() -> None:
    (env,) = worker_environments(a_job(), a_generation(), a_node("a"), nodes())
    assert not {"PADDLE_PORT", "PADDLE_ROLE", "PADDLE_WITH_GLOO", "PADDLE_GLOO_HTTP_ENDPOINT"} & set(env)


def test_an_elastic_job_is_one_for_paddle_unless_the_job_says_otherwise() -> None:
    for least, most, wanted in ((2, 4, ("2:4", "2")), (2, 2, ("2", "1"))):
        role = {"command": ("python", "t.py"), "nodes": {"min": least, "max": most, "target": 2}}
        (env,) = worker_environments(a_job(roles=(role,)), a_generation(), a_node("a"), nodes())
        assert (env["PADDLE_ELASTIC_NP"], env["PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"]) == wanted
    mine = {"PADDLE_ELASTIC_NP": "1:8", "PADDLE_ELASTIC_JOB_ID": "mine", "PADDLE_ELASTIC_SERVER": "etcd:2379"}
    (env,) = worker_environments(a_job(env=mine), a_generation(), a_node("a"), nodes())
    assert {key: env[key] for key in mine} == mine


def test_mindspores_scheduler_is_no_worker_and_all_find_it() -> None:
    roles = (ROLES[1] | {"name": "worker"}, {"name": "scheduler", "command": ("python", "t.py"), "nodes": ONE})
    places = (Place(role="scheduler", index=0, workers=1, devices=("cpu0",)),
              Place(role="worker", index=0, workers=2, devices=("cpu0", "cpu0")))  # fmt: skip
    member = Member(node="b", life="l", group_rank=0, first_rank=0, workers=3, devices=("cpu0",) * 3, places=places)
    generation = a_generation(members={"b": member}, ports={"b": (30000, 30001, 30002, 30003, 30004)})
    scheduler, first, second = worker_environments(
        a_job(roles=roles, completes="worker"), generation, a_node(), nodes()
    )
    assert [(e["MS_SCHED_HOST"], e["MS_SCHED_PORT"]) for e in (scheduler, first, second)] == [("10.0.0.2", "30000")] * 3
    assert scheduler["NODEAGENT_PORT"] == "30000", "the port that is held for it"
    assert [e["MS_ROLE"] for e in (scheduler, first, second)] == ["MS_SCHED", "MS_WORKER", "MS_WORKER"]
    assert [e["MS_WORKER_NUM"] for e in (scheduler, first, second)] == ["2", "2", "2"]
    assert [e["MS_NODE_ID"] for e in (first, second)] == ["0", "1"]


def test_the_roles_file() -> None:
    assert json.loads(roles_file(roles_generation(), {"a": "10.0.0.1", "b": "fd00::2"})) == {
        "pserver": [
            {"index": 0, "node": "a", "host": "10.0.0.1", "port": 30000, "address": "10.0.0.1:30000"},
            {"index": 1, "node": "b", "host": "fd00::2", "port": 30002, "address": "[fd00::2]:30002"},
        ],
        "big-trainer": [{"index": 0, "node": "b", "host": "fd00::2", "port": 30003, "address": "[fd00::2]:30003"}],
    }
