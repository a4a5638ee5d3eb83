"""Records: frozen, strictly decoded, equal again after a trip over the wire; limits of what can be written."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nodeagent.model.base import Record
from nodeagent.model.job import Control, JobEvent, JobRecord
from nodeagent.model.jobspec import JobSpec, Nodes, RestartLimits
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.model.world import Generation, Member, Token
from tests.unit.plan.build import UID, failed, make_exit, make_generation, make_job, make_node, make_spec, spend

GENERATION = make_generation(
    ["n1", "n2"], acks=["n1"], holders=["n3"], reports={"n1": failed(make_exit(signal=9))}, workers=2
)
JOB = make_job("running", GENERATION, budget={"1": spend("node_lost")}, last_reports={"n1": failed(make_exit())})
POD = PodState(
    uid=UID,
    job="a",
    role="worker",
    node="n1",
    phase="running",
    workers=(WorkerState(rank=0, local_rank=0, pid=7, state="running"),),
)
RECORDS: list[Record] = [
    JOB,
    GENERATION,
    make_node("n1", gpus=2, sick=[1], drain=True),
    POD,
    JobEvent(id="1-0", kind="NodeLost"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_what_is_written_is_read_again_the_same(record: Record) -> None:
    assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_records_are_frozen_and_know_their_fields(record: Record) -> None:
    name = next(iter(type(record).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record, name, "other")
    with pytest.raises(ValidationError, match="surprise"):
        type(record).model_validate(record.model_dump() | {"surprise": 1})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Token, '{"number": "1", "id": "x"}'),  # a number as text is not guessed into one
        (Token, '{"number": -1, "id": "x"}'),
        (Token, '{"number": 1}'),
        (Token, "not json"),
        (Control, '{"rev": 0, "target": 1}'),
        (Nodes, '{"min": 0, "max": 1, "target": 1}'),
        (RestartLimits, '{"max": 1, "window": 0}'),
    ],
)
def test_what_does_not_fit_is_refused(kind: type[Record], text: str) -> None:
    with pytest.raises(ValidationError):
        kind.from_json(text)


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a_b", "a b", "x" * 64, "ä"])
def test_names_of_jobs(name: str) -> None:
    with pytest.raises(ValidationError):
        JobSpec.model_validate(make_spec().model_dump() | {"name": name})


@pytest.mark.parametrize("name", ["a", "a-b.c", "7", "x" * 63])
def test_good_names_of_jobs(name: str) -> None:
    assert make_spec(name=name).name == name


def test_a_member_has_a_worker_and_a_device() -> None:
    good = GENERATION.members["n1"].model_dump()
    for wrong in ({"workers": 0}, {"devices": ()}, {"group_rank": -1}):
        with pytest.raises(ValidationError):
            Member.model_validate(good | wrong)


def test_a_generation_tells_its_token_size_and_order() -> None:
    assert GENERATION.token == Token(number=1, id="g1")
    assert GENERATION.world_size == 4
    turned = Generation.model_validate(
        GENERATION.model_dump() | {"members": dict(reversed(GENERATION.members.items()))}
    )
    assert [m.node for m in turned.ordered()] == ["n1", "n2"]


def test_devices_are_healthy_gpus_then_slots() -> None:
    node: NodeRecord = make_node("n1", slots=2, gpus=3, sick=[1])
    assert node.facts.devices() == ("GPU-n1-0", "GPU-n1-2", "cpu0", "cpu1")


def test_a_job_has_one_role() -> None:
    assert JobRecord.from_json(JOB.to_json()).spec.role == JOB.spec.roles[0]
