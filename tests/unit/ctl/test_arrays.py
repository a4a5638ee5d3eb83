"""An array in the list of jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

import pytest

from nodeagent.ctl.arrays import end_all, folded, members
from nodeagent.ctl.client import Client
from nodeagent.ctl.logs import _of_array
from nodeagent.ctl.terminal import CtlError, Exit

Row = dict[str, Any]


def row(name: str, phase: str, index: int | None = None, *, array: str = "a1", submitted: float = 1.0) -> Row:
    of = None if index is None else {
        "name": "s", "id": array, "index": index, "count": 4, "first": 0, "last": 3, "at_once": 0,
    }  # fmt: skip
    pods = [{"node": f"n{index}", "phase": "running"}] if phase == "running" else []
    return {
        "name": name, "phase": phase, "array": of, "age": 5.0 + (index or 0), "gpus": len(pods), "pods": pods,
        "duration": 3.0 if pods else None, "chief": None, "submitted": submitted,
    }  # fmt: skip


def test_one_line_where_its_first_job_stands() -> None:
    rows = [row("x", "running"), row("s-0", "running", 0), row("y", "queued"), row("s-1", "running", 1)]
    rows += [row("s-2", "queued", 2)]
    first, array, last = folded(rows)
    assert (first["name"], last["name"]) == ("x", "y")
    assert (array["name"], array["phase"]) == ("s[0-3]", "2 running, 1 queued, 1 ended before")
    assert (array["gpus"], array["age"], array["duration"]) == (2, 7.0, 3.0)
    assert [pod["node"] for pod in array["pods"]] == ["n0", "n1"]


def test_its_place_in_line_is_that_of_its_first_job_that_waits() -> None:
    places = (None, {"place": 7, "of": 9}, {"place": 4, "of": 9})
    rows = [row(f"s-{i}", "queued", i) | {"queue": place} for i, place in enumerate(places)]
    assert folded(rows)[0]["queue"] == {"place": 4, "of": 9}
    assert folded(rows[:1])[0]["queue"] is None


def test_without_arrays_the_list_is_as_it_was() -> None:
    rows = [row("x", "running"), row("y", "queued")]
    assert folded(rows) == rows


class Knows:
    """An agent that means this array by the name."""

    def __init__(self, array: str | None) -> None:
        self._array = array

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/arrays/s"
        if self._array is None:
            raise CtlError("no such array", Exit.NOT_FOUND)
        return {"id": self._array}


def test_the_jobs_of_the_newest_array_of_a_name_the_live_one_first() -> None:
    old = [row("s-0", "succeeded", 0, array="old", submitted=1.0)]
    new = [row("s-1", "queued", 1, array="new", submitted=2.0), row("s-0", "failed", 0, array="new", submitted=2.0)]
    lists_none = cast(Client, Knows(None))
    assert [r["name"] for r in members(lists_none, [*old, *new], "s")] == ["s-0", "s-1"]
    assert members(lists_none, [*old, *new], "t") == []
    assert members(lists_none, old, "s") == old
    assert members(cast(Client, Knows("old")), [*old, *new], "s") == old, "which is the caller's own"


class Agent:
    """Knows two jobs of an array, and refuses a generation of the first."""

    def get(self, path: str) -> dict[str, Any]:
        if path == "/v1/arrays/s":
            return {"id": "a1"}
        return {"items": [row(f"s-{i}", "running", i) | {"uid": f"u{i}"} for i in (0, 1)]}

    def stream(self, path: str, **_query: object) -> Iterator[Row]:
        if "u0" in path:
            raise CtlError("job 's-0' has no generation 2", Exit.NOT_FOUND)
        yield {"node": "n1", "generation": 2, "rank": 0, "stream": "stdout", "time": "1", "text": "x", "partial": False}


def test_what_one_job_never_had_does_not_keep_the_output_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert _of_array(cast(Client, Agent()), "s", False, {"generation": 2})
    shown = capsys.readouterr()
    assert shown.out == "[0]<stdout>: x\n"
    assert shown.err == "==> s-0 <==\nnodeagentctl: job 's-0' has no generation 2\n==> s-1 <==\n"


@pytest.mark.parametrize(
    ("verb", "changed", "says"),
    [("stop", 2, "stopped: 2 jobs"), ("stop", 0, ": all its jobs had ended already"), ("delete", 1, "deleted: 1 job")],
)
def test_what_became_of_an_array(verb: str, changed: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Ending:
        def get(self, path: str) -> dict[str, Any]:
            if path == "/v1/arrays/array-1" and verb == "delete":
                raise CtlError("no such array", Exit.NOT_FOUND)
            return {"id": "array-1", "phases": {"stopped": 3}, "stopping": 0}

        def change(self, _method: str, path: str, _request_id: str | None) -> dict[str, Any]:
            assert path.startswith("/v1/arrays/array-1")
            return {"id": "array-1", "jobs": [{}] * changed}

        def endure(self, _patience: float) -> None:
            pass

    assert end_all(cast(Client, Ending()), "s", verb, 1.0, no_wait=False, request_id=None)
    assert capsys.readouterr().out.replace("array/s ", "array/s") == f"array/s{says}\n"


@pytest.mark.parametrize("name", ["my job", "jöb", "a/b?c"])
def test_any_name_can_be_asked_for(name: str) -> None:
    class Paths(Agent):
        def get(self, path: str) -> dict[str, Any]:
            assert unquote(path) == f"/v1/arrays/{name}"
            assert re.fullmatch(r"/v1/arrays/[\w.%-]+", path, re.ASCII)
            raise CtlError("no such array", Exit.NOT_FOUND)

    assert not end_all(cast(Client, Paths()), name, "delete", 1.0, no_wait=True, request_id=None)
