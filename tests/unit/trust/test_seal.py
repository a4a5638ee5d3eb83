"""What the cluster's key signs of a job: every part that says what runs, as whom, where and how often."""

from __future__ import annotations

from typing import Any

import pytest

from nodeagent.model.job import Control, JobRecord, Scale
from nodeagent.model.jobspec import Hooks, JobSpec, Nodes, Policy, RestartLimits
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import LIFETIME, Seal
from tests.unit.plan.build import make_job, make_spec

SEAL = Seal(ClusterKey(bytes(32)), "lab")
NOW = 1_700_000_000.7


def signed(spec: JobSpec | None = None, **control: Any) -> JobRecord:
    job = make_job(spec=spec or make_spec())
    wish = SEAL.control(job.uid, job.control.model_copy(update=control))
    return job.model_copy(update={"control": wish, "admission": SEAL.admit(job.uid, job.owner, job.spec, NOW, "n1")})


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
    "checkpoint_dir": "/x", "limits": {"core": 1}, "priority": 9, "preload": ("evil",), "standby": False, "grace": 1.0,
    "restarts": RestartLimits(max=1), "policies": (Policy(on=("*",), do="FailJob"),), "hooks": Hooks(pre_start=("sh",)),
    "hold_timeout": 1.0,
}  # fmt: skip
ROLES = {
    "name": "r", "command": ("sh", "-c", "id"), "nodes": Nodes(min=1, max=4, target=1), "workers_per_node": 2,
    "gpus_per_worker": 0, "uneven": True,
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


CONTROLS = {
    "rev": 2, "desired": "stop", "target": 3, "restart": 1, "delete": True, "by": "eve",
    "scale": Scale(request="r", want=2, before=1), "signature": "",
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
