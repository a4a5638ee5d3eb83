"""What the cluster's key signs of a job: every part that says what runs, as whom, where and how often."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.model.constraints import Constraints, Match
from nodeagent.model.job import Control, JobRecord, Scale
from nodeagent.model.jobspec import (
    After,
    Array,
    Container,
    Hang,
    Hooks,
    JobSpec,
    Nodes,
    Policy,
    Ready,
    RestartLimits,
    Together,
)
from nodeagent.model.world import Ack, Generation
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import LIFETIME, Seal
from tests.unit.plan.build import UID, make_generation, make_job, make_spec

SEAL = Seal(ClusterKey(bytes(32)), "lab")
NOW = 1_700_000_000.7


def signed(spec: JobSpec | None = None, **control: Any) -> JobRecord:
    job = make_job(spec=spec or make_spec())
    wanted = SEAL.control(job.uid, job.control.model_copy(update=control))
    return job.model_copy(update={"control": wanted, "admission": SEAL.admit(job.uid, job.owner, job.spec, NOW, "n1")})


def changed(job: JobRecord, **fields: Any) -> JobRecord:
    return job.model_copy(update=fields)


def role(job: JobRecord, **fields: Any) -> JobRecord:
    return changed(job, spec=job.spec.model_copy(update={"roles": (job.spec.role.model_copy(update=fields),)}))


def test_what_was_signed_is_good_and_stays_good_through_the_store() -> None:
    job = signed(scale=Scale(request="r", want=2, before=1, timeout=30, grace=1))
    assert SEAL.admits(job) and SEAL.controls(job)
    again = JobRecord.from_json(job.to_json())
    assert SEAL.admits(again) and SEAL.controls(again)
    assert job.admission is not None
    assert (job.admission.issued, job.admission.expires) == (1_700_000_000, 1_700_000_000 + LIFETIME)


def test_without_a_signature() -> None:
    job = make_job()
    assert not SEAL.admits(job)
    assert not SEAL.controls(job)


SPECS = {
    "name": "b", "env": {"LD_PRELOAD": "/evil.so"}, "env_file": "/etc/shadow", "working_dir": "/", "user": "root",
    "checkpoint_dir": "/x", "limits": {"core": 1}, "priority": 9, "preload": ("evil",),
    "guessed": ("evil",), "finish": 1.0, "fork_server": False, "grace": 1.0,
    "restarts": RestartLimits(max=1), "policies": (Policy(on=("*",), do="FailJob"),), "hooks": Hooks(pre_start=("sh",)),
    "hold_timeout": 1.0, "time_limit": 1.0, "begin": 1.0, "ttl": 1.0, "queue": "q", "spot": True,
    "after": (After(uid="u", name="x"),),
    "array": Array(name="x", id="a", index=0, count=1, first=0, last=0), "hang": Hang(progress=1.0), "completes": "r",
    "placement": Together(within="rack"), "container": Container(image="evil"), "modules": ("evil",),
}  # fmt: skip
ROLES = {
    "name": "r", "command": ("sh", "-c", "id"), "nodes": Nodes(min=1, max=4, target=1), "workers_per_node": 2,
    "after": ("w",), "ready": Ready(port=True), "replicas": Nodes(min=2, max=2, target=2), "env": {"A": "1"},
    "gpus_per_worker": 0, "uneven": True, "virtual_local_rank": True, "numa_binding": "node", "restart": "alone",
    "grace": 1.0,
    "policies": (Policy(on=("*",), do="FailJob"),),
    "placement": Constraints(require=(Match(label="node", values=("n1",)),)),
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(SPECS))
def test_a_changed_spec_is_not_what_was_signed(field: str) -> None:
    job = signed()
    assert not SEAL.admits(changed(job, spec=job.spec.model_copy(update={field: SPECS[field]})))


@pytest.mark.parametrize("field", sorted(ROLES))
def test_a_changed_role_is_not_what_was_signed(field: str) -> None:
    assert not SEAL.admits(role(signed(), **{field: ROLES[field]}))


def test_every_field_of_a_job_was_tried() -> None:
    job = signed()
    assert set(SPECS) | {"roles", "submitter"} == set(JobSpec.model_fields)
    assert set(ROLES) == set(type(job.spec.role).model_fields)
    submitter = job.spec.submitter
    for field, value in (
        ("user", "root"),
        ("uid", 0),
        ("gid", 0),
        ("host", "x"),
        ("cwd", "/"),
        ("environ", {"A": "1"}),
    ):
        other = submitter.model_copy(update={field: value})
        assert not SEAL.admits(changed(job, spec=job.spec.model_copy(update={"submitter": other}))), field


def test_an_admission_is_of_one_job_one_owner_and_one_time() -> None:
    job = signed()
    assert job.admission is not None
    for fields in ({"uid": "u2"}, {"name": "b"}, {"owner": 0}):
        assert not SEAL.admits(changed(job, **fields)), fields
    for fields in ({"expires": job.admission.expires + 1}, {"issued": 1}, {"by": "n2"}, {"signature": ""}):
        assert not SEAL.admits(changed(job, admission=job.admission.model_copy(update=fields))), fields
    assert not Seal(ClusterKey(bytes(32)), "other").admits(job)
    assert not Seal(ClusterKey(b"x" * 32), "lab").admits(job)


def test_a_renewed_admission_is_the_same_job_for_longer() -> None:
    job = signed()
    renewed = changed(job, admission=SEAL.renewed(job, NOW + 1000, "n2"))
    assert SEAL.admits(renewed)
    assert renewed.admission is not None
    assert (renewed.admission.by, renewed.admission.expires) == ("n2", 1_700_001_000 + LIFETIME)


def gang() -> JobRecord:
    generation = make_generation(["n1", "n2"])
    acks = {"n1": Ack(life="life-n1", address="10.0.0.1:29400", host="10.0.0.1"), "n2": Ack(life="life-n2", host="b")}
    sums = [sum(column) for column in zip(*(parts(generation, node, ack) for node, ack in acks.items()), strict=True)]
    about = {"address": "10.0.0.1:29400", "hosts": {"n1": "10.0.0.1", "n2": "b"}, "seal": " ".join(map(str, sums))}
    return make_job("running", generation.model_copy(update=about))


def parts(generation: Generation, node: str, ack: Ack) -> list[int]:
    signature = SEAL.ack(UID, generation.token, node, ack).signature
    return [int(signature[at : at + 8], 16) for at in range(0, 64, 8)]


def in_generation(job: JobRecord, **fields: Any) -> JobRecord:
    assert job.generation is not None
    return changed(job, generation=job.generation.model_copy(update=fields))


def test_a_generation_is_what_the_agents_of_its_members_agreed_to() -> None:
    job = gang()
    assert SEAL.gang(job)
    assert SEAL.gang(JobRecord.from_json(job.to_json()))
    assert job.generation is not None
    hosts, members = job.generation.hosts, job.generation.members
    of_n1 = parts(job.generation, "n1", Ack(life="life-n1", address="10.0.0.1:29400", host="10.0.0.1"))
    twice = [int(part) + more for part, more in zip(job.generation.seal.split(), of_n1, strict=True)]
    evil = {
        "another address": in_generation(job, address="6.6.6.6:29400"),
        "another generation": in_generation(job, id="g9"),
        "a member that did not agree": in_generation(job, members=make_generation(["n1", "n2", "n3"]).members),
        "another life": in_generation(job, members=members | {"n2": members["n2"].model_copy(update={"life": "x"})}),
        "another rank 0": in_generation(job, members=make_generation(["n2", "n1"]).members),
        "a member less": in_generation(job, members={"n1": members["n1"]}),
        "an agreement that counts twice": in_generation(job, seal=" ".join(map(str, twice))),
        "no agreement": in_generation(job, seal=""),
        "another's rendezvous": in_generation(job, store_hosted=True),
        "another address of a member": in_generation(job, hosts=hosts | {"n2": "6.6.6.6"}),
        "no address of a member": in_generation(job, hosts={"n1": "10.0.0.1"}),
        "another job": changed(job, uid="u2"),
    }
    for what, forged in evil.items():
        assert not SEAL.gang(forged), what
    assert SEAL.gang(in_generation(job, state="forming", seal="")), "nothing is started yet"
    assert SEAL.gang(make_job())


CONTROLS = {
    "rev": 2, "desired": "stop", "target": 3, "restart": 1, "delete": True, "by": "eve",
    "scale": Scale(request="r", want=2, before=1), "sizes": {"trainer": 9}, "met": ("u",), "signature": "",
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(Control.model_fields))
def test_a_changed_control_is_not_what_was_signed(field: str) -> None:
    job = signed()
    assert not SEAL.controls(changed(job, control=job.control.model_copy(update={field: CONTROLS[field]})))


def test_a_control_is_of_one_job() -> None:
    job = signed()
    assert not SEAL.controls(changed(job, uid="u2"))
    assert job.admission is not None
    swapped = job.control.model_copy(update={"signature": job.admission.signature})
    assert not SEAL.controls(changed(job, control=swapped))
