"""Redis hashes to records: what the contract tests cannot show, refusals above all."""

from __future__ import annotations

import json

import pytest

from nodeagent.model.job import BudgetEntry
from nodeagent.model.jobspec import Array
from nodeagent.model.node import NodeFacts, Readiness
from nodeagent.model.usage import Held, UsageDay, UsageRow, UsedTime
from nodeagent.model.world import PodReport, Token
from nodeagent.store import codec
from nodeagent.store.keys import prefix
from nodeagent.store.messages import NewJob
from nodeagent.store.scripts import load
from tests.contract.bench import facts
from tests.unit.plan.build import make_generation, make_holder, make_job, make_spec

NODE = {
    "id": "n1", "life": "a", "start": "2", "lost": "0", "left": "1", "joined": "7",
    "facts": codec.encode_facts(facts("n1")), "readiness": "{}", "rev": "9", "seq": "4",
    "dead": "", "address": "10.0.0.1", "pid": "1",
}  # fmt: skip


def flat(fields: dict[str, str]) -> list[str]:
    return [text for pair in fields.items() for text in pair]


def test_a_node_comes_back() -> None:
    node = codec.decode_node(flat(NODE), "")
    assert (node.id, node.incarnation.start, node.left, node.lost, node.joined, node.rev) == (
        "n1",
        2,
        True,
        False,
        7,
        9,
    )
    assert node.facts == facts("n1")
    assert node.cordon is None


@pytest.mark.parametrize(
    "change", [{"mood": "good"}, {"joined": "soon"}, {"joined": "1.5"}, {"lost": "yes"}, {"facts": "{}"}, {"rev": ""},
               {"facts": str(NODE["facts"]).replace('"cpu_slots":4', '"cpu_slots":1000000000')}]
)  # fmt: skip
def test_a_node_that_does_not_fit_is_an_error(change: dict[str, str]) -> None:
    with pytest.raises((ValueError, KeyError)):
        codec.decode_node(flat(NODE | change), "")


def test_a_node_is_written_as_it_was_read() -> None:
    fields = codec.encode_node(codec.decode_node(flat(NODE), ""))
    assert codec.decode_node(flat(fields), "") == codec.decode_node(flat(NODE), "")
    assert set(NODE) - set(fields) == {"seq", "dead"}


def test_a_job_is_written_as_it_was_read() -> None:
    generation = make_generation(["n1", "n2"], number=3).model_copy(
        update={
            "ports": {"n1": (29500, 29501)},
            "reports": {"n1": PodReport(state="failed", reason="né", seq=1)},
            "missing": {"n2": "b"},
            "hosts": {"n1": "10.0.0.1"},
            "seal": "1 2",
            "released": True,
            "ready": 0.25,
            "holders": {"n9": make_holder("n9", "c")},
            "outside": {"n7": "its fan broke"},
            "planned": True,
        }
    )
    more: dict[str, object] = {
        "active": Token(number=2, id="g2"),
        "budget": {"2": BudgetEntry(at=1, wall=2.5, kind="reform", counts=False, rank=None)},
        "last_reports": {"n2": PodReport(state="succeeded")},
        "started": 1.25,
        "held": Held(at=5, gpus=2, stands=3),
        "used": {"20000": UsedTime(gpu_ms=2**52 + 1, restarts=1)},
    }
    for job in (make_job(), make_job("running", generation).model_copy(update=more)):
        assert codec.decode_job(flat(codec.encode_job(job))) == job


def test_a_member_of_an_array_is_written_with_what_the_scripts_count_by() -> None:
    array = Array(name="s", id="a1", index=3, count=9, first=0, last=8, at_once=4)
    job = make_job(spec=make_spec(name="s-3", array=array))
    fields = codec.encode_job(job)
    assert (fields["array"], fields["at_once"]) == ("a1", "4")
    assert codec.decode_job(flat(fields)) == job
    assert not {"array", "at_once"} & set(codec.encode_job(make_job()))
    new = codec.new_job(NewJob(uid="u", spec=job.spec, control=job.control), 0.0)
    assert (new["array"], new["at_once"]) == ("a1", 4)


def test_a_days_use_is_written_as_it_was_read() -> None:
    day = UsageDay(day=20_000, rows={"1000 default": UsageRow(gpu_ms=2**52 + 1, jobs=2), "-1 b": UsageRow()}, rev=7)
    fields = codec.encode_usage(day)
    assert codec.decode_usage(fields.pop("day"), flat(fields)) == day
    with pytest.raises(ValueError, match="unknown field"):
        codec.decode_usage("1", ["rev", "1", "other", "2"])


def test_a_job_that_does_not_fit_is_an_error() -> None:
    with pytest.raises((ValueError, KeyError)):
        codec.decode_job(flat({"uid": "u1"}))
    with pytest.raises((ValueError, KeyError)):
        codec.decode_job(["uid"])


def test_a_job_has_the_name_that_was_checked() -> None:
    """The API makes folders of it."""
    with pytest.raises(ValueError, match=r"has the name '\.\./\.\./etc', its spec '"):
        codec.decode_job(flat(codec.encode_job(make_job()) | {"name": "../../etc"}))


