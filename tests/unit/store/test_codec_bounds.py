"""Records that somebody else has written to the store: each is refused for a price that does not grow with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from nodeagent.model.job import BudgetEntry
from nodeagent.model.world import PodReport
from nodeagent.store import codec
from tests.contract.bench import facts
from tests.unit.plan.build import make_generation, make_job, make_node, make_spec

MANY = 150_000
DEAR = 250_000
"""More errors than any record may bring pydantic to note: about a second."""

Call = Callable[[], object]


def flat(fields: dict[str, str]) -> list[str]:
    return [text for pair in fields.items() for text in pair]


def with_key(text: str, key: str, value: str) -> str:
    return json.dumps(json.loads(text) | {key: "@"}).replace('"@"', value)


def many(text: str) -> str:
    return "[" + ",".join([text] * MANY) + "]"


def strange(count: int = MANY) -> str:
    return "{" + ",".join(f'"a{n}":1' for n in range(count)) + "}"


NODE = codec.encode_node(make_node("n1"))
JOB = codec.encode_job(
    make_job(
        "running",
        make_generation(["n1"], reports={"n1": PodReport(state="running")}),
        budget={"2": BudgetEntry(at=1, wall=2.5, kind="reform", counts=False)},
    )
)


def node(**change: str) -> Call:
    return lambda: codec.decode_node(flat(NODE | change), "")


def job(change: dict[str, str]) -> Call:
    return lambda: codec.decode_job(flat(JOB | change))


def entries(kind: str, text: str, count: int = 8000) -> Call:
    return job({f"{kind}:n{number}": text for number in range(count)})


HOSTILE: dict[str, Call] = {
    "gpus": node(facts=with_key(NODE["facts"], "gpus", many("{}"))),
    "labels": node(facts=with_key(NODE["facts"], "labels", strange())),
    "facts": node(facts=strange()),
    "readiness": node(readiness="{" + ",".join(f'"u{n}":{{}}' for n in range(MANY)) + "}"),
    "a long name": node(facts=with_key(NODE["facts"], "hostname", json.dumps("x" * 9_000_000))),
    "what a node has not": node(**{f"more{number}": "" for number in range(MANY)}),
    "a cordon": lambda: codec.decode_node(flat(NODE), strange()),
    "a spec": job({"spec": strange()}),
    "roles": job({"spec": with_key(JOB["spec"], "roles", many("{}"))}),
    "preloads": job({"spec": with_key(JOB["spec"], "preload", many("1"))}),
    "just few enough roles": job(
        {"spec": with_key(JOB["spec"], "roles", "[" + ",".join(["{}"] * (codec.MOST_PARTS - 100)) + "]")}
    ),
    "a control": job({"control": with_key(JOB["control"], "met", many("1"))}),
    "a member": job({"member:n1": with_key(JOB["member:n1"], "places", many("{}"))}),
    "members": entries("member", "{}"),
    "too many members": entries("member", JOB["member:n1"], 60_000),
    "holders": entries("holder", strange(20)),
    "members with many devices": entries("member", '{"devices":[' + ",".join("1" * 100) + "]}"),
    "ports": entries("ports", "[" + ",".join(['"x"'] * 100) + "]"),
    "missing": entries("missing", "1"),
    "hosts": entries("host", "1"),
    "reports": entries("report", "1 running {" + strange(30)[1:]),
    "a report": job({"report:n1": "1 failed " + with_key('{"state":"failed"}', "exits", many("{}"))}),
    "restarts": entries("spend", strange(30)),
    "kinds": job({f"kind{number}:": "1" for number in range(60_000)}),
    "a tree": lambda: codec.decode_queues(["tree", '{"queues":' + many("{}") + "}", "rev", "1"]),
    "users": lambda: codec.decode_queues(
        ["tree", '{"queues":[' + ",".join(['{"users":[' + ",".join("1" * 900) + "]}"] * 250) + "]}", "rev", "1"]
    ),
    "windows": lambda: codec.decode_windows(["windows", '{"windows":' + many("{}") + "}", "rev", "1"]),
    "a row": lambda: codec.decode_usage("1", flat({"rev": "1", "row:1 q": strange()})),
    "rows": lambda: codec.decode_usage("1", flat({"rev": "1"} | {f"row:{n} q": strange(30) for n in range(8000)})),
    "an event": lambda: codec.decode_event(("1-1", flat({f"a{n}": "1" for n in range(MANY)}))),
    "a pod": lambda: codec.decode_pod(strange()),
    "half a string": job({"spec": '"' + '\\"' * 200_000 + ',"' * 30_000}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_record_costs_no_more_than_its_bound(name: str) -> None:
    """Counted in errors that pydantic has noted: of a megabyte they were a million."""
    with pytest.raises(ValueError, match=r".") as refused:
        HOSTILE[name]()
    assert not isinstance(refused.value, ValidationError), "nobody is to print all of it"
    assert len(str(refused.value)) < 400
    noted = re.search(r": (\d+) values do not fit", str(refused.value))
    assert int(noted[1] if noted else 0) < DEAR


def test_what_nodeagent_writes_is_far_within_the_bounds() -> None:
    """Text with commas is one value, however long; and so is a gang of thousands of nodes."""
    spec = make_spec().model_copy(update={"env": {"CSV": "1,2," * 200_000}})
    assert codec.decode_job(flat(codec.encode_job(make_job(spec=spec)))).spec == spec
    generation = make_generation([f"n{number}" for number in range(3000)], acks=["n1"])
    large = make_job("running", generation)
    assert codec.decode_job(flat(codec.encode_job(large))) == large
    gpus = make_node("n1", gpus=128)
    assert codec.decode_node(flat(codec.encode_node(gpus)), "") == gpus
    assert facts("n1") == codec.decode_node(flat(NODE | {"facts": codec.encode_facts(facts("n1"))}), "").facts
