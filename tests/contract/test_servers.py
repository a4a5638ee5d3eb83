"""Every script runs on every Redis that is found here, not only on the one that all other tests use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import Admission
from nodeagent.model.node import Cordon
from nodeagent.model.queue import Queue, Queues
from nodeagent.store import calls, client, scripts
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.client import connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.messages import Settlement
from nodeagent.store.scripts import Script
from tests.contract.bench import RedisBench, generation, spec, spend
from tests.contract.programs import others
from tests.contract.test_commits import commit
from tests.contract.test_failsafe_members import lives, set_failsafe_members
from tests.contract.test_generations import judgement
from tests.contract.test_restore import read, read_after, rejoin
from tests.submitting import submit_one

pytestmark = pytest.mark.redis


@pytest.fixture(params=list(others().values()), ids=list(others()))
def server(request: pytest.FixtureRequest) -> Iterator[PrivateRedis]:
    with PrivateRedis(program=request.param) as server:
        yield server


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The scripts that have been run."""
    names = set[str]()

    @cache
    def noted(name: str, *, bare: bool = False) -> Script:
        names.add(name)
        return scripts.load(name, bare=bare)

    for module in (calls, client):
        monkeypatch.setattr(module, "load", noted)
    return names


async def test_each_script_runs(server: PrivateRedis, ran: set[str]) -> None:
    store, links = connect(server.url, "c", 5.0), Links(server.url, 1)
    bench = RedisBench(store, links, prefix("c"))
    await _ended_well(bench)
    await _faulted(bench)
    await _emptied(bench)
    await bench.spoil("changes")
    with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
        await bench.beat("n1")
    folder = files("nodeagent.store") / "scripts"
    steps = {file.name.removesuffix(".lua") for file in folder.iterdir() if file.name[0] != "_"}
    assert {name for name in ran if name[0] != "_"} == steps
    await links.close()
    await store.close()


async def _ended_well(bench: RedisBench) -> None:
    """From a submission into the history."""
    await bench.up("n1", "n2", "n3")
    store, members = bench.store, ("n1", "n2")
    admitted = Admission(by="n1", issued=1000, expires=1060, signature="a")
    await submit_one(store, "u1", spec("train"), 1000, 1.0, "ann", "", admission=admitted)
    job = await store.renew("u1", "a", admitted.model_copy(update={"signature": "b"}))
    job = await bench.set_control(job, "c1")
    asked = Settlement(
        uid="u1", expect=None, expect_state="", control_rev=job.control.rev, control=job.control, event="JobAfterMet",
        text="so", by="n1",
    )  # fmt: skip
    job = await store.settle(asked)
    job = await bench.active(job, *members, failsafe_members=lives(bench, "n1"))
    assert (await store.activate("u1", generation(job).token)).rev == job.rev
    await commit(bench, job, "n1", "a", order=1)
    job = await set_failsafe_members(bench, await bench.job(), "n1", "n2")
    assert job.failsafe_members.keys() == {"n2"}
    for node in members:
        job = await bench.report(job, node, "succeeded")
    job = await bench.end(job, "succeeded")
    for node in members:
        job = await bench.ack(job, node)
    assert (job.phase, generation(job).holders) == ("succeeded", {})
    assert await store.request("c1") is not None
    await store.shelve(["u1"], 0.0, 1000)
    assert [past.uid for past in (await store.history("", 10)).jobs] == ["u1"]


async def _faulted(bench: RedisBench) -> None:
    """A fault that is judged, then removed; what operators write beside it; a node that goes."""
    store = bench.store
    job = await bench.active(await bench.submit("u2", name="second"), "n1", "n2")
    job = await bench.report(job, "n1", "failed")
    job = await bench.active(job, "n1", "n3", spend=spend())
    await store.judge(judgement(job))
    job = await bench.job("u2")
    job = await bench.end(job, "stopped")
    await bench.let_go("n1", "u2", job.last_number)
    for node in generation(await bench.job("u2")).holders:
        await bench.ack(job, node)
    await store.remove("u2")
    await store.cordon("n3", Cordon(reason="fan", by="ann", at=1.5), "c2")
    await store.queues(0, Queues(by="ann", queues=(Queue(name="a"),)), "q1", "queue a created")
    await bench.leave("n3", "it ends")
    await store.forget("n3", "ann", "f1")


async def _emptied(bench: RedisBench) -> None:
    """What was lost is offered again."""
    job, view = await bench.submit("u3", name="third"), await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).jobs["u3"].model_copy(update={"rev": 0}) == job.model_copy(update={"rev": 0})
    assert (await bench.calls.step("read", {"uid": "u3"}))[1] == "whole"