@pytest.mark.parametrize(
    ("field", "like"),
    [
        ("spend:x", "spend:3"), ("spend:-1", "spend:3"), ("spend:" + "9" * 5000, "spend:3"),
        ("used:x", "used:20000"), ("used:9999999", "used:20000"),
        ("member:n3", "member:n1"), ("member:n1", "member:n2"), ("holder:n1", "holder:n9"),
    ],
)  # fmt: skip
def test_a_job_whose_entries_have_wrong_keys_is_an_error(field: str, like: str) -> None:
    """Nothing signs them, and every agent that counted by them ended."""
    fields = ran()
    assert codec.decode_job(flat(fields)).rev == 0
    with pytest.raises(ValueError):
        codec.decode_job(flat(fields | {field: fields[like]}))


def test_a_generation_without_members_is_an_error() -> None:
    fields = {field: text for field, text in ran().items() if not field.startswith("member:")}
    with pytest.raises(ValueError, match="generation 3 without members"):
        codec.decode_job(flat(fields))


def test_a_day_before_1970_can_be_read() -> None:
    """The store counts so where its machine's clock went back to the beginning."""
    assert "-1" in codec.decode_job(flat(ran() | {"used:-1": "{}"})).used


def ran() -> dict[str, str]:
    """The fields of a job that runs, and ran before."""
    generation = make_generation(["n1", "n2"], number=3, holders=["n9"])
    more: dict[str, object] = {
        "budget": {"3": BudgetEntry(at=1, wall=2.5, kind="reform", counts=False)},
        "used": {"20000": UsedTime(gpu_ms=1)},
    }  # fmt: skip
    return codec.encode_job(make_job("running", generation).model_copy(update=more))


def test_the_same_readiness_is_the_same_text_in_any_order() -> None:
    one, two = Readiness(state="ready", folder="f1"), Readiness(state="unfit", reason="né")
    assert codec.encode_readiness({"a": one, "b": two}) == codec.encode_readiness({"b": two, "a": one})


def test_absent_arguments_do_not_travel() -> None:
    assert json.loads(codec.encode({"a": None, "b": [], "c": "né"})) == {"b": [], "c": "né"}


def test_a_report_travels_without_its_seq() -> None:
    sent = codec.encode_report(PodReport(state="failed", seq=8))
    assert sent["state"] == "failed"
    assert "seq" not in json.loads(sent["body"])


def test_every_key_of_a_cluster_has_one_hash_tag() -> None:
    assert prefix("lab-1.b_c") == "na:{lab-1.b_c}:"
    for name in ("", "a b", "{x}", "a:b", "x" * 64, "-a"):
        with pytest.raises(ValueError, match="cluster name"):
            prefix(name)


def test_scripts_are_loaded_once_and_named_by_their_content() -> None:
    assert load("join") is load("join")
    assert load("join").sha != load("beat").sha


@pytest.mark.parametrize("missing", ["id", "lost", "facts", "life", "joined"])
def test_a_node_without_a_field_is_a_record_that_cannot_be_read(missing: str) -> None:
    with pytest.raises(ValueError, match=f"it has no {missing}"):
        codec.decode_node(flat({name: text for name, text in NODE.items() if name != missing}), "")


def test_a_job_without_a_field_is_a_record_that_cannot_be_read() -> None:
    whole = codec.encode_job(make_job(generation=make_generation(["n1"])))
    for missing in (*codec.JOB_TEXT, "generation_number", "generation_state", "generation_planned"):
        with pytest.raises(ValueError, match=f"it has no {missing}"):
            codec.decode_job(flat({name: text for name, text in whole.items() if name != missing}))


def test_jobs_share_the_names_of_their_fields() -> None:
    """They were half of what a waiting job takes of an agent's memory."""
    one, two = (codec.decode_job(flat(codec.encode_job(make_job()))) for _ in range(2))
    for a, b in ((one, two), (one.spec, two.spec), (one.control, two.control), (one.spec.hooks, two.spec.hooks)):
        assert a is not b
        assert a.model_fields_set is b.model_fields_set
    changed = two.model_copy(update={"array": None})
    assert one.model_fields_set == two.model_fields_set
    assert changed.model_fields_set is not two.model_fields_set


def test_a_flag_that_is_none_is_a_record_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="'yes' where 0 or 1 belongs"):
        codec.decode_node(flat(NODE | {"lost": "yes"}), "")


def test_facts_travel_without_what_is_the_default() -> None:
    text = codec.encode_facts(facts("n1"))
    assert not {"healthy", "labels", "spot"} & {*json.loads(text)}
    assert '": ' not in text
    assert NodeFacts.from_json(text) == facts("n1")


@pytest.mark.parametrize("text", ["0", "9" * 16])
def test_what_may_be_a_number(text: str) -> None:
    assert codec.is_number(text)


@pytest.mark.parametrize("text", ["9" * 17, "1" * 5000, "", "-1", None, 7])
def test_what_python_is_not_asked_to_make_a_number_of(text: object) -> None:
    assert not codec.is_number(text)
