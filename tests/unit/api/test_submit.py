"""What a request to submit jobs holds, and what is refused of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeagent.agent.savedview import Acknowledged
from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError
from nodeagent.api.submit import SubmitRoutes, read, read_spec
from nodeagent.model.jobspec import JobSpec, Submission
from nodeagent.store.base import StoreUnavailableError
from tests.unit.api.fakes import FakeView, asked, spec


def test_a_large_submitter_is_read_once_however_many_jobs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is almost the whole of a body, and each of its 256 jobs would bring it along."""
    sizes = []

    def counted(value: Mapping[str, Any], submitter: object) -> JobSpec:
        sizes.append(len(json.dumps(submitter)))
        return read_spec(value, submitter)

    monkeypatch.setattr("nodeagent.api.submit.read_spec", counted)
    body = asked(*(spec(f"a{i}") for i in range(20)))
    body["submitter"]["environ"] = {"PATH": "x" * 100_000}
    assert [one.spec.submitter.environ["PATH"] for one in read(body)] == ["x" * 100_000] * 20
    assert sum(sizes) < 110_000


def test_a_time_from_now_is_counted_by_the_agent() -> None:
    """The tool may be on a machine whose clock is wrong."""
    row = spec("a").model_dump(mode="json", exclude={"submitter"})
    rows = [{"spec": row, "begin_in": 7200}, {"spec": row, "begin_in": None}, {"spec": row | {"begin": 5.0}}]
    before = time.time()
    submitter = spec("x").submitter.model_dump(mode="json")
    later, at_once, then = read({"jobs": rows, "submitter": submitter})
    assert later.spec.begin is not None
    assert before + 7200 <= later.spec.begin <= time.time() + 7200
    assert (at_once.spec.begin, then.spec.begin) == (None, 5.0)
    with pytest.raises(ApiError) as wrong:
        read({"jobs": [{"spec": row, "begin_in": "+2h"}], "submitter": submitter})
    assert wrong.value.message == "begin_in must be a number of seconds"


@pytest.mark.parametrize(("name", "value"), [("submitter", {"user": "bob"}), ("after", ["u1"]), ("array", {"id": "a"})])
def test_what_stands_beside_a_spec_is_not_in_it(name: str, value: object) -> None:
    body = asked(spec("a"))
    body["jobs"][0]["spec"][name] = value
    with pytest.raises(ApiError, match="after, array and submitter stand beside the spec") as wrong:
        read(body)
    assert wrong.value.code == "usage"


def test_who_submits_is_named_in_the_request() -> None:
    with pytest.raises(ApiError, match="the job's spec is not right") as wrong:
        read({"jobs": asked(spec("a"))["jobs"]})
    assert [problem.partition(":")[0] for problem in wrong.value.problems] == ["submitter"]


async def test_what_is_saved_goes_by_the_stores_word_where_it_goes_away_just_then(tmp_path: Path) -> None:
    """By the revision of jobs in the view, which had not read them yet, there was nothing to wait for."""
    who = Caller(uid=1000, gid=1000, name="ann", operator=False, trusted=False)
    view, waited = FakeView(tmp_path), list[int]()
    await view.join()

    async def gone() -> None:
        raise StoreUnavailableError("no answer")

    async def acknowledged(rev: int, _era: str) -> Acknowledged:
        waited.append(rev)
        return Acknowledged(nodes=(), wanted=2, waited=1.0)

    view.__dict__.update(refresh=gone, acknowledged=acknowledged)
    jobs = [Submission(spec(name).model_copy(update={"user": "ann"})) for name in ("a", "b")]
    answer = await SubmitRoutes(view).submit(who, "r", jobs)
    assert (answer.status, view.cluster().jobs) == (201, {})
    del view.__dict__["refresh"]
    await view.refresh()
    assert waited == [view.job("b").rev]
